"""Rows from leaves: the one way in which any column of evidence comes to be.

J1 A projection is a function of the leaf body and of the ids of logs and incarnations alone, so a spill is
replayed, and a table re-derived, from bytes. J2 An event written in two logs is projected once, in the log
of the tenant that acted.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

from sqlalchemy import Table

from kvcustody.audit import schema
from kvcustody.audit.events import log_of

Body = dict[str, Any]


class Incarnation(NamedTuple):
    """An incarnation's row id, and what turns its boot time into UTC."""

    id: int
    offset_us: int


class Ids(NamedTuple):
    """How names become row ids inside one transaction."""

    log: Callable[[str], int]
    incarnation: Callable[[Body, str], Incarnation]


_RELEASED = {
    "released_us": "at_us",
    "released_boot_us": "boot_us",
    "written_blocks": "_written_blocks",
    "written": "_written",
    "final": "_final",
}
_TABLES: dict[str, tuple[Table, dict[str, str]]] = {
    "policy-activated": (schema.policy_revisions, {}),
    "decision": (schema.decisions, {}),
    "residency-opened": (
        schema.residencies,
        {
            "opened_us": "at_us",
            "opened_boot_us": "boot_us",
            "attached_blocks": "_blocks",
            "written_blocks": "_written_blocks",
        },
    ),
    "blocks-attached": (
        schema.attachments,
        {"attached_boot_us": "boot_us", "attached_blocks": "_blocks"},
    ),
    "residency-released": (
        schema.releases,
        _RELEASED,
    ),
    "blocks-released": (schema.releases, _RELEASED),
    "custody-ended": (schema.custody_ends, {"blocks": "_blocks"}),
    "receipt": (schema.receipts, {"blocks": "_blocks", "bytes": "_bytes", "verified": "_verified"}),
    "hit-counters": (schema.hit_counters, {"from_us": "_from_us"}),
    "erasure-requested": (schema.erasures, {"at_boot_us": "boot_us"}),
    "erasure-completed": (schema.erasure_results, {}),
    "orphan-scanned": (schema.orphan_scans, {}),
    "orphan-found": (schema.orphan_findings, {"blocks": "_blocks"}),
    "spill-started": (schema.outages, {}),
    "replay-completed": (schema.outages, {}),
    "gap": (schema.outages, {}),
    "withdrawn": (schema.outages, {}),
}

_DERIVED = {
    "incarnation": "_incarnation",
    "low": "_low",
    "high": "_high",
    "due_us": "_due_us",
    "rule": "_rule",
}


def _sources(kind: str) -> tuple[str, ...]:
    table, renamed = _TABLES[kind]
    names = [column.name for column in table.columns][2:]  # log and idx come first, from the caller
    rule = kind == "hit-counters"  # a counter carries its rule; a decision derives it from its reasons
    return tuple(
        renamed.get(name) or (name if rule and name == "rule" else _DERIVED.get(name, name)) for name in names
    )


_SOURCES = {kind: itemgetter(*_sources(kind)) for kind in _TABLES}


def project(body: Body, ids: Ids) -> tuple[Table, tuple[Any, ...]] | None:
    """The table and the values after (log, idx) for one leaf; None where the leaf alone is the record."""
    kind = body["kind"]
    entry = _TABLES.get(kind)
    if entry is None or not _acting(kind, body):
        return None
    of = ids.incarnation(body, body.get("of_incarnation") or body["incarnation"])
    row = body  # derived values join the body under names that no leaf has; the leaf's bytes are made already
    row["_incarnation"] = of.id
    if "runs" in body:
        row["_blocks"], row["_low"], row["_high"] = extent(body["runs"])
    if kind == "residency-opened":
        written = body.get("written", [])  # leaves of earlier versions have none
        row["_written_blocks"] = extent(written)[0]
        _, row["_low"], row["_high"] = extent(body["runs"] + written)
    elif kind == "custody-ended":
        row["_due_us"] = int(body["due_boot_us"]) + of.offset_us
    elif kind == "receipt":
        # Bytes are of all parts together and even over blocks; a count of sampled blocks cannot be divided.
        row["_bytes"] = body["bytes"] * row["_blocks"] // max(1, body["blocks"])
        row["_verified"] = body["verified"] if body["part"] == 1 else 0
    elif entry[0] is schema.releases:
        row["_final"] = kind == "residency-released"
        row["_written"] = row["_final"] or body["own"]
        row["_written_blocks"] = row["_blocks"] if row["_written"] else 0
    elif kind == "decision":
        row["_rule"] = body["reasons"][0] if body["reasons"] else "default-deny"
    elif kind == "hit-counters":
        row["_from_us"] = body["from_boot_us"] + of.offset_us
    elif entry[0] is schema.outages:
        row = {**_OUTAGE, **body}
        if kind == "withdrawn":
            row["first_sequence"] = row["last_sequence"] = body["of_sequence"]
            row["cause"] = "refused"
    values: tuple[Any, ...] = _SOURCES[kind](row)
    return entry[0], values


_OUTAGE: Body = {"cause": "", "first_sequence": 0, "last_sequence": 0, "added": 0, "duplicates": 0}


def extent(runs: list[list[Any]]) -> tuple[int, int, int]:
    """Blocks, lowest and highest generation of encoded runs (0, 0, -1 when there are none)."""
    blocks, low, high = 0, 1 << 62, -1
    for item in runs:
        length = sum(item[2]) if item[2] else len(item[1])
        first = int(item[0])
        last = first + length - 1 if first else 0
        blocks, low, high = blocks + length, min(low, first), max(high, last)
    return blocks, low if blocks else 0, high


def _acting(kind: str, body: Body) -> bool:
    if kind == "decision":
        return bool(body["log"] == log_of(body["reader"]))
    return kind != "hit-counters" or bool(body["log"] == log_of(body["tenant"]))
