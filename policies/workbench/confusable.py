"""Identifiers that a reviewer takes for one another, though the policy compares them byte for byte.

1. Identifiers are ASCII (bidirectional and invisible characters are refused by the loader, KVP104 and KVP206), so
   confusion is between letters that look alike, case, and separators.
"""

from __future__ import annotations

from collections.abc import Iterable

_PAIRS = (("rn", "m"), ("vv", "w"), ("cl", "d"))
_LETTERS = str.maketrans({"1": "l", "i": "l", "0": "o", "5": "s", "-": "", "_": "", ".": "", "@": "a"})


def skeleton(identifier: str) -> str:
    """What is left of an identifier when look-alikes are made equal."""
    text = identifier.lower()
    for pair, letter in _PAIRS:
        text = text.replace(pair, letter)
    return text.translate(_LETTERS)


def confused(identifiers: Iterable[str]) -> list[tuple[str, str]]:
    """(identifier, the earlier one that it looks like), in the order given."""
    seen: dict[str, str] = {}
    pairs = []
    for identifier in identifiers:
        shape = skeleton(identifier)
        if shape in seen and seen[shape] != identifier:
            pairs.append((identifier, seen[shape]))
        seen.setdefault(shape, identifier)
    return pairs
