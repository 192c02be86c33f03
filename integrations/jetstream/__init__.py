"""KV events and hints of epochs over NATS JetStream: accounts, the stream and its keeper, publisher and reader."""
