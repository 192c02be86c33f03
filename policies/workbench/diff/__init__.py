"""The changes between two revisions: cells, obligations and settings."""
