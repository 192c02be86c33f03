"""Batches from workers: read, checked in separate processes, merged and committed."""
