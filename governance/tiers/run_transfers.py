"""Transfers of published runs between one engine's device and its tiers: decisions about each, on record.

    transfers = RunTransfers(tiers, cost, clock, block_tokens)
    taker = transfers.store(run, size, read)                     # who has the run now, -1: nobody
    way, found = transfers.best(label, keys, depth, most)        # whoever brings most of what follows
    choice = transfers.choose_restore(way, reader, depth, found)
    came = transfers.restore(way, reader, keys, depth, found, choice, write)
    transfers.step(now_us); transfers.leaves()

1. Each movement, and each one that was decided against, is on record with what both ways were expected to take.
2. A tier that is slower than computing is left alone, and a store is not asked what others put there; between steps,
   now and then, one read says whether it still is. Where there is nothing to read, the next request tries.
3. In one step of the engine no more than `step_bytes` leave the device: the rest of what is evicted is not kept.
4. The time of a look-up that asked a shared store is part of what its restore is expected to take, and took.
5. What a tier has already is not decided about, and does not move.

For engines whose device is reached from the thread that schedules: own pools (`governor.offloading`) and SGLang.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from time import perf_counter_ns
from typing import NamedTuple

from kvcustody.audit.evidence.coverage.conservation import TierCounts
from kvcustody.audit.kinds import Event, TransferDecided
from kvcustody.clock import Clock
from kvcustody.governance.custody.books import CopyTiers
from kvcustody.governance.decisions.access_plan import DomainLabel
from kvcustody.governance.observability.prefill_cost import RecomputeCost
from kvcustody.governance.tiers.copies.index import KEY_BYTES, PublishedRun
from kvcustody.governance.tiers.copy_leaves import copy_leaves
from kvcustody.governance.tiers.tier import Found, Read, Restored, SealedTier, Write
from kvcustody.governance.tiers.tier_link import (
    NOTHING_MOVED,
    Moved,
    Outcome,
    TierLink,
    TransferChoice,
    decided,
    tier_figures,
)
from kvcustody.governance.tiers.transfer_rates import TierUse

STEP_BYTES_MAX = 256 << 20
AWAITED_MAX = 4096  # stored runs whose predecessor is remembered


class LookUp(NamedTuple):
    """The predicted and measured time of the newest look-up that asked a shared store."""

    expected_us: int = 0
    took_us: int = 0


class TierWay:
    """One tier with its measured costs. `is_tried`: the next request tests whether it is still slower."""

    __slots__ = ("_awaited", "is_tried", "link", "looked", "tier")

    def __init__(self, tier: SealedTier, *, always: bool) -> None:
        self.tier = tier
        self.link = TierLink(always=always)
        self.looked, self.is_tried = LookUp(), False
        self._awaited: OrderedDict[bytes, None] = OrderedDict()

    def look_up(self, label: DomainLabel, keys: bytes, depth: int, most: int, *, seeks: bool) -> list[Found]:
        """Look up in the tier, and measure the store's time where it was asked (rule 4)."""
        before, began_ns, expected_us = self.tier.sought, perf_counter_ns(), int(self.link.look_us)
        copies = self.tier.lookup(label, keys, depth, most, seeks=seeks)
        self.looked = LookUp()
        if self.tier.sought != before:
            took_us = (perf_counter_ns() - began_ns) // 1000
            self.link.looked(took_us)
            self.looked = LookUp(expected_us, took_us)
        return copies

    def is_awaited(self, run: PublishedRun) -> bool:
        """Whether a run that follows this one is stored: it comes back only after this one."""
        return run.keys[-KEY_BYTES:] in self._awaited

    def stored(self, run: PublishedRun) -> None:
        """Note that the run is in the tier and waits for the one before it."""
        self._awaited.pop(run.keys[-KEY_BYTES:], None)
        self._awaited[run.parent] = None
        if len(self._awaited) > AWAITED_MAX:
            self._awaited.popitem(last=False)


class CopyReader(NamedTuple):
    """The reader of restored blocks: a residency that reads a domain, and its request's latency class."""

    label: DomainLabel
    residency: int
    latency: str = ""


