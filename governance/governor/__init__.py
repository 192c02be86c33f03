"""Custody over our own pools: the Governor that an engine calls, and its parts."""
