"""What a request's blocks are to tiers: a run that no object has yet, one that leaves, a load that was found for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvcustody.allocator.pool.accounting import Domain
from kvcustody.allocator.pool.block_state import Blocks

if TYPE_CHECKING:
    from kvcustody.allocator.external.residency import ExternalResidency
    from kvcustody.governance.tiers.tier_link import TransferChoice


class LeavingRun(NamedTuple):
    """A part of a chain whose blocks are in the index: what one object would hold."""

    domain: Domain
    residency: ExternalResidency
    keys: bytes
    parent: bytes
    depth: int
    blocks: Blocks
    generations: Blocks
    born_us: int
    ceiling_us: int
    due_us: int


class UnsavedRun:
    """The published blocks of a request that no object has yet, one after the other.

    Those before `settled` were computed by steps that have left.
    """

    __slots__ = ("blocks", "first", "keys", "parent", "settled")

    def __init__(self, first: int, parent: bytes) -> None:
        self.first = first
        self.parent = parent
        self.settled = first
        self.keys: list[bytes] = []
        self.blocks: list[int] = []

    @property
    def end(self) -> int:
        """The place behind its last block."""
        return self.first + len(self.blocks)


class PlannedLoad(NamedTuple):
    """What was found for a request, from `depth` to `until` of its chain, and the depth at which each copy ends."""

    tier: str
    names: tuple[bytes, ...]
    ends: tuple[int, ...]
    depth: int
    until: int
    size: int = 0  # sealed bytes, of one shard
    choice: TransferChoice | None = None
