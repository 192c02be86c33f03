"""Erasures of one process from effect to completion: pending blocks, deadlines, and records.

- An erasure takes effect in `begin`, before it returns: nothing that it covers is attached any more.
- It is complete when all of the following hold. Only then is it recorded as complete, with the count and reason of
  blocks that lawfully stay.
  - every block that it ended is zero with receipts;
  - every request that may finish has finished;
  - every tier has confirmed;
  - no known backup has the keys that it destroyed.
- At its deadline, requests that may finish are ended. The part that is not done then is recorded as partial, with the
  reason, and is still awaited.
- Running the same erasure a second time changes nothing and gives the same answer.
"""

from __future__ import annotations

import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvcustody.allocator.pool.block_state import ACTIVE, CACHED, QUARANTINED, Blocks
from kvcustody.audit.kinds import (
    ErasureApplied,
    ErasureCompleted,
    ErasureRemaining,
    ErasureRequested,
    ErasureReread,
    Event,
    OrphanFound,
)
from kvcustody.audit.kinds.block_runs import FlatRuns
from kvcustody.clock import Clock
from kvcustody.errors import KeyringError, ReturnedKeysError
from kvcustody.governance.erasure.selector import Selector, check_selector
from kvcustody.governance.erasure.tier_protocol import (
    CompletedErasure,
    CopyStore,
    RemembersErasures,
    TierErased,
)
from kvcustody.logger import get_logger
from kvcustody.policies.document.model import ErasureDuty, OnRunning
from kvcustody.times import iso

_log = get_logger(__name__)
_REMEMBERED = 1000
_POLL_US = 2_000
_LATE_POLL_US = 1_000_000  # what is on record as partial is looked at rarely
_HELD, _USED = "held by other residencies", "in use by other requests"


class PoolUnits(NamedTuple):
    """Custody units of one pool: blocks with their generations, each once."""

    pool: int
    blocks: Blocks
    generations: Blocks


class UnitStates(NamedTuple):
    """The states of units: `waiting` for fence, scrub or receipt; `quarantined`; `held` or `used` by others."""

    waiting: int
    quarantined: int
    held: tuple[PoolUnits, ...]
    used: tuple[PoolUnits, ...]


class Reread(NamedTuple):
    """Blocks read back while still CLEAN at their generation, those handed out since, and bytes that were not zero."""

    checked: int
    changed: int
    nonzero: int


class ErasureEffect(Protocol):
    """The immediate effect of an erasure on a process's pools, and its progress.

    Counts: requests ended, residencies lapsed, blocks ended.
    """

    aborted: int
    lapsed: int
    ended_blocks: int

    @property
    def finishing(self) -> Sequence[object]:
        """The requests that may finish."""

    @property
    def units(self) -> Sequence[PoolUnits]:
        """The units that the erasure covers."""

    def running(self) -> int:
        """The number of requests that may finish and still run."""

    def end(self) -> None:
        """End those requests as erased."""

    def states(self) -> UnitStates:
        """The present states of the units."""

    def reread(self) -> Reread | None:
        """Read back units still CLEAN at their generation; None where memory cannot be read from here."""


class BlockStates(Protocol):
    """What a pool keeps by block."""

    state: NDArray[np.uint8]
    generation: NDArray[np.int64]


class ErasureResult(NamedTuple):
    """The result in one process. Blocks are counted over all layer groups; `remaining` are those that others hold or
    use.
    """

    aborted_requests: int
    lapsed_residencies: int
    ended_blocks: int
    remaining_blocks: int
    remaining_reason: str
    erasure: str = ""
    finishing_requests: int = 0
    is_complete: bool = False


class ErasureOrder(NamedTuple):
    """An erasure as it reaches a process. `on_record`: the ledger has its request."""

    selector: Selector
    erasure: str
    actor: str
    deadline_us: int
    before_us: int
    on_record: bool


