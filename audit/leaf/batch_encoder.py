"""Events into canonical leaves, many at once: by kind, column by column, in loops that the interpreter does not run.

1. An event with a value that its kind does not take has no leaf: it is named with the reason and hinders no other,
   neither of its batch nor of the leaf that it would have shared.
   numpy's numbers become Python's, and integers from 2^53 on decimal strings; nothing else is converted.
2. The interpreter lock is offered between chunks, so an engine's thread waits for no batch.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, TypeVar

from kvcustody.audit.kinds.custody_events import CustodyChanged
from kvcustody.audit.kinds.event import Event
from kvcustody.audit.kinds.registry import ACTING, KINDS
from kvcustody.audit.leaf.batch import EMPTY, IncarnationStart, LeafBatch, LeafGroup, read_leaves
from kvcustody.audit.leaf.canonical_leaf import LEAF_BYTES_MAX, Context, Leaf, parse
from kvcustody.audit.leaf.column_encoder import Item, Written, leaves_of, written
from kvcustody.audit.leaf.leaf_schema import FOLDED, SCHEMAS
from kvcustody.audit.leaf.merkle import leaf_hashes
from kvcustody.errors import LedgerError

_CHUNK = 256  # events of one kind between offers of the interpreter lock
_ValueT = TypeVar("_ValueT")


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
        return read_leaves(self.leaves)


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
    batch = read_leaves([data for entry in entries for data in entry.leaves])
    items = [(entry.sequence, entry.event) for entry in entries]
    return Encoded(items, [len(entry.leaves) for entry in entries], batch)


def leaves(event: Event, context: Context, sequence: int) -> list[Leaf]:
    """Every leaf of an event, for each of its logs: usually one. Raises what is wrong with it."""
    made = BatchEncoder(context).encode([(sequence, event)])
    for refused in made.refused:
        raise refused.problem
    return [parse(data) for data in made.batch.data]


def leaf(event: Event, context: Context, sequence: int = 0) -> bytes:
    """The canonical bytes of an event that needs one leaf; raises `LedgerError` where it needs several."""
    made = leaves(event, context, sequence)
    if len(made) != 1:
        raise LedgerError(f"`{KINDS[type(event)].name}` needs `{len(made)}` leaves", leaves=len(made))
    return made[0].data


class _Draft:
    """What chunks have made so far: whole groups of one leaf an event, and the leaves of all other events."""

    def __init__(self, count: int) -> None:
        self.logs = [""] * count
        self.at_us = [0] * count
        self.data = [b""] * count
        self.groups: list[LeafGroup] = []
        self.several: dict[int, list[bytes]] = {}  # none: refused
        self.refused: list[RefusedEvent] = []

    def take(self, kind: str, places: list[int], written: Written) -> None:
        """Events of one kind, each of one leaf."""
        data, logs, at_us = self.data, self.logs, self.at_us
        for place, line, log, moment in zip(places, written.data, written.logs, written.at_us, strict=True):
            data[place], logs[place], at_us[place] = line, log, moment
        self.groups.append(LeafGroup(kind, places, written.columns, written.extents))
        for held in written.held:
            owners = [places[owner] for owner in held.owners]
            self.groups.append(LeafGroup(held.name, owners, held.columns, held.extents))


class BatchEncoder:
    """Encodes the events of one incarnation."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def encode(self, items: Sequence[Item]) -> Encoded:
        """The leaves of events in the order of the events; those that have none are in `refused`."""
        draft = _Draft(len(items))
        by_kind: defaultdict[type, list[int]] = defaultdict(list)
        for place, (_, event) in enumerate(items):
            by_kind[event.__class__].append(place)
        for kind, places in by_kind.items():
            for start in range(0, len(places), _CHUNK):
                time.sleep(0)
                self._chunk(draft, kind, items, places[start : start + _CHUNK])
        return self._ordered(draft, items)

    def _chunk(self, draft: _Draft, kind: type, items: Sequence[Item], places: list[int]) -> None:
        try:
            schema = SCHEMAS[kind]
            done = written(schema, [items[place] for place in places], self._context)
            if max(map(len, done.data)) <= LEAF_BYTES_MAX and kind not in ACTING:
                draft.take(schema.name, places, done)
                return
            made = {}
            for number, (place, data) in enumerate(zip(places, done.data, strict=True)):
                if len(data) > LEAF_BYTES_MAX or kind in ACTING:
                    made[place] = leaves_of(items[place][1], done.rows[number])
        except Exception as problem:  # rule 1: whatever a caller put into an event
            if len(places) > 1:
                for place in places:
                    self._chunk(draft, kind, items, [place])
                return
            draft.several[places[0]] = []
            sequence, event = items[places[0]]
            sound, found = self._without_wrong(sequence, event)
            draft.refused += found or [RefusedEvent(sequence, event, problem)]
            if sound is not None:
                row = written(SCHEMAS[kind], [(sequence, sound)], self._context).rows[0]
                draft.several[places[0]] = leaves_of(sound, row)
            return
        draft.several |= made
        rest = [place for place in places if place not in made]
        if rest:
            self._chunk(draft, kind, items, rest)

    def _without_wrong(self, sequence: int, event: Event) -> tuple[CustodyChanged | None, list[RefusedEvent]]:
        """What of a shared leaf can be written, if any of it is wrong, and what is wrong."""
        if not isinstance(event, CustodyChanged) or not all(
            isinstance(getattr(event, key), tuple) for key in FOLDED
        ):
            return None, []
        found: list[RefusedEvent] = []
        kept: dict[str, list[Event]] = {}
        for key in FOLDED:
            for each in getattr(event, key):
                try:
                    written(SCHEMAS[CustodyChanged], [(sequence, _alone(event, key, each))], self._context)
                except Exception as problem:  # rule 1
                    found.append(RefusedEvent(sequence, each, problem))
                else:
                    kept.setdefault(key, []).append(each)
        if not (found and kept):
            return None, []  # refused as a whole
        return event._replace(**{key: tuple(kept.get(key, ())) for key in FOLDED}), found

    def _ordered(self, draft: _Draft, items: Sequence[Item]) -> Encoded:
        """All leaves in the order of their events."""
        context, several = self._context, dict(sorted(draft.several.items()))
        logs, at_us, data, groups, events = draft.logs, draft.at_us, draft.data, draft.groups, list(items)
        widths, parts, of_parts = [1] * len(items), [1] * len(items), [1] * len(items)
        if several:
            more = read_leaves([line for made in several.values() for line in made])
            for place, made in several.items():
                widths[place] = len(made)
            starts = [0, *accumulate(widths)]
            own = [starts[place] + number for place, made in several.items() for number in range(len(made))]
            groups = [group._replace(places=[starts[place] for place in group.places]) for group in groups]
            groups += [group._replace(places=[own[place] for place in group.places]) for group in more.groups]
            wide = {place: len(made) for place, made in several.items()}
            _put(logs, more.logs, wide)
            _put(at_us, more.at_us, wide)
            _put(data, more.data, wide)
            _put(parts, more.parts, wide)
            _put(of_parts, more.of_parts, wide)
            _put(events, [items[place] for place, width in wide.items() for _ in range(width)], wide)
        kinds = [event.__class__ for _, event in events]
        names = {kind: SCHEMAS[kind] for kind in set(kinds)}
        batch = LeafBatch(
            logs,
            [context.incarnation] * len(events),
            [sequence for sequence, _ in events],
            parts,
            of_parts,
            [names[kind].name for kind in kinds],
            [names[kind].outage for kind in kinds],
            at_us,
            data,
            groups,
            {context.incarnation: IncarnationStart("unknown", context.offset_us, at_us[0])} if events else {},
            leaf_hashes(data),
        )
        kept = [item for item, width in zip(items, widths, strict=True) if width] if draft.refused else items
        widths = [width for width in widths if width] if several else widths
        return Encoded(kept, widths, batch, draft.refused)


def _alone(event: CustodyChanged, key: str, held: Event) -> CustodyChanged:
    return event._replace(**{name: (held,) if name == key else () for name in FOLDED})


def _put(column: list[_ValueT], values: Sequence[_ValueT], wide: dict[int, int]) -> None:
    """Put the values of all leaves of some events in the places of these; the events' widths, in order."""
    end = len(values)
    for place, width in reversed(wide.items()):
        column[place : place + 1] = values[end - width : end]
        end -= width
