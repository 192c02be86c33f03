"""Sizing."""
