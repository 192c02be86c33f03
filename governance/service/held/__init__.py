"""Held requests of workers: what they wait for, and their answers."""
