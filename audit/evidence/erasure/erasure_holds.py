"""Legal holds beside an erasure, from leaves only. They bind the ledger's content, not blocks.

1. A hold is about an erasure where it is on everything, on its tenant, or on its subject; about one of a whole tenant
   where it is on any subject of it.
2. What counts is the last leaf of a hold: placed, or lifted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import orjson
from sqlalchemy import Connection, select

from kvcustody.audit.evidence.processes.work_periods import Body
from kvcustody.audit.store.schema.all_tables import is_leaf_of
from kvcustody.audit.store.schema.leaf_tables import legal_holds
from kvcustody.audit.store.schema.ledger import events, logs

HOLD_KIND, PLACED = "legal-hold", "placed"


class ErasureHold(NamedTuple):
    """An active hold; `tenant` None means everything, `subject` is a pseudonym. Times are UTC microseconds."""

    hold: str
    tenant: str | None
    subject: str | None
    reason: str
    actor: str
    at_us: int


class HoldLeaf(NamedTuple):
    """A leaf about a hold, and its place."""

    log: str
    idx: int
    body: dict[str, Any]


def holds_among(bodies: Iterable[Body], tenant: str | None, subject: str | None) -> tuple[ErasureHold, ...]:
    """Return the holds in these leaves that concern an erasure of this tenant (None: any) and subject (None: any)."""
    holds: dict[str, ErasureHold] = {}
    every = [body for body in bodies if body["kind"] == HOLD_KIND]
    for body in sorted(every, key=lambda one: (int(one["at_us"]), one["incarnation"], int(one["sequence"]))):
        if body["action"] == PLACED:
            holds[body["hold"]] = _hold_of(body)
        else:
            holds.pop(body["hold"], None)
    return tuple(sorted(one for one in holds.values() if _is_about(one, tenant, subject)))


def hold_leaves(connection: Connection, tenant: str | None, subject: str | None) -> list[HoldLeaf]:
    """Return the leaves of holds that concern such an erasure, without those about other people."""
    query = (
        select(logs.c.name, events.c.idx, events.c.leaf)
        .join(logs, logs.c.id == events.c.log)
        .join(legal_holds, is_leaf_of(legal_holds))
        .order_by(logs.c.name, events.c.idx)
    )
    every = [HoldLeaf(row[0], row[1], orjson.loads(bytes(row[2]))) for row in connection.execute(query)]
    placed = {leaf[:2]: _hold_of(leaf.body) for leaf in every if leaf.body["action"] == PLACED}
    about = {place for place, hold in placed.items() if _is_about(hold, tenant, subject)}
    names = {placed[place].hold for place in about}
    return [leaf for leaf in every if leaf[:2] in about or (leaf[:2] not in placed and leaf.body["hold"] in names)]


def holds_on_erasure(connection: Connection, tenant: str | None, subject: str | None) -> tuple[ErasureHold, ...]:
    """Return the active holds that concern an erasure; `connection` must see the system log."""
    return holds_among((leaf.body for leaf in hold_leaves(connection, tenant, subject)), tenant, subject)


def _hold_of(body: Body) -> ErasureHold:
    return ErasureHold(
        body["hold"], body["tenant"], body.get("subject"), body["reason"], body["actor"], int(body["at_us"])
    )


def _is_about(hold: ErasureHold, tenant: str | None, subject: str | None) -> bool:
    if hold.tenant is None or tenant is None:
        return True
    return hold.tenant == tenant and (subject is None or hold.subject in (None, subject))
