"""The conformance kit over vLLM's engine core without a model, with the historic bugs that it must detect there."""
