"""What an erasure does to our own pools: end all custody of a selector, now, in every state.

- Requests of the selector, and readers of what only it owns, are aborted, or marked: they then publish nothing more,
  leave no hold, and what they alone use is found by nobody. Their blocks are on the way to CLEAN when they end.
- A block that another lawful holder still holds or uses stays, and is counted with the reason.
- The owner tenant's erasure overrides readers that came through a grant: their continuations become unreachable.
- What ended before, may be theirs and is not CLEAN yet is covered too, and awaited: who wrote a block of a wider
  domain is known to the ledger, not to the pool.
- The next request of the selector starts with an empty domain: no plan keeps a closed one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from kvcustody.allocator.manager.block_manager import BlockManager
from kvcustody.allocator.pool.accounting import Domain, EndedRun, PoolPartition
from kvcustody.allocator.pool.block_state import ACTIVE, CACHED, CLEAN, DIRTY, FENCED, QUARANTINED, Blocks
from kvcustody.allocator.prefix.node import Node
from kvcustody.allocator.prefix.sequence import RunningSequence
from kvcustody.governance.decisions.access_plan import label_of, plan_of
from kvcustody.governance.erasure.erasure_run import (
    ErasureEffect,
    PoolUnits,
    Reread,
    UnitStates,
    unique_units,
)
from kvcustody.governance.erasure.selector import (
    Selector,
    matches_label,
    matches_plan,
    may_hold,
)
from kvcustody.governance.governor.governor_view import GovernorView


class GovernorErasure:
    """A Governor as erasures see it."""

    def __init__(self, governor: GovernorView) -> None:
        self._governor = governor

    def take_effect(self, selector: Selector, before_us: int, *, finish: bool) -> ErasureEffect:
        """End what the selector covers and began before; running requests end now, or are marked with `finish`."""
        governor, now_us = self._governor, self._governor.clock.now_us()
        aborted = lapsed = ended = 0
        finishing: list[object] = []
        units: list[PoolUnits] = []
        for manager in governor.managers:
            covered = _Covered(manager, selector, before_us)
            before = manager.live_blocks()
            for domain in covered.domains:
                domain.is_open = False
            covered.end_holds(before_us)
            for sequence in covered.sequences:
                sequence.stop_publishing()
                if finish:
                    finishing.append(sequence.id)
                else:
                    governor.release(sequence.id, "erased")
                    aborted += 1
            for hold in covered.holds:
                if hold.is_held:  # not over already, with the last of its blocks
                    manager.tree.lapse(hold, "erased", min(before_us, hold.deadline_us))
            lapsed += len(covered.holds)
            manager.tree.flush(now_us)
            _end(manager, covered.tops(), before_us, now_us)
            if finish:
                _unpublish(manager, covered.sequences, now_us)
            manager.tree.evicted_keys.forget(selector.tenant)
            ended += before - manager.live_blocks()
            units.append(covered.units)
        governor.forget_closed_plans()
        governor.forget_forecast(lambda domain: matches_label(selector, label_of(domain)))
        return ErasureEffect(
            aborted, tuple(finishing), lapsed, ended, tuple(part for part in units if len(part.blocks))
        )

    def unit_states(self, units: Sequence[PoolUnits]) -> UnitStates:
        """Where these units are now."""
        waiting = quarantined = 0
        held: list[PoolUnits] = []
        used: list[PoolUnits] = []
        for part in units:
            pool = self._governor.managers[part.pool].pool
            same = pool.generation[part.blocks] == part.generations
            state = pool.state[part.blocks]
            waiting += int(np.count_nonzero(same & ((state == FENCED) | (state == DIRTY))))
            quarantined += int(np.count_nonzero(same & (state == QUARANTINED)))
            for into, wanted in ((held, CACHED), (used, ACTIVE)):
                chosen = same & (state == wanted)
                if chosen.any():
                    into.append(PoolUnits(part.pool, part.blocks[chosen], part.generations[chosen]))
        return UnitStates(waiting, quarantined, tuple(held), tuple(used))

    def still_running(self, requests: Sequence[object]) -> list[object]:
        """Those of the requests that have not ended."""
        return [request for request in requests if request in self._governor.running]

    def end(self, requests: Sequence[object]) -> None:
        """End these requests as erased."""
        for request in requests:
            self._governor.release(request, "erased")

    def reread(self, units: Sequence[PoolUnits]) -> Reread | None:
        """Read back what is still CLEAN at its generation; None where the memory cannot be read."""
        checked = changed = nonzero = 0
        for part in units:
            pool = self._governor.managers[part.pool].pool
            read = getattr(pool.memory, "nonzero_bytes", None)
            if read is None:
                return None
            same = pool.generation[part.blocks] == part.generations
            clean = part.blocks[same & (pool.state[part.blocks] == CLEAN)]
            checked += len(clean)
            changed += int(np.count_nonzero(~same))
            if len(clean):
                nonzero += int(read(clean))
        return Reread(checked, changed, nonzero)


class _Covered:
    """What one pool has of a selector, found before anything is changed."""

    def __init__(self, manager: BlockManager, selector: Selector, before_us: int) -> None:
        self.manager = manager
        self.domains: set[Domain] = set()
        self.inside: dict[int, Node] = {}  # nodes of these domains, and whatever continues them
        for node in manager.tree.nodes():
            domain = node.domain
            if domain in self.domains or matches_label(selector, label_of(domain)):
                self.domains.add(domain)
                self.inside[id(node)] = node
            elif node.parent is not None and id(node.parent) in self.inside:
                self.inside[id(node)] = node
        self.sequences = [
            sequence
            for sequence in manager.decode.sequences
            if sequence is not None
            and sequence.residency.opened_us <= before_us
            and (matches_plan(selector, plan_of(sequence.residency)) or self._reads(sequence))
        ]
        for sequence in self.sequences:
            if matches_label(selector, label_of(sequence.domain)):
                self.domains.add(sequence.domain)
        self.holds = [
            hold
            for account in manager.accounts.values()
            if selector.tenant is None or account.name == selector.tenant
            for hold in manager.hold_table.of(account)
            if hold.opened_us <= before_us and matches_plan(selector, plan_of(hold))
        ]
        self.units = self._units(selector)

    def _reads(self, sequence: RunningSequence) -> bool:
        return any(id(node) in self.inside for node in _path(sequence.leaf))

    def _units(self, selector: Selector) -> PoolUnits:
        """Every block that the selector's holders wrote, hold or use, or whose end is on its way."""
        pool = self.manager.pool
        nodes = dict(self.inside)
        parts: list[Blocks] = []
        for hold in self.holds:
            nodes.update((id(node), node) for node in _path(hold.leaf))
        for sequence in self.sequences:
            nodes.update((id(node), node) for node in _path(sequence.leaf))
            parts += [sequence.blocks, *sequence.windows, *(blocks for blocks, _ in sequence.duplicates)]
        for node in nodes.values():
            parts += [node.blocks, *node.windows]
        for custody in _on_their_way(pool.partitions):
            if custody.domain is not None and may_hold(selector, label_of(custody.domain)):
                parts.append(custody.blocks)
        return unique_units(self.manager.number, parts, pool.generation)

    def end_holds(self, at_us: int) -> None:
        """What is held in the selected domains was held until the erasure was asked for, below other nodes too."""
        for node in self.inside.values():
            if node.domain in self.domains and node.deadline_us:
                node.deadline_us = min(node.deadline_us, at_us)

    def tops(self) -> list[Node]:
        """Unreferenced nodes to end: the topmost of each chain, for what is below ends with them."""
        return [
            node
            for node in self.inside.values()
            if node.length
            and node.refs == 0
            and (node.parent is None or id(node.parent) not in self.inside or node.parent.refs > 0)
        ]


