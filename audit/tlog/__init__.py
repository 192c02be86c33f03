"""Tlog."""
