"""One look over every leaf in the state: counts by incarnation and kind, and the bodies of the few that say how it was.

V1 The leaves of custody are only counted here; those of workers, policies and outages are read.
V2 Events that are written in two logs have one sequence: it is counted once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import orjson
from sqlalchemy import Connection, and_, case, func, select

from kvcustody.audit.as_of import AsOf
from kvcustody.audit.schema import events, incarnations, logs

READ_KINDS = (
    *("worker-started", "worker-stopped", "worker-died", "policy-activated"),
    *("gap", "withdrawn", "spill-started", "replay-completed"),
)
_TWO_LOGS = ("decision", "hit-counters")


class Counted(NamedTuple):
    """Leaves of one kind of one incarnation: in the period, sequences that they take, the highest, parts of many."""

    incarnation: str
    kind: str
    in_period: int
    sequences: int
    highest: int
    continued: int


class Overview(NamedTuple):
    """What one look found."""

    counted: tuple[Counted, ...]
    bodies: tuple[dict[str, Any], ...]

    def of_kind(self, *kinds: str) -> Iterator[dict[str, Any]]:
        """The bodies of these kinds (of `READ_KINDS`), in an order that no database decides."""
        return (body for body in self.bodies if body["kind"] in kinds)


def look_over(
    connection: Connection, as_of: AsOf, since_us: int, until_us: int, *, tenant: str | None
) -> Overview:
    """The overview of a state; of one tenant, counts in the period are of its own log."""
    return Overview(
        tuple(sorted(_counted(connection, as_of, since_us, until_us, tenant))), _bodies(connection, as_of)
    )


def _counted(
    connection: Connection, as_of: AsOf, since_us: int, until_us: int, tenant: str | None
) -> list[Counted]:
    column = events.c
    mine = and_(column.at_us >= since_us, column.at_us < until_us)
    if tenant is not None:
        own = connection.scalar(select(logs.c.id).where(logs.c.name == f"tenant/{tenant}"))
        mine = and_(mine, column.log == (own or -1))
    query = (
        select(
            column.incarnation,
            column.kind,
            func.sum(case((mine, 1), else_=0)),
            func.sum(case((column.part == 1, 1), else_=0)),
            func.max(column.sequence),
            func.sum(case((column.parts > 1, 1), else_=0)),
        )
        .where(as_of.has(events))
        .group_by(column.kind, column.incarnation)  # as their index has them: nothing is sorted
    )
    twice = _sequences_of_two_logs(connection, as_of)
    names = {row.id: row.uuid for row in connection.execute(select(incarnations.c.id, incarnations.c.uuid))}
    return [
        Counted(
            names[life], kind, int(here), twice.get((life, kind), int(sequences)), int(highest), int(parts)
        )
        for life, kind, here, sequences, highest, parts in connection.execute(query)
    ]


def _sequences_of_two_logs(connection: Connection, as_of: AsOf) -> dict[tuple[int, str], int]:
    column = events.c
    query = (
        select(column.incarnation, column.kind, func.count(column.sequence.distinct()))
        .where(column.kind.in_(_TWO_LOGS), as_of.has(events))
        .group_by(column.incarnation, column.kind)
    )
    return {(life, kind): int(number) for life, kind, number in connection.execute(query)}


def _bodies(connection: Connection, as_of: AsOf) -> tuple[dict[str, Any], ...]:
    query = select(events.c.leaf).where(events.c.kind.in_(READ_KINDS), as_of.has(events))
    found = [orjson.loads(leaf) for leaf in connection.scalars(query)]
    order = ("at_us", "incarnation", "sequence", "part")
    return tuple(sorted(found, key=lambda body: tuple(str(body[key]).zfill(20) for key in order)))
