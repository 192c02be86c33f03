"""Key custodians' orders on tenants' keys, which every worker must follow.

1. An order names a tenant and a moment, never an epoch. So following it twice, late, or beside another process on the
   same keys changes nothing more. A worker's acts on its keys are recorded separately (`KeyEvent`).
2. Orders are leaves of the system log, whose content is never dropped. So a worker that was away for years finds them.
3. An order to destroy is complete when two things hold. Every process that was at work at its moment has ended, or has
   reported that it holds nothing of the order any more (`keys-dropped`). Every key is gone that a key service was to
   destroy or that a known backup has.
4. An answer names the moment of a recorded order: of this one, or of a later one on the same tenant. Nobody can answer
   an order that has not been given.
5. Clocks differ by `CLOCKS_DIFFER_US` at most. So a process that seems to have begun that much later may have been at
   work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import orjson
from sqlalchemy import Connection, select

from kvcustody.audit.evidence.processes.orders import order_leaves
from kvcustody.audit.evidence.processes.work_periods import Body, WorkPeriod, read_work_periods
from kvcustody.audit.kinds import SYSTEM, log_of
from kvcustody.audit.store.schema.all_tables import has_leaf
from kvcustody.audit.store.schema.ledger import events, logs

ROTATE, DESTROY = "rotate", "destroy"
CLOCKS_DIFFER_US = 3_600_000_000
KEYS_ORDERED, _DROPPED_KIND, _EVENT_KIND = "keys-ordered", "keys-dropped", "key-event"


class KeyOrder(NamedTuple):
    """A tenant's key epochs from before `at_us` (UTC µs) get a successor (`rotate`), or end and get one (`destroy`)."""

    order: int
    at_us: int
    tenant: str
    action: str
    actor: str
    reason: str


def key_orders(connection: Connection) -> list[KeyOrder]:
    """Return every order, oldest first; `order` is its place in the system log."""
    return [_order(idx, at_us, orjson.loads(leaf)) for idx, at_us, leaf in order_leaves(connection, KEYS_ORDERED)]


class KeyOrderStanding(NamedTuple):
    """An order and its progress (rule 3). Times are UTC µs.

    `state`: `given` (a rotation), `open`, `pending` (a key service destroys keys, or the last known backup is gone, at
    `pending_until_us`), `complete`. `waiting`: workers of which a process has not answered. `in_service`: keys that
    a key service has not answered for.
    """

    order: int
    at_us: int
    tenant: str
    action: str
    actor: str
    reason: str
    state: str = "given"
    waiting: tuple[str, ...] = ()
    in_service: int = 0
    pending_until_us: int | None = None


def order_standings(connection: Connection) -> list[KeyOrderStanding]:
    """Return every order with its progress, oldest first, from leaves only."""
    orders = key_orders(connection)
    destroying = {order.tenant for order in orders if order.action == DESTROY}
    periods = read_work_periods(connection) if destroying else {}
    dropped = [
        (int(body["ordered_utc"]), str(body["incarnation"])) for body in _bodies(connection, _DROPPED_KIND, [SYSTEM])
    ]
    ends: dict[str, list[Body]] = {}
    for body in _bodies(connection, _EVENT_KIND, [log_of(tenant) for tenant in destroying]):
        if body.get("in_service"):
            ends.setdefault(str(body["tenant"]), []).append(body)
    return [
        _standing(order, periods, _answered(order, orders, dropped), ends.get(order.tenant, []))
        if order.action == DESTROY
        else KeyOrderStanding(*order)
        for order in orders
    ]


def _answered(order: KeyOrder, orders: Iterable[KeyOrder], dropped: Iterable[tuple[int, str]]) -> set[str]:
    """Return the processes that have carried out an order to destroy (rule 4)."""
    moments = {one.at_us for one in orders if one.tenant == order.tenant and one.action == DESTROY}
    return {life for at_us, life in dropped if at_us >= order.at_us and at_us in moments}


def _standing(
    order: KeyOrder,
    periods: Mapping[str, WorkPeriod],
    answered: Collection[str],
    ends: Sequence[Body],
) -> KeyOrderStanding:
    waiting = {
        one.worker
        for life, one in periods.items()
        if one.ended_us is None and one.started_us <= order.at_us + CLOCKS_DIFFER_US and life not in answered
    }
    states = Counter((int(body["epoch"]), str(body["in_service"])) for body in ends)
    left = _owed(ends, states)
    put_off = {
        epoch: min(count, max(0, states[epoch, "pending"] - states[epoch, "gone"])) for epoch, count in left.items()
    }
    owed = sum(left.values()) - sum(put_off.values())
    until = [int(body["ends_utc"]) for body in ends if body["in_service"] == "pending" and put_off[int(body["epoch"])]]
    state = "open" if waiting or owed else "pending" if until else "complete"
    return KeyOrderStanding(*order, state, tuple(sorted(waiting)), owed, max(until, default=None))


def _owed(ends: Sequence[Body], states: Mapping[tuple[int, str], int]) -> dict[int, int]:
    """Of each epoch, how many keys a service is still to destroy; leaves are in their order.

    One that is said to be gone more often than it was owed makes no other less owed. What a process before owed counts
    until it is gone, as that process may have died before it said so.
    """
    still: dict[int, int] = {}
    for body in ends:
        if body["in_service"] in ("still-owed", "gone"):
            still[int(body["epoch"])] = int(body["in_service"] == "still-owed")
    return {epoch: max(0, states[epoch, "owed"] - states[epoch, "gone"], still.get(epoch, 0)) for epoch, _ in states}


def _bodies(connection: Connection, kind: str, names: Collection[str]) -> list[Body]:
    query = (
        select(events.c.leaf)
        .join(logs, logs.c.id == events.c.log)
        .where(events.c.kind == kind, logs.c.name.in_(names), has_leaf(events))
        .order_by(events.c.log, events.c.idx)
    )
    return [orjson.loads(bytes(leaf)) for leaf in connection.scalars(query)]


def _order(idx: int, at_us: int, body: dict[str, str]) -> KeyOrder:
    return KeyOrder(idx, at_us, body["of_tenant"], body["action"], body["actor"], body["reason"])
