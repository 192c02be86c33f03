"""The engine's side of a ledger writer: events by sequence, their durability, and waiting callers.

1. `submit` runs no SQL and does no I/O: it appends to a bounded queue under a lock.
2. Every event but those of class C has a sequence; the sequences of one incarnation have no holes. What may share a
   leaf has none by itself (rule 5): `seal` gives one that covers all that was submitted before.
3. A ticket is decided once: committed, refused, or given up by its submitter, whichever comes first.
4. Past twice the capacity events are not kept; a `GapRecorded` for each run of them then names their sequences, and no
   other.
5. Releases, ends and receipts of one tenant that wait together become one `CustodyChanged`, with the sequence after
   those that were given by then: what it tells comes after what it rests on. Whoever orders them by sequence is not
   misled: anything that is submitted later, but an opening or a joined block, comes after it.
6. Where tenants are kept apart, each has a share of the queue and of the spill. Half of both is divided, by a share
   that the caller gives for each tenant. The other half is for the ends of what was admitted, which are accepted from
   every tenant at any time.
7. A tenant beyond its share is in `over`: nothing more of it is admitted, and everything of everybody else. `over` is
   read without a lock. While little waits nothing is counted, and where nothing is divided it stays empty.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from kvcustody.audit.evidence.subjects.subject_table import Row
from kvcustody.audit.kinds import (
    BlocksAttached,
    BlocksReleased,
    CustodyChanged,
    CustodyEnded,
    Event,
    GapRecorded,
    HitCounted,
    HitCounters,
    ReceiptRecorded,
    ResidencyOpened,
    ResidencyReleased,
    Withdrawn,
)
from kvcustody.audit.kinds.block_runs import Runs, block_count
from kvcustody.audit.leaf.batch_encoder import Entry, Item
from kvcustody.clock import Clock
from kvcustody.times import MINUTE_US

_COUNT_KEYS_MAX = 10_000
_TOO_FAST = "events arrived faster than any store could keep them"
_TOGETHER = 64  # events of one leaf at most
_BLOCKS_MAX = 256  # of one event that shares a leaf: longer lists have parts, which an item has not
_BESIDE = frozenset({ResidencyOpened, BlocksAttached})  # come before what is told of them, whatever waits


def _few(runs: Runs) -> bool:
    """Return whether the list is short enough for an item."""
    if runs.__class__ is tuple and len(runs) == 1:
        return len(runs[0].blocks) <= _BLOCKS_MAX
    return block_count(runs) <= _BLOCKS_MAX


def _released_may(event: Event) -> bool:
    assert isinstance(event, ResidencyReleased)
    return not (event.trace or event.incarnation) and _few(event.written)


def _passed_may(event: Event) -> bool:
    assert isinstance(event, BlocksReleased)
    return not (event.trace or event.incarnation) and _few(event.runs)


def _ended_may(event: Event) -> bool:
    assert isinstance(event, CustodyEnded)
    return not event.incarnation and _few(event.runs)


def _scrubbed_may(event: Event) -> bool:
    assert isinstance(event, ReceiptRecorded)
    is_sound = event.result == "ok" and event.tenant is not None
    return is_sound and not event.incarnation and _few(event.runs)


# Which events may be items of a leaf (`leaf_schema`, rule 4); what failed has a leaf of its own.
_MAY_SHARE: dict[type[Event], Callable[[Event], bool]] = {
    ResidencyReleased: _released_may,
    BlocksReleased: _passed_may,
    CustodyEnded: _ended_may,
    ReceiptRecorded: _scrubbed_may,
}


def _is_plain(event: Event, check: Callable[[Event], bool]) -> bool:
    """Return whether it may share a leaf; one with values of another type stands apart, for the encoder to refuse."""
    try:
        return event.at_us.__class__ is int and isinstance(getattr(event, "tenant", None), str) and check(event)
    except (TypeError, AttributeError):
        return False


class _Drafts:
    """What waits to share leaves, by tenant; used under the queue's lock."""

    def __init__(self) -> None:
        self._by_tenant: dict[str, list[Event]] = {}
        self.count = 0

    def add(self, event: Event, tenant: str) -> bool:
        """Put an event with the others of its tenant; True where that is enough for a leaf."""
        found = self._by_tenant.get(tenant)
        if found is None:
            found = self._by_tenant[tenant] = []
        found.append(event)
        self.count += 1
        return len(found) >= _TOGETHER

    def take(self) -> list[Event]:
        """One event for each tenant; nothing waits afterwards."""
        events: list[Event] = []
        for tenant, every in self._by_tenant.items():
            if len(every) == 1:
                events += every
                continue
            released = tuple(event for event in every if isinstance(event, ResidencyReleased))
            passed = tuple(event for event in every if isinstance(event, BlocksReleased))
            ended = tuple(event for event in every if isinstance(event, CustodyEnded))
            scrubbed = tuple(event for event in every if isinstance(event, ReceiptRecorded))
            at_us = max(event.at_us for event in every)
            events.append(CustodyChanged(at_us, tenant, released, passed, ended, scrubbed))
        self._by_tenant = {}
        self.count = 0
        return events


