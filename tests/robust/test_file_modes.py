"""What a deployment leaves on disk is its user's alone whatever the umask: ledger, spill, keys, exports, reports.

Everything here runs under a umask of 0, which takes nothing away from what a file is created with.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text
from structlog.testing import capture_logs
from typer.testing import CliRunner

from kvcustody import files
from kvcustody.allocator.pool.memory_protocol import UnbackedMemory
from kvcustody.audit.store.database.engine import open_store
from kvcustody.clock import SystemClock
from kvcustody.console.main import app
from kvcustody.governance.settings import Settings
from kvcustody.governance.worker.worker import MemoryPlan, open_worker
from kvcustody.policies import library
from standins import builders

PUBLIC = {"policy.yaml"}  # a policy is nobody's secret; this test wrote it


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def lived(folder: Path) -> None:
    """A worker's life, and what people make of its ledger."""
    policy = folder / "policy.yaml"
    policy.write_text(library.source("single-org"), encoding="utf-8")
    settings = Settings(
        **builders.worker_files(folder),
        subject_keys_url=f"sqlite:///{folder / 'subjects.db'}",
        signing_key_path=folder / "signing.key",
        checkpoint_seconds=0.05,
    )
    clock = SystemClock()
    with open_worker(settings, MemoryPlan(lambda n: UnbackedMemory(n, 1, clock=clock), 64, 1, 1024)):
        pass
    ledger = str(folder / "ledger.db")
    run("audit", "export", str(folder / "exported"), "--ledger", ledger)
    report = str(folder / "report")
    run("report", "make", "--framework", "gdpr", "--ledger", ledger, "--format", "json,html", "--out", report)
    run("audit", "prove", "system", "0", "--ledger", ledger, "--out", str(folder / "proof"))


def run(*words: str) -> None:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, result.output


def open_to_others(folder: Path) -> dict[str, str]:
    """Files and folders that anybody but their user may do anything with."""
    modes = {}
    for path in folder.rglob("*"):
        if path.is_dir() and not path.is_symlink() and not any(path.iterdir()):
            continue
        mode = stat.S_IMODE(path.lstat().st_mode)
        if mode & 0o077 and path.name not in PUBLIC and path.is_file():
            modes[str(path.relative_to(folder))] = oct(mode)
    return modes


def test_nothing_is_open_to_others(tmp_path: Path) -> None:
    lived(tmp_path)
    assert len(list((tmp_path / "exported").rglob("*"))) > 3 and list((tmp_path / "report").iterdir())
    assert open_to_others(tmp_path) == {}


def test_a_file_that_is_open_is_found(tmp_path: Path) -> None:
    """The control: written as anybody writes a file, under the same umask."""
    (tmp_path / "careless.json").write_text("{}")
    assert open_to_others(tmp_path) == {"careless.json": "0o666"}


def test_the_group_reads_evidence_where_a_setting_says_so_and_never_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(files.GROUP_READS, "true")
    lived(tmp_path)
    found = open_to_others(tmp_path)
    assert {"ledger.db", "proof.leaf"} <= found.keys() and set(found.values()) == {"0o640"}
    assert any(name.startswith("exported/") for name in found)
    assert not {"root.key", "keys.json", "signing.key", "subjects.db"} & found.keys()


@pytest.mark.parametrize("name", ["ledger.db", "ledger.db-wal"])
def test_a_ledger_that_others_could_read_is_taken_back_and_it_is_said(
    tmp_path: Path, migrated: Path, name: str
) -> None:
    ledger = tmp_path / "ledger.db"
    ledger.write_bytes(migrated.read_bytes())
    ledger.chmod(0o600)
    holder = open_store(ledger)
    with holder.connect() as connection:
        connection.execute(text("create table t (x)"))
        connection.commit()  # an empty log SQLite itself takes back
        (tmp_path / name).chmod(0o666)
        with capture_logs() as logs:
            other = open_store(ledger)
            with other.connect() as reader:
                reader.execute(text("select 1"))
            other.dispose()
    holder.dispose()
    assert stat.S_IMODE(ledger.stat().st_mode) == 0o600
    assert [line["file"] for line in logs if "accessible to other users" in line["event"]] == ["ledger.db"]


def test_taking_back_gives_no_lock_up(tmp_path: Path) -> None:
    """SQLite's locks are the process's: whoever closes the file by another descriptor would lose them."""
    ledger = tmp_path / "ledger.db"
    store = open_store(ledger)
    with store.connect().execution_options(kvcustody_write=True) as writing:
        writing.execute(text("create table t (x)"))
        files.claim_file(ledger, files.PRIVATE)
        files.take_back(ledger, files.PRIVATE)
        child = os.fork()
        if child == 0:  # another process tries to write meanwhile
            try:
                other = open_store(ledger, timeout_seconds=0.1)
                with other.connect().execution_options(kvcustody_write=True) as second:
                    second.execute(text("create table u (x)"))
                os._exit(1)
            except Exception:
                os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "a second writer came in"
    store.dispose()


def test_what_a_command_logs_is_beside_its_answer(tmp_path: Path, migrated: Path) -> None:
    ledger = tmp_path / "ledger.db"
    ledger.write_bytes(migrated.read_bytes())
    ledger.chmod(0o644)
    result = CliRunner().invoke(app, ["db", "upgrade", "--ledger", str(ledger), "--json"])
    assert result.exit_code == 0 and isinstance(json.loads(result.stdout), dict)
    assert "accessible to other users" in result.stderr


def test_a_file_that_is_no_database_is_left_as_it_is(tmp_path: Path) -> None:
    other = tmp_path / "config.json"
    other.write_text("{}" * 2000)
    other.chmod(0o644)
    result = CliRunner().invoke(app, ["db", "upgrade", "--ledger", str(other)])
    assert result.exit_code == 2 and "not a SQLite database" in result.stderr
    assert stat.S_IMODE(other.stat().st_mode) == 0o644 and "accessible to other users" not in result.stderr
