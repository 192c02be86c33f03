"""Many workers that start again at once: no registration waits for what another process left, and none is refused."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from sqlalchemy import select

from kvcustody.audit.store.schema.ledger import incarnations
from kvcustody.governance.api.app import create_app
from kvcustody.governance.api.http import long_poll
from kvcustody.governance.service.access.roles import Role
from kvcustody.governance.service.fleet.dead_workers import DeadWorkers
from kvcustody.governance.service.service import Service, open_local_service
from standins.service.service_world import OFFSET_US, Worker, register, ship


def end_of(service: Service, incarnation: str) -> str | None:
    query = select(incarnations.c.end).where(incarnations.c.uuid == incarnation)
    with service.reading() as connection:
        found: str | None = connection.scalar(query)
    return found


def started(service: Service, client: Any, key: str, name: str) -> Worker:
    made = Worker(name)
    assert register(client, key, made).status_code == 200
    assert ship(client, key, made, made.batch([made.started(), made.request("acme")[0]])).status_code == 200
    return made


def test_a_registration_does_not_wait_for_its_predecessors_end(
    service: Service, client: Any, people: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The closing is held up; the successor is there, and then the predecessor has ended with its custody."""
    key = people.add("again", Role.WORKER)
    dead = started(service, client, key, "again")
    proceed, close = threading.Event(), DeadWorkers._close

    def held_up(self: DeadWorkers, *given: Any) -> bool:
        assert proceed.wait(20)
        return close(self, *given)

    monkeypatch.setattr(DeadWorkers, "_close", held_up)
    successor = Worker("again")
    assert register(client, key, successor).status_code == 200
    assert ship(client, key, successor, successor.batch([successor.started()])).status_code == 200
    assert end_of(service, dead.incarnation) is None
    proceed.set()
    until = time.monotonic() + 20
    while end_of(service, dead.incarnation) != "died":
        assert time.monotonic() < until
        time.sleep(0.01)
    assert end_of(service, successor.incarnation) is None


def test_a_command_closes_before_it_goes_on(
    make_service: Callable[..., Service], make_client: Any, make_people: Any
) -> None:
    """Control: who ends right after it has no time behind it."""
    service = make_service()
    client, people = make_client(service), make_people(service)
    key = people.add("gone", Role.WORKER)
    dead = started(service, client, key, "gone")
    settings = service.settings
    service.close()
    with open_local_service(settings) as local:
        local.fleet.register("gone", "ef" * 16, OFFSET_US)
        assert end_of(local, dead.incarnation) == "died"


@pytest.mark.parametrize("keeps_place", [False, True], ids=["apart", "control"])
def test_questions_that_wait_keep_nobody_out(
    make_service: Callable[..., Service],
    make_people: Callable[[Service], Any],
    monkeypatch: pytest.MonkeyPatch,
    keeps_place: bool,
) -> None:
    """Of four places none is taken by eight workers that wait; control: where they keep theirs, half is refused."""
    if keeps_place:
        from contextlib import nullcontext

        monkeypatch.setattr(long_poll, "no_place", nullcontext)
    service = make_service(running_requests_max=4)
    people = make_people(service)
    names = [f"w-{number}" for number in range(8)]
    keys = [people.add(name, Role.WORKER) for name in names]
    operator = people["operator"]
    app = create_app(service)

    async def main() -> tuple[list[int], int]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://testserver") as http:

            async def ask(path: str, key: str) -> int:
                return (await http.get(path, headers={"Authorization": f"Bearer {key}"})).status_code

            held = []
            for number, key in enumerate(keys, 1):
                held.append(asyncio.create_task(ask("/v1/worker/scans?wait=30", key)))
                until = time.monotonic() + 20
                while len(service.held._waiting) + sum(task.done() for task in held) < number:
                    assert time.monotonic() < until
                    await asyncio.sleep(0.005)
            other = await ask("/v1/workers", operator)
            service.stopping.set()
            return list(await asyncio.gather(*held)), other

    answers, other = asyncio.run(main())
    if keeps_place:
        assert (sorted(answers), other) == ([200] * 4 + [503] * 4, 503), "void: they keep others out"
    else:
        assert (answers, other) == ([200] * 8, 200)
    assert service.held.threads.borrowed_tokens == 0


@pytest.mark.system("the pool of a PostgreSQL service that others have emptied")
def test_credentials_are_looked_up_though_every_other_connection_is_taken(
    service_on_each: Service, make_people: Any
) -> None:
    """Every connection of the pool is out, as its own count says."""
    if service_on_each.engine.dialect.name != "postgresql":
        pytest.skip("of a file there is one pool")
    key = make_people(service_on_each).add("patient", Role.WORKER)
    pool = service_on_each.engine.pool
    with ExitStack() as stack:
        taken = 0
        while pool.checkedout() < pool.size() + pool._max_overflow:  # type: ignore[attr-defined]
            stack.enter_context(service_on_each.engine.connect())
            taken += 1
        assert taken, "void: nothing was taken"
        caller = service_on_each.authenticator.caller(f"Bearer {key}", None, "192.0.2.1")
    assert caller.name == "patient"
