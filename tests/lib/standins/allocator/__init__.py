"""Pools and engines for tests of the allocator."""
