"""Questions that are held open: what they cost while nothing changes, and that whatever changes ends them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import event

from kvcustody.audit.kinds import WorkerStopped
from kvcustody.audit.store.schema.service import service_keys, service_scan_orders
from kvcustody.governance.service.access.roles import Role
from kvcustody.governance.service.held import held_questions
from kvcustody.governance.service.service import Service
from standins.service.service_world import Worker, register, ship

_QUESTIONS = (
    "/v1/worker/erasures?wait=30&keys=0",
    "/v1/worker/policy/records?wait=30",
    "/v1/worker/scans?wait=30",
)


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_questions, "LOOK_SECONDS", 0.02)


def lived(service: Service, client: Any, key: str, name: str, lives: int) -> Worker:
    """A worker of which so many processes have ended, and one runs."""
    for _ in range(lives):
        worker = Worker(name)
        assert register(client, key, worker).status_code == 200
        stopped = WorkerStopped(worker.now_us + 1, name, "stopped", 0, (0,))
        batch = worker.batch([worker.started(), stopped])
        assert ship(client, key, worker, batch).status_code == 200
    worker = Worker(name)
    assert register(client, key, worker).status_code == 200
    assert ship(client, key, worker, worker.batch([worker.started()])).status_code == 200
    return worker


class Held:
    """Questions that are held open, each on a thread and a loop of its own."""

    def __init__(self, service: Service, make_client: Any, key: str, paths: Any) -> None:
        self._service = service
        self.answers: dict[str, Any] = {}
        clients = {path: make_client(service) for path in paths}
        self.threads = {path: threading.Thread(target=self._ask, args=(clients[path], path, key)) for path in paths}
        for thread in self.threads.values():
            thread.start()
        self.until(lambda: len(service.held._waiting) == len(self.threads))

    def _ask(self, client: Any, path: str, key: str) -> None:
        self.answers[path] = client("GET", path, key)

    def until(self, holds: Callable[[], bool]) -> None:
        ends_at = time.monotonic() + 20
        while not holds():
            assert time.monotonic() < ends_at
            time.sleep(0.005)

    def end(self) -> None:
        self._service.stopping.set()
        for thread in self.threads.values():
            thread.join(20)
        self._service.stopping.clear()


def looks(service: Service, number: int) -> None:
    """Wait until the ledger was looked at so many times more."""
    seen, counted = service.held._look, [0]

    def look() -> Any:
        counted[0] += 1
        return seen()

    service.held._look = look
    ends_at = time.monotonic() + 20
    while counted[0] < number:
        assert time.monotonic() < ends_at
        time.sleep(0.005)
    service.held._look = seen


def test_a_held_question_asks_for_nothing_while_nothing_changes(
    service: Service, client: Any, people: Any, make_client: Any
) -> None:
    """However often the ledger is looked at, only the looks ask it, one statement each; control: a change asks."""
    key = people.add("patient", Role.WORKER)
    lived(service, client, key, "patient", 1)
    held = Held(service, make_client, key, _QUESTIONS)
    try:
        looks(service, 2)  # the first finds what came before
        statements: list[str] = []
        watched = service.reader, service.engine
        listener = lambda *call: statements.append(call[2])  # noqa: E731
        for engine in watched:
            event.listen(engine, "before_cursor_execute", listener)
        try:
            looks(service, 5)
            found = [one for one in statements if "scan_orders" in one and "erasures" not in one]
            assert not found, "a question asked though nothing had changed"
            assert sum("policy_release" in one for one in statements) >= 5, "control: the looks were made"
            assert not [one for one in statements if "events.leaf" in one]
            service.changed()
            held.until(lambda: any("scan_orders" in one and "erasures" not in one for one in statements))
        finally:
            for engine in watched:
                event.remove(engine, "before_cursor_execute", listener)
        assert not held.answers
    finally:
        held.end()
    assert {answer.status_code for answer in held.answers.values()} == {200}


def test_what_another_process_writes_ends_a_held_question(
    service: Service, client: Any, people: Any, make_client: Any
) -> None:
    """A scan order by a row alone, as another control plane writes it; the others stay open."""
    key = people.add("waiting", Role.WORKER)
    lived(service, client, key, "waiting", 0)
    held = Held(service, make_client, key, _QUESTIONS)
    try:
        now_us = service.clock.utc_us()
        row = {"scan_order": "ab" * 16, "worker": "waiting", "actor": "olive", "at_us": now_us}
        with service.engine.begin() as connection:
            connection.execute(service_scan_orders.insert().values(**row, deadline_us=now_us + 10**9))
        held.threads[_QUESTIONS[2]].join(20)
        assert held.answers[_QUESTIONS[2]].json()["orders"] == ["ab" * 16]
        assert list(held.answers) == [_QUESTIONS[2]]
    finally:
        held.end()


def test_a_key_that_another_process_revokes_ends_a_held_question(
    service: Service, client: Any, people: Any, make_client: Any
) -> None:
    key = people.add("revoked", Role.WORKER)
    lived(service, client, key, "revoked", 0)
    held = Held(service, make_client, key, _QUESTIONS)
    try:
        with service.engine.begin() as connection:
            mine = service_keys.c.principal == "revoked"
            connection.execute(service_keys.update().where(mine).values(revoked_us=service.clock.utc_us()))
        for thread in held.threads.values():
            thread.join(20)
        assert {answer.status_code for answer in held.answers.values()} == {401}
    finally:
        held.end()


def test_while_the_ledger_cannot_be_looked_at_nobody_is_told_that_nothing_changed(
    service: Service, client: Any, people: Any, make_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its end the question asks anew, and fails as the database does; control: else its first answer is given."""
    key = people.add("blind", Role.WORKER)
    lived(service, client, key, "blind", 0)
    asked: list[str] = []
    owed = service.scans.orders.owed

    def count(worker: str) -> Any:
        asked.append(worker)
        return owed(worker)

    monkeypatch.setattr(service.scans.orders, "owed", count)
    path = "/v1/worker/scans?wait=1"
    looks_ok = Held(service, make_client, key, [path])
    looks(service, 2)
    asked.clear()
    looks_ok.threads[path].join(20)
    assert not asked and looks_ok.answers[path].status_code == 200

    def away() -> Any:
        raise OSError("the database is away")

    monkeypatch.setattr(service.held, "_look", away)
    monkeypatch.setattr(held_questions, "_UNSEEN_SECONDS", 0.05)
    blind = Held(service, make_client, key, [path])
    asked.clear()
    blind.threads[path].join(20)
    assert asked == ["blind"]


def test_a_question_that_is_asked_again_needs_no_database_while_nothing_changed(
    service: Service, client: Any, people: Any, make_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its second wait asks nothing; control: after a change, and for one that does not wait, it is asked."""
    key = people.add("again", Role.WORKER)
    lived(service, client, key, "again", 0)
    asked: list[str] = []
    owed = service.scans.orders.owed
    monkeypatch.setattr(service.scans.orders, "owed", lambda worker: asked.append(worker) or owed(worker))
    path = "/v1/worker/scans?wait=30"
    for changes in (True, False, True):
        if changes:
            service.changed()
        asked.clear()
        held = Held(service, make_client, key, [path])
        looks(service, 3)
        held.end()
        assert held.answers[path].json() == {"orders": []}
        assert bool(asked) is changes
    assert client("GET", "/v1/worker/scans", key).json() == {"orders": []}
    assert asked[1:], "control: who does not wait asks"
