"""The control plane's time: keys stay ended when its clock steps back, and an operator confirms a jump, on record."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.schema.ledger import events
from kvcustody.clock import MICROSECONDS, SystemClock
from kvcustody.console.main import app
from kvcustody.deadline_clock import DeadlineClock
from kvcustody.governance.service.service import Service, open_service
from kvcustody.migrations.upgrade import upgrade
from standins.service.control_plane_world import MovedClock
from standins.service.service_world import settings_in

DAY, YEAR = 86_400 * MICROSECONDS, 365 * 86_400 * MICROSECONDS


class SteppedClock(MovedClock):
    """`ahead_us` is time that went by; `step_us` is what somebody did to the wall clock."""

    step_us = 0

    def utc_us(self) -> int:
        return super().utc_us() + self.step_us


@pytest.fixture
def world(
    tmp_path: Path, make_people: Any, make_client: Any
) -> Iterator[tuple[SteppedClock, Callable[[], tuple[Service, Any, Any]]]]:
    clock = SteppedClock()
    opened: list[Service] = []

    def start() -> tuple[Service, Any, Any]:
        for service in opened:
            service.close()
        opened.append(open_service(settings_in(tmp_path), clock=clock))
        return opened[-1], make_people(opened[-1]), make_client(opened[-1])

    yield clock, start
    opened[-1].close()


@pytest.mark.parametrize("back_us", [MICROSECONDS, 20 * DAY])
def test_a_key_that_ended_stays_ended_when_the_clock_steps_back(world: Any, back_us: int) -> None:
    clock, start = world
    _, people, client = start()
    key = people["auditor"]
    assert client("GET", "/v1/whoami", key).status_code == 200
    clock.ahead_us += DAY
    assert client("GET", "/v1/whoami", key).status_code == 401
    clock.step_us -= back_us
    assert client("GET", "/v1/whoami", key).status_code == 401
    _, _, client = start()
    assert client("GET", "/v1/whoami", key).status_code == 401


def test_positive_control_by_the_wall_clock_the_key_lives_again(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, start = world
    monkeypatch.setattr(DeadlineClock, "utc_us", lambda self: self._wall.utc_us())
    _, people, client = start()
    key = people["auditor"]
    clock.ahead_us += DAY
    assert client("GET", "/v1/whoami", key).status_code == 401
    clock.step_us -= MICROSECONDS
    assert client("GET", "/v1/whoami", key).status_code == 200


def test_a_jump_ends_no_key_until_an_operator_confirms_it_on_record(world: Any) -> None:
    clock, start = world
    service, people, client = start()
    auditor, operator = people["auditor"], people["operator"]
    why = {"reason": "the battery was replaced"}
    assert client("POST", "/v1/clock:confirm", operator, json=why).status_code == 409
    clock.step_us += 10 * YEAR
    assert client("GET", "/v1/whoami", auditor).status_code == 200
    assert client("GET", "/v1/clock", operator).json()["in_doubt"] is True
    step = client("POST", "/v1/policies:propose", people["author"], json={"record": "{}"})
    assert step.status_code == 409  # this service releases nothing; the refusal in doubt is in tests/release
    clock.step_us -= 10 * YEAR
    assert client("GET", "/v1/clock", operator).json()["in_doubt"] is False, "set right, nothing is left of it"
    clock.step_us += 10 * YEAR
    now = client("POST", "/v1/clock:confirm", operator, json=why).json()
    assert not now["in_doubt"] and now["ahead_us"] < MICROSECONDS
    assert client("GET", "/v1/whoami", auditor).status_code == 401
    with service.reading() as connection:
        found = connection.execute(events.select().where(events.c.kind == "clock-confirmed")).all()
    [leaf] = [json.loads(row.leaf) for row in found]
    assert (leaf["actor"], leaf["reason"], leaf["outage"]) == ("operator", why["reason"], "A")
    assert abs(leaf["ahead_seconds"] - 10 * 365 * 86_400) < 60
    clock.step_us -= 10 * YEAR
    assert client("GET", "/v1/whoami", auditor).status_code == 401


def test_the_command_confirms_a_worker_s_clock_on_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    engine = open_store("sqlite:///kvcustody.db")
    upgrade(engine)
    run = CliRunner().invoke
    assert "no process has stored a time" in str(run(app, ["clock", "show"]).output)
    past = SteppedClock()
    past.step_us = -YEAR
    worker = DeadlineClock(past, Path("kvcustody-clock.json"))  # it has known no other time
    shown = run(app, ["clock", "show", "--json"])
    assert json.loads(shown.stdout)["in_doubt"] is True
    done = run(app, ["clock", "confirm", "--reason", "it was a year slow"])
    assert done.exit_code == 0, done.output
    worker.keep()
    assert abs(worker.utc_us() - SystemClock().utc_us()) < 60 * MICROSECONDS
    again = run(app, ["clock", "confirm", "--reason", "it was a year slow"])
    assert again.exit_code == 2 and "nothing to confirm" in again.output
    with engine.connect() as connection:
        leaves = [json.loads(row.leaf) for row in connection.execute(events.select())]
    engine.dispose()
    [leaf] = [leaf for leaf in leaves if leaf["kind"] == "clock-confirmed"]
    assert leaf["reason"] == "it was a year slow" and leaf["actor"].startswith("local:")
