"""How events of one kind become leaves, column by column: shared texts, and what goes between them.

1. The bytes are those of `leaves()`.
2. Only values of exactly the declared types are taken; anything else is `NotPlainError`, and nothing is converted in
   silence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, repeat
from typing import Any, NamedTuple

import orjson

from kvcustody.audit.events.batch import Columns
from kvcustody.audit.events.block_run_text import Extents, NotPlainError, run_texts
from kvcustody.audit.events.canonical_leaf import SCHEMA, Context
from kvcustody.audit.events.registry import (
    FIELD_KEYS,
    HEAD_KEYS,
    KINDS,
    ROWS,
    SYSTEM,
    TOTALS,
    TRACE,
    Event,
    field_types,
    log_of,
)

Item = tuple[int, Event]
Text = Sequence[bytes] | bytes  # of every leaf of a chunk, or the one that all of them have
Fill = Callable[[Sequence[Any]], Text]
_STRICT = orjson.OPT_STRICT_INTEGER
_CACHED_MAX = 4096


class Texts(dict[Any, bytes]):
    """JSON texts of values that recur: names, reasons, domains."""

    def __missing__(self, value: Any) -> bytes:
        if len(self) >= _CACHED_MAX:
            self.clear()
        text = self[value] = orjson.dumps(value)
        return text


class Written(NamedTuple):
    """Leaves of one chunk."""

    logs: Sequence[str]
    at_us: Sequence[int]
    data: Sequence[bytes]
    columns: Columns
    extents: dict[str, Extents]


class _Layout(NamedTuple):
    """The keys whose values differ from leaf to leaf, and the text before each of them and after the last."""

    open: list[str]
    shared: list[bytes]


class Form:
    """How events of one kind are written: the texts that all its leaves share, and what goes between them."""

    def __init__(self, kind: type, context: Context, texts: Texts) -> None:
        self.kind = kind
        self.name = KINDS[kind].name
        self._context = context
        self._texts = texts
        self._keys = FIELD_KEYS[kind]
        self._lists = [key for key in TOTALS if key in self._keys]
        makers: dict[str, Fill] = {
            "int": _integers,
            "float": _integers,  # parts per million by then
            "bool": _flags,
            "str": self._strings,
            "str | None": self._names,
            "tuple[int, ...]": self._numbers,
            "tuple[str, ...]": self._words,
        }
        self._fill = {
            key: makers[annotation]
            for key, annotation in zip(self._keys, field_types(kind), strict=True)
            if key not in self._lists
        }
        if "subject" in self._keys:
            self._fill |= {"subject": _once, "session": _once}
        if ROWS[0] in self._keys:
            self._fill |= dict.fromkeys(ROWS, _numbers_once)
        self._plain = self._layout(traced=False)
        if TRACE in self._keys:
            self._fill[TRACE] = _trace_parts
            self._traced = self._layout(traced=True)

    def write(self, items: Sequence[Item]) -> Written:
        """The leaves of events of this kind; raises `NotPlainError` where one needs the one-by-one form."""
        columns = self._columns(items)
        texts: dict[str, Text] = {
            key: fill(columns[key]) for key, fill in self._fill.items() if key in columns
        }
        extents = {}
        for key in self._lists:
            texts[key], extents[key] = run_texts(columns[key])
            columns[TOTALS[key]] = extents[key].blocks
            texts[TOTALS[key]] = _integers(extents[key].blocks)
        logs = self._logs(columns, len(items))
        texts["log"] = self._recurring(logs)
        texts["sequence"] = _integers([sequence for sequence, _ in items])
        texts["at_us"] = _integers(columns["at_us"])
        layout = self._traced if TRACE in columns else self._plain
        return Written(logs, columns["at_us"], _filled(layout, texts, len(items)), columns, extents)

    def _layout(self, *, traced: bool) -> _Layout:
        """The texts of leaves of this kind, with a place for a trace or without."""
        name, outage = KINDS[self.kind]
        fixed = {"schema": SCHEMA, "kind": name, "outage": outage, "part": 1, "parts": 1}
        fixed["incarnation"] = self._context.incarnation
        sizes = [TOTALS[key] for key in self._lists]
        keys, shared, text = [], [], b"{"
        for key in sorted({*HEAD_KEYS, *self._keys, *sizes} - ({TRACE} if not traced else set())):
            if key == TRACE:  # with its own name and comma, as not every leaf has it
                keys.append(key)
                shared.append(text.removesuffix(b","))
                text = b","
                continue
            text += orjson.dumps(key) + b":"
            if key in fixed:
                text += orjson.dumps(fixed[key]) + b","
            else:
                keys.append(key)
                shared.append(text)
                text = b","
        return _Layout(keys, [*shared, text.removesuffix(b",") + b"}"])

    def _columns(self, items: Sequence[Item]) -> dict[str, Sequence[Any]]:
        """Values by leaf key, as the leaf will have them; run lists are still runs."""
        context = self._context
        fields = zip(*[event for _, event in items], strict=True)
        columns: dict[str, Sequence[Any]] = dict(zip(self._keys, fields, strict=True))
        columns["at_us"] = [moment + context.offset_us for moment in columns["boot_us"]]
        columns["part"] = [1] * len(items)
        if "of_incarnation" in columns:
            columns["of_incarnation"] = [of or context.incarnation for of in columns["of_incarnation"]]
        if "share_ppm" in columns:
            _check({*map(type, columns["share_ppm"])} <= {float, int})
            columns["share_ppm"] = [round(share * 1_000_000) for share in columns["share_ppm"]]
        if "subject" in columns:
            self._pseudonymise(columns)
        if TRACE in columns:
            if any(columns[TRACE]):
                columns[TRACE] = [trace or None for trace in columns[TRACE]]
            else:
                del columns[TRACE]
        return columns

    def _pseudonymise(self, columns: dict[str, Sequence[Any]]) -> None:
        name = self._context.pseudonym
        tenants = [tenant or "" for tenant in columns["tenant"]]
        subjects, sessions = columns["subject"], columns["session"]
        columns["subject"] = [
            None if subject is None else name(tenant, subject)
            for tenant, subject in zip(tenants, subjects, strict=True)
        ]
        columns["session"] = [
            None if session is None else name(tenant, subject or "", session)
            for tenant, subject, session in zip(tenants, subjects, sessions, strict=True)
        ]

    def _logs(self, columns: Mapping[str, Sequence[Any]], count: int) -> Sequence[str]:
        if "tenant" not in columns:
            return [SYSTEM] * count
        names = {tenant: log_of(tenant) for tenant in set(columns["tenant"])}
        return [names[tenant] for tenant in columns["tenant"]]

    def _strings(self, values: Sequence[Any]) -> Text:
        _check({*map(type, values)} == {str})
        return self._recurring(values)

    def _names(self, values: Sequence[Any]) -> Text:
        _check({*map(type, values)} <= {str, type(None)})
        return self._recurring(values)

    def _words(self, values: Sequence[Any]) -> Text:
        _check({*map(type, values)} == {tuple} and {*map(type, chain.from_iterable(values))} <= {str})
        return self._recurring(values)

    def _numbers(self, values: Sequence[Any]) -> Text:
        _check({*map(type, values)} == {tuple})
        _integers([0, *chain.from_iterable(values)])
        return self._recurring(values)

    def _recurring(self, values: Sequence[Any]) -> Text:
        texts = self._texts
        if values.count(values[0]) == len(values):
            return texts[values[0]]
        return list(map(texts.__getitem__, values))


def _filled(layout: _Layout, texts: Mapping[str, Text], count: int) -> list[bytes]:
    """Every leaf: its own texts between those that all have."""
    parts: list[Iterable[bytes]] = []
    shared = layout.shared[0]
    for key, after in zip(layout.open, layout.shared[1:], strict=True):
        own = texts[key]
        if isinstance(own, bytes):
            shared += own + after
        else:
            parts += (repeat(shared, count), own)
            shared = after
    parts.append(repeat(shared, count))
    return list(map(b"".join, zip(*parts, strict=True)))


def _check(plain: bool) -> None:
    if not plain:
        raise NotPlainError


def _integers(values: Sequence[Any]) -> Text:
    """Decimal texts; integers from 2^53 on are refused here, as a leaf has them as strings."""
    _check({*map(type, values)} == {int})
    try:
        if values[0] == values[-1] and values.count(values[0]) == len(values):
            return orjson.dumps(values[0], option=_STRICT)
        return orjson.dumps(values, option=_STRICT)[1:-1].split(b",")
    except TypeError:
        raise NotPlainError from None


def _flags(values: Sequence[Any]) -> Text:
    _check({*map(type, values)} == {bool})
    if values.count(values[0]) == len(values):
        return b"true" if values[0] else b"false"
    return [b"true" if value else b"false" for value in values]


def _once(values: Sequence[Any]) -> Sequence[bytes]:
    """Texts of pseudonyms: most occur once, so none is remembered."""
    _check({*map(type, values)} <= {str, type(None)})
    return list(map(orjson.dumps, values))


def _numbers_once(values: Sequence[Any]) -> Sequence[bytes]:
    """Texts of long lists of numbers: none occurs twice."""
    _check({*map(type, values)} == {tuple})
    _integers([0, *chain.from_iterable(values)])
    return list(map(orjson.dumps, values))


def _trace_parts(values: Sequence[Any]) -> Sequence[bytes]:
    """What a trace adds to a leaf; nothing where there is none."""
    _check({*map(type, values)} <= {str, type(None)})
    return [b"" if value is None else b',"trace":' + orjson.dumps(value) for value in values]
