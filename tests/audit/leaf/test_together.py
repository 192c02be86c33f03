"""Batches that wait are one transaction: sealed once, all in or none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sqlalchemy import Engine, func, select

from kvcustody.audit.kinds import Event, ResidencyOpened
from kvcustody.audit.store.schema.leaf_tables import outages, residencies
from kvcustody.audit.store.schema.ledger import events
from kvcustody.audit.store.schema.trees import unsealed_heads
from kvcustody.audit.verify.ledger.fsck_ledger import fsck
from kvcustody.audit.write.event_writer import EventWriter, WriterSettings

Make = Callable[..., EventWriter]
BATCHES = WriterSettings(batch=50)


def openings(numbers: range) -> list[Event]:
    """Residencies of a few tenants and people; the names of some are new in every batch."""
    rest = (None, False, "internal", (), (), ("own-scope",), 1, 10**9)
    return [
        ResidencyOpened(number, number, f"tenant-{number % 3}", f"person-{number // 7}", *rest) for number in numbers
    ]


def test_batches_that_wait_are_committed_together(any_store: Engine, make_writer: Make) -> None:
    """600 events in batches of 50, four to a transaction: three commits, nothing missing, all names known."""
    writer = make_writer(any_store, settings=BATCHES._replace(root_interval_seconds=3600.0))
    assert writer.submit(openings(range(1, 601))) == 600
    assert writer._mark.reached(600, 60)
    with any_store.connect() as connection:
        commits = select(func.count(unsealed_heads.c.grown_us.distinct()))
        assert connection.scalar(commits) == 3
        assert connection.scalars(select(events.c.sequence).order_by(events.c.sequence)).all() == [*range(1, 601)]
        people = connection.scalars(select(residencies.c.subject).distinct()).all()
        assert len(people) > 80
        assert fsck(connection).problems == []


@pytest.mark.parametrize("place", [10, 60, 170])
def test_one_refused_event_hinders_no_other_batch(any_store: Engine, make_writer: Make, place: int) -> None:
    """A residency that was opened before is refused by the database, in the first batch of a transaction or a later."""
    writer = make_writer(any_store, settings=BATCHES)
    submitted = openings(range(1, 201))
    submitted[place] = submitted[place - 1]
    writer.submit(submitted)
    assert writer.flush()
    with any_store.connect() as connection:
        missing = {*range(1, 201)} - {*connection.scalars(select(events.c.sequence))}
        assert missing == {place + 1}
        gaps = select(outages.c.first_sequence).where(outages.c.kind == "gap")
        assert connection.scalars(gaps).all() == [place + 1]
        assert fsck(connection).problems == []
