"""The leaf of every kind of event, derived only from the event's own declaration.

1. An event's fields determine the following:
   - the keys of its leaf (`_key`) and the types of their values;
   - the canonical bytes (keys in order, `row`);
   - the check of a leaf that comes from elsewhere (`decode`);
   - the columns that rows are made from.
2. A field with a default may have been added after the first version. A leaf that lacks it has the default. A leaf that
   is written has every field, except lists without an item, and fields of `registry.SPARSE` that have their default.
3. Unknown keys are ignored, as a later version may have added them. Code that must refuse them compares bytes
   (`batch.read_leaves`).
4. A leaf of several events of one tenant (`custody-changed`) has a list for each kind that it holds. An item has its
   event's values in the order of `ItemSchema.keys`, as the event's own leaf has them. An item's own moment is given in
   microseconds before the leaf's `boot_us`. Every other moment in it is given in microseconds before its own (negative:
   after it), and is null where the event has none. An item that lacks its last values has their defaults (rule 2). An
   event with a trace, or of another incarnation, has a leaf of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

import msgspec
import numpy as np
from msgspec import NODEFAULT, UNSET, Meta

from kvcustody.audit.kinds.block_runs import EXACT, Runs
from kvcustody.audit.kinds.custody_events import (
    BlocksReleased,
    CustodyChanged,
    CustodyEnded,
    ReceiptRecorded,
    ResidencyReleased,
)
from kvcustody.audit.kinds.event import Event, FieldMeaning, OneOf
from kvcustody.audit.kinds.registry import (
    COPIES,
    COPY_MOMENTS,
    HEAD_KEYS,
    KINDS,
    SCHEMA,
    SIGNATURE,
    TOTALS,
    TRACE,
)
from kvcustody.audit.kinds.row import Kept
from kvcustody.errors import LedgerError

Column = Sequence[Any]

_HEX = frozenset("0123456789abcdef")
_Exact = Annotated[int, Meta(gt=-EXACT, lt=EXACT)]
_Number = _Exact | str  # a decimal string from 2^53 on, as `numbers_of` checks: no pattern, whose types crash at exit
_Runs = list[list[_Number | list[_Exact]]]


class Value(NamedTuple):
    """The meaning of a field's annotation: its type in a leaf, and the check of a column of values."""

    said: Any
    column: Callable[[Column], Column]


class ItemSchema(NamedTuple):
    """An event as an item of a leaf of several (rule 4)."""

    kind: type[Event]
    name: str
    keys: tuple[str, ...]
    moments: frozenset[str]  # which of them are moments
    absent: dict[str, Any]  # what a shorter item says of these keys (rule 2)
    said: type[msgspec.Struct]  # an array


class LeafSchema(NamedTuple):
    """The leaf of one kind of event; `keys` and `values` are in the order of the event's fields."""

    name: str
    outage: str
    keys: tuple[str, ...]
    values: tuple[Value, ...]
    lists: tuple[str, ...]  # keys of run lists
    held: tuple[str, ...]  # keys of lists of items
    numbers: frozenset[str]  # keys of integers, which may be decimal strings in a leaf
    counted: frozenset[str]  # those of them that an event's own values can make that large
    texts: frozenset[str]
    order: tuple[str, ...]  # every key, as it is in bytes
    absent: dict[str, Any]  # what a leaf says that lacks these keys (rule 2)
    meanings: Mapping[str, FieldMeaning | OneOf]  # of a kind that workers hand in: what its fields may name
    row: Callable[..., msgspec.Struct]  # of the values in `order`: what is encoded
    decode: Callable[[bytes], Any]  # a key that the leaf lacks is UNSET

    def kept_as(self, name: str) -> Kept:
        """Return how a database keeps a column of that name: as the leaf's key of the name, or its moment in UTC."""
        said = {key: value.said for key, value in zip(self.keys, self.values, strict=True)}
        is_number = said.get(name) is _Number or {name, boot_key(name)} & self.numbers
        return Kept.NUMBER if is_number else _KEPT[said[name]]


def ints(values: Column) -> Column:
    """Return a column of integers."""
    return values if {*map(type, values)} == {int} else list(map(_int, values))


def numbers_of(said: Column) -> Column:
    """Return integers from leaves, which write large ones as decimal strings."""
    if str not in set(map(type, said)):
        return said
    found = list(map(int, said))
    texts = [(text, number) for text, number in zip(said, found, strict=True) if text.__class__ is str]
    if any(text != str(number) or -EXACT < number < EXACT for text, number in texts):
        raise LedgerError("is no decimal string of a large integer")
    return found


