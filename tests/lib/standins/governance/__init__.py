"""Governors, tiers and sealed objects."""
