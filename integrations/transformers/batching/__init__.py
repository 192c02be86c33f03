"""Batching."""
