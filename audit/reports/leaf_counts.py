"""One pass over every leaf in the state: counts by incarnation and kind, and the bodies of a few important ones.

1. The leaves of custody are only counted here; those of workers, policies and outages are read.
2. Events that are written in two logs have one sequence: it is counted once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import orjson
from sqlalchemy import Connection, and_, case, func, literal_column, not_, or_, select

from kvcustody.audit.evidence.processes.work_periods import LIVES
from kvcustody.audit.kinds import log_of
from kvcustody.audit.kinds.registry import ACTING, KINDS
from kvcustody.audit.store.database.snapshot import AsOf
from kvcustody.audit.store.schema.all_tables import has_leaf
from kvcustody.audit.store.schema.ledger import events, incarnations, logs
from kvcustody.audit.store.schema.trees import checkpoints

READ_KINDS = (
    "enforcement-changed",
    "issuer-assigned",
    *LIVES,
    *("policy-activated", "release-step"),
    *("gap", "withdrawn", "spill-started", "replay-completed"),
)
_TWO_LOGS = tuple(KINDS[kind].name for kind in ACTING)


class LeafCount(NamedTuple):
    """Leaves of one kind of one incarnation: in the period, the sequences they take, and parts of several."""

    incarnation: str
    kind: str
    in_period: int
    sequences: int
    continued: int


class LeafCounts(NamedTuple):
    """The results of one pass."""

    counted: tuple[LeafCount, ...]
    highest: dict[str, int]  # sequence of each incarnation; 0 where it has none
    bodies: tuple[dict[str, Any], ...]

    def of_kind(self, *kinds: str) -> Iterator[dict[str, Any]]:
        """Return the bodies of these kinds (of `READ_KINDS`), in an order independent of the database."""
        return (body for body in self.bodies if body["kind"] in kinds)


def read_leaf_counts(
    connection: Connection, as_of: AsOf, since_us: int, until_us: int, *, tenant: str | None
) -> LeafCounts:
    """Return the overview of a state; for one tenant, counts in the period cover its own log."""
    query = select(incarnations.c.id, incarnations.c.uuid)
    names = {row.id: row.uuid for row in connection.execute(query)}
    counted = _counted(connection, as_of, since_us, until_us, tenant)
    return LeafCounts(
        tuple(sorted(LeafCount(names[life], kind, *numbers) for life, kind, *numbers in counted)),
        {uuid: _highest(connection, as_of, life) or 0 for life, uuid in names.items()},
        _bodies(connection, as_of),
    )


def _counted(
    connection: Connection, as_of: AsOf, since_us: int, until_us: int, tenant: str | None
) -> list[tuple[int, str, int, int, int]]:
    """Return the rows of `LeafCount`, by the number of the incarnation.

    All leaves are counted in an index, and those that do not count taken off: they are few as a rule, and to find them
    in the table is one walk in its own order.
    """
    column = events.c
    later = not_(and_(as_of.has(events), has_leaf(events)))
    foreign = or_(later, column.at_us < since_us, column.at_us >= until_us)
    if tenant is not None:
        own = connection.scalar(select(logs.c.id).where(logs.c.name == log_of(tenant)))
        foreign = or_(foreign, column.log != (own or -1))
    every = select(column.incarnation, column.kind, func.count()).group_by(column.kind, column.incarnation)
    of_kind = func.coalesce(column.kind, literal_column("''")).label("of_kind")  # a name that is not the index's
    off = (later, foreign, or_(later, column.part > 1), and_(not_(later), column.parts > 1))
    few = (
        select(column.incarnation, of_kind, *(func.sum(case((each, 1), else_=0)) for each in off))
        .where(or_(foreign, column.parts > 1))
        .group_by(of_kind, column.incarnation)
    )
    less = {(life, kind): tuple(map(int, sums)) for life, kind, *sums in connection.execute(few)}
    twice = _sequences_of_two_logs(connection, as_of)
    counts = []
    for life, kind, leaves in connection.execute(every):
        beyond, outside, continuing, parts = less.get((life, kind), (0, 0, 0, 0))
        if leaves > beyond:
            sequences = twice.get((life, kind), leaves - continuing)
            counts.append((life, kind, leaves - outside, sequences, parts))
    return counts


def _highest(connection: Connection, as_of: AsOf, life: int) -> int | None:
    """Return the highest sequence of an incarnation: the first in the state, searching downwards."""
    column = events.c
    query = select(column.sequence).where(column.incarnation == life, as_of.has(events), has_leaf(events))
    return connection.scalar(query.order_by(column.sequence.desc()).limit(1))


def _sequences_of_two_logs(connection: Connection, as_of: AsOf) -> dict[tuple[int, str], int]:
    column = events.c
    query = (
        select(column.incarnation, column.kind, func.count(column.sequence.distinct()))
        .where(column.kind.in_(_TWO_LOGS), as_of.has(events), has_leaf(events))
        .group_by(column.incarnation, column.kind)
    )
    return {(life, kind): int(number) for life, kind, number in connection.execute(query)}


def _bodies(connection: Connection, as_of: AsOf) -> tuple[dict[str, Any], ...]:
    query = select(events.c.leaf).where(events.c.kind.in_(READ_KINDS), as_of.has(events), has_leaf(events))
    found = [orjson.loads(leaf) for leaf in connection.scalars(query)]
    order = ("at_us", "incarnation", "sequence", "part")
    return tuple(sorted(found, key=lambda body: tuple(str(body[key]).zfill(20) for key in order)))


def newest_leaf_us(connection: Connection, checkpoint: int) -> int:
    """Return when the newest leaf under a checkpoint was written; clocks differ, so this need not be the last leaf."""
    column = checkpoints.c
    return connection.scalar(select(func.max(column.at_us)).where(column.size <= checkpoint)) or 0


def first_leaf_us(connection: Connection, state: AsOf) -> int:
    """Return when the earliest first leaf of a log was written; 0 if there is none."""
    column, each = events.c, select(logs.c.id)  # log by log: a place alone is in no index
    first = select(func.min(column.at_us)).where(
        column.idx == 0, column.log.in_(each), state.has(events), has_leaf(events)
    )
    return connection.scalar(first) or 0