class _Run:
    """One erasure on its way."""

    __slots__ = ("began_utc", "effect", "finishing", "is_on_record", "may_wait", "order", "tiers")

    def __init__(self, order: ErasureOrder, effect: ErasureEffect, began_utc: int) -> None:
        self.order = order
        self.began_utc = began_utc
        self.may_wait = False  # for nothing that comes soon
        self.effect = effect
        self.finishing = len(effect.finishing)
        self.tiers: dict[str, TierErased] = {}
        self.is_on_record = False  # as partial


class ErasureRunner:
    """The erasures of one process. `emit` hands events to the ledger's queue; `duty` is the active policy's.

    `take_effect` ends what a selector covers and began before an instant; whether running requests may finish is its
    last argument. `record` has a request on record at once, or raises: then nothing was done.
    """

    def __init__(
        self,
        take_effect: Callable[[Selector, int, bool], ErasureEffect],
        clock: Clock,
        emit: Callable[[Sequence[Event]], None],
        duty: Callable[[], ErasureDuty],
        record: Callable[[Sequence[Event]], object],
    ) -> None:
        self._take_effect = take_effect
        self._clock = clock
        self._emit = emit
        self._duty = duty
        self._record = record
        self._next_poll_us = 0
        self.backed_up_until: Callable[[int, int], int] = lambda before_us, now_us: 0
        """Until when (UTC) a known backup opens that has the shred keys from before a moment; 0: none does."""
        self.tiers: list[CopyStore] = []
        self.pending: dict[str, _Run] = {}
        self._known: OrderedDict[str, ErasureResult] = OrderedDict()

    def destroy_returned(self, completed: Callable[[], Iterable[CompletedErasure]], *, at_start: bool = True) -> int:
        """Destroy again the keys that came back with a copy of their file; returns their number.

        By the file's own receipts that was done when it was opened; by the erasures that `completed` gives it is done
        here. What came back is a finding. `at_start`: count those of the receipts too.
        """
        tiers = [tier for tier in self.tiers if isinstance(tier, RemembersErasures)]
        if not tiers:
            return 0
        returned = max(tier.returned_keys for tier in tiers) if at_start else 0
        returned += sum(tier.erase_returned(complete) for complete in completed() for tier in tiers)
        self.record_returned(returned)
        return returned

    def record_returned(self, keys: int) -> None:
        """Record the number of destroyed keys that were in their file again; nothing for none."""
        if keys:
            cause = f"{keys} destroyed keys were in their file again ({ReturnedKeysError.code})"
            _log.error(cause, code=ReturnedKeysError.code, keys=keys)
            now_us = self._clock.now_us()
            self._emit([OrphanFound(now_us, 0, 1, "returned key", cause, None, 0, (), "destroyed", "recovered")])

    def begin(
        self,
        selector: Selector,
        *,
        erasure: str | None = None,
        actor: str = "engine",
        deadline_us: int | None = None,
        before_us: int | None = None,
        on_record: bool = False,
    ) -> ErasureResult:
        """Erase now. Times are boot time.

        Raises `ConfigError` for a malformed selector, `UnsignedOrderError` for a request that nobody else would follow.

        Without a deadline the policy's holds, from now on; without `before_us` the erasure covers all until now.
        """
        check_selector(selector)
        erasure = erasure or uuid.uuid4().hex
        known = self._known.get(erasure)
        if known is not None:
            return known
        now_us, duty = self._clock.now_us(), self._duty()
        deadline_us = now_us + duty.within_us if deadline_us is None else deadline_us
        before_us = now_us if before_us is None else min(before_us, now_us)
        order = ErasureOrder(selector, erasure, actor, deadline_us, before_us, on_record)
        if not on_record:
            self._record([_requested(order, now_us)])
        finish = duty.running is OnRunning.FINISH and now_us < deadline_us
        run = _Run(order, self._take_effect(selector, before_us, finish), self._clock.utc_us())
        for tier in self.tiers:
            run.tiers[tier.name] = tier.erase(erasure, selector, before_us)
        self._emit([_applied(run, now_us)])
        self.pending[erasure] = run
        self._next_poll_us = 0
        return self._remember(run, run.effect.states(), is_complete=False)

    def poll(self, *, now: bool = False) -> None:
        """Advance pending erasures, once a step: end what is past its deadline, record what is complete.

        Looks every 2 ms, every second where all are on record as partial, or `now`.
        """
        now_us = self._clock.now_us()
        if now_us < self._next_poll_us and not now:
            return
        for run in list(self.pending.values()):
            self._poll(run, now_us)
        late = all(run.is_on_record or run.may_wait for run in self.pending.values())
        self._next_poll_us = now_us + (_LATE_POLL_US if late else _POLL_US)

    def next_due_us(self) -> int | None:
        """When the next poll is due, so that an idle engine takes a step then. None without a pending erasure."""
        return self._next_poll_us if self.pending else None

    @property
    def looks_at_blocks(self) -> bool:
        """Whether a poll may end requests or blocks; one that waits for a backup to be destroyed does neither."""
        return any(not run.may_wait for run in self.pending.values())

    def _poll(self, run: _Run, now_us: int) -> None:
        order, effect = run.order, run.effect
        if run.finishing:
            run.finishing = effect.running()
        if run.finishing and now_us >= order.deadline_us:
            effect.end()
            run.finishing = effect.running()
        for tier in self.tiers:
            done = run.tiers.get(tier.name)
            if done is None or not done.done:
                run.tiers[tier.name] = tier.erase(order.erasure, order.selector, order.before_us)
        unit_states = effect.states()
        waiting = self._waiting_for(run, unit_states)
        run.may_wait = not waiting
        waiting = waiting or self._backups_of(run)
        if not waiting:
            self._complete(run, unit_states, now_us)
        elif now_us >= order.deadline_us and not run.is_on_record:
            run.is_on_record = True
            self._emit([_result(run, unit_states, "partial", waiting, now_us)])

    @staticmethod
    def _waiting_for(run: _Run, unit_states: UnitStates) -> str:
        """What is not done yet, in words; empty when all is."""
        tiers = sum(tier.waiting + tier.unsure for tier in run.tiers.values())
        parts = (
            (run.finishing, "requests still run"),
            (unit_states.waiting, "blocks await their receipts"),
            (unit_states.quarantined, "blocks are quarantined"),
            (tiers, "objects await deletion in tiers"),
        )
        return "; ".join(f"{count} {what}" for count, what in parts if count)

    def _backups_of(self, run: _Run) -> str:
        """That backups have the keys that the erasure destroyed, in words; empty where none does that is known."""
        if not (run.tiers and run.order.selector.ends_keys):
            return ""
        try:
            until_us = self.backed_up_until(run.began_utc, self._clock.utc_us())
        except KeyringError as error:
            return error.message
        return f"backups of its keys can be opened until {iso(until_us)}" if until_us else ""

    def _complete(self, run: _Run, unit_states: UnitStates, now_us: int) -> None:
        order = run.order
        tenant = order.selector.tenant
        events: list[Event] = [
            ErasureRemaining(
                now_us,
                order.erasure,
                tenant,
                reason,
                FlatRuns(part.blocks, part.generations, part.pool),
            )
            for reason, parts in ((_HELD, unit_states.held), (_USED, unit_states.used))
            for part in parts
        ]
        read = run.effect.reread()
        if read is not None:
            events.append(ErasureReread(now_us, order.erasure, tenant, *read))
        reason = _remaining_reason(unit_states)
        if read is not None and read.nonzero:
            reason = f"{read.nonzero} bytes were not zero when read back"
        outcome = "partial" if read is not None and read.nonzero else "complete"
        self._emit([*events, _result(run, unit_states, outcome, reason, now_us)])
        del self.pending[order.erasure]
        self._remember(run, unit_states, is_complete=outcome == "complete")

    def _remember(self, run: _Run, unit_states: UnitStates, *, is_complete: bool) -> ErasureResult:
        effect, erasure = run.effect, run.order.erasure
        known = self._known[erasure] = ErasureResult(
            effect.aborted,
            effect.lapsed,
            effect.ended_blocks,
            _blocks(unit_states.held) + (0 if run.finishing else _blocks(unit_states.used)),
            _remaining_reason(unit_states),
            erasure,
            len(effect.finishing),
            is_complete,
        )
        while len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return known

    def result(self, erasure: str) -> ErasureResult | None:
        """What is known of an erasure here, or None."""
        return self._known.get(erasure)


