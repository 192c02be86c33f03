"""A real NATS server, a worker's blocks, and an index that is fed with what workers tell."""
