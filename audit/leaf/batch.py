"""Leaves in order, column by column, for appending in a transaction and for reading from bytes.

1. Every column is a function of the leaves' bytes: `read_leaves` of them gives the batch that the encoder gave. Values
   of `LeafGroup.columns` are as in the leaf, with two exceptions. Decimal strings of large integers are integers, and a
   field that a leaf lacks has its default (`leaf_schema`).
2. A group has no column for a key in `UNREAD`, because no row is made from them. It has a column of traces if a leaf
   has a trace. The items of a `custody-changed` leaf are in the groups of their kinds, at the place of the leaf. `item`
   is their number in it, and 0 for leaves of these kinds.
3. A few leaves are read at a time, and equal texts are kept once: the values of a whole batch are more than a
   processor's cache holds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, chain, compress, islice
from operator import add, attrgetter, itemgetter, mul, sub
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET
from msgspec.structs import astuple

from kvcustody.audit.kinds.block_runs import EXACT, UNNAMED, encoded_blocks, is_plain
from kvcustody.audit.kinds.registry import COPIES, TOTALS, TRACE
from kvcustody.audit.leaf.block_run_text import Extents
from kvcustody.audit.leaf.leaf_schema import (
    DECODE,
    FOLDED,
    ITEMS,
    LIST_OF_KIND,
    SCHEMA_OF_NAME,
    LeafSchema,
    check_copies,
    numbers_of,
)
from kvcustody.audit.leaf.merkle import leaf_hashes
from kvcustody.errors import LedgerError

Columns = Mapping[str, Sequence[Any]]

# What these say is in the columns of the whole batch, in extents, or in the leaf alone.
UNREAD = frozenset({"schema", "kind", "outage", "incarnation", "sequence", "parts", "domains", *TOTALS, *FOLDED})
_CHUNK = 128
_encode = msgspec.json.Encoder().encode


class LeafGroup(NamedTuple):
    """Leaves of one kind: their places in the batch, their values by leaf key, the extents of their run lists."""

    kind: str
    places: Sequence[int]
    columns: Columns
    extents: Mapping[str, Extents]


class IncarnationStart(NamedTuple):
    """Facts about an incarnation from its first leaf in a batch."""

    worker: str
    offset_us: int
    at_us: int


class LeafBatch(NamedTuple):
    """Leaves in order; columns have one value for each leaf."""

    logs: Sequence[str]
    incarnations: Sequence[str]
    sequences: Sequence[int]
    parts: Sequence[int]
    of_parts: Sequence[int]
    kinds: Sequence[str]
    outages: Sequence[str]
    at_us: Sequence[int]
    data: Sequence[bytes]
    groups: Sequence[LeafGroup]
    founders: Mapping[str, IncarnationStart]
    hashes: Sequence[bytes]  # RFC 6962, of `data`


UNKNOWN_WORKER = "unknown"
OWN_LIFE = frozenset(  # what a process says of itself, with its worker's name
    {"worker-started", "worker-stopped", "observation-started"}
)
EMPTY = LeafBatch((), (), (), (), (), (), (), (), (), (), {}, ())
_HEAD = attrgetter("log", "incarnation", "sequence", "part", "parts", "kind", "outage", "at_us")


_KIND = re.compile(rb',"kind":"([^"]*)"')
_WHERE = re.compile(r"at `\$[^`]*`$")


def read_leaves(
    lines: Sequence[bytes],
    *,
    canonical: bool = False,
    hashed: bool = True,
    keys: frozenset[str] | None = None,
) -> LeafBatch:
    """Return a batch of existing leaves; raises `LedgerError` if one does not conform to its kind.

    `canonical`: each must be the canonical bytes of what was read of it, so that no byte says anything else.
    `hashed` False: nobody asks for their hashes, and the batch has none.
    `keys`: groups have no other columns, and of run lists only how many blocks they have: for leaves that a ledger has
    taken, whose runs were looked at then.
    """
    reading = _Reading(keys)
    try:
        for start in range(0, len(lines), _CHUNK):
            some = lines[start : start + _CHUNK]
            joined = b",".join(some)
            kinds = _KIND.findall(joined)
            # A key of this name that is not the leaf's own can only make a leaf be refused: its kind is in its schema.
            leaves = [DECODE[kind](line) for kind, line in zip(kinds, some, strict=True)]
            # All at once: no object's text is the beginning of another's, so each meets its own line.
            if canonical and _encode(leaves) != b"[%b]" % joined:
                raise LedgerError("is not in its canonical form")
            reading.take(start, leaves)
    except (
        msgspec.MsgspecError,
        ValueError,
        LookupError,
        TypeError,
        ArithmeticError,
        RecursionError,
    ) as problem:
        where = _WHERE.search(str(problem))  # what stands there may be anybody's name
        raise LedgerError(f"is not a leaf of its kind{f', {where[0]}' if where else ''}") from problem
    return reading.batch(lines, leaf_hashes(lines) if hashed else ())


class _Kind(NamedTuple):
    """What the leaves of one kind say, so far."""

    schema: LeafSchema
    places: list[int]
    columns: dict[str, list[Any]]
    extents: dict[str, Extents]


class _Reading:
    """The leaves of a batch on their way into columns, some at a time (rule 3)."""

    def __init__(self, keys: frozenset[str] | None) -> None:
        self._keys = keys
        self._head: list[list[Any]] = [[] for _ in range(8)]
        self._kinds: dict[str, _Kind] = {}
        self._texts: dict[Any, Any] = {}
        self._founders: dict[str, IncarnationStart] = {}

    def take(self, first: int, leaves: list[Any]) -> None:
        """The next leaves, the first of them at this place."""
        logs, lives, *numbers, kinds, outages, at_us = zip(*map(_HEAD, leaves), strict=True)
        for uuid in {*lives} - self._founders.keys():
            founder = leaves[lives.index(uuid)]
            moment = int(founder.at_us)
            # A `worker` in a leaf of another kind may be somebody else's.
            worker = founder.worker if founder.kind in OWN_LIFE else UNKNOWN_WORKER
            self._founders[uuid] = IncarnationStart(worker, moment - int(founder.boot_us), moment)
        texts = map(self._shared, (logs, lives, kinds, outages))
        columns = (next(texts), next(texts), *map(numbers_of, numbers), *texts, numbers_of(at_us))
        for whole, values in zip(self._head, columns, strict=True):
            whole.extend(values)
        by_kind: dict[str, list[int]] = {}
        for place, kind in enumerate(kinds):
            by_kind.setdefault(kind, []).append(place)
        for kind, places in by_kind.items():
            if kind in SCHEMA_OF_NAME:
                self._take_kind(kind, [first + place for place in places], [leaves[place] for place in places])

    def _take_kind(self, kind: str, places: list[int], leaves: list[Any]) -> None:
        schema = SCHEMA_OF_NAME[kind]
        fields: dict[str, Sequence[Any]] = dict(zip(schema.order, zip(*map(astuple, leaves), strict=True), strict=True))
        for key, default in schema.absent.items():
            if msgspec.UnsetType in set(map(type, fields[key])):
                fields[key] = tuple(default if value is UNSET else value for value in fields[key])
        if kind in LIST_OF_KIND:
            fields["item"] = [0] * len(places)
        if COPIES[0] in schema.keys:
            check_copies(fields)
        self._add(schema, places, fields)
        if schema.held:
            self._take_items(places, fields)

    def _take_items(self, places: list[int], leaf: Mapping[str, Sequence[Any]]) -> None:
        """What these leaves hold, as leaves of the items' kinds say it."""
        numbers = [0] * len(places)
        moments = numbers_of(leaf["boot_us"])
        offsets = list(map(sub, numbers_of(leaf["at_us"]), moments))
        for key, item in ITEMS.items():
            lists = leaf[key]
            widths = list(map(len, lists))
            items = list(chain.from_iterable(lists))
            if not items:
                continue
            owners = [place for place, width in enumerate(widths) for _ in range(width)]
            fields: dict[str, Sequence[Any]] = dict(zip(item.keys, zip(*map(astuple, items), strict=True), strict=True))
            fields["boot_us"] = _moments([moments[owner] for owner in owners], fields["boot_us"])
            for name in item.moments - {"boot_us"} if self._keys is None else ():
                fields[name] = _moments(fields["boot_us"], fields[name])
            fields["at_us"] = [moment + offsets[owner] for owner, moment in zip(owners, fields["boot_us"], strict=True)]
            fields["of_incarnation"] = [leaf["incarnation"][owner] for owner in owners]
            for name in ("log", "tenant"):
                fields[name] = [leaf[name][owner] for owner in owners]
            if TRACE in SCHEMA_OF_NAME[item.name].order:
                fields[TRACE] = [None] * len(items)
            fields["part"] = [1] * len(items)
            fields["item"] = [numbers[place] + at for place, width in enumerate(widths) for at in range(1, width + 1)]
            numbers = list(map(add, numbers, widths))
            self._add(SCHEMA_OF_NAME[item.name], [places[owner] for owner in owners], fields)

    def _add(self, schema: LeafSchema, places: list[int], fields: dict[str, Sequence[Any]]) -> None:
        """Add to the columns of a kind what leaves, or items, say."""
        known = self._kinds.get(schema.name)
        if known is None:
            asked = [*schema.order, *(["item"] if schema.name in LIST_OF_KIND else ())]
            columns: dict[str, list[Any]] = {
                key: [] for key in asked if key not in UNREAD and (self._keys is None or key in self._keys)
            }
            nothing = {key: Extents([], [], []) for key in schema.lists}
            known = self._kinds[schema.name] = _Kind(schema, [], columns, nothing)
        known.places.extend(places)
        extents_of = {key: extents(fields[key]) if self._keys is None else _sizes(fields[key]) for key in schema.lists}
        for key in schema.lists:
            fields.setdefault(TOTALS[key], extents_of[key].blocks)
        for key, whole in known.columns.items():
            values = fields[key]
            if key in schema.texts:
                whole.extend(self._shared(values))
            else:
                whole.extend(numbers_of(values) if key in schema.numbers else values)
        for key, sizes in known.extents.items():
            for whole, more in zip(sizes, extents_of[key], strict=True):
                whole.extend(more)

    def batch(self, lines: Sequence[bytes], hashes: Sequence[bytes]) -> LeafBatch:
        """Return the batch of all added leaves, which consist of these lines with these hashes."""
        groups = []
        for schema, places, columns, found in self._kinds.values():
            if TRACE in columns and columns[TRACE].count(None) == len(places):
                del columns[TRACE]
            groups.append(LeafGroup(schema.name, places, columns, found))
        return LeafBatch._make((*self._head, lines, groups, self._founders, hashes))

    def _shared(self, values: Sequence[Any]) -> Iterator[Any]:
        """Return the texts with equal ones shared as one object, so that the others' memory is freed."""
        return map(self._texts.setdefault, values, values)


