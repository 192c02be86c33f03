"""Runs of a request's blocks on their way to a tier, and loads on their way back, from the plan to the answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvcustody.allocator.pool.accounting import Domain
from kvcustody.allocator.pool.block_state import Blocks

if TYPE_CHECKING:
    from kvcustody.allocator.external.residency import ExternalResidency
    from kvcustody.governance.tiers.tier_link import Moved, TransferChoice

NOT_THERE = -1


class LeavingPart(NamedTuple):
    """One object's content for one layer group, from `depth` of the chain on."""

    keys: bytes
    parent: bytes
    depth: int
    blocks: Blocks
    generations: Blocks


class LeavingRun(NamedTuple):
    """An indexed part of a chain, `length` blocks from `depth` on, that leaves as one object per layer group.

    `parent` and `key` are the chain's keys of the block before it and of its last block. `awaited_by`: the one tier
    that it leaves for, which has what goes on from it.
    """

    domain: Domain
    residency: ExternalResidency
    depth: int
    length: int
    parts: tuple[LeavingPart, ...]
    born_us: int
    ceiling_us: int
    due_us: int
    parent: bytes
    key: bytes
    awaited_by: str | None = None


class UnsavedRun:
    """A request's consecutive published blocks that no object has yet, by layer group.

    Those before `settled` were computed by steps that have left. `NOT_THERE`: a window has passed it. Of several groups
    the generations are kept too: a window gives blocks back before their run is cut.
    """

    __slots__ = ("blocks", "first", "generations", "keys", "parent", "settled")

    def __init__(self, first: int, parent: bytes, groups: int) -> None:
        self.first = first
        self.parent = parent
        self.settled = first
        self.keys: list[bytes] = []
        self.blocks: list[list[int]] = [[] for _ in range(groups)]
        self.generations: list[list[int]] = [[] for _ in range(groups)]

    @property
    def end(self) -> int:
        """The place behind its last block."""
        return self.first + len(self.keys)

    def drop(self, count: int) -> None:
        """Drop the first blocks, which were cut off."""
        self.parent = self.keys[count - 1]
        self.first += count
        del self.keys[:count]
        for column in (*self.blocks, *self.generations):
            del column[:count]


class PlannedPart(NamedTuple):
    """Consecutive copies in one layer group and domain, with the depth at which each ends.

    They fill blocks `depth` to `until`.
    """

    group: int
    domain: Domain
    names: tuple[bytes, ...]
    ends: tuple[int, ...]
    depth: int
    until: int


class PlannedLoad(NamedTuple):
    """The copies found for a request, from `depth` to `until` of its chain, after a look-up that took `looked_us`."""

    tier: str
    parts: tuple[PlannedPart, ...]
    depth: int
    until: int
    size: int = 0  # sealed bytes, of one shard
    choice: TransferChoice | None = None
    looked_us: int = 0

    @property
    def blocks(self) -> int:
        """The number of blocks in all groups together."""
        return sum(part.until - part.depth for part in self.parts)

    def missing(self, loaded_blocks: int) -> bytes:
        """Return the name of the first object that was not loaded, given the number of loaded blocks."""
        for part in self.parts:
            for name, end in zip(part.names, part.ends, strict=True):
                if min(end, part.until) - part.depth > loaded_blocks:
                    return name
            loaded_blocks -= part.until - part.depth
        raise AssertionError("all of it came")


def choice_for_part(choice: TransferChoice, blocks: int, whole: int) -> TransferChoice:
    """Return one object's share of a choice that was made for several objects of `whole` blocks together."""
    transfer_us, recompute_us = choice.transfer_us * blocks // whole, choice.recompute_us * blocks // whole
    return choice._replace(transfer_us=transfer_us, recompute_us=recompute_us)


class ChainSpan(NamedTuple):
    """Blocks `first` to `last` of a chain are wanted from this domain; the domain has the blocks up to `whole`."""

    domain: Domain
    first: int
    last: int
    whole: int


class RunningStore(NamedTuple):
    """A store whose job the workers have: the blocks that move, and the decision that they do."""

    moved: Moved
    choice: TransferChoice


class LateBlocks(NamedTuple):
    """Loaded blocks whose copies are due by now; requests of which vLLM attaches all blocks or none."""

    blocks: set[int]
    requests: set[str]


class Fetching:
    """A request's ticket, and its started fetch."""

    __slots__ = ("jobs", "text", "until_us")

    def __init__(self, text: str) -> None:
        self.text = text
        self.jobs: set[int] | None = None  # None: it has not begun
        self.until_us = 0


class SharedLookup:
    """A request's look-up: its reason, its running jobs, and its expected and measured time."""

    __slots__ = ("began_us", "expected_us", "jobs", "reason", "took_us", "until_us")

    def __init__(self, reason: str, began_us: int, until_us: int, expected_us: int) -> None:
        self.reason, self.began_us, self.until_us, self.expected_us = reason, began_us, until_us, expected_us
        self.jobs: set[int] = set()
        self.took_us = 0
