"""When routers' names for an erased scope ended, and which doors follow; from leaves only.

1. An erasure raises epochs (`epoch-raised`). A door that takes a version with all of them gives routers no earlier name
   of the scope again; its `epochs-taken` leaf says since when. A door that has not is behind since the raise it lacks.
2. The name that a tenant's subjects share ends later, in a batch; until then `shared_waits` says so.
3. Nothing here says that a router forgot anything (`ROUTERS_KEEP`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sqlalchemy import Connection, select

from kvcustody.audit.evidence.processes.work_periods import Body, about, ends, life_leaves
from kvcustody.audit.kinds import SYSTEM
from kvcustody.audit.store.schema.all_tables import has_leaf
from kvcustody.audit.store.schema.leaf_tables import epoch_raises, epochs_taken
from kvcustody.audit.store.schema.ledger import incarnations, logs

RAISED_KIND, TAKEN_KIND = "epoch-raised", "epochs-taken"
ROUTERS_KEEP = (
    "text of prompts, and an index of names that no door gives any more, stay in a router until its own eviction or "
    "restart: no leaf proves that end"
)
_OF_PEOPLE = {"subject", "session"}


def ended_names(bodies: Iterable[Body], erasure: str) -> dict[str, Any] | None:
    """Return what these leaves show; None if none records that the erasure raised an epoch. Times are UTC µs.

    A door that lacks a raise has `behind_since_us`; `ended_us` where its process has ended since.
    """
    every = list(bodies)
    of_it = [body for body in every if body["kind"] == RAISED_KIND and body["erasure"] == erasure]
    if not of_it:
        return None
    raised = sorted((int(body["number"]), str(body["scope"]), int(body["at_us"])) for body in of_it)
    newest, over = raised[-1][0], ends(every)
    taken: dict[str, list[tuple[int, int, str]]] = {}
    for body in every:
        if body["kind"] == TAKEN_KIND:
            said = int(body["version"]), int(body["at_us"]), about(body)
            taken.setdefault(body["door"], []).append(said)
    doors = []
    for door, said_by in sorted(taken.items()):
        following = [(at_us, version) for version, at_us, _ in said_by if version >= newest]
        if following:
            at_us, version = min(following)
            doors.append(_door(door, version, taken_us=at_us))
            continue
        version, _, life = max(said_by, key=lambda one: one[:2])
        since_us = min(at_us for number, _, at_us in raised if number > version)
        end = over.get(life)
        doors.append(_door(door, version, behind_since_us=since_us, ended_us=end and end[0]))
    return {
        "raised": [{"scope": scope, "number": number, "at_us": at_us} for number, scope, at_us in raised],
        "shared_waits": {scope for _, scope, _ in raised} <= _OF_PEOPLE,
        "doors": doors,
        "kept": ROUTERS_KEEP,
    }


def _door(
    door: str,
    version: int,
    *,
    taken_us: int | None = None,
    behind_since_us: int | None = None,
    ended_us: int | None = None,
) -> dict[str, Any]:
    return {
        "door": door,
        "version": version,
        "taken_us": taken_us,
        "behind_since_us": behind_since_us,
        "ended_us": ended_us,
    }


def ended_name_leaves(connection: Connection, erasure: str) -> set[tuple[str, int]]:
    """Return the places of the leaves that show it: each door's first that takes every raise, else its newest.

    A door whose last process ended before the first raise is none that lacks it.
    """
    raises, takes = epoch_raises.c, epochs_taken.c
    names = {row.id: row.name for row in connection.execute(select(logs.c.id, logs.c.name))}
    of_it = select(raises.log, raises.idx, raises.number, raises.at_us)
    rows = connection.execute(of_it.where(raises.erasure == erasure, has_leaf(epoch_raises))).all()
    if not rows:
        return set()
    leaves = {(names[row.log], row.idx) for row in rows}
    newest, first_us = max(row.number for row in rows), min(row.at_us for row in rows)
    lives = life_leaves(connection)
    over = ends(leaf.body for leaf in lives)
    columns = select(takes.door, takes.log, takes.idx, takes.version, takes.at_us, incarnations.c.uuid)
    joined = columns.join(incarnations, incarnations.c.id == takes.incarnation).where(has_leaf(epochs_taken))
    following: dict[str, Any] = {}
    last: dict[str, Any] = {}
    for life in connection.scalars(select(takes.incarnation).distinct()).all():
        of_life = joined.where(takes.incarnation == life)
        taking = of_life.where(takes.version >= newest).order_by(takes.version, takes.idx)
        for row in connection.execute(taking.limit(1)):
            if row.door not in following or row.at_us < following[row.door].at_us:
                following[row.door] = row
        for row in connection.execute(of_life.order_by(takes.version.desc(), takes.idx.desc()).limit(1)):
            if row.door not in last or row.at_us > last[row.door].at_us:
                last[row.door] = row
    for door, row in last.items():
        end = over.get(row.uuid)
        if door in following:
            leaves.add((names[following[door].log], following[door].idx))
        elif end is None or end[0] >= first_us:
            leaves.add((names[row.log], row.idx))
            leaves |= {(SYSTEM, leaf.idx) for leaf in lives if about(leaf.body) == row.uuid}
    return leaves
