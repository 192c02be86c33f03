"""The conformance kit over continuous batching, with the historic bugs that it must detect there."""
