"""Workers that do not come back: closed by a bound of silence, or by two operators; and those that do come back."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from sqlalchemy import select

from kvcustody.audit.evidence.coverage.summary import coverage
from kvcustody.audit.store.schema.ledger import events, incarnations
from kvcustody.audit.verify.ledger.fsck_ledger import fsck
from kvcustody.clock import VirtualClock
from kvcustody.governance.service.access.roles import Role
from kvcustody.governance.service.service import Service, open_service
from standins.service.service_world import OFFSET_US, Worker, register, settings_in, ship

SECOND = 1_000_000
HOUR, DAY = 3600 * SECOND, 86_400 * SECOND


class World:
    """Control planes over one ledger whose clock is moved, and workers that are heard when a test says so."""

    def __init__(self, folder: Path, make_client: Any) -> None:
        self.clock = VirtualClock(utc_us=OFFSET_US + 60 * SECOND)
        self.folder = folder
        self.opened: list[Service] = []
        self.service = self.open()
        self.client = make_client(self.service)
        roles = {
            "worker": Role.WORKER,
            "another": Role.WORKER,
            "olive": Role.OPERATOR,
            "oscar": Role.OPERATOR,
        }
        for name, role in roles.items():
            self.service.principals.enrol(name, [role], by="test")
        issue = self.service.principals.issue_key
        self.people = {name: issue(name, days=90, by="test").key for name in roles}

    def open(self, **more: Any) -> Service:
        self.opened.append(open_service(settings_in(self.folder, **more), clock=self.clock))
        return self.opened[-1]

    def worker(self) -> Worker:
        """One that has two requests open, with two blocks each."""
        made = Worker()
        assert register(self.client, self.people["worker"], made).status_code == 200
        two = [made.started(), made.request("acme")[0], made.request("acme")[0]]
        self.ship(made, two)
        return made

    def ship(self, worker: Worker, what: list[Any]) -> dict[str, Any]:
        answer = ship(self.client, self.people["worker"], worker, worker.batch(what))
        assert answer.status_code == 200, answer.text
        self.service.fleet.flush(now=True)
        found: dict[str, Any] = answer.json()
        return found

    def close(self, worker: Worker, who: str, **more: Any) -> Any:
        body = {"incarnation": worker.incarnation, "spill_lost": True, "reason": f"{who} saw it"} | more
        return self.client("POST", "/v1/workers:close", self.people[who], json=body)

    def leaves(self, kind: str) -> list[dict[str, Any]]:
        query = select(events.c.leaf).where(events.c.kind == kind).order_by(events.c.idx)
        with self.service.reading() as connection:
            return [orjson.loads(bytes(leaf)) for leaf in connection.scalars(query)]

    def end(self, worker: Worker) -> str | None:
        query = select(incarnations.c.end).where(incarnations.c.uuid == worker.incarnation)
        with self.service.reading() as connection:
            found: str | None = connection.scalar(query)
        return found

    def silent_for(self, us: int, *services: Service) -> None:
        """So long nothing comes, and control planes look every now and then."""
        for _ in range(4):
            self.clock.advance(us // 4)
            for service in services or (self.service,):
                service.dead_workers.turn()


@pytest.fixture
def world(tmp_path: Path, migrated: Path, make_client: Any) -> Iterator[World]:
    shutil.copy(migrated, tmp_path / "ledger.db")
    made = World(tmp_path, make_client)
    yield made
    for service in made.opened:
        service.close()


def test_who_is_silent_for_longer_than_the_bound_is_closed_as_unproven(world: World) -> None:
    dead, other = world.worker(), Worker("another")
    key = world.people["another"]
    register(world.client, key, other)
    world.silent_for(7 * DAY)  # not longer yet
    assert world.end(dead) is None, "control"
    ship(world.client, key, other, other.batch([other.started()]))  # this one speaks
    world.service.fleet.flush(now=True)
    world.silent_for(2 * HOUR)
    assert world.end(dead) == "died" and world.end(other) is None
    (died,) = world.leaves("worker-died")
    assert (died["closed_by"], died["actor"], died["bound_seconds"]) == (
        "silence",
        "control-plane",
        7 * 86_400,
    )
    assert died["silent_seconds"] >= 7 * 86_400 and not died["spill_lost"]
    assert (died["residencies"], died["blocks"]) == (2, 4)
    with world.service.reading() as connection:
        row = coverage(connection).total
        assert (row.unproven, row.in_time) == (4, 0)
        assert fsck(connection).ok


def test_it_returns_and_goes_on_where_it_was(world: World) -> None:
    cut_off = world.worker()
    world.silent_for(8 * DAY)
    world.silent_for(2 * HOUR)
    assert world.end(cut_off) == "died"
    assert world.ship(cut_off, cut_off.request("acme"))["added"] == 4  # none is refused
    assert world.end(cut_off) is None
    assert [one["of_incarnation"] for one in world.leaves("worker-returned")] == [cut_off.incarnation]
    with world.service.reading() as connection:
        assert coverage(connection).total.in_time == 2, "what it proves counts"
        assert fsck(connection).ok
    world.silent_for(HOUR)
    assert world.end(cut_off) is None, "it was heard"
    world.silent_for(8 * DAY)
    world.silent_for(2 * HOUR)
    assert world.end(cut_off) == "died" and len(world.leaves("worker-died")) == 2


def test_an_outage_of_the_control_plane_makes_nobody_silent(world: World) -> None:
    worker = world.worker()
    world.service.close()
    world.clock.advance(30 * DAY)  # nobody could speak
    world.service = world.open()
    world.service.dead_workers.turn()
    world.clock.advance(HOUR // 2)
    world.service.dead_workers.turn()
    assert world.end(worker) is None
    world.silent_for(HOUR)
    assert world.end(worker) == "died", "control: it had its chance"


def test_a_clock_in_doubt_closes_nobody(world: World) -> None:
    worker = world.worker()
    world.service.clock.in_doubt = True
    world.silent_for(9 * DAY)
    assert world.end(worker) is None
    world.service.clock.in_doubt = False
    world.silent_for(2 * HOUR)
    assert world.end(worker) == "died", "control"


def test_with_a_bound_of_0_nobody_is_closed_for_silence(world: World) -> None:
    world.service.close()
    world.service = world.open(worker_silence_days=0)
    worker = Worker()
    world.service.fleet.register("worker", worker.incarnation, 5)
    world.silent_for(4000 * DAY)
    assert world.end(worker) is None


@pytest.mark.system("two control planes close one dead worker twice")
def test_several_control_planes_close_it_once(world: World) -> None:
    dead = world.worker()
    other = world.open(name="second", state_path=world.folder / "state-2", listen=f"unix:{world.folder}/2.sock",
                       signing_key_path=world.folder / "none.key")  # fmt: skip
    world.silent_for(8 * DAY, world.service, other)
    world.silent_for(2 * HOUR, other, world.service)
    assert world.end(dead) == "died" and len(world.leaves("worker-died")) == 1
    assert len(world.leaves("custody-ended")) == 1


def test_two_operators_declare_a_process_dead(world: World) -> None:
    dead = world.worker()
    refused = world.close(dead, "olive")
    assert refused.status_code == 409 and "is running" in refused.text, "it was heard just now"
    world.clock.advance(90 * SECOND)
    assert world.close(dead, "olive").json()["outcome"] == "asked"
    assert world.close(dead, "olive").json()["outcome"] == "asked", "the same person twice is one person"
    assert world.end(dead) is None
    assert world.close(dead, "oscar").json()["outcome"] == "closed"
    (died,) = world.leaves("worker-died")
    assert (died["closed_by"], died["actor"], died["approver"]) == ("declared", "olive", "oscar")
    assert died["reason"] == "olive saw it; oscar saw it" and died["spill_lost"] and died["blocks"] == 4
    assert world.close(dead, "oscar").status_code == 404, "it is closed"
    assert {one["actor"] for one in world.leaves("worker-closing-asked")} == {"olive"}


def test_what_one_asked_for_is_forgotten_after_a_day(world: World) -> None:
    dead = world.worker()
    world.clock.advance(90 * SECOND)
    assert world.close(dead, "olive").json()["outcome"] == "asked"
    world.clock.advance(DAY + SECOND)
    assert world.close(dead, "oscar").json()["outcome"] == "asked"
    assert world.close(dead, "olive").json()["outcome"] == "closed", "control: within a day"


@pytest.mark.parametrize("wrong", [{"spill_lost": False}, {"reason": ""}, {"incarnation": "x"}])
def test_nothing_is_declared_by_halves(world: World, wrong: dict[str, Any]) -> None:
    dead = world.worker()
    world.clock.advance(90 * SECOND)
    assert world.close(dead, "olive", **wrong).status_code == 422
    assert world.leaves("worker-closing-asked") == []


def test_a_worker_cannot_say_that_people_or_silence_closed_another(world: World) -> None:
    from kvcustody.audit.kinds import WorkerDied, WorkerReturned

    old, new = world.worker(), world.worker()
    forged: Callable[..., Any] = lambda **more: WorkerDied(  # noqa: E731
        new.now_us, "worker", old.incarnation, "exit", 0, 0, **more
    )
    for wrong in (
        forged(closed_by="declared", actor="a", approver="b"),
        forged(),
        WorkerReturned(new.now_us, "worker", old.incarnation),
    ):
        answer = ship(world.client, world.people["worker"], new, new.batch([wrong]))
        assert answer.status_code == 426 and answer.json()["kind"] in ("worker-died", "worker-returned"), answer.text
        new.sequence -= 1
    assert world.ship(new, [new.started()])["added"] == 1, "control: of itself it may say that it began"
