"""Governed counterparts of transformers' cache classes: each cache's slabs are in custody until the cache ends."""
