"""TensorRT-LLM with our tiers: a connector whose blocks are stored sealed, by domain. Never run on TensorRT-LLM
itself.
"""
