"""The door's feed of erase epochs: from a control plane's answers to what goes on of a request, metrics and record."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvcustody.clock import MICROSECONDS, VirtualClock
from kvcustody.errors import ServiceError
from kvcustody.governance.control_plane import epoch_feed
from kvcustody.governance.edge.erase_epochs import (
    EpochScope,
    EpochTags,
    EraseEpochs,
    KnownEpochs,
    RaisedEpoch,
)
from kvcustody.governance.edge.name_scopes import NameScopes
from kvcustody.integrations.door.door_metrics import DoorMetrics
from kvcustody.integrations.door.door_record import DoorRecord
from kvcustody.integrations.door.follow_epochs import EpochsOfDoor, follow_epochs
from kvcustody.policies.document.model import Scope
from standins.integrations.door_world import Signers, make_signers
from standins.integrations.fleet_edge import BY_SUBJECT, FleetEdge

KEY = bytes(32)
TAGS = EpochTags(KEY)
ALICE = RaisedEpoch(1, TAGS.of(EpochScope("api-keys", "acme", "alice")))


class ControlPlane:
    """Answers as the API does: what was raised after the asked version, in one page."""

    def __init__(self) -> None:
        self.raised: list[RaisedEpoch] = []
        self.is_away = False
        self.scopes = BY_SUBJECT
        self.asked: list[int] = []

    def get(self, path: str, **query: Any) -> dict[str, Any]:
        if self.is_away:
            raise ServiceError("the control plane is away")
        self.asked.append(query["known"])
        version = len(self.raised)
        return {
            "key": KEY.hex(),
            "version": version,
            "floor": 0,
            "digest": EraseEpochs(self.raised, version=version).digest,
            "raised": [[one.number, one.tag.hex()] for one in self.raised[query["after"] :]],
            "namespace_days": 30,
            "scopes": None if self.scopes.digest == query["scopes"] else self.scopes.data(),
        }


@pytest.fixture(scope="module")
def signers() -> Signers:
    return make_signers()


def shown(metrics: DoorMetrics, name: str) -> float | None:
    return metrics.registry.get_sample_value(f"kvcustody_door_epochs_{name}")


def test_an_erasure_ends_the_name_of_its_subject(
    tmp_path: Path, signers: Signers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The feed asks once as it starts, and here when it is told to: its thread does not run."""
    monkeypatch.setattr(epoch_feed.EpochFeed, "start", lambda self: self._try(wait_seconds=0))
    plane, metrics, feeds = ControlPlane(), DoorMetrics(), list[epoch_feed.EpochFeed]()
    began = epoch_feed.EpochFeed.__init__

    def kept(self: epoch_feed.EpochFeed, *given: Any, **more: Any) -> None:
        began(self, *given, spread=float, **more)
        feeds.append(self)

    monkeypatch.setattr(epoch_feed.EpochFeed, "__init__", kept)
    clock = VirtualClock()
    with ExitStack() as stack:
        epochs = follow_epochs(plane, clock, metrics, stack, lease_seconds=300)  # type: ignore[arg-type]
        (feed,) = feeds
        fleet = FleetEdge(tmp_path, signers, epochs=epochs, metrics=metrics, scopes=None)
        before = fleet.send(fleet.clients.alice).json["cache_salt"]
        assert fleet.send(fleet.clients.alice).json["cache_salt"] == before and shown(metrics, "version") == 0
        plane.raised.append(ALICE)
        clock.advance(20 * MICROSECONDS)
        assert shown(metrics, "age_seconds") == 20
        feed.ask()
        assert fleet.send(fleet.clients.alice).json["cache_salt"] != before
        assert (shown(metrics, "version"), shown(metrics, "age_seconds")) == (1, 0)
        session = {"x-kvcustody-session": "s1"}
        assert len({fleet.send(fleet.clients.alice, headers=each).json["cache_salt"] for each in ({}, session)}) == 1
        for scopes, names in ((NameScopes(Scope.SESSION), 3), (NameScopes(Scope.TENANT), 1), (BY_SUBJECT, 2)):
            plane.scopes = scopes
            feed.ask()
            one = [fleet.send(fleet.clients.alice, headers=each).json["cache_salt"] for each in ({}, session)]
            other = fleet.send(fleet.clients.acme, headers={"x-kvcustody-subject": "bob"}).json["cache_salt"]
            assert len({*one, other}) == names, "a rule change takes effect at the door"
        feed.ask()
        assert not fleet.edge.lacks(), "scopes that are known are not said again"
        plane.is_away = True
        clock.advance(299 * MICROSECONDS)
        assert not fleet.edge.lacks()
        clock.advance(MICROSECONDS)
        assert fleet.edge.lacks() and metrics.registry.get_sample_value("kvcustody_door_past_lease_total") == 0
        names = {fleet.send(fleet.clients.alice).json["cache_salt"] for _ in range(3)}
        assert len(names) == metrics.registry.get_sample_value("kvcustody_door_past_lease_total") == 3


def test_a_door_opens_where_the_control_plane_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    plane, metrics = ControlPlane(), DoorMetrics()
    plane.is_away = True
    with ExitStack() as stack:
        epochs = follow_epochs(plane, VirtualClock(), metrics, stack, lease_seconds=300)  # type: ignore[arg-type]
        assert epochs() is None and shown(metrics, "age_seconds") == -1


class Versions:
    """A writer that keeps the version of each leaf."""

    def __init__(self, recorded: list[int]) -> None:
        self.recorded = recorded

    def submit(self, events: Any) -> int:
        self.recorded += [one.version for one in events]
        return len(self.recorded)


def test_each_newer_version_is_recorded_at_most_one_a_second() -> None:
    clock, recorded = VirtualClock(), list[int]()
    taken = EpochsOfDoor(clock, DoorRecord(Versions(recorded), clock, "door"))  # type: ignore[arg-type]
    for version, waited_ms in ((0, 0), (0, 2000), (1, 0), (2, 400), (3, 400), (4, 400), (4, 5000)):
        clock.advance(waited_ms * 1000)
        taken.take(KnownEpochs(EraseEpochs(version=version), TAGS), 0)
    assert recorded == [0, 1, 4]
