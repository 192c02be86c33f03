"""The conformance kit over a governed vLLM with LMCache's own server behind it."""
