"""`kvcustody coverage`: what it prints, agreement, exit codes and mistakes in one line."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from sqlalchemy import text
from typer.testing import CliRunner

from kvcustody.audit.kinds import (
    CustodyEnded,
    ReceiptRecorded,
    ResidencyOpened,
    ResidencyReleased,
    WorkerStarted,
)
from kvcustody.audit.kinds.block_runs import Run
from kvcustody.audit.store.database.engine import open_store
from kvcustody.console.main import app
from kvcustody.migrations.upgrade import upgrade
from standins import builders


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    """Four blocks on two shards: wiped in time, verified in full."""
    import numpy as np

    path = tmp_path / "ledger.db"
    engine = open_store(path)
    upgrade(engine)
    runs = (Run(np.arange(4), 1),)
    proof = ("acme", "memset", "cpu", 4096 * 4, 550, 600, "full", 1.0, 4, "ok", runs)
    events = [
        WorkerStarted(1, "w", 64, 2, 4096, "cpu", "test"),
        ResidencyOpened(100, 1, "acme", None, None, False, "internal", (), (), (), 1, 900, runs, "ab" * 8),
        ResidencyReleased(200, 1, "acme", "finish", (), 500),
        CustodyEnded(510, "acme", "internal", runs, "expired", 500, 500, 200, 1000, 900),
        ReceiptRecorded(600, 1, 0, *proof),
        ReceiptRecorded(600, 1, 1, *proof),
    ]
    builders.record(engine, tmp_path / "spill", events)
    engine.dispose()
    return path


def run(*arguments: str, code: int = 0) -> str:
    group = "audit" if arguments[0] == "recompute" else "coverage"
    found = CliRunner().invoke(app, [group, *arguments])
    assert found.exit_code == code, found.output
    return found.output


def test_both_implementations_print_the_same_and_agree(ledger: Path) -> None:
    shown = orjson.loads(run("show", "--ledger", str(ledger), "--json"))
    again = orjson.loads(run("recompute", "--ledger", str(ledger), "--json"))
    assert shown["total"]["covered"] == shown["total"]["due"] == 8
    assert again["agrees"] is True and again["differences"] == [] and again["leaves"] == 3
    assert {key: again["total"][key] for key in again["total"]} == {key: shown["total"][key] for key in again["total"]}
    assert again["unaccounted"] == {"residencies": 0, "generations": 0, "receipts": 0}
    assert "100.00 %" in run("show", "--ledger", str(ledger)) and "agrees" in run("recompute", "--ledger", str(ledger))


@pytest.mark.parametrize(
    ("options", "due"),
    [
        (("--tenant", "acme", "--classification", "internal", "--model", "ab" * 8, "--tier", "device"), 8),
        (("--tenant", "acme", "--classification", "public"), 0),
        (("--model", "unknown"), 0),
        (("--until", "2020-01-01"), 0),
        (("--since", "2020-01-01T00:00:00+02:00"), 8),
        (("--as-of", "1"), 8),
    ],
)
def test_every_selector_is_taken_by_both(ledger: Path, options: tuple[str, ...], due: int) -> None:
    if options[0] == "--as-of":
        engine = open_store(ledger)
        with engine.connect() as connection:
            options = ("--as-of", str(connection.scalar(text("select max(size) from checkpoints"))))
        engine.dispose()
    for command in ("show", "recompute"):
        assert orjson.loads(run(command, "--ledger", str(ledger), *options, "--json"))["total"]["due"] == due


def test_a_column_that_was_changed_is_found_by_the_leaves(ledger: Path) -> None:
    engine = open_store(ledger)
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP TRIGGER IF EXISTS custody_ends_update")
        connection.exec_driver_sql("UPDATE custody_ends SET tenant = 'labs'")
    engine.dispose()
    found = orjson.loads(run("recompute", "--ledger", str(ledger), "--json", code=1))
    assert found["agrees"] is False
    assert {item["tenant"] for item in found["differences"]} == {"acme", "labs"}
    assert "differ" in run("recompute", "--ledger", str(ledger), code=1)


def test_mistakes_are_one_line(ledger: Path, tmp_path: Path) -> None:
    for arguments, what in (
        (("show", "--ledger", str(tmp_path / "none.db")), "no ledger here"),
        (("show", "--ledger", str(ledger), "--tier", "hots"), "tier `hots`"),
        (("show", "--ledger", str(ledger), "--tenant", "acne"), "did you mean `acme`?"),
        (("recompute", "--ledger", str(ledger), "--tenant", "acne"), "did you mean `acme`?"),
        (("show", "--ledger", str(ledger), "--since", "soon"), "`soon` is no ISO 8601"),
        (("show", "--ledger", str(ledger), "--since", "2026-02-01", "--until", "2026-01-01"), "is empty"),
        (("show", "--ledger", str(ledger), "--as-of", "99"), "no checkpoint of `99`"),
        (("recompute", "--export", str(tmp_path)), "export"),
    ):
        output = run(*arguments, code=2)
        assert what in output and output.count("\n") == 1, output
