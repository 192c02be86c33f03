"""A worker behind a control plane puts back keys and receipts of before an erasure: the ledger there knows of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcustody.audit.kinds import ErasureCompleted, Event, OrphanFound
from kvcustody.clock import SystemClock
from kvcustody.errors import ServiceError
from kvcustody.governance.control_plane.connection import ControlPlaneConnection
from kvcustody.governance.control_plane.erasures import RemoteInbox
from kvcustody.governance.erasure.selector import Selector
from standins.redteam.put_back import OBJECTS, Deployment, check_at_start
from standins.service.service_world import Server, Worker, register, ship


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    """Put back as it was before `ada` was erased, receipts too."""
    deployed = Deployment(tmp_path / "worker")
    copy = deployed.copy(receipts=True)
    deployed.place.tier.erase("e", Selector(tenant="acme", subject="ada"), deployed.place.world.clock.now_us())
    assert deployed.opened() == 0
    deployed.put_back(copy, receipts=True)
    yield deployed
    deployed.stop()
    deployed.place.staging.close()


@pytest.fixture
def erased(client: Any, people: Any) -> Callable[[], None]:
    """The erasure of `ada`, asked for and answered as complete by the worker."""

    def erase() -> None:
        worker = Worker()
        assert register(client, people["worker"], worker).status_code == 200
        first = worker.batch([worker.started(), *worker.request("acme", "ada")])
        assert ship(client, people["worker"], worker, first).status_code == 200
        asked = client("POST", "/v1/erasures", people["dpo"], json={"tenant": "acme", "subject": "ada"})
        done = ErasureCompleted(worker.now_us + 1, asked.json()["erasure"], "acme", "complete", 1, 2, 0, "")
        answer = ship(client, people["worker"], worker, worker.batch([done]))
        assert answer.status_code == 200, answer.text

    return erase


@pytest.mark.parametrize("remembers", [False, True], ids=["control: the ledger is put back too", "ledger"])
def test_keys_that_the_control_plane_knows_as_erased_are_destroyed_again(
    deployment: Deployment, erased: Callable[[], None], people: Any, server: Server, remembers: bool
) -> None:
    """With the ledger of that time, too, nothing is left that could tell."""
    if remembers:
        erased()
    with ControlPlaneConnection(server.address, people["worker"]) as connection:
        check_at_start(
            deployment,
            RemoteInbox(connection, 0, clock=SystemClock(), lease_seconds=300),
            ["returned key"] * remembers,
        )
    assert deployment.opened() == (0 if remembers else OBJECTS)


def test_where_it_is_away_at_the_start_they_are_once_it_answers(
    deployment: Deployment, erased: Callable[[], None], people: Any, server: Server
) -> None:
    erased()
    events: list[Event] = []
    facade = _Facade(deployment, events)
    with ControlPlaneConnection(server.address, people["worker"]) as connection:
        inbox = RemoteInbox(connection, 0, clock=SystemClock(), lease_seconds=300)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(connection, "get", _away)
            facade.erasures.destroy_returned(inbox.completed)
        assert deployment.opened() == OBJECTS, "control: nobody could be asked"
        inbox.look(facade)  # type: ignore[arg-type]
    assert deployment.opened() == 0 and [type(event) for event in events] == [OrphanFound]


def _away(*_: object, **__: object) -> None:
    raise ServiceError("unreachable", problem="unreachable")


class _Facade:
    """Does at once what is handed to it."""

    def __init__(self, deployment: Deployment, found: list[Event]) -> None:
        self.erasures = deployment.runner(found)

    def call(self, command: Any) -> Any:
        return command(self)

    def erase(self, *_: object, **__: object) -> None: ...

    def follow_keys(self, *_: object) -> None: ...

    def end_keys_in_service(self) -> None: ...

    def restrict(self, *_: object) -> None: ...

    def renew_custody(self, *_: object) -> None: ...

    def order_enforcement(self, *_: object) -> None: ...
