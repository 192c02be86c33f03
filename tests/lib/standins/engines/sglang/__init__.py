"""SGLang engines, and a probe inside their processes."""
