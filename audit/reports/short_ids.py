"""Short forms of process ids in a report's text; an annex has the full ids.

1. All are equally long: the shortest beginning, of 8 letters or more, at which those of one report differ.
2. Where no beginning of fewer than 16 letters does it, each is its last 8 letters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

_SHORTEST, _TOO_LONG = 8, 16


def short_ids(ids: Iterable[str]) -> Callable[[str], str]:
    """Return the function that shortens ids in a text with these ids."""
    every = set(ids)
    for length in range(_SHORTEST, _TOO_LONG):
        if len({each[:length] for each in every}) == len(every):
            return lambda each: each[:length]
    return lambda each: each[-_SHORTEST:]
