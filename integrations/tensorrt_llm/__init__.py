"""TensorRT-LLM beside our tiers: a connector whose blocks rest sealed, by domain. Never run on TensorRT-LLM itself."""