def merge_batches(batches: Sequence[LeafBatch]) -> LeafBatch:
    """Return the batches merged in order; needs at least one."""
    if len(batches) == 1:
        return batches[0]
    rows = [list(chain.from_iterable(column)) for column in zip(*[batch[:9] for batch in batches], strict=True)]
    pieces: dict[str, list[LeafGroup]] = {}
    start = 0
    for batch in batches:
        for group in batch.groups:
            moved = group._replace(places=[start + place for place in group.places])
            pieces.setdefault(group.kind, []).append(moved)
        start += len(batch.data)
    founders = {uuid: founder for batch in reversed(batches) for uuid, founder in batch.founders.items()}
    hashes = list(chain.from_iterable(batch.hashes for batch in batches))
    return LeafBatch._make([*rows, [_joined(groups) for groups in pieces.values()], founders, hashes])


def _joined(groups: list[LeafGroup]) -> LeafGroup:
    """Groups of one kind as one; a column that one of them has not is empty there."""
    if len(groups) == 1:
        return groups[0]
    keys = dict.fromkeys(key for group in groups for key in group.columns)
    columns: dict[str, Sequence[Any]] = {}
    for key in keys:
        parts = [group.columns.get(key) or [None] * len(group.places) for group in groups]
        columns[key] = list(chain.from_iterable(parts))
    extents = {
        name: Extents(
            *(list(chain.from_iterable(parts)) for parts in zip(*[g.extents[name] for g in groups], strict=True))
        )
        for name in groups[0].extents
    }
    places = list(chain.from_iterable(group.places for group in groups))
    return LeafGroup(groups[0].kind, places, columns, extents)


