"""Holds that a narrowing act ended earlier than their releases state, from the leaves of such acts.

1. A leaf lists every hold of a tenant that stands after the act. A hold lasts until the earliest deadline that names
   it; one that was released before an act and is not listed was over by then (replaced by an extension, evicted,
   erased).
2. Before and after are those of the process that wrote both leaves: its own order, not its clock. A release that a
   successor wrote is after all.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import orjson
from sqlalchemy import Connection, select

from kvcustody.audit.store.database.snapshot import AsOf, is_in
from kvcustody.audit.store.schema.all_tables import has_leaf, is_leaf_of
from kvcustody.audit.store.schema.leaf_tables import releases
from kvcustody.audit.store.schema.ledger import events


class NarrowingAct(NamedTuple):
    """A process ended a tenant's holds earlier: every hold from then on, and until when (boot time)."""

    sequence: int
    at_us: int  # boot time
    holds: dict[int, int]


def read_narrowed(
    connection: Connection,
    incarnation: int,
    as_of: AsOf | None = None,
    *,
    among: Collection[int] | None = None,
) -> dict[int, int]:
    """Return by residency the latest end of its hold, in boot time; only residencies that an act concerns.

    `among`: of these residencies alone, at most a few thousand.
    """
    acts = _acts(connection, incarnation, as_of)
    if not acts:
        return {}
    column = releases.c
    query = (
        select(column.residency, column.tenant, events.c.sequence)
        .select_from(releases.join(events, is_leaf_of(releases)))
        .where(column.incarnation == incarnation, column.final, column.part == 1, is_in(as_of, releases))
        .where(events.c.incarnation == column.incarnation)
        .order_by(events.c.sequence)
    )
    if among is not None:
        query = query.where(column.residency.in_(among))
    released = {residency: (tenant, sequence) for residency, tenant, sequence in connection.execute(query)}
    return ended_by_acts(acts, released)


def ended_by_acts(
    acts: Mapping[str, Sequence[NarrowingAct]], released: Mapping[int, tuple[str, int]]
) -> dict[int, int]:
    """Return the latest end of holds by residency. `acts`: each tenant's acts in order; `released`: each residency's
    tenant, and the place of its release among its process's leaves.
    """
    order = {tenant: [act.sequence for act in every] for tenant, every in acts.items()}
    latest: dict[int, int] = {}
    for residency, (tenant, sequence) in released.items():
        for act in acts.get(tenant, [])[bisect_left(order.get(tenant, []), sequence) :]:
            until = act.holds.get(residency)
            latest[residency] = min(latest.get(residency, 1 << 62), act.at_us if until is None else until)
            if until is None:
                break
    return latest


def _acts(connection: Connection, incarnation: int, as_of: AsOf | None) -> dict[str, list[NarrowingAct]]:
    """Return the narrowing acts of a process by tenant, in order, with the parts of each combined."""
    # Sorted here: asked for in their order, every leaf of the process would be walked for these few.
    query = select(events.c.leaf).where(
        events.c.kind == "holds-narrowed",
        events.c.incarnation == incarnation,
        is_in(as_of, events),
        has_leaf(events),
    )
    acts: dict[str, list[NarrowingAct]] = {}
    found = [orjson.loads(leaf) for leaf in connection.scalars(query)]
    for body in sorted(found, key=lambda body: (int(body["sequence"]), int(body["part"]))):
        every = acts.setdefault(body["tenant"], [])
        if not every or every[-1].sequence != body["sequence"]:
            every.append(NarrowingAct(body["sequence"], body["boot_us"], {}))
        every[-1].holds.update(zip(body["holds"], body["until_boot_us"], strict=True))
    return acts
