"""Attackers: two worlds, hostile stores, killed tiers."""
