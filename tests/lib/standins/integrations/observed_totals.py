"""What observers saw of engines that nobody governs: totals by engine and tenant, apart from every figure of custody.

1. These figures are an engine's own word about its cache. They say what it held and for how long, never that memory
   was overwritten, and no report adds them to custody, coverage or bytes destroyed.
2. Where an observer had a gap, its counts are unsure; the gaps are counted beside them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import orjson
from sqlalchemy import Connection, select

from kvcustody.audit.kinds import KINDS, ObservationGap, ObservedOverdue, ObservedRemoved, ObservedStored
from kvcustody.audit.store.schema.ledger import events

UNATTRIBUTED = "unattributed"


class ObservedTotals(NamedTuple):
    """One engine's blocks of one tenant, as observed. `gaps` are the engine's, the same in each of its rows."""

    engine: str
    tenant: str
    residencies: int = 0
    stored_blocks: int = 0
    removed_blocks: int = 0
    removed_late_blocks: int = 0
    overdue_residencies: int = 0
    overdue_blocks: int = 0
    gaps: int = 0


_SUMS = ObservedTotals._fields[3:8]
_STORED, _REMOVED, _OVERDUE, _GAP = (
    KINDS[kind].name for kind in (ObservedStored, ObservedRemoved, ObservedOverdue, ObservationGap)
)


def observed_totals(connection: Connection) -> tuple[ObservedTotals, ...]:
    """Totals by engine and tenant, in name order; blocks that nothing attributes are `unattributed`."""
    rows: dict[tuple[str, str], dict[str, int]] = {}
    chains: dict[tuple[str, str], set[tuple[str, int]]] = {}
    gaps: dict[str, int] = {}
    query = select(events.c.kind, events.c.leaf).where(events.c.kind.in_((_STORED, _REMOVED, _OVERDUE, _GAP)))
    for kind, leaf in connection.execute(query):
        body: dict[str, Any] = orjson.loads(leaf)
        if kind == _GAP:
            gaps[body["engine"]] = gaps.get(body["engine"], 0) + 1
            continue
        who = (body["engine"], body["tenant"] or UNATTRIBUTED)
        chains.setdefault(who, set()).add((body["incarnation"], body["residency"]))
        row = rows.setdefault(who, dict.fromkeys(_SUMS, 0))
        for name, amount in _amounts(kind, body):
            row[name] += amount
    return tuple(
        ObservedTotals._make((*who, len(chains[who]), *(rows[who][name] for name in _SUMS), gaps.get(who[0], 0)))
        for who in sorted(rows)
    )


def _amounts(kind: str, body: dict[str, Any]) -> list[tuple[str, int]]:
    blocks = body["blocks"]
    if kind == _STORED:
        return [("stored_blocks", blocks)]
    if kind == _OVERDUE:
        return [("overdue_residencies", 1), ("overdue_blocks", blocks)]
    return [("removed_blocks", blocks), ("removed_late_blocks", body["late"])]