def part_of_batch(batch: LeafBatch, first: int, below: int) -> LeafBatch:
    """Return the leaves of a batch at these places."""
    if (first, below) == (0, len(batch.data)):
        return batch
    rows = [column[first:below] for column in batch[:9]]
    groups = []
    for group in batch.groups:
        inside = [first <= place < below for place in group.places]
        if any(inside):
            groups.append(
                LeafGroup(
                    group.kind,
                    [place - first for place in compress(group.places, inside)],
                    {key: list(compress(column, inside)) for key, column in group.columns.items()},
                    {
                        key: Extents(*(list(compress(column, inside)) for column in extents))
                        for key, extents in group.extents.items()
                    },
                )
            )
    return LeafBatch._make([*rows, groups, batch.founders, batch.hashes[first:below]])


def _sizes(lists: Sequence[Sequence[Sequence[Any]]]) -> Extents:
    """Return the block counts of every list of encoded runs, without their extents."""
    return Extents([sum(map(encoded_blocks, runs)) if runs else 0 for runs in lists], [], [])


def extents(lists: Sequence[Sequence[Sequence[Any]]]) -> Extents:
    """Return the extent of every list of encoded runs."""
    widths = set(map(len, lists))
    if widths == {0}:
        return Extents([0] * len(lists), [0] * len(lists), [-1] * len(lists))
    items = list(chain.from_iterable(lists))
    if not is_plain(items):
        return _any_extents(lists)
    firsts = numbers_of(list(map(itemgetter(0), items)))
    if min(firsts) < 0:
        raise LedgerError("has a run of a negative generation")
    lengths = list(map(_length, items))
    if widths == {1}:  # the rule: one run a list
        highs = [first + length - 1 if first else 0 for first, length in zip(firsts, lengths, strict=True)]
        return Extents(lengths, list(firsts), highs)
    sums, every = Extents([], [], []), zip(firsts, lengths, strict=True)
    for runs in lists:
        total, low, high = 0, 1 << 62, -1
        for first, length in islice(every, len(runs)):
            total, low = total + length, min(low, first)
            high = max(high, first + length - 1 if first else 0)
        sums.blocks.append(total)
        sums.low.append(low if total else 0)
        sums.high.append(high)
    return sums


