"""Prefix caching: block keys, the hash index, the radix tree with its eviction queues, and running sequences."""
