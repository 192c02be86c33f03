"""A scan in slices, with bounded work in each step while the process serves. A finding needs several rounds that agree.

- A step does `Budget.work` units of work and at most one piece more (`PIECE_BLOCKS` blocks, or one visit). This does
  not depend on the size of the pool or of a path, or on the number of tenants, requests and holds.
- A disagreement is a finding only when two rounds in a row saw it in the same custody. For a block without an owner
  three rounds are needed, as splits may hide it from one. A move that one round caught half-done is over by the next.
- It changes nothing. What it finds is for a full scan to confirm and repair.
- It keeps arrays and small tables, allocated and touched once: no step pays for growing, freeing or collecting them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcustody.governance.orphans.finding import Finding

PIECE_BLOCKS = 2048  # the most blocks that one array operation touches
SUSPECTS_MAX = 256  # of one round: with more, a full scan is due anyway
TAKEN_MAX = 16  # findings handed over at once

Suspect = tuple[str, int, int]
"""Class; block and generation, or residency and 0."""


class Budget(NamedTuple):
    """The work that one step may do. A unit is about one look at one object: 0.2 us as measured."""

    work: int = 112


class ScanProgress(NamedTuple):
    """The progress of the scan: complete rounds, and everything it has looked at."""

    rounds: int
    nodes: int
    holds: int
    sequences: int
    blocks: int


class Slices(ABC):
    """Rounds cut into steps; a subclass defines a round, and yields where `_spend` says so."""

    def __init__(self, pool: int, budget: Budget | None = None) -> None:
        self._pool = pool
        self._budget = (budget or Budget()).work
        self._left = 0
        self._work: Iterator[None] = self._rounds()
        self._suspects: dict[Suspect, int] = {}  # of this round, and in how many rounds running each was seen
        self._before: dict[Suspect, int] = {}
        self._found: dict[Suspect, Finding] = {}
        self.rounds = self.nodes = self.holds = self.sequences = self.blocks = 0

    def step(self) -> None:
        """Scan one slice."""
        self._left = self._budget
        next(self._work, None)

    @property
    def progress(self) -> ScanProgress:
        """The scan's progress."""
        return ScanProgress(self.rounds, self.nodes, self.holds, self.sequences, self.blocks)

    @property
    def has_found(self) -> bool:
        """Whether there is a finding to take."""
        return bool(self._found)

    def take(self) -> list[Finding]:
        """Return what rounds agreed on since the last call; at most `TAKEN_MAX`, the rest with the next call."""
        chosen = [what for what, _ in zip(self._found, range(TAKEN_MAX), strict=False)]
        return [self._found.pop(what) for what in chosen]

    def _rounds(self) -> Iterator[None]:
        while True:
            self._suspects = {}
            yield from self._round()
            self._before = self._suspects
            self.rounds += 1
            yield

    @abstractmethod
    def _round(self) -> Iterator[None]:
        """One look at everything; yields whenever a step is over."""

    def _spend(self, work: int) -> bool:
        """Count work; whether the step is over."""
        self._left -= work
        return self._left <= 0

    def _suspect(self, what: Suspect, tenant: str, cause: str, rounds: int = 2) -> None:
        """A disagreement; a finding from the `rounds`-th round in a row on."""
        if len(self._suspects) >= SUSPECTS_MAX:
            return
        seen = self._suspects[what] = self._before.get(what, 0) + 1
        if seen >= rounds and len(self._found) < SUSPECTS_MAX:
            blocks = (what[1],) if what[2] else ()
            residency = 0 if what[2] else what[1]
            self._found[what] = Finding(what[0], tenant, cause, blocks, residency=residency, pool=self._pool)


def pieces(blocks: int) -> Iterator[slice]:
    """Yield a pool's blocks in pieces of `PIECE_BLOCKS`."""
    for first in range(0, blocks, PIECE_BLOCKS):
        yield slice(first, min(first + PIECE_BLOCKS, blocks))


def touched(blocks: int) -> NDArray[np.int64]:
    """Return zeros whose pages are all in use already, so that first uses cost nothing later."""
    return np.full(blocks, 0, dtype=np.int64)
