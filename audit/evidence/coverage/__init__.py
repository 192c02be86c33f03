"""Deletion coverage: which custody was due, whether its memory was overwritten in time, and what proves it."""
