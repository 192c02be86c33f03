"""The connector's half in a worker process: KV tensors as bytes of blocks, and the scrubs of each step."""
