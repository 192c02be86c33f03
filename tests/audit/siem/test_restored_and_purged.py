"""A sink whose ledger was restored, replaced or purged: every existing leaf arrives, and the status reports it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest
from sqlalchemy import Connection, Engine, delete, select

from kvcustody.audit.evidence.query.events import EventRow
from kvcustody.audit.kinds import KeyEvent
from kvcustody.audit.siem import cursor_reader
from kvcustody.audit.siem.cursor_reader import SinkPositions, newest_positions, pull
from kvcustody.audit.siem.delivery import DeliveryPump
from kvcustody.audit.siem.formats import open_shape
from kvcustody.audit.store.database.append_only_triggers import triggers_lifted
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.schema.ledger import events
from standins import builders
from standins.sinks import Flaky


def newest(connection: Connection) -> dict[str, int]:
    """How many leaves each log has."""
    return {name: place.next for name, place in newest_positions(connection).places.items()}


def array(rows: Sequence[EventRow]) -> bytes:
    return orjson.dumps([open_shape("cloudevents", "ab" * 8).shape(row) for row in rows])


def record(path: Path, spill: Path, names: Sequence[str]) -> None:
    """One leaf a name, in a process of its own."""
    engine = open_store(path)
    writer = builders.writer(engine, spill)
    writer.submit([KeyEvent(number, None, "made", number, name) for number, name in enumerate(names, 1)])
    assert writer.flush()
    writer.close()
    engine.dispose()


def deliver(path: Path, folder: Path, sink: Flaky) -> DeliveryPump:
    """A process of its own delivers everything new, and ends."""
    engine = open_store(path)
    pump = DeliveryPump(engine, sink, folder, array)
    while pump.step():
        pass
    engine.dispose()
    return pump


def received(sink: Flaky) -> dict[tuple[str, str], Any]:
    """What a receiver holds that drops doubles by source and id."""
    every = [event for _, body in sink.taken for event in orjson.loads(body)]
    return {(event["source"], event["id"]): event["data"] for event in every}


def actors(sink: Flaky) -> set[str]:
    return {data["actor"] for data in received(sink).values() if data["kind"] == "key-event"}


@pytest.mark.parametrize("after", [("c",), tuple("cdef"), tuple("cdefghij")], ids=["shorter", "same", "longer"])
def test_a_restored_ledger_is_seen_and_nothing_of_it_is_skipped(
    migrated: Path, tmp_path: Path, after: tuple[str, ...]
) -> None:
    path, sink = tmp_path / "ledger.db", Flaky()
    shutil.copy(migrated, path)
    record(path, tmp_path / "1", "ab")
    shutil.copy(path, tmp_path / "backup.db")
    record(path, tmp_path / "2", ("lost-1", "lost-2", "lost-3", "lost-4"))
    assert deliver(path, tmp_path / "sink", sink).status().restarted == 0
    shutil.copy(tmp_path / "backup.db", path)
    record(path, tmp_path / "3", after)
    assert deliver(path, tmp_path / "sink", sink).status().restarted == 1
    assert {"a", "b", *after} <= actors(sink)
    assert len({identity for identity, _ in sink.taken}) == len(sink.taken), "no batch passes for another"
    again = deliver(path, tmp_path / "sink", sink)
    assert again.status().restarted == 1 and again.status().delivered == 0, "told after a restart, sent once"


def test_without_the_digest_a_restored_ledger_reads_as_nothing_new(
    migrated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test above."""
    monkeypatch.setattr(cursor_reader, "_foreign", lambda *_: [])
    with pytest.raises(AssertionError):
        test_a_restored_ledger_is_seen_and_nothing_of_it_is_skipped(migrated, tmp_path, ("c",))


def test_a_log_that_is_gone_is_told(any_store: Engine, make_writer: Any, world: Any) -> None:
    writer = make_writer(any_store)
    writer.submit(world(7).run(60).events)
    assert writer.flush()
    with any_store.connect() as connection:
        batch = pull(connection, SinkPositions(), limit=10_000)
        places = {**batch.positions.places, "tenant/gone": cursor_reader.LogPlace(3, 2, "00")}
        after = pull(connection, batch.positions._replace(places=places))
        assert not after.rows and after.positions.restarted == {"tenant/gone": 1}
        assert {name: place.next for name, place in after.positions.places.items()} == newest(connection)
        assert pull(connection, after.positions).positions == after.positions


def test_leaves_that_a_purge_took_first_are_counted(any_store: Engine, make_writer: Any, world: Any) -> None:
    """At the start of a log, in its middle where a hold kept what is before, and all that is new."""
    writer = make_writer(any_store)
    writer.submit(world(7).run(60).events)
    assert writer.flush()
    with any_store.begin() as connection:
        name, size = max(newest(connection).items(), key=lambda item: item[1])
        batch = pull(connection, SinkPositions(), limit=10_000)
        log = connection.scalar(select(cursor_reader.logs.c.id).where(cursor_reader.logs.c.name == name))
        with triggers_lifted(connection):
            gone = events.c.idx.in_((0, 1, 5, size - 1))
            connection.execute(delete(events).where(events.c.log == log, gone))
        at, rows = SinkPositions(), []
        while (page := pull(connection, at, limit=7)).rows:
            rows += page.rows
            at = page.positions
        assert page.positions.purged == {name: 4} and not page.positions.restarted
        assert {(row.log, row.idx) for row in rows} == {
            (row.log, row.idx) for row in batch.rows if row.log != name or row.idx not in (0, 1, 5, size - 1)
        }
        assert pull(connection, page.positions).positions == page.positions, "counted once"
        assert any("4 leaves" in line for line in cursor_reader.describe_losses(page.positions.losses))


def test_newest_positions_are_after_everything_and_see_a_restore(migrated: Path, tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    shutil.copy(migrated, path)
    record(path, tmp_path / "1", "ab")
    shutil.copy(path, tmp_path / "backup.db")
    record(path, tmp_path / "2", ("lost",))
    engine = open_store(path)
    with engine.connect() as connection:
        place = cursor_reader.newest_positions(connection)
        assert pull(connection, place) == ((), place)
    engine.dispose()
    shutil.copy(tmp_path / "backup.db", path)
    record(path, tmp_path / "3", tuple("cdef"))
    engine = open_store(path)
    with engine.connect() as connection:
        batch = pull(connection, place)
        kept = pull(connection, cursor_reader.newest_positions(connection))
    engine.dispose()
    assert not kept.rows and sum(batch.positions.restarted.values()) == 1
    assert {row.body.get("actor") for row in batch.rows} >= set("abcdef")
