"""Queries over many logs give the same answer as log by log, in few statements."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from sqlalchemy import Engine, event, select

from kvcustody.audit.evidence.query import events as asking
from kvcustody.audit.evidence.query.events import Cursor, EventFilter, EventRow, every_event, find_events
from kvcustody.audit.kinds import Event, KeyEvent, ResidencyOpened, ResidencyReleased
from kvcustody.audit.store.database import snapshot
from kvcustody.audit.store.database.snapshot import AsOf
from kvcustody.audit.store.schema.leaf_tables import releases
from kvcustody.audit.store.schema.ledger import events, logs
from kvcustody.audit.tlog.database_proofs import LedgerProofs

TENANTS = 90


def history() -> Iterator[Event]:
    """A request of each tenant, and a key of every ninth."""
    for number in range(3 * TENANTS):
        tenant, at = f"tenant-{number % TENANTS:02d}", 1000 * number + 1
        rest = (False, "internal", (), (), ("own",), 1, at + 10**9)
        yield ResidencyOpened(at, number + 1, tenant, None, None, *rest)
        yield ResidencyReleased(at + 5, number + 1, tenant, "finish", (), 0)
        if number % 9 == 0:
            yield KeyEvent(at + 9, tenant, "made", 1, "test")


@pytest.fixture
def filled(any_store: Engine, make_writer: Any) -> Engine:
    writer = make_writer(any_store)
    every = list(history())
    writer.submit(every[: len(every) // 2])
    assert writer.flush()
    writer.submit(every[len(every) // 2 :])
    assert writer.flush()
    return any_store


WANTED = (
    EventFilter(kinds=("key-event",)),
    EventFilter(kinds=("residency-released", "key-event")),
    EventFilter(rule="own"),
    EventFilter(kinds=("key-event",), since_us=1),
    EventFilter(residency=7),
    EventFilter(tenant="tenant-09", kinds=("key-event",)),
    EventFilter(kinds=("orphan-found",)),
)


@pytest.mark.parametrize("number", range(len(WANTED)))
def test_a_search_finds_what_a_look_at_every_leaf_finds(filled: Engine, number: int) -> None:
    wanted = WANTED[number]
    with filled.connect() as connection:
        plain = [
            row for row in every_event(connection, EventFilter(tenant=wanted.tenant)) if asking.says(row.body, wanted)
        ]
        for page in (1, 7, 1000):
            assert list(every_event(connection, wanted, page=page)) == plain
        assert bool(plain) == (number != len(WANTED) - 1)
        sizes = LedgerProofs(connection).sizes()
        assert list(every_event(connection, wanted, as_of=LedgerProofs(connection).checkpoint().size)) == [
            row for row in plain if row.idx < sizes[row.log]
        ]


def test_a_page_that_looked_at_enough_goes_on_where_it_ended(filled: Engine) -> None:
    wanted, events, after, pages = EventFilter(rule="own"), list[EventRow](), None, 0
    with filled.connect() as connection:
        while True:
            page = find_events(connection, wanted, after=after, scan_max=1)
            events += page.rows
            pages += 1
            if page.next is None:
                break
            after = Cursor.from_text(page.next.to_text())
        assert pages > 1 and events == list(every_event(connection, wanted))
        assert [orjson.loads(row.leaf)["kind"] for row in events] == ["residency-opened"] * 3 * TENANTS


def test_small_logs_are_searched_together(filled: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its control: log by log."""
    asked: list[str] = []
    event.listen(filled, "before_cursor_execute", lambda *given: asked.append(given[2]))
    counts = []
    for window in (asking._WINDOW, 0):
        monkeypatch.setattr(asking, "_WINDOW", window or 1)
        with filled.connect() as connection:
            asked.clear()
            find_events(connection, EventFilter(rule="nobody"))
            counts.append(len(asked))
    assert counts[0] < 6 and counts[1] > TENANTS


def test_a_state_of_many_logs_is_that_of_few(filled: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked up in one object, or compared case by case."""
    with filled.connect() as connection:
        ids = connection.scalars(select(logs.c.id).order_by(logs.c.id)).all()
        state = AsOf({log: log % 4 for log in ids[1:]})
        assert len(state.sizes) > snapshot._CASES
        answers = []
        for cases in (snapshot._CASES, 10**6):
            monkeypatch.setattr(snapshot, "_CASES", cases)
            answers.append(
                [
                    sorted(
                        map(
                            tuple,
                            connection.execute(select(table.c.log, table.c.idx).where(state.has(table))),
                        )
                    )
                    for table in (events, releases)
                ]
            )
    assert answers[0] == answers[1] and all(answers[0])
