"""The books of our own pools: block managers and their running sequences.

An erasure ends all custody that a selector matches, at once and in every state:

- Requests of the selector, and readers of blocks that only it owns, are aborted or marked. A marked request publishes
  nothing more and leaves no hold, and no look-up finds the blocks that only it uses. Their blocks are on the way to
  CLEAN when the requests end.
- A block that another lawful holder still holds or uses stays, and is counted with the reason.
- The owner tenant's erasure overrides readers that use a grant: their continuations become unreachable.
- Blocks that ended before, may belong to the selector and are not CLEAN yet are covered too, and awaited. The reason:
  the ledger knows who wrote a block of a wider domain, but the pool does not.

Conservation's counters come only from states, generations, block tables and devices, never from events. A block is live
until its custody end is on its way to the ledger. So FENCED blocks are live, and so are blocks that are quarantined
because their fence never retired.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

import numpy as np
from numpy.typing import NDArray

from kvcustody.allocator.manager.block_manager import BlockManager
from kvcustody.allocator.manager.check_invariants import check
from kvcustody.allocator.pool.accounting import Domain, EndedRun, PoolPartition
from kvcustody.allocator.pool.block_state import CLEAN, DIRTY, FENCED, QUARANTINED, Blocks, BlockState
from kvcustody.allocator.prefix.node import Node
from kvcustody.allocator.prefix.sequence import RunningSequence
from kvcustody.audit.evidence.coverage.conservation import PoolCounts
from kvcustody.audit.kinds import CustodyOverdue, Event
from kvcustody.governance.custody.books import CopyTiers, Covers, PoolFigures
from kvcustody.governance.custody_events import (
    blocks_passed,
    custody_ended,
    integrity_mismatch,
    scrub_receipts,
)
from kvcustody.governance.decisions.access_plan import label_of, plan_of
from kvcustody.governance.decisions.staged_table import quotas_of
from kvcustody.governance.erasure.erasure_run import PoolUnits, Reread, UnitStates, unique_units, unit_states
from kvcustody.governance.erasure.selector import Selector, matches_label, matches_plan, may_hold
from kvcustody.governance.governor.end_domains import end_domains, nodes_inside, topmost
from kvcustody.governance.governor.forecast_pools import ForecastPools
from kvcustody.governance.governor.pools import Pools
from kvcustody.governance.governor.sequence_events import unlisted
from kvcustody.governance.observability.stats import charged_blocks, overdue_us, pool_stats
from kvcustody.governance.orphans.finding import RepairableFinding
from kvcustody.governance.orphans.online_pool_scan import OnlineScan
from kvcustody.governance.orphans.pool_scan import PoolScan
from kvcustody.governance.orphans.scan_protocol import Held, PoolFindings
from kvcustody.governance.orphans.slices import Slices
from kvcustody.policies.document.model import Profile
from kvcustody.policies.table.decision_table import DecisionTable

GRACE_US = 1_000_000  # what is overdue for longer at the end of a step goes on record; so does that nothing is any more


class PoolBooks:
    """`Books` of our own pools.

    `release` ends the request with a handle, for a cause; `finish` ends a sequence, also one whose handle is gone.
    """

    def __init__(
        self,
        pools: Pools,
        forecast: ForecastPools,
        release: Callable[[Hashable, str], bool],
        finish: Callable[[RunningSequence, str, Hashable], None],
    ) -> None:
        self._pools = pools
        self._forecast = forecast
        self.release = release
        self.finish = finish
        self.running: dict[Hashable, RunningSequence] = {}
        self.copies = CopyTiers()
        self._launch = 0
        self._late: set[int] = set()  # pools with custody that is overdue, on record

    @property
    def pools(self) -> list[BlockManager]:
        """The block managers, one per pool."""
        return self._pools.managers

    def limit(self, table: DecisionTable) -> None:
        """Limit as `Books` does, the forecast too; prepares block checksums before a request waits for them."""
        quotas = quotas_of(table)
        self._pools.limit(quotas)
        if table.policy.profile is Profile.SHARED:
            self._forecast.limit(quotas)
        if table.policy.checks_integrity:
            for manager in self.pools:
                manager.pool.keep_sums()

    def close(self, covers: Covers, now_us: int) -> None:
        """As `Books`."""
        for manager in self.pools:
            end_domains(manager, covers, now_us)

    def erase(self, selector: Selector, before_us: int, now_us: int, *, finish: bool) -> PoolErasure:
        """As `Books`."""
        return PoolErasure(self, selector, before_us, now_us, finish=finish)

    def census(self) -> PoolsCensus:
        """As `Books`."""
        return PoolsCensus(self)

    def slices(self) -> list[Slices]:
        """Return an online scan of each pool."""
        running = self.running

        def is_live(sequence: RunningSequence) -> bool:
            return running.get(sequence.id) is sequence

        return [OnlineScan(manager, is_live) for manager in self.pools]

    def take_events(self, now_us: int) -> list[Event]:
        """As `Books`."""
        events: list[Event] = []
        for number, manager in enumerate(self.pools):
            pool = manager.pool
            if pool.sums is not None and pool.sums.found:
                changed, pool.sums.found = pool.sums.found, []
                events += [integrity_mismatch(mismatch, number) for mismatch in changed]
            if pool.released:
                passed, pool.released = pool.released, []
                for gone in passed:
                    events += blocks_passed(gone, number)
            if pool.ended:
                custodies, pool.ended = pool.ended, []
                events += [custody_ended(custody, number, now_us) for custody in custodies]
            if pool.receipts:
                launches, pool.receipts = pool.receipts, []
                size = pool.memory.bytes_per_block
                for scrubbed in launches:
                    self._launch += 1
                    events += scrub_receipts(scrubbed, self._launch, number, size, now_us)
        events += self.copies.leaves()
        return events

    def take_overdue(self, now_us: int) -> list[CustodyOverdue]:
        """Return the pools whose custody went past its deadline, or no longer is, since the last call (`GRACE_US`)."""
        changed = []
        for manager in self.pools:
            number, was_late = manager.number, manager.number in self._late
            if not manager.behind and not was_late:
                continue
            late_us = overdue_us(manager, now_us)
            if late_us > GRACE_US and not was_late:
                self._late.add(number)
                holds = manager.hold_table.overdue(now_us)
                changed.append(CustodyOverdue(now_us, number, holds, now_us - late_us))
            elif not late_us and was_late:
                self._late.discard(number)
                changed.append(CustodyOverdue(now_us, number, 0, 0))
        return changed

    def figures(self, now_us: int) -> PoolFigures:
        """As `Books`."""
        tokens: dict[str, int] = {}
        for sequence in self.running.values():
            name, length = sequence.account.name, self.pools[sequence.pool].decode.length
            tokens[name] = tokens.get(name, 0) + int(length[sequence.slot])
        return PoolFigures(
            tuple(pool_stats(manager, now_us) for manager in self.pools),
            len(self.running),
            charged_blocks(account for manager in self.pools for account in manager.accounts.values()),
            self._pools.room_of(),
            tokens,
        )

    def teardown(self, now_us: int) -> None:
        """End as `Books` does; every block is scrubbed, and tiers that do not outlive the process end."""
        for handle in list(self.running):
            self.release(handle, "shutdown")
        for manager in self.pools:
            manager.teardown(now_us)
        self.copies.close()


class PoolsCensus:
    """`Census` of our own pools."""

    def __init__(self, books: PoolBooks) -> None:
        self._books = books

    def findings(self, now_us: int) -> PoolFindings:
        """As `Census`."""
        books = self._books
        live = {sequence: handle for handle, sequence in books.running.items()}
        findings: list[RepairableFinding] = []
        compared = blocks = 0

        def end(sequence: RunningSequence) -> None:
            books.finish(sequence, "orphan", live.get(sequence))

        for manager in books.pools:
            mine = {sequence for sequence in live if sequence.account.name in manager.accounts}
            scan = PoolScan(manager, mine, now_us, end)
            findings += scan.findings()
            compared += len(scan.sequences) + len(manager.hold_table)
            blocks += manager.pool.blocks
        return PoolFindings(findings, compared, blocks)

    def problems(self) -> list[str]:
        """As `Census`."""
        return [problem for manager in self._books.pools for problem in check(manager)]

    def counts(self) -> PoolCounts:
        """As `Census`."""
        managers, running = self._books.pools, self._books.running
        pools = [manager.pool for manager in managers]
        stuck = sum(
            len(custody.blocks) for pool in pools for partition in pool.partitions for custody in partition.stuck
        )

        def in_state(*states: BlockState) -> int:
            return sum(pool.counts[state] for pool in pools for state in states)

        shards = max((pool.memory.shards for pool in pools), default=0)
        return PoolCounts(
            allocated_total=sum(pool.next_generation - 1 for pool in pools),
            unreported=self._unlisted(),
            live_blocks=in_state(BlockState.ACTIVE, BlockState.CACHED, BlockState.FENCED) + stuck,
            fenced=0,
            # Memory that was never in custody waits for its first scrub at generation 0 and counts nowhere.
            dirty=sum(int(np.count_nonzero((pool.state == DIRTY) & (pool.generation > 0))) for pool in pools),
            quarantined=in_state(BlockState.QUARANTINED) - stuck,
            scrubbed=tuple(sum(pool.memory.scrubbed(shard) for pool in pools) for shard in range(shards)),
            open_residencies=len(running),
        )

    def _unlisted(self) -> int:
        """How many blocks no leaf lists before their requests end."""
        managers = self._books.pools
        running = self._books.running.values()
        return sum(len(unlisted(sequence, managers[sequence.pool])[0]) for sequence in running)

    def held(self) -> Held:
        """As `Census`."""
        live = {}
        for manager in self._books.pools:
            pool = manager.pool
            waiting = np.isin(pool.state, (CLEAN, DIRTY, QUARANTINED), invert=True)
            for partition in pool.partitions:
                for custody in partition.stuck:
                    waiting[custody.blocks] = True
            live[manager.number] = pool.generation[waiting]
        residencies = frozenset(sequence.residency.id for sequence in self._books.running.values())
        return Held(residencies, live, self._unlisted())

    def domains(self) -> set[Domain]:
        """As `Census`."""
        return {node.domain for manager in self._books.pools for node in manager.tree.nodes()}

    def generations(self, pool: int) -> NDArray[np.int64]:
        """As `Census`."""
        return self._books.pools[pool].pool.generation


class PoolErasure:
    """An `ErasureEffect` in our own pools; making it ends what it covers."""

    def __init__(self, books: PoolBooks, selector: Selector, before_us: int, now_us: int, *, finish: bool) -> None:
        self._books = books
        self.aborted = self.lapsed = self.ended_blocks = 0
        self.finishing: list[Hashable] = []
        self.units: list[PoolUnits] = []
        for manager in books.pools:
            self._end(_Covered(manager, selector, before_us), before_us, now_us, finish=finish)
            manager.tree.evicted_keys.forget(selector.tenant)

    def _end(self, covered: _Covered, before_us: int, now_us: int, *, finish: bool) -> None:
        manager = covered.manager
        live_before = manager.live_blocks()
        for domain in covered.domains:
            domain.is_open = False
        covered.end_holds(before_us)
        for sequence in covered.sequences:
            sequence.stop_publishing()
            if finish:
                self.finishing.append(sequence.id)
            else:
                self._books.release(sequence.id, "erased")
                self.aborted += 1
        for hold in covered.holds:
            if hold.is_held:  # not over already, with the last of its blocks
                manager.tree.lapse(hold, "erased", min(before_us, hold.deadline_us))
        self.lapsed += len(covered.holds)
        manager.tree.flush(now_us)
        for node in topmost(covered.inside):  # due when the erasure was asked for, however long it took
            manager.tree.end_subtree(node, "erased", before_us, now_us)
        manager.tree.flush(now_us)
        if finish:
            _unpublish(manager, covered.sequences, now_us)
        self.ended_blocks += live_before - manager.live_blocks()
        if len(covered.units.blocks):
            self.units.append(covered.units)

    def running(self) -> int:
        """As `ErasureEffect`."""
        return sum(handle in self._books.running for handle in self.finishing)

    def end(self) -> None:
        """As `ErasureEffect`."""
        for handle in [handle for handle in self.finishing if handle in self._books.running]:
            self._books.release(handle, "erased")

    def states(self) -> UnitStates:
        """As `ErasureEffect`."""
        pools = self._books.pools

        def waiting(part: PoolUnits, same: NDArray[np.bool_], state: NDArray[np.uint8]) -> int:
            return int(np.count_nonzero(same & ((state == FENCED) | (state == DIRTY))))

        return unit_states(self.units, lambda number: pools[number].pool, waiting)

    def reread(self) -> Reread | None:
        """As `ErasureEffect`."""
        checked = changed = nonzero = 0
        for part in self.units:
            pool = self._books.pools[part.pool].pool
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
        self.inside = nodes_inside(manager, self._covers(selector))
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

    def _covers(self, selector: Selector) -> Covers:
        """Whether a domain is the selector's; those that are become `domains`."""

        def covers(domain: Domain) -> bool:
            if domain not in self.domains:
                if not matches_label(selector, label_of(domain)):
                    return False
                self.domains.add(domain)
            return True

        return covers

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
    runs: list[EndedRun] = []
    for partition in partitions:
        runs += [*partition.fenced, *partition.dirty, *partition.stuck]
    return runs


def _path(leaf: Node | None) -> Iterable[Node]:
    while leaf is not None:
        yield leaf
        leaf = leaf.parent
