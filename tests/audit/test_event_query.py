"""Pages of leaves (Q1-Q3) against a plain scan of every leaf, on both databases."""

from __future__ import annotations

import random
from typing import Any

import orjson
import pytest
from sqlalchemy import Engine, select

from kvcustody.audit import event_query
from kvcustody.audit.event_query import (
    BlockRef,
    Cursor,
    EventFilter,
    EventRow,
    every_event,
    find_events,
    newest_events,
)
from kvcustody.audit.events import (
    DecisionRecorded,
    ErasureCompleted,
    ErasureRequested,
    KeyEvent,
    PolicyActivated,
)
from kvcustody.audit.ledger_proofs import LedgerProofs
from kvcustody.audit.runs import decode
from kvcustody.audit.schema import events, logs
from kvcustody.errors import LedgerError


def fill(store: Engine, make_writer: Any, world: Any) -> Any:
    played = world(5).run(120)
    writer = make_writer(store)
    writer.submit(played.events)
    now = played.now
    for number in range(30):
        effect = "permit" if number % 3 else "deny"
        reasons = ("g-1" if number % 2 else "no-restricted", "own")
        writer.submit(
            [
                DecisionRecorded(
                    now, "reuse", effect, "tenant-0", f"tenant-{number % 3}", "internal", reasons, number % 4
                ),
                PolicyActivated(
                    now + number, number, 'g-1","actor":"eve', "shared", "d", ("alice", "bob")[number % 2]
                ),
                KeyEvent(now, "tenant-1", "made", number, "alice"),
                ErasureRequested(now, f"e{number}", "tenant-2", "subject", None, None, now, "dpo"),
                ErasureCompleted(now, f"e{number}", "tenant-2", ("complete", "partial")[number % 2], 1, 1, 0),
            ]
        )
    assert writer.flush()
    return writer


def whole(store: Engine) -> list[EventRow]:
    with store.connect() as connection:
        rows = connection.execute(
            select(logs.c.name, events.c.idx, events.c.at_us, events.c.kind, events.c.leaf, logs.c.id).join(
                logs, logs.c.id == events.c.log
            )
        ).all()
    rows = sorted(rows, key=lambda row: (row.id, row.at_us, row.idx))
    return [
        EventRow(row.name, row.idx, row.at_us, row.kind, orjson.loads(bytes(row.leaf)), bytes(row.leaf))
        for row in rows
    ]


def test_every_filter_is_a_scan_of_all_leaves(
    any_store: Engine, make_writer: Any, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = fill(any_store, make_writer, world)
    monkeypatch.setattr(event_query, "_WINDOW", 37)
    leaves = whole(any_store)
    body = next(row.body for row in leaves if row.kind == "custody-ended" and row.body["runs"])
    run = decode(body["runs"][0])
    ref = BlockRef(writer.incarnation, int(run.blocks[0]), run.generation)
    middle = sorted(row.at_us for row in leaves)[len(leaves) // 2]

    def touches(row: EventRow) -> bool:
        runs = [decode(item) for item in row.body.get("runs", []) + row.body.get("written", [])]
        return any(
            0 <= ref.generation - one.generation < len(one.blocks)
            and one.blocks[ref.generation - one.generation] == ref.block
            for one in runs
        )

    cases: list[tuple[EventFilter, Any]] = [
        (EventFilter(), lambda row: True),
        (EventFilter(tenant="tenant-1"), lambda row: row.log == "tenant/tenant-1"),
        (EventFilter(logs=("system",), tenant="tenant-1"), lambda row: False),
        (EventFilter(kinds=("decision", "receipt")), lambda row: row.kind in ("decision", "receipt")),
        (EventFilter(since_us=middle), lambda row: row.at_us >= middle),
        (EventFilter(until_us=middle), lambda row: row.at_us < middle),
        (EventFilter(actor="alice"), lambda row: row.body.get("actor") == "alice"),
        (EventFilter(actor="eve"), lambda row: False),
        (EventFilter(outcome="deny"), lambda row: row.body.get("effect") == "deny"),
        (EventFilter(outcome="partial"), lambda row: row.body.get("outcome") == "partial"),
        (EventFilter(rule="no-restricted"), lambda row: "no-restricted" in row.body.get("reasons", ())),
        (EventFilter(grant="g-1"), lambda row: "g-1" in row.body.get("reasons", ())),
        (EventFilter(revision=1), lambda row: row.body.get("revision") == 1),
        (EventFilter(residency=3), lambda row: row.body.get("residency") == 3),
        (EventFilter(block=ref), touches),
        (EventFilter(incarnation="f" * 32), lambda row: False),
    ]
    seen_something = 0
    with any_store.connect() as connection:
        for wanted, says in cases:
            expected = [row for row in leaves if says(row)]
            for page in (1000, 7):
                assert list(every_event(connection, wanted, page=page)) == expected, wanted
            seen_something += bool(expected) and len(expected) < len(leaves)
            newest = newest_events(connection, wanted, limit=5)
            last = sorted(expected, key=lambda row: (row.at_us, row.log, row.idx))[-5:]
            assert [row.at_us for row in newest] == [row.at_us for row in last]
    assert seen_something == 12


def test_as_of_a_checkpoint_pages_repeat(any_store: Engine, make_writer: Any, world: Any) -> None:
    writer = fill(any_store, make_writer, world)
    with any_store.connect() as connection:
        size = LedgerProofs(connection).checkpoint().size
        before = find_events(connection, EventFilter(), limit=10_000, as_of=size)
    writer.submit(
        [KeyEvent(1, "tenant-1", "made", 99, "alice")]
    )  # earlier than all others, and recorded later
    assert writer.flush()
    with any_store.connect() as connection:
        assert find_events(connection, EventFilter(), limit=10_000, as_of=size) == before
        assert len(find_events(connection, EventFilter(), limit=10_000).rows) == len(before.rows) + 1


def test_a_call_looks_at_a_bounded_number_of_leaves(
    store: Engine, make_writer: Any, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, make_writer, world)
    monkeypatch.setattr(event_query, "_WINDOW", 10)
    with store.connect() as connection:
        found = find_events(connection, EventFilter(actor="nobody"), scan_max=30)
        assert found.rows == () and found.next is not None and found.scanned == 30
        again = find_events(connection, EventFilter(actor="nobody"), after=found.next)
        assert again.next is None and again.scanned == len(whole(store)) - 30


def test_cursors_are_text() -> None:
    chance = random.Random(1)
    for _ in range(50):
        cursor = Cursor(chance.randrange(9), chance.randrange(2**50), chance.randrange(2**40))
        assert Cursor.from_text(cursor.to_text()) == cursor
    for wrong in ("", "x", "AAAA", "MS4y", "\xe9"):
        with pytest.raises(LedgerError):
            Cursor.from_text(wrong)
