"""Seeded tenants, faults and a fake clock."""