def check_copies(columns: Mapping[str, Column]) -> None:
    """Check that lists of copies are equally long and not empty, names hexadecimal, and counts not negative.

    Raises `LedgerError`.
    """
    counts = [columns[key] for key in COPIES[1:]]
    every = [columns[COPIES[0]], *counts, *(columns[key] for key in COPY_MOMENTS if key in columns)]
    if any(len({*map(len, lists)}) != 1 or not lists[0] for lists in zip(*every, strict=True)):
        raise LedgerError("lists of copies do not belong together")
    if any(min(values) < 0 for column in counts for values in column):
        raise LedgerError("a count of copies is below 0")
    names = list(chain.from_iterable(columns[COPIES[0]]))
    if not _HEX.issuperset("".join(names)) or not 0 < min(map(len, names)) <= max(map(len, names)) <= 64:
        raise LedgerError("a name of a copy is not hexadecimal")


def _int(value: Any) -> int:
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        raise LedgerError(f"a leaf has an integer here, and not a {_named(value)}")
    return int(value)


def _flags(values: Column) -> Column:
    if {*map(type, values)} == {bool}:
        return values
    if not all(isinstance(value, (bool, np.bool_)) for value in values):
        raise LedgerError("a leaf has a truth value here")
    return list(map(bool, values))


def _shares(values: Column) -> Column:
    return [round(float(share) * 1_000_000) for share in values]


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise LedgerError(f"a leaf has a text here, and not a {_named(value)}")
    return str.__str__(value)


def _texts(values: Column) -> Column:
    return values if {*map(type, values)} == {str} else list(map(_text, values))


def _names(values: Column) -> Column:
    if {*map(type, values)} <= {str, type(None)}:
        return values
    return [None if value is None else _text(value) for value in values]


def _lists_of(check: Callable[[Column], Column]) -> Callable[[Column], Column]:
    def lists(values: Column) -> Column:
        if not {*map(type, values)} <= {tuple, list}:
            raise LedgerError("a leaf has a list here")
        found = [*chain.from_iterable(values)]
        checked = check(found) if found else found
        return values if checked is found else [check(some) if some else some for some in values]

    return lists


def _exact_ints(values: Column) -> Column:
    found = ints(values)
    if min(found) <= -EXACT or max(found) >= EXACT:
        raise LedgerError("a list in a leaf has no integer from 2^53 on")
    return found


def _named(value: object) -> str:
    return "float" if isinstance(value, float) else type(value).__name__


def _as_given(values: Column) -> Column:
    return values


VALUES: dict[Any, Value] = {  # by the type of an event's field
    int: Value(_Number, ints),
    float: Value(_Number, _shares),  # parts per million by then
    bool: Value(bool, _flags),
    str: Value(str, _texts),
    str | None: Value(str | None, _names),
    tuple[int, ...]: Value(list[_Exact], _lists_of(_exact_ints)),
    tuple[str, ...]: Value(list[str], _lists_of(_texts)),
    Runs: Value(_Runs, _as_given),
}
_TEXTS = (str, str | None, tuple[str, ...])


def plain_type(annotation: Any) -> Any:
    """Return the type of a field's values, without the annotation of their meaning."""
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _meanings(kind: type[Event]) -> dict[str, FieldMeaning | OneOf]:
    """What the fields of a kind that is handed in may name, by leaf key; raises where a text has no meaning."""
    if not (kind.by_worker or kind.by_door):
        return {}
    meanings_by_key: dict[str, FieldMeaning | OneOf] = {}
    for field in msgspec.structs.fields(kind):
        meanings = [each for each in get_args(field.type)[1:] if isinstance(each, (FieldMeaning, OneOf))]
        if len(meanings) != 1 and (meanings or plain_type(field.type) in _TEXTS):
            raise TypeError(f"{kind.__name__}.{field.name}: state what it names (`FieldMeaning`)")
        meanings_by_key |= {_key(field.name, kind.__struct_fields__): meaning for meaning in meanings}
    return meanings_by_key


_KEPT = {bool: Kept.FLAG, str: Kept.TEXT, str | None: Kept.MAYBE_TEXT}
DURATIONS = ("scrub_within_us", "age_us", "within_us", "transfer_us", "recompute_us", "actual_us")
_RENAMED = {
    "incarnation": "of_incarnation",
    "sequence": "of_sequence",
    "share": "share_ppm",
    "at_us": "boot_us",
}


def _key(field: str, fields: tuple[str, ...]) -> str:
    """Return the leaf key of an event's field: boot times have a suffix, and the first run list is `runs`."""
    if field in ("attached", "runs") or (field == "written" and "attached" not in fields):
        return "runs"
    if field in _RENAMED:
        return _RENAMED[field]
    return boot_key(field) if field not in DURATIONS else field


def boot_key(name: str) -> str:
    """Return the leaf key of a moment on its process's clock, given the moment's name; other names stay."""
    return f"{name.removesuffix('_us')}_boot_us" if name.endswith("_us") else name


FOLDED: dict[str, type[Event]] = {  # kinds of which one leaf may have several, by the key of their list
    "released": ResidencyReleased,
    "passed": BlocksReleased,
    "ended": CustodyEnded,
    "scrubbed": ReceiptRecorded,
}
_OF_LEAF = frozenset({"tenant", "of_incarnation", TRACE})  # the leaf's own say them; what has a trace is no item


