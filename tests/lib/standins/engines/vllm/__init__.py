"""vLLM engines, and a probe inside their processes."""
