"""Many events into canonical leaves at once: by kind, column by column, in loops that the interpreter does not run.

1. The bytes are those of `leaves()`, which stays the definition: an event with a value that is not of the exact
   declared type, one that goes to two logs, and one that outgrows a leaf are written by it.
2. An event that cannot be written is named with its reason and hinders no other.
3. The interpreter lock is offered between chunks, so an engine's thread waits for no batch.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from kvcustody.audit.events.batch import EMPTY, IncarnationStart, LeafBatch, LeafGroup, batch_of
from kvcustody.audit.events.block_run_text import NotPlainError
from kvcustody.audit.events.canonical_leaf import LEAF_BYTES_MAX, Context, Leaf, leaves, parse
from kvcustody.audit.events.column_encoder import Form, Item, Texts, Written
from kvcustody.audit.events.control_events import DecisionRecorded
from kvcustody.audit.events.ledger_events import HitCounted, HitCounters
from kvcustody.audit.events.registry import KINDS, Event
from kvcustody.audit.tlog.merkle import leaf_hashes

_CHUNK = 256  # events of one kind between offers of the interpreter lock
_TWO_LOGS = (DecisionRecorded, HitCounted, HitCounters)


class RefusedEvent(NamedTuple):
    """An event that has no leaf, and why."""

    sequence: int
    event: Event
    problem: Exception


class Entry(NamedTuple):
    """One event and the bytes of its leaves."""

    sequence: int
    event: Event
    leaves: Sequence[bytes]

    def batch(self) -> LeafBatch:
        """Its leaves as a batch of their own."""
        return batch_of([parse(data) for data in self.leaves])


class Encoded(NamedTuple):
    """Events with their leaves: `widths[i]` leaves of the batch, in order, belong to `items[i]`."""

    items: Sequence[Item]
    widths: Sequence[int]
    batch: LeafBatch
    refused: Sequence[RefusedEvent] = ()

    def entries(self) -> list[Entry]:
        """One entry an event, for where each must be dealt with by itself."""
        ends = accumulate(self.widths)
        return [
            Entry(sequence, event, self.batch.data[end - width : end])
            for (sequence, event), width, end in zip(self.items, self.widths, ends, strict=True)
        ]


NOTHING = Encoded((), (), EMPTY)


def encoded_of(entries: Sequence[Entry]) -> Encoded:
    """Entries together again."""
    batch = batch_of([parse(data) for entry in entries for data in entry.leaves])
    items = [(entry.sequence, entry.event) for entry in entries]
    return Encoded(items, [len(entry.leaves) for entry in entries], batch)


class BatchEncoder:
    """Encodes the events of one incarnation; remembers the texts of names that recur."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._texts = Texts()
        self._forms = {kind: Form(kind, context, self._texts) for kind in KINDS}

    def encode(self, items: Sequence[Item]) -> Encoded:
        """The leaves of events in the order of the events; those that have none are in `refused`."""
        draft = _Draft(items)
        by_kind: defaultdict[type, list[int]] = defaultdict(list)
        for place, (_, event) in enumerate(items):
            by_kind[event.__class__].append(place)
        for kind, places in by_kind.items():
            form = self._forms.get(kind)
            for start in range(0, len(places), _CHUNK):
                time.sleep(0)
                self._chunk(draft, form, places[start : start + _CHUNK])
        return draft.encoded(self._context)

    def _chunk(self, draft: _Draft, form: Form | None, places: list[int]) -> None:
        try:
            if form is None or form.kind in _TWO_LOGS:
                raise NotPlainError
            written = form.write([draft.items[place] for place in places])
        except Exception:  # whatever it is, the definition decides which event it is about
            draft.singly(places, self._context)
            return
        sizes = list(map(len, written.data))
        if max(sizes) <= LEAF_BYTES_MAX:
            draft.take(form.name, places, written)
            return
        short = [place for place, size in zip(places, sizes, strict=True) if size <= LEAF_BYTES_MAX]
        draft.singly(sorted({*places} - {*short}), self._context)
        if short:
            self._chunk(draft, form, short)


