"""Mooncake's store."""
