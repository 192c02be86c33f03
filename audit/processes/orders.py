"""Orders in the system log, as whoever acts on them reads them, and what is said of who checks their authors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from sqlalchemy import Connection, select

from kvcustody.audit.database.signed_orders import orders_of
from kvcustody.audit.events import SYSTEM
from kvcustody.audit.schema.all_tables import has_leaf
from kvcustody.audit.schema.ledger import events, logs

NOT_AUTHENTICATED = (
    "Orders are not authenticated: no leaf carries the signature of who asked for an erasure, a restriction, later "
    "keys or monitoring. Workers behind a control plane write no orders. A worker with a ledger of its own follows "
    "every order that was written there."
)
AUTHENTICATED = (
    "Orders are authenticated: this process follows an erasure, a restriction, later keys, monitoring, an issuer or a "
    "legal hold only where a key with the role `orders` signed its leaf."
)


class OrderLeaf(NamedTuple):
    """An order's place in the system log, its time (UTC), and its leaf's bytes."""

    idx: int
    at_us: int
    leaf: bytes


def order_leaves(
    connection: Connection, kind: str, *, newest: bool = False, idx: int | None = None
) -> list[OrderLeaf]:
    """The orders of a kind that count, oldest first; the `newest` alone, or the one at a place.

    Signed orders stand in the order of the times that were signed: a copy of an old one is old (`signed_orders`, 2).
    """
    query = (
        select(events.c.idx, events.c.at_us, events.c.leaf)
        .join(logs, logs.c.id == events.c.log)
        .where(events.c.kind == kind, logs.c.name == SYSTEM, has_leaf(events))
        .order_by(events.c.idx.desc())
    )
    if idx is not None:
        query = query.where(events.c.idx == idx)
    signed = orders_of(connection)
    if newest and signed is None:
        query = query.limit(1)
    rows: Iterable[Any] = connection.execute(query)
    found = [OrderLeaf(row.idx, row.at_us, bytes(row.leaf)) for row in rows][::-1]
    if signed is not None:
        read = [(one, signed.accepted(one.leaf)) for one in found]
        found = [one._replace(at_us=int(body["at_us"])) for one, body in read if body is not None]
        found.sort(key=lambda one: (one.at_us, one.idx))
    return found[-1:] if newest else found
