"""A scan in slices: a bounded number of nodes, holds, sequences and blocks a step, while the process serves.

A round notes what every node has (references, holds, uses), then counts sequences and holds, then compares. Steps lie
between these, so a node is compared only where nothing was attached to it or taken from it meanwhile.

J1  A step looks at no more than `Budget` says, whatever the size of the pool.
J2  A disagreement is a finding only when two rounds in a row saw it in the same custody: what a round caught in the
    middle of a move is gone in the next.
J3  It changes nothing. What it finds is for a full scan to confirm and repair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcustody.allocator.block import ACTIVE, CACHED
from kvcustody.allocator.manager import BlockManager
from kvcustody.allocator.node import Node
from kvcustody.allocator.residency import Residency
from kvcustody.allocator.sequence import Sequence
from kvcustody.governance.scan import Finding


class Budget(NamedTuple):
    """What one step may look at."""

    nodes: int = 16
    holds: int = 24
    sequences: int = 4
    blocks: int = 8192


class Progress(NamedTuple):
    """How far the scan has come: whole rounds, and everything it has looked at."""

    rounds: int
    nodes: int
    holds: int
    sequences: int
    blocks: int


_HOLD = 1 << 32  # in a count, holds stand above references


class OnlineScan:
    """One pool, scanned a slice a step. `live` gives the sequences of requests that have not ended."""

    def __init__(
        self, manager: BlockManager, live: Callable[[], set[Sequence]], budget: Budget | None = None
    ) -> None:
        self._manager = manager
        self._live = live
        self._budget = budget or Budget()
        self._work: Iterator[None] = self._round()
        # By node: what it had (references, holds, uses, first generation), and what was counted. In shards,
        # so that no step ever pays for resizing or freeing all of it; numbers only, so that no collector walks it.
        shards = len(manager.tree.index.stripes)
        self._noted: list[dict[int, tuple[int, int, int, int]]] = [{} for _ in range(shards)]
        self._counts: list[dict[int, int]] = [{} for _ in range(shards)]
        self._holds_counted = True
        self._suspects: set[tuple[str, int, int]] = set()
        self._before: set[tuple[str, int, int]] = set()
        self._found: dict[tuple[str, int, int], Finding] = {}
        blocks = manager.pool.blocks
        self._had: NDArray[np.int64] = np.zeros(blocks, dtype=np.int64)  # generation in custody, when noted
        self._has: NDArray[np.int64] = np.zeros(blocks, dtype=np.int64)  # generation that somebody has
        self.progress = Progress(0, 0, 0, 0, 0)

    def step(self) -> None:
        """One slice (J1)."""
        next(self._work, None)

    @property
    def has_found(self) -> bool:
        """There is something to take."""
        return bool(self._found)

    def take(self) -> list[Finding]:
        """What two rounds agreed on since the last call (J2)."""
        found, self._found = list(self._found.values()), {}
        return found

    # -- a round ------------------------------------------------------------------------------------------------------

    def _round(self) -> Iterator[None]:
        while True:
            self._suspects = set()
            yield from self._note_blocks()
            yield from self._note_nodes()
            yield from self._count_sequences()
            yield from self._count_holds()
            yield from self._compare_nodes()
            yield from self._compare_blocks()
            self._before = self._suspects
            self._count(rounds=1)

    def _count(self, **more: int) -> None:
        self.progress = Progress(
            *(value + more.get(name, 0) for name, value in self.progress._asdict().items())
        )

    def _note_blocks(self) -> Iterator[None]:
        pool, size = self._manager.pool, self._budget.blocks
        for first in range(0, pool.blocks, size):
            part = slice(first, first + size)
            state = pool.state[part]
            held = (state == ACTIVE) | (state == CACHED)
            np.multiply(pool.generation[part], held, out=self._had[part])
            self._has[part] = 0
            self._count(blocks=len(state))
            yield

    def _note_nodes(self) -> Iterator[None]:
        most, seen = self._budget.nodes, 0
        for stripe in self._manager.tree.index.stripes:
            for node in list(stripe.values()):
                noted = self._noted[self._shard(node)]
                if id(node) not in noted:
                    noted[id(node)] = self._state(node)
                    for blocks in (node.blocks, *node.windows):
                        self._mark(blocks)
                seen += 1
                if seen % most == 0:
                    yield
        self._count(nodes=seen)
        yield

    def _shard(self, node: Node) -> int:
        return (id(node) >> 5) % len(self._noted)

    def _state(self, node: Node) -> tuple[int, int, int, int]:
        return node.refs, node.holds, node.hits, int(self._manager.pool.generation[node.blocks[0]])

    def _see(self, node: Node, count: int) -> None:
        shard = self._shard(node)
        if id(node) in self._noted[shard]:
            counts = self._counts[shard]
            counts[id(node)] = counts.get(id(node), 0) + count

    def _mark(self, blocks: NDArray[np.int64]) -> None:
        self._has[blocks] = self._manager.pool.generation[blocks]

    def _count_sequences(self) -> Iterator[None]:
        slots, most = self._manager.decode.sequences, self._budget.sequences
        looked, live = 0, self._live()
        for slot in range(len(slots)):
            sequence = slots[slot] if slot < len(slots) else None
            if sequence is None:
                continue
            if sequence not in live:
                what = "lost finish", sequence.residency.id, 0
                self._suspect(what, sequence.account.name, "a sequence without a live request")
            node = sequence.leaf
            while node is not None:
                self._see(node, 1)
                self._mark(node.blocks)
                for window in node.windows:
                    self._mark(window)
                node = node.parent
            for blocks in (sequence.blocks, *sequence.windows, *(one for one, _ in sequence.duplicates)):
                self._mark(blocks)
            looked += 1
            if looked % most == 0:
                yield
                live = self._live()
        self._count(sequences=looked)
        yield

    def _count_holds(self) -> Iterator[None]:
        most, looked = self._budget.holds, 0
        self._holds_counted = True
        for account in list(self._manager.accounts.values()):
            hold = account.residencies.oldest
            while hold is not None:
                self._count_hold(hold)
                hold = hold.newer
                looked += 1
                if looked % most == 0:
                    yield
                    if hold is not None and not hold.is_held:  # it lapsed just now: this count is lost
                        self._holds_counted = False
                        break
        self._count(holds=looked)
        yield

    def _count_hold(self, hold: Residency) -> None:
        node = hold.leaf
        if node is None or node.length == 0:
            what = "residency without block", hold.id, 0
            self._suspect(what, hold.account.name, "its last block has ended")
        while node is not None:
            if node.domain.owner is hold.account or node.domain.is_segment:
                self._see(node, _HOLD)
            node = node.parent

    def _compare_nodes(self) -> Iterator[None]:
        """Only what is as it was noted: nothing was attached to it or taken from it meanwhile."""
        at = 0
        for stripe in self._manager.tree.index.stripes:
            for node in list(stripe.values()):
                shard = self._shard(node)
                noted = self._noted[shard].pop(id(node), None)
                count = self._counts[shard].pop(id(node), 0)
                if noted is not None and node.length and noted == self._state(node):
                    self._compare(node, count % _HOLD, count // _HOLD)
                at += 1
                if at % self._budget.nodes == 0:
                    yield
        for number in range(len(self._noted)):  # nodes that went meanwhile
            self._noted[number].clear()
            self._counts[number].clear()
            if number % 64 == 63:
                yield
        yield

    def _compare(self, node: Node, refs: int, holds: int) -> None:
        pairs = (
            (node.refs, refs, "reference without sequence", "sequence without reference"),
            (node.holds, holds, "hold without residency", "residency without block"),
        )
        for kept, counted, more, fewer in pairs if self._holds_counted else pairs[:1]:
            if kept != counted:
                generation = int(self._manager.pool.generation[node.blocks[0]])
                what = more if kept > counted else fewer, int(node.blocks[0]), generation
                self._suspect(what, node.domain.owner.name, f"{kept} kept, {counted} counted")

    def _compare_blocks(self) -> Iterator[None]:
        pool, size = self._manager.pool, self._budget.blocks
        for first in range(0, pool.blocks, size):
            part = slice(first, first + size)
            state = pool.state[part]
            lost = (self._had[part] > 0) & (pool.generation[part] == self._had[part])
            lost &= ((state == ACTIVE) | (state == CACHED)) & (self._has[part] != self._had[part])
            for place in np.flatnonzero(lost)[:16].tolist():
                block = first + place
                what = "reference without sequence", block, int(self._had[block])
                self._suspect(what, "", "a block in custody that no request and no chain has")
            yield

    def _suspect(self, what: tuple[str, int, int], tenant: str, cause: str) -> None:
        self._suspects.add(what)
        if what in self._before:  # the second round in a row (J2)
            blocks = (what[1],) if what[2] else ()
            residency = 0 if what[2] else what[1]
            self._found[what] = Finding(what[0], tenant, cause, blocks, residency=residency)