def _end(manager: BlockManager, tops: Iterable[Node], due_us: int, now_us: int) -> None:
    """What is erased was due when the erasure was asked for, however long it took to take effect."""
    for node in tops:
        manager.tree.end_subtree(node, "erased", due_us, now_us)
    manager.tree.flush(now_us)


def _unpublish(manager: BlockManager, sequences: Iterable[RunningSequence], now_us: int) -> None:
    """What only these sequences use leaves the index, and what continues it for nobody ends."""
    uses: dict[int, int] = {}
    nodes: dict[int, Node] = {}
    for sequence in sequences:
        for node in _path(sequence.leaf):
            nodes[id(node)] = node
            uses[id(node)] = uses.get(id(node), 0) + 1
    for key, node in nodes.items():
        if node.holds or node.refs != uses[key]:
            continue
        manager.tree.unpublish(node, "erased")
        child = node.first_child
        while child is not None:
            after = child.next_sibling
            if child.refs == 0:
                manager.tree.end_subtree(child, "erased", now_us, now_us)
            child = after
    manager.tree.flush(now_us)


def _on_their_way(partitions: Iterable[PoolPartition]) -> list[EndedRun]:
    found: list[EndedRun] = []
    for partition in partitions:
        found += [*partition.fenced, *partition.dirty, *partition.stuck]
    return found


def _path(leaf: Node | None) -> Iterable[Node]:
    while leaf is not None:
        yield leaf
        leaf = leaf.parent
