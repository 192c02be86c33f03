"""Processes that are killed while they write, and what has to be there afterwards."""
