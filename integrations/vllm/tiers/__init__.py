"""Tiers of a governed vLLM: workers store evicted blocks sealed, and the scheduler finds them again."""
