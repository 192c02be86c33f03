"""A full scan of one pool: disagreements of the allocator, the live sequences and the queues, and their repairs.

`PoolScan.findings` gives each disagreement with its repair. It compares:

- references and holds;
- the index with the tree: chains that cannot be found, and entries that lead nowhere;
- blocks in custody that belong to no node and no sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import numpy as np

from kvcustody.allocator.manager.block_manager import BlockManager
from kvcustody.allocator.manager.repair import (
    cut_path,
    drop_entries,
    end_lost,
    remove_from_index,
    set_holds,
    set_refs,
)
from kvcustody.allocator.pool.accounting import Account, Domain
from kvcustody.allocator.pool.block_state import ACTIVE, CACHED, QUARANTINED, Blocks
from kvcustody.allocator.prefix.hash_index import COARSE_BLOCKS
from kvcustody.allocator.prefix.node import Node, PathResidency
from kvcustody.allocator.prefix.sequence import RunningSequence
from kvcustody.governance.decisions.access_plan import DomainLabel
from kvcustody.governance.orphans.finding import FAILED_VERIFICATION, NONE, FindingBuilder, RepairableFinding
from kvcustody.governance.orphans.pool_census import TreeCensus


class PoolScan:
    """One pool, read once. `live`: sequences whose requests have not ended.

    `end` ends a sequence in every book, with its evidence.
    """

    def __init__(
        self,
        manager: BlockManager,
        live: set[RunningSequence],
        now_us: int,
        end: Callable[[RunningSequence], None],
    ) -> None:
        self.manager = manager
        self.live = live
        self.now_us = now_us
        self.end = end
        self.census = TreeCensus(manager)
        self.sequences = self.census.sequences
        self._found = FindingBuilder(manager.number, now_us)

    def findings(self) -> list[RepairableFinding]:
        """Return every finding of this pool with its repair, in an order in which they can be repaired one by one."""
        return [
            *self._missing_references(),
            *self._lost_sequences(),
            *self._leaked_references(),
            *self._blockless(),
            *self._holds(),
            *index_findings(self.census, self._found),
            *lost_blocks(self.census, self._found),
            *self._fences(),
        ]

    # -- sequences ----------------------------------------------------------------------------------------------------

    def _lost_sequences(self) -> list[RepairableFinding]:
        findings = [
            self._sequence("lost finish", sequence, "a sequence without a live request", "released")
            for sequence in self.sequences
            if sequence not in self.live
        ]
        wanted = "sequence without reference"
        findings += [
            self._sequence(wanted, sequence, "blocks of its path have ended under it", "aborted")
            for sequence in self.census.broken
        ]
        findings += [
            self._sequence(wanted, sequence, "a live request without a slot", "closed")
            for sequence in self.live
            if sequence.slot < 0
        ]
        return findings

    def _sequence(self, orphan: str, sequence: RunningSequence, cause: str, action: str) -> RepairableFinding:
        def end() -> tuple[str, str]:
            if sequence in self.census.broken:
                cut_path(self.manager, sequence)
            sequence.stop_publishing()
            self.end(sequence)
            return action, "recovered"

        residency, tenant = sequence.residency, sequence.account.name
        since_us = residency.opened_us
        return self._found(orphan, tenant, cause, sequence.blocks, end, since_us=since_us, residency=residency.id)

    # -- references ---------------------------------------------------------------------------------------------------

    def _missing_references(self) -> list[RepairableFinding]:
        """Taken from the root down, before any sequence ends that should have them."""
        tree, now_us, census = self.manager.tree, self.now_us, self.census

        def missing(node: Node, counted: int) -> RepairableFinding:
            def take() -> tuple[str, str]:
                set_refs(tree, node, counted, now_us)
                return "reference taken", "recovered"

            cause = f"{counted} sequences, {node.refs} references"
            return self._node("sequence without reference", node, cause, take)

        places = np.flatnonzero(census.refs < census.counted).tolist()
        return [missing(census.nodes[at], int(census.counted[at])) for at in places]

    def _leaked_references(self) -> list[RepairableFinding]:
        """Given back from the leaves up."""
        census, findings = self.census, []
        for at in np.flatnonzero(census.refs > census.counted)[::-1].tolist():
            node = census.nodes[at]
            cause = f"{node.refs} references, {int(census.counted[at])} sequences"
            repair = _Refs(self.manager, node, self.now_us)
            findings.append(self._node("reference without sequence", node, cause, repair))
        return findings

    def _node(self, orphan: str, node: Node, cause: str, repair: Callable[[], tuple[str, str]]) -> RepairableFinding:
        tenant = node.domain.owner.name
        return self._found(orphan, tenant, cause, node.blocks, repair, since_us=node.used_us)

    # -- holds --------------------------------------------------------------------------------------------------------

    def _blockless(self) -> list[RepairableFinding]:
        def dropped(residency: PathResidency) -> RepairableFinding:
            def drop() -> tuple[str, str]:
                self.manager.hold_table.remove(residency)
                return "hold dropped", "recovered"

            orphan, cause, tenant = (
                "residency without block",
                "its last block has ended",
                residency.account.name,
            )
            since_us = residency.opened_us
            return self._found(orphan, tenant, cause, NONE, drop, since_us=since_us, residency=residency.id)

        return [dropped(residency) for residency in self.census.blockless]

    def _holds(self) -> list[RepairableFinding]:
        tree, now_us, census = self.manager.tree, self.now_us, self.census

        def differing(node: Node, held: int) -> RepairableFinding:
            def hold() -> tuple[str, str]:
                if node.length:
                    set_holds(tree, node, held, now_us)
                return "holds counted anew", "recovered"

            orphan = "hold without residency" if node.holds > held else "residency without block"
            return self._node(orphan, node, f"{node.holds} holds, {held} residencies", hold)

        places = np.flatnonzero(census.holds != census.held)[::-1].tolist()
        return [differing(census.nodes[at], int(census.held[at])) for at in places]

    # -- fences -------------------------------------------------------------------------------------------------------

    def _fences(self) -> list[RepairableFinding]:
        findings: list[RepairableFinding] = []
        for partition in self.manager.pool.partitions:
            for custody in partition.stuck:
                tenant = custody.account.name if custody.account is not None else ""
                cause = f"fence {custody.fence} outlived its bound"
                findings.append(
                    self._found(
                        "stuck fence",
                        tenant,
                        cause,
                        custody.blocks,
                        lambda: ("quarantined until it retires", "contained"),
                        since_us=custody.ended_us,
                    )
                )
        unverified = self.manager.pool.state == QUARANTINED
        for trouble in findings:
            unverified[list(trouble.finding.blocks)] = False
        if unverified.any():
            cause = "blocks did not verify after a scrub"
            contained = "quarantined until teardown", "contained"
            failed = np.flatnonzero(unverified)
            findings.append(self._found(FAILED_VERIFICATION, "", cause, failed, lambda: contained))
        return findings


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


_CLASS = "unreachable chain"


def index_findings(census: TreeCensus, new_finding: FindingBuilder) -> list[RepairableFinding]:
    """Return findings of nodes that are indexed but not in the tree, and of nodes without an entry."""
    tree, now_us = census.manager.tree, new_finding.now_us

    def stray(node: Node) -> RepairableFinding:
        def drop() -> tuple[str, str]:
            drop_entries(tree, node)
            return "taken out of the index", "recovered"

        tenant, cause = node.domain.owner.name, "indexed but not in the tree"
        return new_finding(_CLASS, tenant, cause, node.blocks, drop, since_us=node.used_us)

    def part(node: Node) -> RepairableFinding:
        def end() -> tuple[str, str]:
            if node.length:
                remove_from_index(tree, node, now_us)
            return "ended" if node.length == 0 else "left to its requests", "recovered"

        tenant, cause = node.domain.owner.name, "in the tree but not indexed"
        return new_finding(_CLASS, tenant, cause, node.blocks, end, since_us=node.used_us)

    strays, parts = _entries(census)
    return [*map(stray, strays), *map(part, parts)]


def _entries(census: TreeCensus) -> tuple[list[Node], list[Node]]:
    """Entered nodes that are not in the tree, and nodes with fewer entries than their keys ask for.

    A key leads to one node, so a node's entries are whole when there are as many as its length calls for.
    """
    index = census.manager.tree.index
    # A stripe's nodes as a list first: fetched together from memory, they are there when their turn comes.
    entered = chain.from_iterable(map(list, map(dict.values, index.stripes)))
    have = census.occurrences(entered, len(index))
    strays: list[Node] = []
    if int(have.sum()) != len(index):
        places = census.places(index.nodes(), len(index)).tolist()
        outside = (node for node, at in zip(index.nodes(), places, strict=True) if at < 0)
        strays = list({id(node): node for node in outside}.values())
    start, length = census.tree.start, census.tree.length
    wanted = census.tree.keyed * (1 + (start + length) // COARSE_BLOCKS - (start + 1) // COARSE_BLOCKS)
    return strays, [census.nodes[at] for at in np.flatnonzero(have != wanted).tolist()]


def lost_blocks(census: TreeCensus, new_finding: FindingBuilder) -> list[RepairableFinding]:
    """Return a finding for each account that is charged for more than nodes and sequences explain."""
    manager, now_us = census.manager, new_finding.now_us
    pool = manager.pool
    lost = np.flatnonzero(((pool.state == ACTIVE) | (pool.state == CACHED)) & ~_explained(census))

    def of(account: Account, blocks: Blocks) -> RepairableFinding:
        def end() -> tuple[str, str]:
            left = blocks[(pool.state[blocks] == ACTIVE) | (pool.state[blocks] == CACHED)]
            end_lost(manager, left, _nobodys(manager, account), now_us)
            return "ended", "recovered"

        cause = "blocks in custody that no request and no chain holds"
        return new_finding("reference without sequence", account.name, cause, blocks, end)

    return [of(account, blocks) for account, blocks in _by_account(census, lost)] if len(lost) else []


def _explained(census: TreeCensus) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """By block: a node or a sequence has it."""
    has = np.zeros(census.manager.pool.blocks, dtype=np.bool_)
    parts: list[Blocks] = [*census.tree.blocks, *census.tree.windows]
    for sequence in census.sequences:
        parts += [sequence.blocks, *sequence.windows]
        parts += [blocks for blocks, _ in sequence.duplicates]
    if parts:
        has[np.concatenate(parts)] = True
    return has


def _by_account(census: TreeCensus, lost: Blocks) -> list[tuple[Account, Blocks]]:
    accounts = census.manager.accounts
    explained = dict.fromkeys(accounts, 0)
    for node in census.nodes:
        explained[node.domain.owner.name] += node.block_count
    for sequence in census.sequences:
        for first, last, domain in sequence.shares(sequence.published, sequence.block_count):
            explained[domain.owner.name] += last - first
        for blocks, domain in sequence.duplicates:
            explained[domain.owner.name] += len(blocks)
        for window in sequence.windows:
            explained[sequence.domain.owner.name] += len(window)
    left, shares = lost, []
    for name, account in accounts.items():
        surplus = account.active_blocks + account.cached_blocks - explained[name]
        if surplus > 0 and len(left):
            shares.append((account, left[:surplus]))
            left = left[surplus:]
    if len(left):
        shares.append((next(iter(accounts.values())), left))
    return shares


def _nobodys(manager: BlockManager, account: Account) -> Domain:
    """A domain for custody whose own is not known any more: never cached, read back in full."""
    label = DomainLabel(account.name, "unknown", 0, "request", None, None, None)
    return manager.domain(account, label=label, idle_us=0, absolute_us=0, scrub_within_us=1_000_000, verify_share=1.0)
