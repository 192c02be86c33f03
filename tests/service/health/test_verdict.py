"""Each thing that can be wrong with a service, planted, and told alike by health, readiness, metrics and the inbox."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import text

from kvcustody import guarding_thread
from kvcustody.audit.store.database.engine import VERSION_TABLE
from kvcustody.audit.tlog.checkpoint_signer import SignerStatus
from kvcustody.errors import LedgerError
from kvcustody.governance.service.access.roles import Role
from kvcustody.governance.service.health import verdict
from kvcustody.governance.service.health.verdict import NOT_READY, TroubleKind
from kvcustody.governance.service.service import Service
from kvcustody.guarding_thread import GuardingThread
from standins.service.service_world import Worker, register, ship


class World:
    """A service, and what each place says of it."""

    def __init__(self, service: Service, client: Any, people: Any) -> None:
        self.service, self.client, self.people = service, client, people
        self.operator = people["operator"]

    def metrics(self) -> dict[str, float]:
        answer = self.client("GET", "/metrics", self.operator)
        assert answer.status_code == 200, answer.text
        found = re.findall(r'kvcustody_service_trouble\{kind="(\w+)"\} (\S+)', answer.text)
        return {kind: float(value) for kind, value in found}

    def ready(self) -> bool:
        return bool(self.client("GET", "/health/ready").status_code == 200)

    def told(self) -> dict[str, set[str]]:
        """The kinds that each place names."""
        health = self.client("GET", "/v1/health", self.operator).json()
        assert (health["status"] == "ok") is not bool(health["troubles"])
        items = self.client("GET", "/v1/inbox", self.operator).json()["items"]
        return {
            "health": {one["kind"] for one in health["troubles"]},
            "metrics": {kind for kind, value in self.metrics().items() if value},
            "inbox": {one["about"] for one in items if one["kind"] == "service"},
        }


@pytest.fixture
def world(make_service: Callable[..., Service], make_client: Any, make_people: Any) -> World:
    service = make_service(root_interval_seconds=0.2)
    return World(service, make_client(service), make_people(service))


def until(holds: Callable[[], Any]) -> Any:
    ends = time.monotonic() + 20
    while not (found := holds()):
        assert time.monotonic() < ends
        time.sleep(0.02)
    return found


def batches(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full for what workers hand in; the refusal stays until a batch is committed."""
    key, worker = world.people.add("gpu-0", Role.WORKER), Worker("gpu-0")
    assert register(world.client, key, worker).status_code == 200
    ingest = world.service.ingest
    assert ship(world.client, key, worker, worker.batch([worker.started()])).status_code == 200

    def full(*given: Any, **named: Any) -> Any:
        raise LedgerError("the disk is full")

    monkeypatch.setattr(ingest, "_all_new", full)
    monkeypatch.setattr(ingest, "_commit_one", full)
    assert ship(world.client, key, worker, worker.batch(worker.request("acme"))).status_code == 503


