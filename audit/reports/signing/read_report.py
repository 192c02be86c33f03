"""A report from its JSON: every field of the type that the model gives it, and nothing besides.

1. What is read back writes the same bytes; `Report.to_bytes` of it is compared with what was read, so a field that is
   missing, is of another type, or belongs to no part of the model is found.
"""

from __future__ import annotations

import types
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from kvcustody.audit.reports.model import SCHEMA, Report
from kvcustody.errors import LedgerError


def report_of(body: dict[str, Any]) -> Report:
    """The report that a JSON body has; raises `LedgerError` where it is none."""
    if not isinstance(body, dict) or body.get("schema") != SCHEMA:
        raise LedgerError(f"this is no report of schema `{SCHEMA}`")
    made: Report = _read(Report, body, "report")
    return made


def _read(kind: Any, value: Any, where: str) -> Any:
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        choices = get_args(kind)
        if value is None and type(None) in choices:
            return None
        return _read(next(each for each in choices if each is not type(None)), value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise LedgerError(f"`{where}` is no list")
        item = get_args(kind)[0]
        return tuple(_read(item, each, f"{where}[{place}]") for place, each in enumerate(value))
    if hasattr(kind, "_fields"):
        return _record(kind, value, where)
    if type(value) is not kind:
        raise LedgerError(f"`{where}` is not of type {kind.__name__}")
    return value


def _record(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise LedgerError(f"`{where}` is no object")
    hints, defaults = _hints(kind), kind._field_defaults
    given = {}
    for name in kind._fields:
        if name in value:
            given[name] = _read(hints[name], value[name], f"{where}.{name}")
        elif name not in defaults:
            raise LedgerError(f"`{where}` has no `{name}`")
    return kind(**given)


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)
