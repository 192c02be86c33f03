"""Mutants of policies."""
