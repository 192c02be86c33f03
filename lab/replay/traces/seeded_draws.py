"""Uniform draws by hash: a draw depends only on a seed and names, so every machine and every order agree."""

from __future__ import annotations

import hashlib
import json

from kvcustody.lab.replay.traces.model import Key

_SCALE = 2.0**-64


def name_digest(seed: int, *names: Key, size: int = 8) -> bytes:
    """Return the BLAKE2b digest of the JSON list [seed, names...]; as a list, different names never read alike."""
    return hashlib.blake2b(json.dumps([seed, *names]).encode("ascii"), digest_size=size).digest()


def draw(seed: int, *names: Key) -> float:
    """Return a number in [0, 1), uniform over names."""
    return int.from_bytes(name_digest(seed, *names), "big") * _SCALE
