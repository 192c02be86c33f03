"""Missing sequences are found by reading only what is new, and dropped leaves do not count as missing."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, delete, event, insert, select

from kvcustody.audit.evidence.processes import sequence_gaps
from kvcustody.audit.evidence.processes.sequence_gaps import (
    Gap,
    Span,
    dropped_spans,
    gaps,
    keep_spans,
    kept_spans,
    lacks_below,
)
from kvcustody.audit.kinds import WorkerStarted
from kvcustody.audit.store.database.engine import WRITE
from kvcustody.audit.store.schema.ledger import events, incarnations
from kvcustody.audit.store.schema.sequences import sequence_spans
from kvcustody.audit.verify.ledger.fsck_ledger import fsck


def _anew(connection: Connection) -> tuple[Gap, ...]:
    """As nothing that was kept says."""
    with connection.begin_nested() as nothing:
        connection.execute(delete(sequence_spans))
        found = gaps(connection)
        nothing.rollback()
    return found


def _recount(connection: Connection) -> list[tuple[int, str]]:
    """Sequence by sequence, in sets."""
    incomplete = []
    for life, uuid in connection.execute(select(incarnations.c.id, incarnations.c.uuid)).all():
        column = events.c
        rows = connection.execute(
            select(column.sequence, column.part, column.parts, column.log).where(column.incarnation == life)
        ).all()
        sets: dict[tuple[int, int], tuple[int, set[int]]] = {}
        for sequence, part, parts, log in rows:
            sets.setdefault((sequence, log), (parts, set()))[1].add(part)
        torn = {sequence for (sequence, _), (parts, there) in sets.items() if len(there) != parts}
        every = set(range(1, max((row.sequence for row in rows), default=0) + 1))
        lost = every - {row.sequence for row in rows}
        incomplete += [(number, uuid) for number in torn | lost]
    return sorted(incomplete)


def _numbers(found: tuple[Gap, ...]) -> list[tuple[int, str]]:
    return sorted(
        (number, gap.incarnation) for gap in found for number in range(gap.first_sequence, gap.last_sequence + 1)
    )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("at_once", [3, 1 << 18])
def test_whatever_came_and_went_the_answer_is_a_recount(
    any_store: Engine,
    make_writer: Any,
    world: Any,
    unguarded: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    seed: int,
    at_once: int,
) -> None:
    """Leaves go, come back and are added, spans are kept in between, and a second process has its own."""
    monkeypatch.setattr(sequence_gaps, "_AT_ONCE", at_once)
    chance, played = random.Random(seed), world(seed).run(60)
    writer = make_writer(any_store)
    other = make_writer(any_store, worker="other", spill_directory=tmp_path / "other")
    other.submit([WorkerStarted(1, "other", 8, 1, 4096, "cpu", "test")])
    aside: list[Any] = []
    for start in range(0, len(played.events), 40):
        writer.submit(played.events[start : start + 40])
        assert writer.flush() and other.flush()
        with any_store.connect().execution_options(**WRITE) as connection, connection.begin():
            unguarded(connection)
            if aside and chance.random() < 0.5:
                connection.execute(insert(events), aside)
                aside = []
            rows = connection.execute(select(events)).all()
            for row in chance.sample(rows, min(len(rows), chance.randrange(4))):
                kept = kept_spans(connection, row.incarnation)
                if not any(first <= row.sequence <= last for first, last in kept):  # what was whole stays
                    aside.append(row._asdict())
                    connection.execute(delete(events).where(events.c.log == row.log, events.c.idx == row.idx))
        if chance.random() < 0.6:
            keep_spans(any_store)
        with any_store.connect() as connection:
            found = gaps(connection)
            assert _numbers(found) == _recount(connection)
            assert found == _anew(connection)
    assert keep_spans(any_store) <= 2 and keep_spans(any_store) == 0


def test_what_is_whole_is_not_looked_at_again(any_store: Engine, make_writer: Any, world: Any) -> None:
    """With its control: before it is kept, its sequences are asked for."""
    writer = make_writer(any_store)
    writer.submit(world(3).run(60).events)
    assert writer.flush()
    asked: list[str] = []

    def note(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        asked.append(statement)

    event.listen(any_store, "before_cursor_execute", note)
    try:
        with any_store.connect() as connection:
            assert gaps(connection) == ()
            assert any("events.sequence >=" in one for one in asked)
            asked.clear()
        assert keep_spans(any_store) == 1
        asked.clear()
        with any_store.connect() as connection:
            assert gaps(connection) == ()
        assert asked and not any("events.sequence >=" in one for one in asked)
    finally:
        event.remove(any_store, "before_cursor_execute", note)


@pytest.mark.parametrize("short", [1 << 10, 0], ids=["many to a transaction", "control: each by itself"])
def test_short_processes_are_kept_many_to_a_transaction(
    any_store: Engine,
    make_writer: Any,
    unguarded: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    short: int,
) -> None:
    """Of one that lacks a sequence only what is there is kept."""
    monkeypatch.setattr(sequence_gaps, "_SHORT", short)
    for number in range(5):
        writer = make_writer(any_store, worker=f"w{number}", spill_directory=tmp_path / str(number))
        writer.submit([WorkerStarted(at, f"w{number}", 8, 1, 4096, "cpu", "test") for at in (1, 2, 3)])
        assert writer.flush()
    lacking = writer.incarnation
    with any_store.connect().execution_options(**WRITE) as connection, connection.begin():
        unguarded(connection)
        of = select(incarnations.c.id).where(incarnations.c.uuid == lacking).scalar_subquery()
        connection.execute(delete(events).where(events.c.incarnation == of, events.c.sequence == 2))
    begun: list[Any] = []

    def note(connection: Any) -> None:
        begun.append(connection)

    event.listen(any_store, "begin", note)
    try:
        assert keep_spans(any_store) == 5
    finally:
        event.remove(any_store, "begin", note)
    assert (len(begun) <= 3) == bool(short)  # a look at all, a transaction of the whole ones, one of the lacking one
    with any_store.connect() as connection:
        lives = connection.execute(select(incarnations.c.id, incarnations.c.uuid)).all()
        kept = {uuid: kept_spans(connection, life) for life, uuid in lives}
    assert kept.pop(lacking) == [(1, 1), (3, 3)]
    assert len(kept) == 4 and all(len(spans) == 1 and spans[0][0] == 1 for spans in kept.values())


def test_what_is_missing_before_a_leaf_is_asked_of_what_is_not_kept_alone(
    any_store: Engine, make_writer: Any, world: Any, unguarded: Any
) -> None:
    """Retention drops what is whole: it is not missing. With its control: not kept, it is."""
    writer = make_writer(any_store)
    writer.submit(world(5).run(40).events)
    assert writer.flush()
    uuid, highest = writer.incarnation, writer.durable_sequence
    with any_store.connect() as connection:
        assert not lacks_below(connection, uuid, highest + 1)
        assert lacks_below(connection, uuid, highest + 2), "a hole before it"
        assert lacks_below(connection, "none", 2) and not lacks_below(connection, "none", 1)
    keep_spans(any_store)
    with any_store.connect().execution_options(**WRITE) as connection, connection.begin():
        unguarded(connection)
        connection.execute(delete(events).where(events.c.sequence.between(3, 9)))
        assert not lacks_below(connection, uuid, highest + 1)
        connection.execute(delete(sequence_spans))
        assert lacks_below(connection, uuid, highest + 1), "control"
        assert not lacks_below(connection, uuid, 3)


def test_a_range_that_no_leaf_has_is_found(any_store: Engine, make_writer: Any, world: Any) -> None:
    """A row that was put there to hide what is missing."""
    writer = make_writer(any_store)
    writer.submit(world(4).run(40).events)
    assert writer.flush()
    keep_spans(any_store)
    with any_store.connect() as connection:
        life = int(connection.scalar(select(incarnations.c.id).where(incarnations.c.uuid == writer.incarnation)) or 0)
        ((_, last),) = kept_spans(connection, life)
        assert fsck(connection).problems == [] and dropped_spans(connection, life) == []
    with any_store.connect().execution_options(**WRITE) as connection, connection.begin():
        connection.execute(
            insert(sequence_spans).values(incarnation=life, first_sequence=last + 5, last_sequence=last + 9)
        )
    with any_store.connect() as connection:
        assert dropped_spans(connection, life) == [(last + 5, last + 9)]
        (problem,) = (each.what for each in fsck(connection).problems)
        assert "`sequence_spans`" in problem and f"`{last + 5}` to `{last + 9}`" in problem


@pytest.mark.parametrize(
    ("spans", "others", "left"),
    [
        ([(1, 9)], [], [(1, 9)]),
        ([(1, 9)], [(1, 9)], []),
        ([(1, 9)], [(3, 3), (5, 6)], [(1, 2), (4, 4), (7, 9)]),
        ([(1, 4), (8, 9)], [(2, 8)], [(1, 1), (9, 9)]),
        ([(1, 4), (8, 9), (11, 12)], [(0, 20)], []),
        ([(5, 6)], [(1, 2), (9, 9)], [(5, 6)]),
    ],
)
def test_ranges_without_others(spans: list[Span], others: list[Span], left: list[Span]) -> None:
    assert list(sequence_gaps._minus(spans, others)) == left