def _requested(order: ErasureOrder, now_us: int) -> ErasureRequested:
    return request_event(order.selector, order.erasure, order.actor, order.deadline_us, now_us)


def request_event(selector: Selector, erasure: str, actor: str, deadline_us: int, now_us: int) -> ErasureRequested:
    """Return the event of an erasure request; people in it become pseudonyms in the ledger."""
    parts = Selector(**{**selector._asdict(), "tenant": None, "subject": None, "session": None})
    return ErasureRequested(
        now_us,
        erasure,
        selector.tenant,
        selector.kind,
        selector.subject,
        selector.session,
        deadline_us,
        actor,
        parts.text(),
    )


def _applied(run: _Run, now_us: int) -> ErasureApplied:
    effect, order = run.effect, run.order
    runs = [run_ for part in effect.units for run_ in FlatRuns(part.blocks, part.generations, part.pool)]
    return ErasureApplied(
        now_us,
        order.erasure,
        order.selector.tenant,
        effect.aborted,
        len(effect.finishing),
        effect.lapsed,
        tuple(runs),
        tuple(run.tiers),
        tuple(done.objects + done.waiting for done in run.tiers.values()),
    )


def _result(run: _Run, unit_states: UnitStates, outcome: str, reason: str, now_us: int) -> ErasureCompleted:
    effect, order = run.effect, run.order
    kept = _blocks(unit_states.held) + _blocks(unit_states.used)
    total = _blocks(effect.units)
    return ErasureCompleted(
        now_us,
        order.erasure,
        order.selector.tenant,
        outcome,
        effect.aborted + len(effect.finishing) + effect.lapsed,
        total - kept - unit_states.waiting - unit_states.quarantined,
        kept + sum(done.remaining for done in run.tiers.values()),
        reason,
    )


