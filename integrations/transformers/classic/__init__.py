"""Governed counterparts of transformers' cache classes; a cache's slabs stay in custody until the cache ends."""