class QueuedEvents:
    """One class A event whose submitter waits: queued → taken → committed, or refused.

    `decide` is called once it is either, or need not be waited for any longer; on whichever thread knows first.
    """

    __slots__ = ("cause", "decide", "state")

    def __init__(self, decide: Callable[[], object]) -> None:
        self.decide = decide
        self.state = "queued"
        self.cause = ""


class EventQueue:
    """The queue between an engine and its ledger writer."""

    def __init__(
        self,
        clock: Clock,
        shares: TenantShares,
        *,
        capacity: int,
        batch: int,
        count_seconds: float,
        offset_us: int = 0,
    ) -> None:
        """`batch` events wake the writer; `shares` is told whose wait. `offset_us` turns boot time into UTC."""
        self._offset_us = offset_us
        self._shares = shares
        self._clock = clock
        self._limit = 2 * capacity
        self._batch = batch
        self._count_seconds = count_seconds
        self._lock = threading.Lock()
        self._queue: deque[Item] = deque()
        self._drafts = _Drafts()
        self._tickets: dict[int, QueuedEvents] = {}
        self._counts: dict[tuple[str, str, str, str, str, int, int], list[int]] = {}
        self._dropped: list[tuple[int, int]] = []  # first and last of each run of sequences
        self.counts_due = time.monotonic() + count_seconds
        self.sequence = 0  # the last one given
        self.wake = threading.Event()
        self.idle = False  # the writer sleeps until `wake` is set
        self.hurry = False  # somebody waits for all that is queued

    def __len__(self) -> int:
        return len(self._queue) + self._drafts.count

    @property
    def empty(self) -> bool:
        """Whether nothing is queued, counted, or still to be accounted for."""
        with self._lock:
            return not (self._queue or self._counts or self._dropped or self._drafts.count)

    # -- the engine's thread --------------------------------------------------------------------------------

    def submit(self, events: Sequence[Event]) -> int:
        """Queue events of class B and C; return the last assigned sequence."""
        with self._lock:
            if HitCounted in map(type, events):
                events = self._count(events)
            if len(self) + len(events) > self._limit:
                first = self.sequence + 1
                self.sequence += len(events)
                self._drop(first, self.sequence)
            else:
                self._keep(events)
            last = self.sequence
        if self.idle or len(self) >= self._batch:
            self.idle = False
            self.wake.set()
        return last

    def seal(self) -> int:
        """Close the shared leaves of waiting events to further ones; return the last submitted sequence."""
        with self._lock:
            self._close_drafts()
            return self.sequence

    def _keep(self, events: Sequence[Event]) -> None:
        """Queue events, or put them with others (rule 5). The caller holds the lock."""
        alone: list[Event] = []
        drafts, may_share = self._drafts, _MAY_SHARE
        for event in events:
            kind = event.__class__
            check = may_share.get(kind)
            if check is not None and _is_plain(event, check):
                tenant: str = event.tenant  # type: ignore[attr-defined]  # each of these has one
                if drafts.add(event, tenant) or drafts.count >= self._batch:
                    self._close_drafts(alone)
                    alone = []
                continue
            if drafts.count and kind not in _BESIDE:
                self._close_drafts(alone)
                alone = []
            alone.append(event)
        self._number(alone)

    def _close_drafts(self, before: Sequence[Event] = ()) -> None:
        """Queue what waited to share leaves, after these. The caller holds the lock."""
        self._number(before)
        if self._drafts.count:
            self._number(self._drafts.take())

    def _number(self, events: Sequence[Event]) -> None:
        if events:
            self._queue.extend(enumerate(events, self.sequence + 1))
            self.sequence += len(events)
            self._shares.queued(self._queue, events)

    def submit_ticket(self, event: Event, decide: Callable[[], object]) -> tuple[int, QueuedEvents]:
        """Queue an event whose submitter waits until `decide` is called."""
        ticket = QueuedEvents(decide)
        with self._lock:
            self._close_drafts()
            self.sequence += 1
            sequence = self.sequence
            self._tickets[sequence] = ticket
            self._queue.append((sequence, event))
        self.wake.set()
        return sequence, ticket

    def give_up(self, sequence: int, event: Event, ticket: QueuedEvents) -> bool:
        """Give up waiting for an event: return False if it was committed first; else its act must not happen."""
        with self._lock:
            if ticket.state == "committed":
                return False
            in_flight = ticket.state != "refused"
            ticket.state = "refused"  # the writer drops the ticket when it meets it
        if in_flight:  # still queued, or being committed: account for the sequence either way
            self.emit(self.withdrawal(sequence, event))
        return True

    def _drop(self, first: int, last: int) -> None:
        """These are not kept; a sequence that was given in between stands for an event that is. Under the lock."""
        if self._dropped and self._dropped[-1][1] == first - 1:
            first = self._dropped.pop()[0]
        self._dropped.append((first, last))

    def _account(self) -> None:
        """Queue, before everything else, what names the sequences that were dropped. The caller holds the lock."""
        at_us, made = self._clock.now_us(), list[Item]()
        for first, last in self._dropped:
            self.sequence += 1
            made.append((self.sequence, GapRecorded(at_us, _TOO_FAST, first, last)))
        self._queue.extendleft(reversed(made))
        self._dropped.clear()

    def _count(self, events: Sequence[Event]) -> list[Event]:
        """Add up the class C events; the others are returned. The caller holds the lock."""
        rest: list[Event] = []
        for event in events:
            if not isinstance(event, HitCounted):
                rest.append(event)
                continue
            minute = (event.at_us + self._offset_us) // MINUTE_US  # of UTC: no counter goes on over its end
            key = (event.tenant, event.owner, event.action, event.effect, event.rule, event.revision, minute)
            total = self._counts.get(key)
            if total is None:
                total = self._counts[key] = [event.at_us, 0, 0, 0, event.at_us]
            total[1] += event.requests
            total[2] += event.blocks
            total[3] += event.tokens
            total[4] = max(total[4], event.at_us)
        return rest

    # -- the writer's thread --------------------------------------------------------------------------------

    def take(self, most: int) -> tuple[list[Item], list[int]]:
        """Return the next events, at most so many, and the sequences among them whose submitters had given up."""
        taken: list[Item] = []
        given_up: list[int] = []
        with self._lock:
            self._close_drafts()
            if self._dropped:
                self._account()
            pop, tickets = self._queue.popleft, self._tickets
            if not tickets:
                taken = [pop() for _ in range(min(len(self._queue), most))]
                self._shares.taken(self._queue, taken)
                return taken, []
            while self._queue and len(taken) < most:
                item = pop()
                ticket = tickets.get(item[0])
                if ticket is not None:
                    if ticket.state == "refused":
                        del tickets[item[0]]
                        given_up.append(item[0])
                        continue
                    ticket.state = "taken"
                taken.append(item)
            self._shares.taken(self._queue, taken)
        return taken, given_up

    def emit(self, event: Event) -> None:
        """Queue an event of the writer's own, beyond every limit."""
        with self._lock:
            self._close_drafts()
            self.sequence += 1
            self._queue.append((self.sequence, event))

    def requeue(self, sequence: int, event: Event) -> None:
        """Queue an event again that already has a sequence."""
        with self._lock:
            self._queue.append((sequence, event))

    def next_sequence(self) -> int:
        """Return a sequence for an event that is written immediately."""
        with self._lock:
            self.sequence += 1
            return self.sequence

    def withdrawal(self, sequence: int, event: Event) -> Event:
        """Return the event that accounts for one whose submitter was refused."""
        return Withdrawn(self._clock.now_us(), sequence, getattr(event, "tenant", None))

    def flush_counts(self, *, now: bool) -> None:
        """Turn the summed class C events into counters: on time, when they are many, or `now`."""
        due = now or time.monotonic() >= self.counts_due
        if not due and len(self._counts) < _COUNT_KEYS_MAX:
            return
        self.counts_due = time.monotonic() + self._count_seconds
        with self._lock:
            counts, self._counts = self._counts, {}
        for key, (since, requests, blocks, tokens, last) in counts.items():
            tenant, owner, action, effect, rule, revision, _ = key
            who = (tenant, owner, action, effect, rule)
            self.emit(HitCounters(last, *who, revision, since, requests, blocks, tokens))

    # -- those who wait -------------------------------------------------------------------------------------

    @property
    def awaited(self) -> bool:
        """Whether somebody waits for a commit."""
        return bool(self._tickets)

    def awaits(self, sequence: int) -> bool:
        """Return whether the event has a submitter who waits, or who gave up without knowing the writer's decision."""
        return sequence in self._tickets

    def settle(self, sequence: int, state: str, cause: str = "") -> bool:
        """Decide a ticket unless its submitter has given up; return False if it has, or nobody waits."""
        with self._lock:
            ticket = self._tickets.pop(sequence, None)
            if ticket is None or ticket.state == "refused":
                return False
            ticket.state, ticket.cause = state, cause
        ticket.decide()
        return True

    def release_all(self, cause: str) -> None:
        """Release those who wait, because nothing can be recorded now."""
        with self._lock:
            waiting = list(self._tickets.values())
        for ticket in waiting:
            ticket.cause = cause
            ticket.decide()


