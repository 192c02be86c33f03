"""Copies off the device: their rows, and their coverage by tier."""
