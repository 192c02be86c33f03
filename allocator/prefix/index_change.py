"""A change of the prefix index, told to whoever asked for it: what may be found from now on, or no longer.

H1  Every key that is entered is told once, and once more when it leaves, in whatever way; a split changes nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from kvcustody.allocator.pool.domain import Domain


class IndexChange(NamedTuple):
    """A run of blocks that was published (`cause` is empty), or that ended because of `cause`.

    keys: 32 bytes a block, in chain order. parent: the key before the first of a published run (b"" at the start of a
    prompt). residency: the id of the one that published; 0 for an end.
    """

    domain: Domain
    keys: bytes
    parent: bytes
    residency: int
    cause: str
