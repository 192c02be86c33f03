"""History: what the leaves say of each incarnation, sorted by what it is, with nothing concluded from it yet.

1. A leaf counts for the incarnation that it is about (`of_incarnation`, else the one that wrote it), and its times
   are on that incarnation's boot clock; a successor's release is put on it by way of UTC.
2. Of two ends of one custody the first counts: an incarnation's own before its successor's, then by (sequence, part).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvcustody.errors import LedgerError
from recompute.columns import (
    Columns,
    Entries,
    Numbers,
    Statements,
    TextNumbers,
    distinct,
)
from recompute.facts import ErasureFact, Narrowing, Person

_TOP = 1 << 62


class StatementPlaces(NamedTuple):
    """Statements laid out: per entry the row of its leaf, the place of what it names (`NamedBlocks`), the block."""

    row: Numbers
    place: Numbers
    block: Numbers


class NamedBlocks(NamedTuple):
    """Every (pool, generation) of an incarnation that any leaf names, in order, and each statement beside it."""

    pool: Numbers
    generation: Numbers
    uses: StatementPlaces
    gone: StatementPlaces
    ends: StatementPlaces
    proofs: StatementPlaces
    covered: StatementPlaces


class RecomputedLife:
    """One incarnation; times are its boot time, tenants and other texts numbers of `History.names`."""

    def __init__(self, uuid: str, names: TextNumbers) -> None:
        self.uuid = uuid
        self.names = names
        self.offset_us = 0
        self.founded: tuple[int, int] | None = None
        self.shards = 0
        self.generation = 0  # where its counter started
        self.people = Columns(
            "residency", "tenant", "classification", "subject", "session", "model", "opened"
        )
        # `own`: its own process wrote it, and `sequence` says where among its leaves.
        self.released = Columns("residency", "at", "hold", "tenant", "sequence", "own")
        self.narrowings: dict[int, Narrowing] = {}  # by where they stand among its leaves
        # Residencies and the blocks that they refer to from `begun` on; `until` and `hold` where the leaf itself says
        # when that ended (`over`), and not its residency's release.
        self.uses = Statements("residency", "begun", "written", "over", "until", "hold")
        # Residencies that go on and the blocks that they let go of.
        self.gone = Statements("residency", "at", "hold")
        # Ends of custody: `foreign` a successor wrote; `dead` is unproven from the outset.
        self.ends = Statements(
            *("foreign", "sequence", "part", "tenant", "classification", "dead"),
            *("due", "ended", "retired", "ceiling", "within"),
        )
        # Receipts of one shard each; `level` is its place in `LEVELS`.
        self.proofs = Statements("shard", "started", "ended", "level", "good", "bytes", "blocks")
        # What erasures cover.
        self.covered = Statements("erasure")
        self.named: NamedBlocks

    def persons(self) -> dict[int, Person]:
        """Whose residency each is."""
        text = self.names.texts()
        names = ("residency", "tenant", "subject", "session", "opened")
        rows = zip(*(self.people[name].tolist() for name in names), strict=True)
        return {each: Person(text[who], text[sub], text[ses], at) for each, who, sub, ses, at in rows}

    def left(self) -> dict[int, tuple[int, str]]:
        """Of each release that its own process wrote: where it stands among its leaves, and the tenant."""
        text, mine, made = self.names.texts(), self.released["own"] == 1, dict[int, tuple[int, str]]()
        names = ("residency", "sequence", "tenant")
        for each, sequence, who in zip(*(self.released[name][mine].tolist() for name in names), strict=True):
            made[each] = max(made.get(each, (0, "")), (sequence, text[who]))
        return made

    def lay_out(self) -> None:
        """Give every (pool, generation) that is named its place; raises `LedgerError` for malformed runs."""
        every = [each.entries() for each in (self.uses, self.gone, self.ends, self.proofs, self.covered)]
        width = 1 + max((int(part.generation.max()) for part in every if len(part.row)), default=0)
        pools = 1 + max((int(part.pool.max()) for part in every if len(part.row)), default=0)
        if pools * width > _TOP:
            raise LedgerError("a run in a leaf is malformed: its pool or generation is too high")
        keys = [part.pool * width + part.generation for part in every]
        listed = distinct(np.concatenate(keys))
        self.named = NamedBlocks(
            listed // width,
            listed % width,
            *map(_placed, every, (np.searchsorted(listed, key) for key in keys)),
        )


def _placed(part: Entries, place: Numbers) -> StatementPlaces:
    return StatementPlaces(part.row, place, part.block)


class History:
    """What was read: incarnations by id, erasures, and when the last leaf was written."""

    def __init__(self) -> None:
        self.lives: dict[str, RecomputedLife] = {}
        self.erasures: list[ErasureFact] = []
        self.names = TextNumbers()
        self.last_us = 0
        self.leaves = 0

    def life(self, uuid: str) -> RecomputedLife:
        """The incarnation of this id, made on first mention."""
        found = self.lives.get(uuid)
        if found is None:
            found = self.lives[uuid] = RecomputedLife(uuid, self.names)
        return found
