"""Orders on enforcement: by the command, on a worker's own ledger; what is refused, and what is said of the time."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import orjson
import pytest
import structlog
from typer.testing import CliRunner

from kvcustody.allocator.pool.memory_protocol import UnbackedMemory
from kvcustody.audit.evidence.processes.enforcement import (
    forecasts,
    monitored_periods,
    qualification,
    worker_enforcement,
)
from kvcustody.audit.evidence.query.showback import showback
from kvcustody.audit.store.database.engine import open_store
from kvcustody.clock import SystemClock
from kvcustody.console.main import app
from kvcustody.errors import ConfigError
from kvcustody.governance.admission_outcome import Admission
from kvcustody.governance.decisions.replay_decisions import recorded_requests
from kvcustody.governance.identity.principal import identify
from kvcustody.governance.monitoring.ordering import enforcement_order
from kvcustody.governance.settings import Settings, load_settings
from kvcustody.governance.worker.worker import MemoryPlan, Worker, open_worker
from kvcustody.policies import library
from kvcustody.testkit.conformance.deployment import toy_model
from standins import builders

CLOCK = SystemClock()
TOMORROW = (datetime.now(UTC) + timedelta(days=1)).strftime("%Y-%m-%d")
MODEL = toy_model(16)
PROMPT = list(range(10, 80))


@pytest.fixture
def olga(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever orders is enrolled in the ledger."""
    monkeypatch.chdir(tmp_path)
    ledger = f"sqlite:///{tmp_path / 'ledger.db'}"
    run("init", "--ledger", ledger)
    run("principal", "add", "olga", "--role", "approver", "--ledger", ledger)


def run(*words: str) -> str:
    """What a command prints; its log ends with it, for the worker beside it has one of its own."""
    result = CliRunner().invoke(app, [*words])
    structlog.reset_defaults()
    assert result.exit_code == 0, result.output
    return result.stdout


def settings(folder: Path, **more: Any) -> Settings:
    policy = folder / "policy.yaml"
    policy.write_text(library.source("regulated-saas"), encoding="utf-8")
    return load_settings(
        **builders.worker_files(folder),
        erasure_poll_ms=10,
        **more,
    )


def opened(folder: Path, **more: Any) -> Worker:
    plan = MemoryPlan(lambda blocks: UnbackedMemory(blocks, 1, clock=CLOCK), 256, 1, 1024)
    return open_worker(settings(folder, **more), plan)


def command(folder: Path, *arguments: str) -> Any:
    return orjson.loads(run("policy", *arguments, "--ledger", f"sqlite:///{folder / 'ledger.db'}", "--json"))


def order(folder: Path, *arguments: str) -> Any:
    until = () if arguments[0] == "enforce" else ("--until", TOMORROW)
    return command(folder, "enforce", *arguments, *until, "--as", "olga", "--reason", "test")


