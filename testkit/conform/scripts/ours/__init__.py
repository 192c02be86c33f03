"""The same questions about kvcustody."""