class RunTransfers(CopyTiers):
    """The tiers of one engine, in the order of look-up. Called on the owning thread."""

    def __init__(
        self,
        tiers: Sequence[SealedTier],
        cost: RecomputeCost,
        clock: Clock,
        block_tokens: int,
        *,
        always: bool = False,
    ) -> None:
        """`always`: whatever is permitted is moved, whatever it takes."""
        self.ways = [TierWay(tier, always=always) for tier in tiers]
        self.cost = cost
        self.step_bytes = self.left_bytes = STEP_BYTES_MAX
        self.object_blocks = min((tier.object_blocks for tier in tiers), default=1)
        self._clock = clock
        self._block_tokens = block_tokens
        self._decisions: list[TransferDecided] = []

    @property
    def tiers(self) -> list[SealedTier]:
        """The tiers in the order of look-up."""
        return [way.tier for way in self.ways]

    def admits(self, label: DomainLabel) -> bool:
        """Whether the policy permits this domain's blocks in any tier."""
        return any(way.tier.admits(label) for way in self.ways)

    # -- out ------------------------------------------------------------------------------------------------------

    def store(self, run: PublishedRun, size: int, read: Read) -> int:
        """Offer a run of this many bytes to the tiers in turn; returns the index of the one that has it, -1: none."""
        for number, way in enumerate(self.ways):
            if self._store(way, run, size, read):
                return number
        return -1

    def _store(self, way: TierWay, run: PublishedRun, size: int, read: Read) -> bool:
        """Whether the tier has the run now. Of what is there already nothing is decided, and nothing moves."""
        label, blocks = run.label, len(run.keys) // KEY_BYTES
        if way.tier.has_run(label, run.keys, run.depth):
            return True
        if not way.tier.admits(label):
            return False
        recompute_us = self._recompute_us(blocks, run.depth)
        choice = way.link.choose_store(
            size, recompute_us, is_busy=size > self.left_bytes, is_awaited=way.is_awaited(run)
        )
        moved = Moved(way.tier.name, label.tenant, 0, blocks, size)
        if not choice.moves:
            self._record("store", moved, choice)
            return False
        self.left_bytes -= size
        began_ns = perf_counter_ns()
        stored = way.tier.store(run, read)
        took_us = (perf_counter_ns() - began_ns) // 1000
        has = stored == blocks or way.tier.has(label, run.keys[-KEY_BYTES:])
        if has:
            way.stored(run)
        if stored:
            part = size * stored // blocks
            way.link.stored(part, stored, took_us)
            self._record("store", moved._replace(blocks=stored, size=part), choice, Outcome("done", took_us))
        elif not has:  # no room, no buffer, or the store failed
            self._record("store", moved, choice, Outcome("failed", took_us))
        return has

    # -- back -----------------------------------------------------------------------------------------------------

    def best(
        self, label: DomainLabel, keys: bytes, depth: int, most: int, tried: Collection[TierWay] = ()
    ) -> tuple[TierWay | None, list[Found]]:
        """Return the tier that brings most blocks after `depth`; the first one where several are equal."""
        best: tuple[TierWay | None, list[Found]] = (None, [])
        farthest = 0
        for way in self.ways:
            if way in tried:
                continue
            found = way.look_up(label, keys, depth, most, seeks=self._may_seek(way, most - depth, depth))
            way.is_tried = way.is_tried and bool(found)
            blocks = sum([one.blocks for one in found])
            if blocks > farthest:
                best, farthest = (way, found), blocks
        return best

    def _may_seek(self, way: TierWay, blocks: int, depth: int) -> bool:
        """Whether to ask a shared store: what would not be brought is not asked for."""
        if not way.tier.is_shared or way.is_tried:
            return True
        if way.link.watch.is_left_alone:
            return False
        size = blocks * way.tier.block_bytes
        return way.link.pays_to_look(size, self._recompute_us(blocks, depth), self._clock.now_us())

    def choose_restore(self, way: TierWay, reader: CopyReader, depth: int, copies: Sequence[Found]) -> TransferChoice:
        """Decide whether to restore these; a decision against it is recorded here."""
        blocks, size = _extent(copies)
        recompute_us = self._recompute_us(blocks, depth)
        now_us = self._clock.now_us()
        choice = way.link.choose_restore(size, recompute_us, now_us, is_tried=way.is_tried, latency=reader.latency)
        if choice.transfer_us:
            choice = choice._replace(transfer_us=choice.transfer_us + way.looked.expected_us)
        if not choice.moves:
            self._record("restore", _moved(way, reader, copies), choice, latency=reader.latency)
        return choice

    def restore(
        self,
        way: TierWay,
        reader: CopyReader,
        keys: bytes,
        depth: int,
        copies: list[Found],
        choice: TransferChoice,
        write: Write,
    ) -> list[Restored]:
        """Restore the chosen copies; returns those that came, in order. Raises `DeviceError` where the device
        failed.
        """
        blocks, size = _extent(copies)
        began_ns = perf_counter_ns()
        came = way.tier.load(reader.label, keys, depth, copies, write)
        took_us = (perf_counter_ns() - began_ns) // 1000
        count = sum(one.blocks for one in came)
        way.link.restored(size, count, took_us, asked=blocks)
        way.is_tried = False
        took_us += way.looked.took_us
        if count == blocks:
            outcome = Outcome("done", took_us)
        else:
            outcome = Outcome("partial" if count else "failed", took_us, count)
        self._record("restore", _moved(way, reader, copies), choice, outcome, reader.latency)
        return came

    # -- time -----------------------------------------------------------------------------------------------------

    def step(self, now_us: int) -> None:
        """End due copies, once an engine step, and look at a tier that is not in use."""
        self.left_bytes = self.step_bytes
        for way in self.ways:
            if way.tier.is_due(now_us):
                way.tier.expire()
        for way in self.ways:
            if way.link.watch.due(now_us):
                self._look(way)

    @staticmethod
    def _look(way: TierWay) -> None:
        began_ns = perf_counter_ns()
        size = way.tier.probe()
        if size:
            way.link.restores.learn(size, (perf_counter_ns() - began_ns) // 1000)
        else:
            way.is_tried = way.tier.is_shared

    def narrow(self) -> None:
        """End copies that the changed policy or keys no longer permit."""
        for way in self.ways:
            way.tier.narrow()

    def forget_tenant(self, tenant: str) -> None:
        """End the copies of an unlisted tenant that has left."""
        for way in self.ways:
            way.tier.end_tenant(tenant)

    def close(self) -> None:
        """End copies that must not outlive the process, and close the stores."""
        for way in self.ways:
            way.tier.close()

    # -- evidence -------------------------------------------------------------------------------------------------

    def leaves(self) -> list[Event]:
        """Return the events of starts, ends and decisions since the last call."""
        recorded: list[Event] = []
        for way in self.ways:
            events = way.tier.take_events()
            if events:
                recorded += copy_leaves(way.tier.name, events, way.tier.within_us)
        if self._decisions:
            recorded += self.take_decisions()
        return recorded

    def take_decisions(self) -> list[TransferDecided]:
        """Return the decisions since the last call."""
        decisions, self._decisions = self._decisions, []
        return decisions

    def counts(self) -> tuple[TierCounts, ...]:
        """Return each tier's own counters for conservation, after every event was handed over."""
        return tuple(TierCounts(way.tier.name, *way.tier.counts[:-1]) for way in self.ways)

    def uses(self) -> list[TierUse]:
        """Return what each tier did."""
        return [way.link.use(way.tier.name) for way in self.ways]

    def figures(self) -> dict[str, float]:
        """Return every figure, by the keys of `metrics.MEASURES`."""
        found: dict[str, float] = {}
        for way in self.ways:
            tier = way.tier
            found |= tier_figures(way.link.use(tier.name), tier.counts, tier.capacity_bytes)
        return found

    def _recompute_us(self, blocks: int, depth: int) -> float | None:
        """What computing these blocks again is expected to take; None where that is not known."""
        tokens = self._block_tokens
        return self.cost.seconds_of(blocks * tokens, depth * tokens) * 1e6 if self.cost.is_known else None

    def _record(
        self,
        action: str,
        moved: Moved,
        choice: TransferChoice,
        outcome: Outcome = NOTHING_MOVED,
        latency: str = "",
    ) -> None:
        """Put a decision on record."""
        self._decisions.append(decided(self._clock.now_us(), action, moved, choice, outcome, latency))


def _extent(found: Sequence[Found]) -> tuple[int, int]:
    """Blocks and sealed bytes."""
    return sum(one.blocks for one in found), sum(one.size for one in found)


def _moved(way: TierWay, reader: CopyReader, found: Sequence[Found]) -> Moved:
    return Moved(way.tier.name, reader.label.tenant, reader.residency, *_extent(found))
