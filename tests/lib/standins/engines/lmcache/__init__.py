"""LMCache's server, its sites and store faults."""
