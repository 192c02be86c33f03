"""Every reader that remembers a place in the log sees a restore from a backup, on each database."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
import pytest
from sqlalchemy import Connection, Engine

from kvcustody.audit.evidence.explore.by_time import find_by_time
from kvcustody.audit.evidence.query import events as query
from kvcustody.audit.evidence.query.events import CursorError, EventFilter, find_events
from kvcustody.audit.kinds import KeyEvent
from kvcustody.audit.siem.commit_order_reader import newest, read_in_commit_order
from kvcustody.audit.siem.cursor_reader import newest_positions, pull
from kvcustody.audit.store.database.engine import open_store
from standins import builders
from standins.postgres import new_ledger


class Restorable(NamedTuple):
    """A ledger of which no process holds a connection, with its backup."""

    open: Callable[[], Engine]
    back_up: Callable[[], None]
    restore: Callable[[], None]


@pytest.fixture(params=["sqlite", "postgresql"])
def ledger(request: pytest.FixtureRequest, tmp_path: Path, migrated: Path) -> Iterator[Restorable]:
    if request.param == "sqlite":
        path, kept = tmp_path / "ledger.db", tmp_path / "backup.db"
        shutil.copy(migrated, path)
        back_up, restore = partial(shutil.copy, path, kept), partial(shutil.copy, kept, path)
        yield Restorable(partial(open_store, path), back_up, restore)
        return
    with new_ledger(request.getfixturevalue("postgres")) as engine:
        url, name = engine.url.render_as_string(hide_password=False), str(engine.url.database)
        engine.dispose()
        kept = f"{name}_backup"
        address = request.getfixturevalue("postgres")
        yield Restorable(
            partial(open_store, url),
            partial(in_server, address, f'CREATE DATABASE "{kept}" TEMPLATE "{name}"'),
            partial(
                in_server,
                address,
                f'DROP DATABASE "{name}" WITH (FORCE)',
                f'CREATE DATABASE "{name}" TEMPLATE "{kept}"',
                f'DROP DATABASE "{kept}"',
            ),
        )


def in_server(address: str, *statements: str) -> None:
    with psycopg.connect(address, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement)


def record(ledger: Restorable, spill: Path, names: Sequence[str], *, at_us: int) -> None:
    """One leaf a name, a microsecond apart, sealed, by a process of its own."""
    engine = ledger.open()
    writer = builders.writer(engine, spill)
    writer.submit([KeyEvent(number, None, "made", number, name) for number, name in enumerate(names, at_us)])
    assert writer.flush() and writer.seal()
    writer.close()
    engine.dispose()


def ask(ledger: Restorable, question: Callable[[Connection], Any]) -> Any:
    engine = ledger.open()
    try:
        with engine.connect() as connection:
            return question(connection)
    finally:
        engine.dispose()


KEYS = EventFilter(kinds=("key-event",))
PAGES: dict[str, Callable[..., Any]] = {
    "log by log": find_events,
    "oldest": partial(find_by_time, newest=False),
    "newest": find_by_time,
}


@pytest.mark.parametrize("after", [(), tuple("cdefgh")], ids=["shorter", "longer"])
def test_a_restore_is_never_nothing_new(ledger: Restorable, tmp_path: Path, after: tuple[str, ...]) -> None:
    """Control: before the restore each reader goes on from the same place without a word."""
    record(ledger, tmp_path / "1", "ab", at_us=1)
    ledger.back_up()
    record(ledger, tmp_path / "2", ("lost-1", "lost-2", "lost-3"), at_us=10)
    places, position = ask(ledger, newest_positions), ask(ledger, newest)
    cursors = {
        name: ask(ledger, partial(find, wanted=KEYS, limit=1 if name == "newest" else 4)).next
        for name, find in PAGES.items()
    }
    assert not ask(ledger, lambda connection: pull(connection, places)).positions.restarted
    assert not ask(ledger, lambda connection: read_in_commit_order(connection, position)).restarted
    for name, find in PAGES.items():
        assert ask(ledger, partial(find, wanted=KEYS, after=cursors[name])).rows, name
    ledger.restore()
    if after:
        record(ledger, tmp_path / "3", after, at_us=20)
    assert ask(ledger, lambda connection: pull(connection, places)).positions.restarted == {"system": 1}
    assert ask(ledger, lambda connection: read_in_commit_order(connection, position)).restarted
    for name, find in PAGES.items():
        with pytest.raises(CursorError, match="restore"):
            ask(ledger, partial(find, wanted=KEYS, after=cursors[name]))


def test_without_the_check_a_page_after_a_restore_reads_as_the_last(
    ledger: Restorable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test above."""
    monkeypatch.setattr(query, "check_cursor", lambda *_: None)
    with pytest.raises(pytest.fail.Exception):
        test_a_restore_is_never_nothing_new(ledger, tmp_path, ())
