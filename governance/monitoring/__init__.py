"""Enforcement that is switched on step by step: whose requests are governed, and what is recorded of the others."""
