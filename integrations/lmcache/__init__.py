"""LMCache's server under governance: its second tier's content is sealed, counted, and ended by policy."""