def _moments(since: Sequence[int], ago: Sequence[Any]) -> list[int]:
    """Moments that items say."""
    return [0 if value is None else moment - int(value) for moment, value in zip(since, ago, strict=True)]


def _any_extents(lists: Sequence[Sequence[Sequence[Any]]]) -> Extents:
    """Return the extents if some runs are of a shorter form."""
    sums = Extents([], [], [])
    add_blocks, add_low, add_high = sums.blocks.append, sums.low.append, sums.high.append
    for runs in lists:
        if len(runs) == 1:  # the rule
            total, low, high = _extent(runs[0])
        else:
            found = [_extent(item) for item in runs]
            total = sum(blocks for blocks, _, _ in found)
            low = min((low for _, low, _ in found), default=0)
            high = max((high for _, _, high in found), default=-1)
        add_blocks(total)
        add_low(low if total else 0)
        add_high(high)
    return sums


def _extent(item: Sequence[Any]) -> tuple[int, int, int]:
    """Blocks, lowest and highest generation of one encoded run; raises where `decode` could not read it."""
    head = item[0]
    is_placed = head.__class__ is list
    if not is_placed and len(item) > 1 and item[1].__class__ is list:
        (first,), length = numbers_of([head]), _length(item)
        if first < 0:
            raise LedgerError("has a run of a negative generation")
        return length, first, first + length - 1 if first else 0
    named = head if is_placed else item
    if len(named) == 3:  # the rule: one stretch
        base, low, blocks = named
        wrong, high = base < 0 or low < 1 or blocks < 1, low + blocks - 1
    else:
        gaps, counts = named[1::2], named[2::2]
        wrong = len(gaps) != len(counts) or named[0] < 0 or gaps[0] < 1 or min(counts) < 1 or min(gaps) < 0
        low, blocks, high = gaps[0], sum(counts), sum(named) - named[0] - 1
    if wrong:
        raise LedgerError("has a list of generations of another form")
    if high >= EXACT or (is_placed and (len(item) != 3 or _length([0, *item[1:]]) != blocks)):
        raise LedgerError("has a run of another form")
    return blocks, low, high


def _length(item: Sequence[Any]) -> int:
    """Return the block count of one encoded run; raises if `decode` could not read it, because later would be too
    late.
    """
    _, deltas, counts, *pool = item
    if not deltas.__class__ is counts.__class__ is list or (pool and (len(pool) > 1 or int(pool[0]) < 1)):
        raise LedgerError("has a run of another form")
    if counts and (len(counts) != len(deltas) or min(counts) < 1):
        raise LedgerError("has a run whose counts do not match its deltas")
    if min(accumulate(map(mul, deltas, counts) if counts else deltas)) < UNNAMED:
        raise LedgerError("has a run of a negative block")
    return sum(counts) if counts else len(deltas)