class _Draft:
    """A batch in the making: chunks arrive by kind, leaves end up in the order of their events."""

    def __init__(self, items: Sequence[Item]) -> None:
        self.items = items
        self._data = [b""] * len(items)
        self._logs = [""] * len(items)
        self._at_us = [0] * len(items)
        self._groups: list[LeafGroup] = []
        self._single: dict[int, list[Leaf]] = {}  # none: refused
        self._refused: list[RefusedEvent] = []

    def take(self, kind: str, places: list[int], written: Written) -> None:
        data, logs, at_us = self._data, self._logs, self._at_us
        for place, leaf, log, moment in zip(places, written.data, written.logs, written.at_us, strict=True):
            data[place], logs[place], at_us[place] = leaf, log, moment
        self._groups.append(LeafGroup(kind, places, written.columns, written.extents))

    def singly(self, places: list[int], context: Context) -> None:
        for place in places:
            sequence, event = self.items[place]
            try:
                self._single[place] = leaves(event, context, sequence)
            except Exception as problem:  # rule 2: whatever a caller put into an event
                self._single[place] = []
                self._refused.append(RefusedEvent(sequence, event, problem))

    def encoded(self, context: Context) -> Encoded:
        if self._single:
            return self._merged(context)
        count = len(self.items)
        return Encoded(self.items, [1] * count, self._batch(context, range(count)), self._refused)

    def _batch(self, context: Context, places: Sequence[int]) -> LeafBatch:
        """The batch of the leaves that chunks made, at these places."""
        count, whole = len(places), len(places) == len(self.items)
        items = self.items if whole else [self.items[place] for place in places]
        kinds = [event.__class__ for _, event in items]
        names = {kind: KINDS[kind].name for kind in set(kinds)}
        outages = {kind: KINDS[kind].outage for kind in names}
        at_us = self._at_us if whole else [self._at_us[place] for place in places]
        data = self._data if whole else [self._data[place] for place in places]
        return LeafBatch(
            self._logs if whole else [self._logs[place] for place in places],
            [context.incarnation] * count,
            [sequence for sequence, _ in items],
            [1] * count,
            [1] * count,
            list(map(names.__getitem__, kinds)),
            list(map(outages.__getitem__, kinds)),
            at_us,
            data,
            self._groups,
            {context.incarnation: IncarnationStart("unknown", context.offset_us, at_us[0])} if count else {},
            leaf_hashes(data),
        )

    def _merged(self, context: Context) -> Encoded:
        """Leaves of chunks and single ones in the order of their events."""
        single = self._single
        fast = [place for place in range(len(self.items)) if place not in single]
        first = self._batch(context, fast)
        second = batch_of([leaf for place in sorted(single) for leaf in single[place]])
        widths = [len(single[place]) if place in single else 1 for place in range(len(self.items))]
        starts = [0, *accumulate(widths)]
        of_first = [starts[place] for place in fast]
        of_second = [
            starts[place] + number for place in sorted(single) for number in range(len(single[place]))
        ]
        moved = dict(zip(fast, of_first, strict=True))
        groups = [
            group._replace(places=[moved[place] for place in group.places]) for group in self._groups
        ] + [group._replace(places=[of_second[place] for place in group.places]) for group in second.groups]
        order = sorted(range(starts[-1]), key=[*of_first, *of_second].__getitem__)
        founders = {**second.founders, **first.founders}
        pairs = zip((*first[:9], first.hashes), (*second[:9], second.hashes), strict=True)
        *placed, hashes = [[both[place] for place in order] for both in ([*a, *b] for a, b in pairs)]
        batch = LeafBatch._make((*placed, groups, founders, hashes))
        kept = [(item, width) for item, width in zip(self.items, widths, strict=True) if width]
        return Encoded([item for item, _ in kept], [width for _, width in kept], batch, self._refused)
