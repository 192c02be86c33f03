"""Tiers of a governed vLLM: what its workers keep of evicted blocks, sealed, and how the scheduler finds it again."""