def _item_of(kind: type[Event]) -> ItemSchema:
    fields = msgspec.structs.fields(kind)
    every = [(_key(field.name, kind.__struct_fields__), VALUES[plain_type(field.type)].said) for field in fields]
    item_fields = [(key, said) for key, said in every if key not in _OF_LEAF]
    moments = frozenset(key for key, _ in item_fields if key.endswith("boot_us"))
    defaults = {_key(field.name, kind.__struct_fields__): field.default for field in fields if not field.required}
    absent = {key: None if key in moments else defaults[key] for key, _ in item_fields if key in defaults}
    typed = [(key, said | None if key in moments else said, absent.get(key, NODEFAULT)) for key, said in item_fields]
    return ItemSchema(
        kind,
        str(kind.__struct_config__.tag),
        tuple(key for key, _ in item_fields),
        moments,
        absent,
        msgspec.defstruct(f"{kind.__name__}Item", typed, array_like=True, gc=False),
    )


ITEMS = {key: _item_of(kind) for key, kind in FOLDED.items()}
LIST_OF_KIND = {item.name: key for key, item in ITEMS.items()}
VALUES |= {tuple[kind, ...]: Value(list[ITEMS[key].said], _as_given) for key, kind in FOLDED.items()}  # type: ignore[valid-type,misc]


def schema_of(kind: type[Event]) -> LeafSchema:
    """Return the schema of a kind of event."""
    name, fields = str(kind.__struct_config__.tag), msgspec.structs.fields(kind)
    keys = tuple(_key(field.name, kind.__struct_fields__) for field in fields)
    values = tuple(VALUES[plain_type(field.type)] for field in fields)
    lists = tuple(key for key in TOTALS if key in keys)
    numbers = ["sequence", "part", "parts", "at_us"]
    types: dict[str, Any] = dict.fromkeys(HEAD_KEYS, str) | dict.fromkeys(numbers, _Number)
    types |= {"schema": Literal[SCHEMA], "kind": Literal[name], "outage": Literal[kind.outage]}
    types |= dict(zip(keys, (value.said for value in values), strict=True))
    types |= {TOTALS[key]: _Number for key in lists}
    absent: dict[str, Any] = {key: field.default for key, field in zip(keys, fields, strict=True) if not field.required}
    absent |= {TOTALS[key]: 0 for key in lists if key in absent}
    order = tuple(sorted(types))
    optional = [(key, types[key] | msgspec.UnsetType, UNSET) if key in absent else (key, types[key]) for key in order]
    read = msgspec.defstruct(kind.__name__, optional, kw_only=True, gc=False)
    return LeafSchema(
        name,
        kind.outage,
        keys,
        values,
        lists,
        tuple(FOLDED) if kind is CustodyChanged else (),
        frozenset(key for key in order if types[key] is _Number),
        frozenset({"at_us", *(key for key, value in zip(keys, values, strict=True) if value.said is _Number)}),
        frozenset(key for key in order if types[key] in (str, str | None)),
        order,
        absent | ({TRACE: None} if TRACE in absent else {}),
        _meanings(kind),
        msgspec.defstruct(kind.__name__, order, gc=False),
        msgspec.json.Decoder(read).decode,
    )


SCHEMAS = {kind: schema_of(kind) for kind in KINDS}
SCHEMA_OF_NAME = {schema.name: schema for schema in SCHEMAS.values()}
WORKERS_KINDS = frozenset(SCHEMAS[kind].name for kind in KINDS if kind.by_worker)
DOORS_KINDS = frozenset(SCHEMAS[kind].name for kind in KINDS if kind.by_door)
ORDERS = frozenset(SCHEMAS[kind].name for kind in KINDS if kind.is_order)
SIGNED_ORDERS = frozenset(schema.name for schema in SCHEMAS.values() if SIGNATURE in schema.keys)
LEAF_KEYS = {schema.name: frozenset(schema.order) for schema in SCHEMAS.values()}
SERVING_KINDS = frozenset(schema.name for schema in SCHEMAS.values() if FieldMeaning.SERVED in schema.meanings.values())
"""Kinds that say whom a worker served: only these show that it held something of a tenant."""
CLAIMING_KINDS = frozenset(
    schema.name
    for schema in SCHEMAS.values()
    if {FieldMeaning.HELD, FieldMeaning.OWNER} & set(schema.meanings.values())
)
"""Kinds that may be in a tenant's log because of what somebody says of it: none of them shows that it is one."""


class _Unknown(msgspec.Struct):
    """A leaf of a kind that a later version added: nothing is derived from it."""

    at_us: int
    boot_us: int
    incarnation: str
    kind: str
    log: str
    outage: str
    part: int
    parts: int
    sequence: int


class _Decoders(dict[bytes, Callable[[bytes], Any]]):
    """How leaves of a kind are read."""

    def __missing__(self, kind: bytes) -> Callable[[bytes], Any]:
        return msgspec.json.Decoder(_Unknown).decode


DECODE = _Decoders((name.encode(), schema.decode) for name, schema in SCHEMA_OF_NAME.items())
