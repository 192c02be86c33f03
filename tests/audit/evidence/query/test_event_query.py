"""Pages of leaves against a plain scan of every leaf, on both databases."""

from __future__ import annotations

import random
from typing import Any

import orjson
import pytest
from coverage_oracle import NOWHERE, items_of, listed
from sqlalchemy import Engine, delete, insert, select

from kvcustody.audit.evidence.query import events as event_query
from kvcustody.audit.evidence.query.events import (
    BlockRef,
    Cursor,
    EventFilter,
    EventRow,
    every_event,
    find_events,
    newest_events,
)
from kvcustody.audit.kinds import (
    DecisionRecorded,
    ErasureCompleted,
    ErasureRequested,
    KeyEvent,
    PolicyActivated,
)
from kvcustody.audit.store.database.engine import WRITE
from kvcustody.audit.store.schema.leaf_tables import event_traces
from kvcustody.audit.store.schema.ledger import events, logs
from kvcustody.audit.tlog.database_proofs import LedgerProofs
from kvcustody.audit.verify.ledger.fsck_ledger import fsck
from kvcustody.errors import LedgerError

TRACES = ("ab" * 16, "cd" * 16, "ef" * 16)


def fill(store: Engine, make_writer: Any, world: Any) -> Any:
    played = world(5).run(120)
    writer = make_writer(store)
    traced = [
        event._replace(trace=TRACES[number % 7]) if number % 7 < 3 and "trace" in event.__struct_fields__ else event
        for number, event in enumerate(played.events)
    ]
    writer.submit(traced)
    now = played.now
    for number in range(30):
        effect = "permit" if number % 3 else "deny"
        reasons = ("g-1" if number % 2 else "no-restricted", "own")
        writer.submit(
            [
                DecisionRecorded(
                    now, "reuse", effect, "tenant-0", f"tenant-{number % 3}", "internal", reasons, number % 4
                ),
                PolicyActivated(now + number, number, 'g-1","actor":"eve', "shared", "d", ("alice", "bob")[number % 2]),
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
        EventRow(row.name, row.idx, row.at_us, row.kind, orjson.loads(bytes(row.leaf)), bytes(row.leaf)) for row in rows
    ]


def _reads(body: dict[str, Any], tenant: str) -> bool:
    """A decision names its reader; what else names an owner is of its reader's log."""
    return body["reader"] == tenant if body["kind"] == "decision" else "owner" in body and body["tenant"] == tenant


def test_every_filter_is_a_scan_of_all_leaves(
    any_store: Engine, make_writer: Any, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = fill(any_store, make_writer, world)
    monkeypatch.setattr(event_query, "_WINDOW", 37)
    leaves = whole(any_store)
    ended = [each for row in leaves for each in items_of(row.body) if each["kind"] == "custody-ended"]
    generation = next(each["runs"][0][1] for each in ended if each["runs"])
    wiped = [each for row in leaves for each in items_of(row.body) if each["kind"] == "receipt"]
    block = next(block for each in wiped for key, block in listed(each["runs"]) if key == (0, generation))
    ref = BlockRef(writer.incarnation, block, generation)
    middle = sorted(row.at_us for row in leaves)[len(leaves) // 2]

    def touches(row: EventRow) -> bool:
        runs = [run for each in items_of(row.body) for run in each.get("runs", []) + each.get("written", [])]
        return any(key == (0, generation) and index in (block, NOWHERE) for key, index in listed(runs))

    reader, owner = next(
        (each["reader"], each["owner"]) for row in leaves for each in items_of(row.body) if each["kind"] == "decision"
    )

    def hands_out(row: EventRow) -> bool:
        runs = [run for each in items_of(row.body) for run in each.get("runs", []) + each.get("written", [])]
        return any(key[1] == generation for key, _ in listed(runs))

    cases: list[tuple[EventFilter, Any]] = [
        (EventFilter(), lambda row: True),
        (EventFilter(tenant="tenant-1"), lambda row: row.log == "tenant/tenant-1"),
        (EventFilter(logs=("system",), tenant="tenant-1"), lambda row: False),
        (EventFilter(logs=(), tenant="tenant-1"), lambda row: False),
        (
            EventFilter(kinds=("decision", "receipt")),
            lambda row: any(each["kind"] in ("decision", "receipt") for each in items_of(row.body)),
        ),
        (EventFilter(kinds=("custody-changed",)), lambda row: row.kind == "custody-changed"),
        (EventFilter(since_us=middle), lambda row: row.at_us >= middle),
        (EventFilter(until_us=middle), lambda row: row.at_us < middle),
        (EventFilter(actor="alice"), lambda row: row.body.get("actor") == "alice"),
        (EventFilter(actor="eve"), lambda row: False),
        (EventFilter(outcome="deny"), lambda row: row.body.get("effect") == "deny"),
        (EventFilter(outcome="partial"), lambda row: row.body.get("outcome") == "partial"),
        (EventFilter(rule="no-restricted"), lambda row: "no-restricted" in row.body.get("reasons", ())),
        (EventFilter(grant="g-1"), lambda row: "g-1" in row.body.get("reasons", ())),
        (EventFilter(revision=1), lambda row: row.body.get("revision") == 1),
        (
            EventFilter(residency=3),
            lambda row: any(each.get("residency") == 3 for each in items_of(row.body)),
        ),
        (EventFilter(block=ref), touches),
        (EventFilter(incarnation="f" * 32), lambda row: False),
        (EventFilter(trace=TRACES[0]), lambda row: row.body.get("trace") == TRACES[0]),
        (EventFilter(trace=TRACES[1], until_us=middle), lambda row: _traced(row, 1) and row.at_us < middle),
        (EventFilter(trace=TRACES[1], since_us=middle), lambda row: _traced(row, 1) and row.at_us >= middle),
        (
            EventFilter(trace=TRACES[2], tenant="tenant-1", kinds=("residency-opened",)),
            lambda row: _traced(row, 2) and (row.log, row.kind) == ("tenant/tenant-1", "residency-opened"),
        ),
        (EventFilter(trace="12" * 16), lambda row: False),
        (EventFilter(reader=reader), lambda row: any(_reads(each, reader) for each in items_of(row.body))),
        (
            EventFilter(owner=owner),
            lambda row: any(each.get("owner") == owner for each in items_of(row.body)),
        ),
        (EventFilter(generation=generation), hands_out),
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
    assert seen_something == 20


def _traced(row: EventRow, which: int) -> bool:
    return bool(row.body.get("trace") == TRACES[which])


def test_a_trace_is_found_without_a_look_at_other_leaves(
    any_store: Engine, make_writer: Any, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own rows alone are read, page by page, a log without any is passed by, and a row that lies finds nothing."""
    fill(any_store, make_writer, world)
    monkeypatch.setattr(event_query, "_WINDOW", 10)
    leaves = whole(any_store)
    mine = [row for row in leaves if _traced(row, 0)]
    with any_store.connect() as connection:
        found = find_events(connection, EventFilter(trace=TRACES[0]), limit=10_000)
        assert list(found.rows) == mine and found.scanned == len(mine) < len(leaves) / 4
        control = find_events(connection, EventFilter(residency=10**9), limit=10_000)
        assert control.rows == () and control.scanned == len(leaves)
        size = LedgerProofs(connection).checkpoint().size
        assert find_events(connection, EventFilter(trace=TRACES[0]), limit=10_000, as_of=size) == found
        assert fsck(connection).problems == []
    liar = next(row for row in leaves if "trace" not in row.body)
    with any_store.connect().execution_options(**WRITE) as connection, connection.begin():
        log = connection.scalar(select(logs.c.id).where(logs.c.name == liar.log))
        lie = {"log": log, "idx": liar.idx, "trace": TRACES[0], "at_us": liar.at_us}
        connection.execute(insert(event_traces).values(**lie))
        lost = mine[0]
        lost_log = connection.scalar(select(logs.c.id).where(logs.c.name == lost.log))
        place = (event_traces.c.log == lost_log, event_traces.c.idx == lost.idx)
        connection.execute(delete(event_traces).where(*place))
    with any_store.connect() as connection:
        assert list(every_event(connection, EventFilter(trace=TRACES[0]), page=3)) == mine[1:]
        said = {(problem.log, problem.idx, problem.what) for problem in fsck(connection).problems}
    assert said == {
        (liar.log, liar.idx, "its row in `event_traces` differs from the leaf"),
        (lost.log, lost.idx, "its row in `event_traces` is missing"),
    }


def test_as_of_a_checkpoint_pages_repeat(any_store: Engine, make_writer: Any, world: Any) -> None:
    writer = fill(any_store, make_writer, world)
    with any_store.connect() as connection:
        size = LedgerProofs(connection).checkpoint().size
        before = find_events(connection, EventFilter(), limit=10_000, as_of=size)
    writer.submit([KeyEvent(1, "tenant-1", "made", 99, "alice")])  # earlier than all others, and recorded later
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
