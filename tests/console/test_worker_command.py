"""`kvcustody worker` on a plain ledger, and what a purge and `audit times` say then."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine
from typer.testing import CliRunner

from kvcustody.audit.kinds import ResidencyOpened, WorkerStarted
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.tlog.checkpoint_signer import CheckpointSigner
from kvcustody.audit.tlog.signing_key import SigningKey
from kvcustody.clock import SystemClock
from kvcustody.console.main import app
from standins import builders

KEY = SigningKey.generate("ledger.example/worker")
PEOPLE = ("--actor", "ops", "--approver", "dpo", "--reason", "host destroyed")


class Shifted(SystemClock):
    """A wall clock that is wrong by so much."""

    def __init__(self, by_us: int) -> None:
        super().__init__()
        self._by_us = by_us

    def utc_us(self) -> int:
        return super().utc_us() + self._by_us


@pytest.fixture
def place(tmp_path: Path, migrated: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KVCUSTODY_DATABASE_URL", raising=False)
    shutil.copy(migrated, "kvcustody.db")
    return open_store("sqlite:///kvcustody.db", timeout_seconds=2.0)


def killed(store: Engine, name: str, silent_seconds: int) -> str:
    """A process that opened two residencies so long ago, and said nothing since."""
    clock = Shifted(-silent_seconds * 1_000_000)
    writer = builders.writer(store, Path(f"spill-{name}"), worker=name, clock=clock)
    now = clock.now_us()
    writer.submit([WorkerStarted(now, name, 8, 1, 4096, "cpu", "test")])
    writer.submit(
        [
            ResidencyOpened(now, number, "acme", None, None, False, "internal", (), (), ("own",), 1, 9)
            for number in range(2)
        ]
    )
    assert writer.flush()
    writer.close()
    return writer.incarnation


def run(*words: str, code: int = 0) -> Any:
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == code, (done.output, done.exception)
    return json.loads(done.stdout) if code == 0 and "--json" in words else done.output


def sign(store: Engine) -> None:
    CheckpointSigner(store, [KEY], memory=Path("signed"), clock=SystemClock()).sign_once()


def test_a_process_is_closed_by_two_people_and_stops_no_purge_then(place: Engine) -> None:
    silent, speaks = killed(place, "gone", 300), killed(place, "here", 0)
    listed = {one["worker"]: one for one in run("worker", "list", "--json")["processes"]}
    assert listed["gone"]["incarnation"] == silent and listed["gone"]["memory"]
    assert {"gone", "here"} == set(listed)
    for wrong in (
        ("gone", *PEOPLE),  # without --spill-lost
        ("gone", "--spill-lost", "--actor", "ops", "--approver", "ops", "--reason", "x"),
        ("nobody", "--spill-lost", *PEOPLE),
        (speaks, "--spill-lost", *PEOPLE),  # it was heard just now
    ):
        run("worker", "close", *wrong, code=2)
    assert len(run("worker", "list", "--json")["processes"]) == 2, "nothing was closed"
    sign(place)
    before = "2100-01-01"
    [plan] = run("audit", "purge", "--until", before, "--json")["logs"]
    assert plan["kept_by"] == "a process that had not ended" and plan["first"] == plan["below"]
    [closed] = run("worker", "close", "gone", "--spill-lost", *PEOPLE, "--json")["processes"]
    assert closed == {"worker": "gone", "incarnation": silent, "closed": True}
    assert [one["worker"] for one in run("worker", "list", "--json")["processes"]] == ["here"]
    run("worker", "close", silent, "--spill-lost", *PEOPLE, code=2)  # it is closed
    sign(place)
    [plan] = run("audit", "purge", "--until", before, "--json")["logs"]
    assert (plan["first"], plan["below"]) == (0, 2), "up to what the other one holds"
    asked = run("audit", "query", "--kind", "worker-died", "--json")
    assert "declared" in json.dumps(asked) and "host destroyed" in json.dumps(asked)
    assert run("audit", "fsck", "--json")["problems"] == []


def test_times_that_cannot_be_are_listed(place: Engine) -> None:
    killed(place, "ahead", -86_400 * 365)
    sign(place)
    found = run("audit", "times", "--json")["times"]
    assert {odd["why"] for odd in found} == {"ahead"}
    assert {odd["log"] for odd in found} == {"system", "tenant/acme"}
    own = run("audit", "times", "--tenant", "acme", "--json")["times"]
    assert [(odd["log"], odd["idx"]) for odd in own] == [("tenant/acme", 0), ("tenant/acme", 1)]
    assert all(odd["not_before_us"] == 0 < odd["not_after_us"] < odd["at_us"] for odd in own)
    assert "ahead" in run("audit", "times")
