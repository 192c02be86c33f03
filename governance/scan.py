"""Orphan scans of one process: what the allocator, the live sequences and the queues disagree about, and the repair.

F1  A finding is a disagreement between two sources that are counted apart; a scan changes nothing until it is told to.
F2  Every finding of the twelve classes has a repair. What cannot be explained is ended, never kept; what a fence holds
    is contained until the fence retires.
F3  One pass over nodes, holds and sequences, and array operations over blocks: no walk from a hold to its root.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcustody.allocator.block import ACTIVE, CACHED, QUARANTINED, Blocks
from kvcustody.allocator.domain import Domain
from kvcustody.allocator.index import COARSE_BLOCKS
from kvcustody.allocator.manager import BlockManager
from kvcustody.allocator.mend import (
    cut_path,
    drop_entries,
    drop_residency,
    end_lost,
    set_holds,
    set_refs,
    unreach,
)
from kvcustody.allocator.node import Node
from kvcustody.allocator.quota import Account
from kvcustody.allocator.residency import Residency
from kvcustody.allocator.sequence import Sequence as Running
from kvcustody.governance.plan import DomainLabel

CLASSES = (
    "reference without sequence",
    "sequence without reference",
    "hold without residency",
    "residency without block",
    "stuck fence",
    "lost finish",
    "dead incarnation",
    "unreachable chain",
    "receipt without release",
    "ledger gap",
    "tier object without index",
    "index without tier object",
)
NONE: Blocks = np.empty(0, dtype=np.int64)


class Finding(NamedTuple):
    """One disagreement: its class as the design names it, its owner, and the blocks it is about.

    `age_us`: for how long at least, where that is known. `action` and `outcome` are empty until it was repaired.
    """

    orphan: str
    tenant: str
    cause: str
    blocks: tuple[int, ...]
    age_us: int = 0
    residency: int = 0
    pool: int = 0
    action: str = ""
    outcome: str = ""


Repair = Callable[[], tuple[str, str]]


class Trouble(NamedTuple):
    """A finding with what repairs it: a call that returns what was done and what came of it."""

    finding: Finding
    repair: Repair

    def mend(self) -> Finding:
        """Repair it; the finding says how that went."""
        action, outcome = self.repair()
        return self.finding._replace(action=action, outcome=outcome)


class PoolScan:
    """One pool's nodes, holds and sequences, read once. `live`: sequences of requests that have not ended here.

    `end` ends a sequence in every book, with its evidence.
    """

    def __init__(
        self, manager: BlockManager, live: set[Running], now_us: int, end: Callable[[Running], None]
    ) -> None:
        self.manager = manager
        self.end = end
        self.live = live
        self.now_us = now_us
        self.nodes: list[Node] = []
        self.parents: list[int] = []
        self._read_nodes()
        self.place = {id(node): at for at, node in enumerate(self.nodes)}
        self.sequences = [sequence for sequence in manager.decode.sequences if sequence is not None]
        self.refs: NDArray[np.int64] = self._array("refs")
        self.holds: NDArray[np.int64] = self._array("holds")
        self.counted: NDArray[np.int64] = np.zeros(len(self.nodes), dtype=np.int64)
        self.broken: dict[Running, list[Node]] = {}  # sequences with path nodes that are not in the tree
        self._count_references()
        self.residencies: list[Residency] = []
        self.blockless: list[Residency] = []
        self.held: NDArray[np.int64] = self._count_holds()

    def _array(self, field: str) -> NDArray[np.int64]:
        return np.fromiter((getattr(node, field) for node in self.nodes), np.int64, len(self.nodes))

    def _read_nodes(self) -> None:
        stack = [(node, -1) for node in self.manager.tree.roots.values()]
        nodes, parents = self.nodes, self.parents
        while stack:
            node, parent = stack.pop()
            at = len(nodes)
            nodes.append(node)
            parents.append(parent)
            child = node.first_child
            while child is not None:
                stack.append((child, at))
                child = child.next_sibling

    def _count_references(self) -> None:
        for sequence in self.sequences:
            node = sequence.leaf
            while node is not None:
                at = self.place.get(id(node))
                if at is None:
                    self.broken.setdefault(sequence, []).append(node)
                else:
                    self.counted[at] += 1
                node = node.parent

    def _count_holds(self) -> NDArray[np.int64]:
        """How many residencies explain each node's holds: (node, account) pairs climb to the roots together (F3)."""
        accounts = list(self.manager.accounts.values())
        codes = {id(account): code for code, account in enumerate(accounts)}
        leaves: list[int] = []
        owners: list[int] = []
        for code, account in enumerate(accounts):
            for residency in account.residencies.values():
                leaf = residency.leaf
                place = self.place.get(id(leaf)) if leaf is not None and leaf.length else None
                if place is None:
                    self.blockless.append(residency)
                else:
                    leaves.append(place)
                    owners.append(code)
        width = max(1, len(accounts))
        counted = np.zeros(len(self.nodes), dtype=np.int64)
        if not leaves:
            return counted
        domains: dict[int, tuple[int, bool]] = {}
        node_owner = np.empty(len(self.nodes), dtype=np.int64)
        for at, node in enumerate(self.nodes):
            domain = node.domain
            known = domains.get(domain.tag)
            if known is None:
                owner = codes.get(id(domain.owner), -1)
                known = domains[domain.tag] = (owner, domain.is_segment)
            node_owner[at] = -2 if known[1] else known[0]
        parents = np.array(self.parents, dtype=np.int64)
        pairs = np.array(leaves, dtype=np.int64) * width + np.array(owners, dtype=np.int64)
        pairs, counts = np.unique(pairs, return_counts=True)
        while len(pairs):
            here, who = pairs // width, pairs % width
            owner_here = node_owner[here]
            holds = (owner_here == who) | (owner_here == -2)
            counted += np.bincount(here[holds], counts[holds], len(counted)).astype(np.int64)
            up = parents[here]
            inside = up >= 0
            pairs, counts = _combined(up[inside] * width + who[inside], counts[inside])
        return counted

    # -- findings -----------------------------------------------------------------------------------------------------

    def troubles(self) -> list[Trouble]:
        """Every finding of this pool with its repair, in an order in which they can be repaired one by one."""
        return [
            *self._missing_references(),
            *self._lost_sequences(),
            *self._leaked_references(),
            *self._holds(),
            *self._index(),
            *self._blocks(),
            *self._fences(),
        ]

    def _found(
        self,
        orphan: str,
        tenant: str,
        cause: str,
        blocks: Blocks | tuple[int, ...],
        repair: Repair,
        *,
        since_us: int = 0,
        residency: int = 0,
    ) -> Trouble:
        age_us = max(0, self.now_us - since_us) if since_us else 0
        listed = tuple(blocks) if isinstance(blocks, tuple) else tuple(blocks.tolist())
        finding = Finding(orphan, tenant, cause, listed, age_us, residency, self.manager.number)
        return Trouble(finding, repair)

    def _lost_sequences(self) -> list[Trouble]:
        made = [
            self._sequence("lost finish", sequence, "a sequence without a live request", "released")
            for sequence in self.sequences
            if sequence not in self.live
        ]
        wanted = "sequence without reference"
        made += [
            self._sequence(wanted, sequence, "blocks of its path have ended under it", "aborted")
            for sequence in self.broken
        ]
        made += [
            self._sequence(wanted, sequence, "a live request without a slot", "closed")
            for sequence in self.live
            if sequence.slot < 0
        ]
        return made

    def _sequence(self, orphan: str, sequence: Running, cause: str, action: str) -> Trouble:
        def end() -> tuple[str, str]:
            if sequence in self.broken:
                cut_path(self.manager, sequence)
            self.manager.withdraw(sequence)
            self.end(sequence)
            return action, "recovered"

        residency = sequence.residency
        return self._found(
            orphan,
            sequence.account.name,
            cause,
            sequence.blocks,
            end,
            since_us=residency.opened_us,
            residency=residency.id,
        )

    def _missing_references(self) -> list[Trouble]:
        """Taken from the root down, before any sequence ends that should have them."""
        tree, now_us = self.manager.tree, self.now_us
        made: list[Trouble] = []
        for at in np.flatnonzero(self.refs < self.counted).tolist():
            node, counted = self.nodes[at], int(self.counted[at])

            def take(node: Node = node, counted: int = counted) -> tuple[str, str]:
                set_refs(tree, node, counted, now_us)
                return "reference taken", "recovered"

            made.append(
                self._found(
                    "sequence without reference",
                    node.domain.owner.name,
                    f"{counted} sequences, {node.refs} references",
                    node.blocks,
                    take,
                    since_us=node.used_us,
                )
            )
        return made

    def _leaked_references(self) -> list[Trouble]:
        """Given back from the leaves up."""
        now_us = self.now_us
        made: list[Trouble] = []
        for at in np.flatnonzero(self.refs > self.counted)[::-1].tolist():
            node, counted = self.nodes[at], int(self.counted[at])
            made.append(
                self._found(
                    "reference without sequence",
                    node.domain.owner.name,
                    f"{node.refs} references, {counted} sequences",
                    node.blocks,
                    _Refs(self.manager, node, now_us),
                    since_us=node.used_us,
                )
            )
        return made

    def _holds(self) -> list[Trouble]:
        tree, now_us = self.manager.tree, self.now_us
        made: list[Trouble] = []
        for residency in self.blockless:

            def drop(residency: Residency = residency) -> tuple[str, str]:
                drop_residency(residency)
                return "hold dropped", "recovered"

            made.append(
                self._found(
                    "residency without block",
                    residency.account.name,
                    "its last block has ended",
                    (),
                    drop,
                    since_us=residency.opened_us,
                    residency=residency.id,
                )
            )
        for at in np.flatnonzero(self.holds != self.held)[::-1].tolist():
            node, held = self.nodes[at], int(self.held[at])

            def hold(node: Node = node, held: int = held) -> tuple[str, str]:
                if node.length:
                    set_holds(tree, node, held, now_us)
                return "holds counted anew", "recovered"

            orphan = "hold without residency" if node.holds > held else "residency without block"
            cause = f"{node.holds} holds, {held} residencies"
            made.append(
                self._found(orphan, node.domain.owner.name, cause, node.blocks, hold, since_us=node.used_us)
            )
        return made

    def _index(self) -> list[Trouble]:
        tree, now_us = self.manager.tree, self.now_us
        made: list[Trouble] = []
        strays, partly = self._entries()
        for node in strays:

            def drop(node: Node = node) -> tuple[str, str]:
                drop_entries(tree, node)
                return "taken out of the index", "recovered"

            tenant = node.domain.owner.name
            cause = "indexed but not in the tree"
            made.append(
                self._found("unreachable chain", tenant, cause, node.blocks, drop, since_us=node.used_us)
            )
        for node in partly:

            def end(node: Node = node) -> tuple[str, str]:
                if node.length:
                    unreach(tree, node, now_us)
                return "ended" if node.length == 0 else "left to its requests", "recovered"

            made.append(
                self._found(
                    "unreachable chain",
                    node.domain.owner.name,
                    "in the tree but not indexed",
                    node.blocks,
                    end,
                    since_us=node.used_us,
                )
            )
        return made

    def _entries(self) -> tuple[list[Node], list[Node]]:
        """Nodes that are indexed and not in the tree, and nodes with fewer entries than their keys ask for.

        A key leads to one node, so a node's entries are whole when there are as many as its length calls for.
        """
        stripes = self.manager.tree.index.stripes
        every = [id(node) for stripe in stripes for node in stripe.values()]
        entered, counts = np.unique(np.array(every, dtype=np.int64), return_counts=True)
        strays = set(entered.tolist()) - self.place.keys()
        found = [node for node in (self.manager.tree.index.nodes() if strays else ()) if id(node) in strays]
        start, length = self._array("start"), self._array("length")
        keyed = np.fromiter((bool(node.keys) for node in self.nodes), np.bool_, len(self.nodes))
        wanted = keyed * (1 + (start + length) // COARSE_BLOCKS - (start + 1) // COARSE_BLOCKS)
        have = np.zeros(len(self.nodes), dtype=np.int64)
        if len(entered):
            ids = np.fromiter(self.place.keys(), np.int64, len(self.nodes))
            at = np.minimum(np.searchsorted(entered, ids), len(entered) - 1)
            have = np.where(entered[at] == ids, counts[at], 0)
        partly = [self.nodes[at] for at in np.flatnonzero(have != wanted).tolist()]
        return list({id(node): node for node in found}.values()), partly

    def _blocks(self) -> list[Trouble]:
        """Blocks in custody that no node and no sequence has."""
        pool = self.manager.pool
        has = np.zeros(pool.blocks, dtype=np.bool_)
        parts: list[Blocks] = [node.blocks for node in self.nodes]
        parts += [window for node in self.nodes if node.windows for window in node.windows]
        for sequence in self.sequences:
            parts += [sequence.blocks, *sequence.windows]
            parts += [blocks for blocks, _ in sequence.duplicates]
        if parts:
            has[np.concatenate(parts)] = True
        lost = np.flatnonzero(((pool.state == ACTIVE) | (pool.state == CACHED)) & ~has)
        if not len(lost):
            return []
        return [self._lost(account, blocks) for account, blocks in self._by_account(lost) if len(blocks)]

    def _lost(self, account: Account, blocks: Blocks) -> Trouble:
        def end() -> tuple[str, str]:
            pool = self.manager.pool
            left = blocks[(pool.state[blocks] == ACTIVE) | (pool.state[blocks] == CACHED)]
            end_lost(self.manager, left, _nobodys(self.manager, account), self.now_us)
            return "ended", "recovered"

        cause = "blocks in custody that no request and no chain has"
        return self._found("reference without sequence", account.name, cause, blocks, end)

    def _by_account(self, lost: Blocks) -> list[tuple[Account, Blocks]]:
        """Whose lost blocks are: accounts are charged for more than nodes and sequences explain."""
        explained = dict.fromkeys(self.manager.accounts, 0)
        for node in self.nodes:
            explained[node.domain.owner.name] += node.block_count
        for sequence in self.sequences:
            for first, last, domain in sequence.shares(sequence.published, sequence.block_count):
                explained[domain.owner.name] += last - first
            for blocks, domain in sequence.duplicates:
                explained[domain.owner.name] += len(blocks)
            for window in sequence.windows:
                explained[sequence.domain.owner.name] += len(window)
        left, made = lost, []
        for name, account in self.manager.accounts.items():
            surplus = account.active_blocks + account.cached_blocks - explained[name]
            if surplus > 0 and len(left):
                made.append((account, left[:surplus]))
                left = left[surplus:]
        if len(left):
            fallback = next(iter(self.manager.accounts.values()))
            made.append((fallback, left))
        return made

    def _fences(self) -> list[Trouble]:
        made: list[Trouble] = []
        stuck = 0
        for partition in self.manager.pool.partitions:
            for custody in partition.stuck:
                stuck += len(custody.blocks)
                made.append(
                    self._found(
                        "stuck fence",
                        custody.account.name if custody.account is not None else "",
                        f"fence {custody.fence} outlived its bound",
                        custody.blocks,
                        lambda: ("quarantined until it retires", "contained"),
                        since_us=custody.ended_us,
                    )
                )
        quarantined = int(np.count_nonzero(self.manager.pool.state == QUARANTINED))
        if quarantined > stuck:
            cause = f"{quarantined - stuck} blocks did not verify after a scrub"
            made.append(
                self._found(
                    "failed verification", "", cause, (), lambda: ("quarantined until teardown", "contained")
                )
            )
        return made


class _Refs:
    """Gives back what no sequence explains, counted at the moment of the repair: others may have gone before."""

    def __init__(self, manager: BlockManager, node: Node, now_us: int) -> None:
        self.manager = manager
        self.node = node
        self.now_us = now_us

    def __call__(self) -> tuple[str, str]:
        node = self.node
        if node.length:
            counted = 0
            for sequence in self.manager.decode.sequences:
                at = sequence.leaf if sequence is not None else None
                while at is not None:
                    counted += at is node
                    at = at.parent
            if counted < node.refs:
                set_refs(self.manager.tree, node, counted, self.now_us)
        return "references given back", "recovered"


def _combined(
    pairs: NDArray[np.int64], counts: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    if not len(pairs):
        return pairs, counts
    unique, where = np.unique(pairs, return_inverse=True)
    return unique, np.bincount(where, counts, len(unique)).astype(np.int64)


def _nobodys(manager: BlockManager, account: Account) -> Domain:
    """A domain for custody whose own is not known any more: never cached, read back in full."""
    label = DomainLabel(account.name, "unknown", 0, "request", None, None, None)
    return manager.domain(
        account, label=label, idle_us=0, absolute_us=0, scrub_within_us=1_000_000, verify_share=1.0
    )