def until(worker: Worker, holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        worker.governor.step()
        time.sleep(0.005)


def ask(worker: Worker, tenant: str) -> int:
    who = identify(issuer="idp", tenant=tenant, verified={"subject": "ann", "session": "s"})
    outcome = worker.governor.admit(who, MODEL, PROMPT)
    assert isinstance(outcome, Admission)
    worker.governor.commit([outcome.request_id], [len(PROMPT)])
    worker.governor.release(outcome.request_id)
    return outcome.hit_tokens


@pytest.mark.usefixtures("olga")
def test_the_command_moves_a_worker_and_shows_what_it_foresaw(tmp_path: Path) -> None:
    with opened(tmp_path, monitoring="allowed") as worker:
        governor = worker.governor
        order(tmp_path, "monitor")
        until(worker, lambda: governor.enforcement.mode == "monitor")
        assert ask(worker, "acme") == 0 < ask(worker, "globex"), "monitored: the engine knows no tenants"
        order(tmp_path, "canary", "--tenant", "acme", "--share", "10%")
        until(worker, lambda: governor.enforcement.mode == "canary")
        assert [ask(worker, "acme"), ask(worker, "acme") > 0] == [0, True]
        governor.step()
        worker.writer.flush()
        said = command(tmp_path, "enforcement")
        assert [one["mode"] for one in said["workers"]] == ["canary"]
        assert said["order"]["share_millionths"] == 100_000 and said["order"]["tenants"] == ["acme"]
        order(tmp_path, "enforce")
        until(worker, lambda: governor.enforcement.mode == "enforce")
        ask(worker, "globex")
        governor.step()
        worker.writer.flush()
    engine = open_store(tmp_path / "ledger.db", read_only=True)
    with engine.connect() as connection:
        assert worker_enforcement(connection) == (), "nobody is at work"
        periods = monitored_periods(connection)
        assert [(one.mode, one.actor) for one in periods] == [("monitor", "olga"), ("canary", "olga")]
        assert "not enforced for everybody" in qualification(periods)
        assert monitored_periods(connection, since_us=CLOCK.utc_us() + 1) == ()
        by_tenant = {one.tenant: one for one in forecasts(connection)}
        assert by_tenant["globex"].refused_tokens == by_tenant["globex"].reused_tokens > 0
        assert by_tenant["globex"].prefilled_again_tokens == by_tenant["globex"].reused_tokens
        assert by_tenant["acme"].would_deny == 0 == by_tenant["acme"].reused_tokens
        rows = showback(connection, 0, CLOCK.utc_us(), {})
        assert sum(row.taken_hit_blocks + row.given_hit_blocks for row in rows) == 0, "no reuse across tenants"
        assert sum(row.own_hit_blocks for row in rows) > 0, "control: what was enforced counts"
        assert len(list(recorded_requests(connection))) == 3, "of the five, those that were enforced"
    engine.dispose()
    shown = CliRunner().invoke(app, ["coverage", "show", "--ledger", f"sqlite:///{tmp_path / 'ledger.db'}"])
    assert "not enforced for everybody" in shown.stderr


@pytest.mark.usefixtures("olga")
def test_a_restart_comes_back_to_what_was_ordered_and_enforces_before_it_heard(tmp_path: Path) -> None:
    with opened(tmp_path, monitoring="allowed"):
        order(tmp_path, "canary", "--share", "50%")
    with opened(tmp_path, monitoring="allowed") as worker:
        assert worker.governor.enforcement.mode == "enforce"
        until(worker, lambda: worker.governor.enforcement.mode == "canary")
        first = worker.governor.enforcement
    with opened(tmp_path, monitoring="allowed") as worker:
        until(worker, lambda: worker.governor.enforcement.mode == "canary")
        assert worker.governor.enforcement == first, "the same seed: the same sessions"


@pytest.mark.usefixtures("olga")
def test_a_worker_that_does_not_allow_it_enforces_and_says_so(tmp_path: Path) -> None:
    with opened(tmp_path) as worker:
        order(tmp_path, "monitor")
        until(worker, lambda: worker.governor.enforcement_refused == "not allowed here")
        assert ask(worker, "acme") == ask(worker, "globex") == 0
        worker.writer.flush()
        [said] = command(tmp_path, "enforcement")["workers"]
        assert (said["mode"], said["refused"]) == ("enforce", "not allowed here")


@pytest.mark.parametrize("profile", ["strict", "dedicated"])
def test_no_isolating_profile_is_ever_monitored(tmp_path: Path, profile: str) -> None:
    with pytest.raises(ConfigError, match="monitoring"):
        settings(tmp_path, profile=profile, monitoring="allowed", root_key_source="file")


@pytest.mark.parametrize(
    ("mode", "given", "says"),
    [
        ("monitor", {"until_us": None}, "needs an end"),
        ("monitor", {"until_us": 1}, "needs an end"),
        ("monitor", {"until_us": 200 * 86_400_000_000}, "needs an end"),
        ("monitor", {"tenants": ["acme"]}, "a canary"),
        ("canary", {}, "a canary"),
        ("canary", {"share": "100%"}, "not a share"),
        ("canary", {"share": "5"}, "not a share"),
        ("enforce", {}, "takes no end"),
        ("observe", {}, "none of"),
        ("monitor", {"reason": ""}, "its reason"),
    ],
)
def test_an_order_that_does_not_say_enough_is_none(mode: str, given: dict[str, Any], says: str) -> None:
    full: dict[str, Any] = {
        "until_us": 2_000_000,
        "actor": "olga",
        "reason": "test",
        "at_us": 1,
        "now_utc_us": 10,
    }
    with pytest.raises(ConfigError, match=says):
        enforcement_order(None, mode, **(full | given))
