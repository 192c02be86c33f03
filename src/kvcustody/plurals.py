"""Counts in sentences: `several(1, "gap")` is "1 gap", `several(2_000, "leaf")` is "2,000 leaves"."""

from __future__ import annotations

_IRREGULAR = {"epoch": "epochs", "leaf": "leaves", "person": "people", "stratum": "strata"}


def several(number: int, one: str, more: str = "") -> str:
    """How many of something, thousands apart; `one` ends with its noun, and `more` is its plural where none is made."""
    return f"{number:,} {one if number == 1 else more or plural(one)}"


def plural(singular: str) -> str:
    """More than one of something."""
    before, space, noun = singular.rpartition(" ")
    if noun in _IRREGULAR:
        return f"{before}{space}{_IRREGULAR[noun]}"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{singular[:-1]}ies"
    return f"{singular}es" if noun.endswith(("s", "sh", "ch", "x")) else f"{singular}s"