ShareOf = Callable[[str], float]
_DIVIDED = 0.5  # rule 6
_WATCHED = 0.125  # of the queue's capacity: below it nobody can be over a share that matters


class TenantShares:
    """Each tenant's share of one ledger's queue of `events` and spill of `spill_bytes`; thread-safe."""

    def __init__(self, *, events: int = 65_536, spill_bytes: int = 2 << 30) -> None:
        self._events = events * _DIVIDED
        self._bytes = spill_bytes * _DIVIDED
        self._watched = max(1, int(events * _WATCHED))
        self._share_of: ShareOf | None = None
        self._queued: Counter[str] | None = None  # None: too little waits to be counted
        self._spilled: defaultdict[str, float] = defaultdict(float)
        self._lock = threading.Lock()
        self.over: frozenset[str] = frozenset()

    def divide(self, share_of: ShareOf | None) -> None:
        """Divide by `share_of` from now on, a tenant's share from 0 to 1; None: no division.

        `share_of` is called on any thread.
        """
        with self._lock:
            self._share_of = share_of
            self._queued = None
            self._judge()

    def queued(self, queue: Collection[Item], added: Iterable[Event]) -> None:
        """Record that these were added to the queue; called under the queue's own lock."""
        if self._share_of is None or (self._queued is None and len(queue) <= self._watched):
            return
        with self._lock:
            if self._queued is None:
                self._queued = Counter(map(_tenant, (event for _, event in queue)))
            else:
                self._queued.update(map(_tenant, added))
            self._judge()

    def taken(self, queue: Collection[Item], items: Iterable[Item]) -> None:
        """Record that these left the queue; called under the queue's own lock."""
        if self._queued is None:
            return
        with self._lock:
            if len(queue) <= self._watched // 2:
                self._queued = None
            elif self._queued is not None:
                self._queued.subtract(map(_tenant, (event for _, event in items)))
            self._judge()

    def spilled(self, sizes: Iterable[tuple[str, float]]) -> None:
        """Record that so many bytes of these tenants went to the spill."""
        with self._lock:
            for tenant, size in sizes:
                self._spilled[tenant] += size
            self._judge()

    def replayed(self) -> None:
        """Record that the spill is empty."""
        with self._lock:
            self._spilled.clear()
            self._judge()

    def _judge(self) -> None:
        share_of = self._share_of
        if share_of is None:
            self.over = frozenset()
            return
        held: tuple[tuple[Mapping[str, float], float], ...]
        held = ((self._queued or Counter(), self._events), (self._spilled, self._bytes))
        self.over = frozenset(
            tenant
            for counts, whole in held
            for tenant, count in counts.items()
            if tenant and count > share_of(tenant) * whole
        )


