"""Deletion coverage: the custody that was due, whether its memory was overwritten in time, and the evidence."""
