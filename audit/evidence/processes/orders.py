"""Orders in the system log as their followers read them, and statements about who verifies their authors."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import orjson
from sqlalchemy import Connection, select

from kvcustody.audit.kinds import SYSTEM, log_of, tenant_of
from kvcustody.audit.kinds.registry import SIGNATURE
from kvcustody.audit.leaf.leaf_schema import SIGNED_ORDERS
from kvcustody.audit.store.database.signed_orders import SIGNED_LATER, RefusedOrder, SignedOrders, orders_of
from kvcustody.audit.store.database.snapshot import AsOf
from kvcustody.audit.store.schema.all_tables import has_leaf
from kvcustody.audit.store.schema.ledger import events, logs
from kvcustody.plurals import several

NOT_AUTHENTICATED = (
    "Orders are not authenticated: nobody checks a signature of who asked for an erasure, a restriction, later keys or "
    "monitoring. Workers behind a control plane write no orders. A worker with a ledger of its own follows "
    "every order that was written there."
)
AUTHENTICATED = (
    "Orders are authenticated: this process follows an erasure, a restriction, later keys, monitoring, an issuer or a "
    "legal hold only where a key with the role `orders` signed its leaf."
)


ALL_AUTHENTICATED = (
    "Orders are authenticated: every worker states that it follows those of its control plane, or those alone whose "
    "leaf a trusted key signed."
)
_NEWEST_SHOWN = 1000


class OrderLeaf(NamedTuple):
    """An order's place in the system log, its time (UTC), and its leaf's bytes."""

    idx: int
    at_us: int
    leaf: bytes


def order_leaves(connection: Connection, kind: str, *, newest: bool = False, idx: int | None = None) -> list[OrderLeaf]:
    """Return the orders of a kind that count, oldest first; only the `newest`, or the one at a place.

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
        read = [(one, signed.accepted(one.leaf, kind)) for one in found]
        found = [one._replace(at_us=int(body["at_us"])) for one, body in read if body is not None]
        found.sort(key=lambda one: (one.at_us, one.idx))
    return found[-1:] if newest else found


class UnsignedOrder(NamedTuple):
    """A recorded order without a signature: its leaf's place, SHA-256 and time (UTC), and its author."""

    kind: str
    log: str
    idx: int
    digest: str
    at_us: int
    actor: str
    tenant: str | None


def orders_to_sign(connection: Connection) -> list[UnsignedOrder]:
    """Return orders that nobody follows because their leaves lack a signature, oldest first; not those with a wrong
    one.
    """
    signed = orders_of(connection)
    if signed is None:
        return []
    query = (
        select(logs.c.name, events.c.idx, events.c.leaf)
        .join(logs, logs.c.id == events.c.log)
        .where(events.c.kind.in_(sorted(SIGNED_ORDERS)), has_leaf(events))
        .order_by(events.c.at_us, logs.c.name, events.c.idx)
    )
    unsigned = []
    for log, idx, leaf in connection.execute(query):
        data = bytes(leaf)
        if signed.refusal(data) is None:
            continue
        body = orjson.loads(data)
        if SIGNATURE not in body and body["log"] == log:
            digest = hashlib.sha256(data).hexdigest()
            tenant = None if log == SYSTEM else tenant_of(log)
            unsigned.append(
                UnsignedOrder(body["kind"], log, idx, digest, int(body["at_us"]), str(body["actor"]), tenant)
            )
    return unsigned


def orders_followed(bodies: Iterable[Mapping[str, Any]]) -> str:
    """Return the sentence about the orders that workers follow, from the leaves of their starts."""
    said = {body.get("orders", "") for body in bodies if body["kind"] == "worker-started"}
    return ALL_AUTHENTICATED if said and "" not in said else NOT_AUTHENTICATED


def orders_statement(
    connection: Connection, as_of: AsOf, bodies: Iterable[Mapping[str, Any]], tenant: str | None = None
) -> str:
    """Return a document's sentence about the orders behind its verdicts; `bodies` are the leaves of workers' starts."""
    return f"{orders_followed(bodies)} {_order_signatures(connection, as_of, tenant)}".rstrip()


def _order_signatures(connection: Connection, as_of: AsOf, tenant: str | None) -> str:
    """Return how many recorded orders carry a signature; for one tenant, those in its own log."""
    bodies = [orjson.loads(leaf) for leaf in _order_leaves(connection, as_of, tenant)]
    orders = [body for body in bodies if body["kind"] != SIGNED_LATER]
    if not orders:
        return ""
    signed, later = sum(1 for body in orders if body.get(SIGNATURE)), len(bodies) - len(orders)
    return (
        f"Of {several(len(orders), 'order')} on record {signed} carry a signature, and {later} more leaves sign one. "
        "Verdicts on erasures, restrictions, cases and legal holds rest on orders: `report verify --trust` says which "
        "count."
    )


def refused_orders(
    connection: Connection, signed: SignedOrders, as_of: AsOf, tenant: str | None
) -> tuple[RefusedOrder, ...]:
    """Return the orders of a state that nobody may act on, oldest first; for one tenant, those in its own log."""
    believed = signed.over(connection)
    judged = (believed.refusal(leaf) for leaf in _order_leaves(connection, as_of, tenant))
    return tuple(refused for refused in judged if refused is not None)


def _order_leaves(connection: Connection, as_of: AsOf, tenant: str | None) -> Iterator[bytes]:
    query = (
        select(events.c.leaf)
        .join(logs, logs.c.id == events.c.log)
        .where(events.c.kind.in_(sorted(SIGNED_ORDERS)), as_of.has(events), has_leaf(events))
        .order_by(events.c.at_us, logs.c.name, events.c.idx)
    )
    if tenant is not None:
        query = query.where(logs.c.name == log_of(tenant))
    return map(bytes, connection.scalars(query))


def unsigned_orders(connection: Connection) -> tuple[RefusedOrder, ...]:
    """Return the newest recorded orders that nobody acts on, oldest first; empty if every order counts."""
    signed = orders_of(connection)
    if signed is None:
        return ()
    query = select(events.c.leaf).where(events.c.kind.in_(sorted(SIGNED_ORDERS)), has_leaf(events))
    newest = connection.scalars(query.order_by(events.c.at_us.desc()).limit(_NEWEST_SHOWN)).all()
    found = (signed.refusal(bytes(leaf)) for leaf in reversed(newest))
    return tuple(refused for refused in found if refused is not None)