def _remaining_reason(unit_states: UnitStates) -> str:
    parts = ((_blocks(unit_states.held), _HELD), (_blocks(unit_states.used), _USED))
    return "; ".join(f"{count} {reason}" for count, reason in parts if count)


def _blocks(units: Sequence[PoolUnits]) -> int:
    return sum(len(part.blocks) for part in units)


def unique_units(pool: int, blocks: Sequence[Blocks], generation_of: Blocks) -> PoolUnits:
    """Return units of one pool from lists of blocks at their present generations, each once, ordered by generation."""
    every = np.unique(np.concatenate(blocks)) if blocks else np.empty(0, dtype=np.int64)
    generations = generation_of[every]
    order = np.argsort(generations)
    return PoolUnits(pool, every[order], generations[order])


def unit_states(
    units: Iterable[PoolUnits],
    pool_of: Callable[[int], BlockStates],
    waiting: Callable[[PoolUnits, NDArray[np.bool_], NDArray[np.uint8]], int],
) -> UnitStates:
    """Return the present states of these units.

    `waiting` counts those of a part that wait; it is told whether each has its generation still, and its state.
    """
    waits = quarantined = 0
    held: list[PoolUnits] = []
    used: list[PoolUnits] = []
    for part in units:
        pool = pool_of(part.pool)
        same, state = pool.generation[part.blocks] == part.generations, pool.state[part.blocks]
        waits += waiting(part, same, state)
        quarantined += int(np.count_nonzero(same & (state == QUARANTINED)))
        for into, wanted in ((held, CACHED), (used, ACTIVE)):
            chosen = same & (state == wanted)
            if chosen.any():
                into.append(PoolUnits(part.pool, part.blocks[chosen], part.generations[chosen]))
    return UnitStates(waits, quarantined, tuple(held), tuple(used))
