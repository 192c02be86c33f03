"""Pages of the documentation that run."""
