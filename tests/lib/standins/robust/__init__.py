"""Worlds that are broken on purpose."""
