"""Long reads of a SQLite ledger by commands do not block its writers' log, and leave no copy of it behind."""

from __future__ import annotations

import importlib
import stat
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from structlog.testing import capture_logs

from kvcustody.audit.exports.ledger_source import LedgerSource
from kvcustody.audit.store.database import private_copy
from kvcustody.audit.store.database.dialect import file_of
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.database.private_copy import at_rest
from standins.audit.ledgers import report_ledger
from standins.audit.write_ahead_log import is_held
from standins.console.command_line import call

POLICY = Path(__file__).parents[4] / "policies" / "library" / "regulated-saas.yaml"
READERS = {
    "report make --framework gdpr --format json --out made": ("console.report.command", "build_report"),
    f"report ropa --policy {POLICY} --controller A --format json --out made": (
        "console.report.ropa",
        "build_record",
    ),
    "audit fsck": ("console.audit.fsck", "fsck"),
    "audit recompute": ("console.coverage.command", "coverage"),
    "coverage show": ("console.coverage.command", "coverage"),
    "subject show --tenant tenant-0 --subject dana": ("governance.api.operations.custody", "subject_page"),
    "custody coverage --since 2020-01-01": ("governance.api.operations.custody", "coverage"),
    f"policy lint {POLICY}": ("console.policy.lint", "sources_in_use"),
}

EXITS = {"audit fsck": 1}  # its names stand in no register


@pytest.fixture
def ledger(tmp_path: Path, migrated: Path, world: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path, scratch = tmp_path / "ledger.db", tmp_path / "scratch"
    path.write_bytes(migrated.read_bytes())
    store = open_store(path)
    report_ledger.fill(store, world, tmp_path)
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.chdir(tmp_path)
    yield path
    assert not list(scratch.iterdir())
    store.dispose()


def held_by(line: str, ledger: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a command holds the log in the middle of what takes it long."""
    room, name = READERS[line]
    module = importlib.import_module(f"kvcustody.{room}")
    long_work, seen = getattr(module, name), []

    def work(connection: Any, *given: Any, **more: Any) -> Any:
        connection.execute(text("SELECT count(*) FROM logs")).scalar()
        seen.append(is_held(ledger))
        return long_work(connection, *given, **more)

    monkeypatch.setattr(module, name, work)
    call(f"{line} --ledger {ledger}", exits=EXITS.get(line, 0))
    assert seen
    return any(seen)


@pytest.mark.parametrize("line", READERS)
def test_a_long_reader_holds_no_log(line: str, ledger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not held_by(line, ledger, monkeypatch)


@pytest.mark.parametrize("line", READERS)
def test_control_without_its_copy_it_does(line: str, ledger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for room in ("console.opening", "console.audit.fsck", "console.api.ledger_asker"):
        monkeypatch.setattr(f"kvcustody.{room}.at_rest", nullcontext)
    assert held_by(line, ledger, monkeypatch)


def test_an_export_reads_in_short_transactions(ledger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leaves, seen = LedgerSource.leaves, []

    def watched(source: LedgerSource, name: str, first: int, end: int) -> Iterator[bytes]:
        for leaf in leaves(source, name, first, end):
            if not seen:
                seen.append(is_held(ledger))
            yield leaf

    monkeypatch.setattr(LedgerSource, "leaves", watched)
    call(f"audit export exported --ledger {ledger} --unrecorded")
    assert seen == [False]


def test_a_copy_is_its_users_alone_and_of_one_moment(ledger: Path) -> None:
    engine = open_store(ledger, read_only=True)
    with at_rest(engine) as read, read.connect() as connection:
        copy = file_of(read)
        assert copy is not None and copy.name == ledger.name and copy != ledger
        assert stat.S_IMODE(copy.stat().st_mode) == 0o600 and stat.S_IMODE(copy.parent.stat().st_mode) == 0o700
        before = connection.execute(text("PRAGMA user_version")).scalar()
        assert not is_held(ledger)
        assert connection.execute(text("PRAGMA user_version")).scalar() == before
    assert not copy.parent.exists()
    engine.dispose()


@pytest.mark.parametrize(("seconds", "is_said"), [(-1.0, True), (3600.0, False)])
def test_a_copy_that_takes_longer_than_a_reader_may_is_said(
    ledger: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, is_said: bool
) -> None:
    """Control: one within the bound is not."""
    monkeypatch.setattr(private_copy, "COPY_SECONDS", seconds)
    store = open_store(ledger, read_only=True)
    with capture_logs() as said, at_rest(store):
        pass
    store.dispose()
    warned = [line for line in said if "exceeded the time limit" in line["event"]]
    assert bool(warned) is is_said
    assert all(line["ledger_bytes"] == ledger.stat().st_size for line in warned)


def test_without_room_for_a_copy_the_ledger_is_read_and_it_is_said(
    ledger: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(private_copy, "claim_file", full)
    engine = open_store(ledger, read_only=True)
    with at_rest(engine) as read:
        assert read is engine
    said = capsys.readouterr()
    assert "No space left on device" in said.out + said.err and "TMPDIR" in said.out + said.err
    engine.dispose()
