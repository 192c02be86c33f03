"""External."""
