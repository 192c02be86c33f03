"""Read a report from JSON: every field has the type that its section gives it, and there are no others.

1. A report that is read back writes the same bytes: its `Report.to_bytes` is compared with the input. So a field that
   is missing, has another type, or belongs to no part of the model is found.
"""

from __future__ import annotations

import types
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from kvcustody.audit.reports.document import Signature
from kvcustody.audit.reports.framework import Framework
from kvcustody.audit.reports.model import REPORT, Report
from kvcustody.audit.reports.parameters import ReportParameters
from kvcustody.audit.reports.section import sections
from kvcustody.errors import LedgerError

_FOLLOWS = {"schema", "rerun", "statements"}  # written from the rest (rule 1)
_ABOUT: dict[str, Any] = {
    "version": str,
    "asked": ReportParameters,
    "framework": Framework,
    "signature": Signature | None,
}


def report_of(body: dict[str, Any]) -> Report:
    """Return the report in a JSON body; raises `LedgerError` if it is not a report."""
    if not isinstance(body, dict) or body.get("schema") != REPORT.schema:
        raise LedgerError(f"this is no report of schema `{REPORT.schema}`")
    types = report_types()
    unknown = body.keys() - types.keys() - _FOLLOWS
    if unknown:
        raise LedgerError(f"`{min(unknown)}` is no part of a report")
    facts: dict[str, Any] = {}
    for name, of in types.items():
        if name not in body and name != "signature":
            raise LedgerError(f"`report` has no `{name}`")
        facts[name] = _read(of, body.get(name), f"report.{name}")
    about = {name: facts.pop(name) for name in _ABOUT}
    return Report(**about, facts=facts)


def report_types() -> dict[str, Any]:
    """Return the type of each field of a report's JSON, except those derived from the others."""
    return {**_ABOUT, **{name: of for section in sections() for name, of in section.types.items()}}


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
    hints = _hints(kind)
    for name in kind._fields:
        if name not in value:
            raise LedgerError(f"`{where}` has no `{name}`")
    return kind(**{name: _read(hints[name], value[name], f"{where}.{name}") for name in kind._fields})


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)
