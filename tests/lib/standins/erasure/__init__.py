"""Erasures, their certificates and histories."""
