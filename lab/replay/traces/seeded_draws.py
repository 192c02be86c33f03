"""Draws by hash: a uniform number that depends on a seed and a few names only, so any machine and any order
agree.
"""

from __future__ import annotations

import hashlib
import json

from kvcustody.lab.replay.traces.model import Key

_SCALE = 2.0**-64


def name_digest(seed: int, *names: Key, size: int = 8) -> bytes:
    """BLAKE2b over the JSON list [seed, names...]: a list, so that no two different lists read alike."""
    return hashlib.blake2b(json.dumps([seed, *names]).encode("ascii"), digest_size=size).digest()


def draw(seed: int, *names: Key) -> float:
    """A number in [0, 1), uniform over names."""
    return int.from_bytes(name_digest(seed, *names), "big") * _SCALE
