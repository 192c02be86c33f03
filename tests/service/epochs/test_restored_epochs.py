"""A control plane whose database was restored: no name comes back that an erasure ended, and nothing is restarted."""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcustody.clock import SystemClock
from kvcustody.errors import ServiceError
from kvcustody.governance.control_plane.connection import ControlPlaneConnection
from kvcustody.governance.control_plane.epoch_feed import EpochFeed
from kvcustody.governance.edge.erase_epochs import Epochs, KnownEpochs
from kvcustody.governance.edge.worker_epochs import WorkerEpochs
from kvcustody.governance.service.service import Service
from kvcustody.integrations.door.door_metrics import DoorMetrics
from standins.integrations.door_world import Signers, make_signers
from standins.integrations.fleet_edge import FleetEdge
from standins.service.epoch_fleet import Fleet, serve
from standins.service.service_world import Server

ALICE = "alice"


class Plane:
    """A control plane of which the database is saved and put back."""

    def __init__(self, folder: Path, make_service: Any, make_client: Any, make_people: Any) -> None:
        self.folder, self._make, self._client, self._people = folder, make_service, make_client, make_people
        self.fleet = self._begin()

    def _begin(self) -> Fleet:
        service = self._make()
        return serve(service, self._client(service), self._people(service))

    def save(self) -> None:
        source, copy = (sqlite3.connect(self.folder / name) for name in ("ledger.db", "copy.db"))
        source.backup(copy)
        source.close()
        copy.close()

    def end(self) -> None:
        self.fleet.service.stopping.set()
        self.fleet.server.close()
        self.fleet.service.close()

    def restore(self) -> None:
        """The copy takes the database's place; the keys of people go on."""
        keys = self.fleet.people.keys
        self.end()
        for path in self.folder.glob("ledger.db*"):
            path.unlink()
        (self.folder / "copy.db").rename(self.folder / "ledger.db")
        service = self._make()
        people = self._people(service)
        people.keys.update(keys)
        client = self._client(service)
        client._keys = itertools.count(100)  # the restored database has the answers to the first ones
        self.fleet = Fleet(service, client, people, Server(service))


class Follower:
    """A door or a worker that goes on while the control plane is put back."""

    def __init__(self, plane: Plane, who: str) -> None:
        self.plane, self.who = plane, who
        self.feed = EpochFeed(None, SystemClock(), lease_seconds=300)  # type: ignore[arg-type]
        self.ask()

    def ask(self) -> KnownEpochs:
        with ControlPlaneConnection(self.plane.fleet.server.address, self.plane.fleet.people[self.who]) as connection:
            self.feed._connection = connection
            self.feed.ask()
        known = self.feed.known()
        assert known is not None
        return known


@pytest.fixture
def plane(tmp_path: Path, make_service: Callable[..., Service], make_client: Any, make_people: Any) -> Iterator[Plane]:
    made = Plane(tmp_path, make_service, make_client, make_people)
    yield made
    made.fleet.service.stopping.set()
    made.fleet.server.close()


@pytest.fixture(scope="module")
def signers() -> Signers:
    return make_signers()


def epochs(known: KnownEpochs) -> Epochs:
    return known.of("corp", "acme", ALICE)


@pytest.mark.parametrize("erased_since", [0, 1, 3], ids=["shorter", "as long", "longer"])
def test_a_restored_database_ends_every_name_and_brings_none_back(
    plane: Plane, tmp_path: Path, signers: Signers, erased_since: int
) -> None:
    plane.fleet.erase("ana")
    door, worker = Follower(plane, "door"), Follower(plane, "worker")
    epochs_of_worker = WorkerEpochs()
    epochs_of_worker.take(worker.ask())
    edge = FleetEdge(tmp_path, signers, epochs=door.feed.known, metrics=DoorMetrics())
    first = edge.send(edge.clients.alice).json["cache_salt"]
    plane.save()
    before = door.ask()
    plane.fleet.erase(ALICE)  # it is lost
    erased = worker.ask()
    epochs_of_worker.take(erased)
    assert epochs(erased).private > 0 == epochs(before).private, "control"
    newest = erased.epochs.version
    plane.restore()
    while erased_since and plane.fleet.service.epochs.page(after=0).version < newest + erased_since - 1:
        plane.fleet.erase("ana")
    kept = plane.fleet.service.epochs.page(after=0)
    answer = worker.ask()
    assert epochs(answer).fleet > newest and answer.epochs.version > kept.version
    assert epochs_of_worker.take(answer) is not None
    assert epochs_of_worker.of("corp", "acme", ALICE) == epochs(answer)
    assert epochs(door.ask()) == epochs(answer), "the door, which knew less, follows the same"
    names = {first, edge.send(edge.clients.alice).json["cache_salt"]}
    assert len(names) == 2
    again = worker.ask()
    assert again.epochs.version == door.ask().epochs.version == answer.epochs.version, "once"
    plane.fleet.erase(ALICE)
    assert epochs(worker.ask()).private > epochs(answer).fleet


def test_without_the_raise_the_older_snapshot_is_refused(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a control plane that raises nothing is not followed."""
    plane.save()
    plane.fleet.erase(ALICE)
    worker = Follower(plane, "worker")
    plane.restore()
    monkeypatch.setattr(Service, "raise_above", lambda *_: None)
    with pytest.raises(ServiceError, match="is lower than"):
        worker.ask()
    known = worker.feed.last_known()
    assert known is not None and epochs(known).private > 0, "it acts by what it knows until its lease ends"


def test_who_lies_of_what_was_lost_is_refused_or_bounded(plane: Plane) -> None:
    ask, key = plane.fleet.client, plane.fleet.people["worker"]
    now_us = plane.fleet.service.clock.utc_us()
    assert ask("GET", f"/v1/worker/epochs?lost={now_us + 10**12}", key).status_code == 409
    assert ask("GET", "/v1/worker/epochs?lost=5", key).json()["version"] >= now_us
    version = ask("GET", "/v1/worker/epochs?lost=5", key).json()["version"]
    assert ask("GET", f"/v1/worker/epochs?lost={version}", key).status_code == 503, "once a minute at most"
    assert ask("GET", "/v1/worker/epochs", key).json()["version"] == version
    assert ask("GET", "/v1/worker/epochs?lost=5", plane.fleet.people["auditor"]).status_code == 403


def test_a_raise_for_a_restore_is_on_record(plane: Plane) -> None:
    plane.fleet.service.raise_above(1)
    found = plane.fleet.client("GET", "/v1/audit/events?kind=epoch-raised", plane.fleet.people["auditor"])
    assert [(one["leaf"]["scope"], one["leaf"]["erasure"]) for one in found.json()["items"]] == [("fleet", "")]