def sizes_of(entries: Iterable[Entry], names: Iterable[Row]) -> Iterator[tuple[str, int]]:
    """Yield the spill size of entries and their names, by tenant."""
    for entry in entries:
        yield _tenant(entry.event), sum(map(len, entry.leaves))
    for row in names:
        yield row[1], len(str(row))


def _tenant(event: Event) -> str:
    return getattr(event, "tenant", None) or ""


class DurableWatermark:
    """The highest sequence up to which every event is durable, or was refused to its caller."""

    def __init__(self) -> None:
        self.sequence = 0
        self._beyond: set[int] = set()  # finished, with an unfinished one before them
        self._moved = threading.Condition()

    def advance(self, finished: Sequence[int]) -> None:
        """Mark these sequences, each given once, as finished."""
        if not finished:
            return
        mark = self.sequence
        if min(finished) == mark + 1 and max(finished) == mark + len(finished):  # the rule: a batch without holes
            mark += len(finished)
        else:
            self._beyond.update(finished)
        while mark + 1 in self._beyond:
            mark += 1
            self._beyond.discard(mark)
        with self._moved:
            self.sequence = mark
            self._moved.notify_all()

    def reached(self, sequence: int, timeout_seconds: float) -> bool:
        """Wait until everything up to a sequence is finished; return False on timeout."""
        with self._moved:
            return self._moved.wait_for(lambda: self.sequence >= sequence, timeout_seconds)
