"""Which of an incarnation's sequences leaves have, as ranges.

S1  Where as many sequences are there as between the lowest and the highest, none is looked at by itself.
"""

from __future__ import annotations

from sqlalchemy import Connection, func, select

from kvcustody.audit.schema.ledger import events

Span = tuple[int, int]
"""First and last of consecutive sequences."""


def recorded_sequences(connection: Connection, incarnation: int) -> list[Span]:
    """Every range of consecutive sequences with a leaf, ascending; an event of several leaves counts once."""
    there = select(events.c.sequence).where(events.c.incarnation == incarnation).distinct().subquery()
    sequence = there.c.sequence
    count, first, last = connection.execute(
        select(func.count(), func.min(sequence), func.max(sequence)).select_from(there)
    ).one()
    if not count:
        return []
    if count == last - first + 1:
        return [(first, last)]
    before = func.lag(sequence).over(order_by=sequence).label("before")
    steps = select(before, sequence).subquery()
    jumps = select(steps).where(steps.c.sequence > steps.c.before + 1).order_by(steps.c.sequence)
    ends, starts = zip(*connection.execute(jumps).all(), strict=True)
    return list(zip((first, *starts), (*ends, last), strict=True))