def signer_refuses(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = SignerStatus(4, 1, "roots differ", "")
    monkeypatch.setattr(world.service.signer, "status", lambda: refused)


def signer_gone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    signer = world.service.signer
    assert signer is not None
    signer.close()
    monkeypatch.setattr(signer, "_sign", lambda: None)
    monkeypatch.setattr(world.service.verdict, "_signed_within_seconds", 0.1)
    world.people.add("somebody", Role.WORKER)  # a leaf
    until(lambda: any(one.kind is TroubleKind.SIGNER for one in world.service.verdict.troubles()))


def clock(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    wall = world.service.clock._wall

    class Ahead:
        def utc_us(self) -> int:
            return wall.utc_us() + 400 * 86_400_000_000

    monkeypatch.setattr(world.service.clock, "_wall", Ahead())


def schema(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with world.service.engine.begin() as connection:
        connection.execute(text(f"UPDATE {VERSION_TABLE} SET version_num = '9999'"))
    time.sleep(0.6)  # what was read before is fresh so long


def thread(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarding_thread, "_failing", type(guarding_thread._failing)())

    def fails() -> None:
        raise LedgerError("it fails")

    made = GuardingThread(fails, name="planted", goes_on=False)
    monkeypatch.setattr(threading, "excepthook", lambda *_: None)
    made.start()
    made.join()
    monkeypatch.setattr(world, "thread", made, raising=False)  # nobody else holds it


def unsealed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world.service.verdict, "_root_interval_seconds", -1.0)  # any age is too old
    time.sleep(0.6)


PLANTED = [
    (batches, TroubleKind.BATCHES),
    (signer_refuses, TroubleKind.SIGNER),
    (signer_gone, TroubleKind.SIGNER),
    (clock, TroubleKind.CLOCK),
    (thread, TroubleKind.THREAD),
    (unsealed, TroubleKind.UNSEALED),
]


def test_a_service_in_order_says_so_and_every_series_is_there(world: World) -> None:
    """Control for all that follows: nothing is told of, and a first scrape has every kind."""
    assert world.metrics() == {kind.value: 0.0 for kind in TroubleKind}
    assert world.told() == {"health": set(), "metrics": set(), "inbox": set()} and world.ready()


@pytest.mark.parametrize(("plant", "kind"), PLANTED, ids=lambda one: getattr(one, "__name__", None))
def test_what_is_wrong_is_told_alike_everywhere(
    world: World, monkeypatch: pytest.MonkeyPatch, plant: Callable[..., None], kind: TroubleKind
) -> None:
    plant(world, monkeypatch)
    kinds = {kind.value} | ({"ledger"} if kind is TroubleKind.THREAD else set())  # its writer admits nothing then
    assert world.told() == dict.fromkeys(("health", "metrics", "inbox"), kinds)
    assert world.ready() is (kind not in NOT_READY)


def test_another_schema_keeps_requests_away(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    schema(world, monkeypatch)
    assert {kind for kind, value in world.metrics().items() if value} >= {"schema"}
    assert not world.ready()


@pytest.fixture
def silent(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A database that takes every question and answers none, for the probe and for whoever looks a key up."""
    assert world.metrics()["database"] == 0.0, "control: the key was found valid, and the database answers"
    answers = threading.Event()

    def waits(*given: Any, **named: Any) -> Any:
        answers.wait(60)
        raise LedgerError("no answer")

    monkeypatch.setattr(verdict, "PATIENCE_SECONDS", 0.3)
    monkeypatch.setattr(world.service.verdict._probe, "_once", waits)
    monkeypatch.setattr(world.service.principals, "by_key", waits)
    time.sleep(1.1)  # until the key has to be looked up again
    yield world
    answers.set()


def test_a_silent_database_holds_no_answer_up(silent: World) -> None:
    """Each within its bound and a margin for a busy machine, though nobody can look anything up."""
    for ask, expected in (
        (lambda: silent.client("GET", "/health/live").status_code, 200),
        (lambda: silent.client("GET", "/health/ready").status_code, 503),
        (lambda: silent.client("GET", "/metrics", silent.operator).status_code, 200),
        (lambda: silent.client("GET", "/v1/health", silent.operator).status_code, 503),
    ):
        answers: list[int] = []
        asking = threading.Thread(target=lambda ask=ask, answers=answers: answers.append(ask()), daemon=True)
        asking.start()
        asking.join(20)  # the database would take 60 s
        assert answers == [expected]
    assert silent.metrics()["database"] == 1.0
    said = silent.client("GET", "/v1/health", silent.operator).json()["detail"]
    assert "no answer for" in said


def test_only_who_was_known_is_told_metrics_without_a_database(silent: World) -> None:
    """Control: a key that was never shown is looked up, and waits with the database; another operation too."""
    authenticator = silent.service.authenticator
    known, stranger = (f"Bearer {key}" for key in (silent.operator, silent.operator[:-1] + "A"))
    assert authenticator.remembered(known) is not None and authenticator.remembered(stranger) is None
    assert authenticator.known(known) is None, "for nothing else"
    silent.service.principals.narrowings += 1
    assert authenticator.remembered(known) is None, "what this process narrowed counts at once"
