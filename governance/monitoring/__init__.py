"""Stepwise enforcement: whose requests are governed, and what is recorded of the others."""
