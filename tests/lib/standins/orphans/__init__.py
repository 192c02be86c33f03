"""Planted orphans."""
