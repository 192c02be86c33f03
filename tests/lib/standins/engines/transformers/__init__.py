"""transformers with a tiny model."""
