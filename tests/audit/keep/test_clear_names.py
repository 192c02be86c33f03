"""No subject's name reaches a ledger in clear, from workers or the service, unless a setting allows it."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import select

from kvcustody.audit.evidence.subjects.pseudonym_directory import SubjectDirectory
from kvcustody.audit.evidence.subjects.subject_key_store import (
    SubjectKeys,
    is_tag,
    open_subject_keys,
    store_beside,
)
from kvcustody.audit.evidence.subjects.subject_table import Row, committed_name, names_of
from kvcustody.audit.kinds import ErasureRequested, Event
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.schema.ledger import subjects
from kvcustody.audit.verify.ledger.fsck_ledger import fsck
from kvcustody.audit.write.committer import Committer
from kvcustody.audit.write.event_writer import EventWriter, WriterSettings
from kvcustody.clock import SystemClock
from kvcustody.errors import ConfigError, LedgerError, LedgerUnavailable
from kvcustody.governance.service.settings import load_service_settings
from kvcustody.governance.settings import Settings, load_settings
from kvcustody.migrations.upgrade import upgrade

NAME = "ada-lovelace-of-acme"
QUICK = WriterSettings(interval_seconds=0.001, durable_seconds=3.0, retry_seconds=0.02)


def erasure(clock: SystemClock) -> Event:
    """An event that names somebody."""
    now_us = clock.now_us()
    return ErasureRequested(now_us, "e" * 32, "acme", "subject", NAME, None, now_us + 1_000_000, "dpo")


def write(settings: Settings, folder: Path) -> None:
    """What a worker with these settings writes of somebody."""
    engine = open_store(settings.database_url)
    upgrade(engine)
    clock = SystemClock()
    writer = EventWriter(
        engine,
        worker="w",
        clock=clock,
        spill_directory=folder / "spill",
        settings=QUICK,
        subject_keys=settings.open_subject_keys(),
        clear_names=settings.subject_names == "clear",
    )
    writer.submit_durable(erasure(clock))
    writer.close()
    engine.dispose()


def holders(folder: Path) -> set[str]:
    """The files in which the name stands."""
    return {path.name for path in folder.rglob("*") if path.is_file() and NAME.encode() in path.read_bytes()}


def worker_settings(folder: Path, **explicit: str) -> Settings:
    return load_settings(database_url=f"sqlite:///{folder}/ledger.db", **explicit)


def test_without_a_setting_the_ledger_names_nobody_and_its_own_store_finds_them(tmp_path: Path) -> None:
    write(worker_settings(tmp_path), tmp_path)
    assert {name.split("-wal")[0] for name in holders(tmp_path)} == {"ledger-subjects.db"}
    assert stat.S_IMODE((tmp_path / "ledger-subjects.db").stat().st_mode) == 0o600
    keys = SubjectKeys.open(tmp_path / "ledger-subjects.db")
    with open_store(tmp_path / "ledger.db").connect() as connection:
        assert list(map(is_tag, connection.scalars(select(subjects.c.subject)))) == [True]
        assert len(names_of(connection, "acme", NAME, keys)) == 1
        assert names_of(connection, "acme", NAME) == []
        assert fsck(connection).remarks == []
    keys.close()


def test_control_the_setting_says_it_by_name_and_fsck_says_that_it_is_so(tmp_path: Path) -> None:
    write(worker_settings(tmp_path, subject_names="clear"), tmp_path)
    assert "ledger.db" in holders(tmp_path) and not (tmp_path / "ledger-subjects.db").exists()
    with open_store(tmp_path / "ledger.db").connect() as connection:
        found = fsck(connection)
        assert found.ok and len(found.remarks) == 1 and "1 row of" in found.remarks[0]
    write(worker_settings(tmp_path), tmp_path)  # the setting goes: who is in clear is found all the same
    keys = SubjectKeys.open(tmp_path / "ledger-subjects.db")
    with open_store(tmp_path / "ledger.db").connect() as connection:
        assert len(names_of(connection, "acme", NAME, keys)) == 2
    keys.close()


@pytest.mark.parametrize("load", [load_settings, load_service_settings])
def test_on_a_server_it_has_to_be_said_which_of_the_two_it_is(load: Callable[..., Settings]) -> None:
    with pytest.raises(ConfigError, match=r"subject_names: clear"):
        load(database_url="postgresql://db/kv").open_subject_keys()
    assert load(database_url="postgresql://db/kv", subject_names="clear").open_subject_keys() is None
    with pytest.raises(ConfigError, match="subject_names"):
        load(subject_keys_url="sqlite:///people.db", subject_names="clear")


def test_a_writer_without_keys_names_nobody_by_mistake(tmp_path: Path) -> None:
    engine = open_store(tmp_path / "ledger.db")
    upgrade(engine)
    clock = SystemClock()
    writer = EventWriter(engine, worker="w", clock=clock, spill_directory=tmp_path / "spill", settings=QUICK)
    with pytest.raises(LedgerUnavailable):
        writer.submit_durable(erasure(clock))
    writer.close()
    assert holders(tmp_path) == set()


def test_names_of_a_spill_from_before_there_were_keys_are_sealed_as_they_are_replayed(tmp_path: Path) -> None:
    engine = open_store(tmp_path / "ledger.db")
    upgrade(engine)
    secret = "5" * 32
    rows: list[Row] = [(committed_name(secret, "acme", NAME, ""), "acme", NAME, "", secret)]
    with pytest.raises(LedgerError, match="subjects cannot be named"):
        Committer(engine, SubjectDirectory()).write_names(rows, own=True)
    keys = open_subject_keys(tmp_path / "ledger.db", None, clear=False)
    assert keys is not None
    Committer(engine, SubjectDirectory(keys)).write_names(rows, own=True)
    with engine.connect() as connection:
        (kept,) = connection.execute(select(subjects.c.subject, subjects.c.secret)).all()
        assert is_tag(kept.subject) and secret not in kept.secret
        assert names_of(connection, "acme", NAME, keys) == [rows[0][0]]
    keys.close()


def test_a_store_lies_beside_a_file_and_nowhere_else() -> None:
    assert store_beside("sqlite:////var/lib/kv/a.db") == Path("/var/lib/kv/a-subjects.db")
    assert store_beside("kvcustody.db") == Path("kvcustody-subjects.db")
    assert store_beside("postgresql://db/kv") is None and store_beside("sqlite:///:memory:") is None
