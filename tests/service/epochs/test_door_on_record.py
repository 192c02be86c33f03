"""A door on record: what it acts by and its end are leaves, and the list of doors has it."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvcustody.audit.kinds import WorkerStopped
from kvcustody.clock import MICROSECONDS, SystemClock, VirtualClock
from kvcustody.errors import ConfigError
from kvcustody.governance.edge.erase_epochs import KnownEpochs
from kvcustody.governance.identity.principal import Principal
from kvcustody.governance.settings import Settings
from kvcustody.integrations.door.client_hints import ClippedHint, HintBounds
from kvcustody.integrations.door.door_metrics import DoorMetrics
from kvcustody.integrations.door.door_record import DoorRecord, open_door_record
from kvcustody.integrations.door.follow_epochs import follow_epochs
from kvcustody.integrations.identity.from_settings import open_request_gate
from standins.integrations.door_world import Signers, make_signers
from standins.integrations.fleet_edge import FleetEdge, door_key
from standins.service.epoch_fleet import Fleet


@pytest.fixture(scope="module")
def signers() -> Signers:
    return make_signers()


def settings_of(folder: Path, name: str) -> Settings:
    return Settings(worker_name=name, policy_path=folder / "policy.yaml", spill_path=folder / "spill")


def recorded(fleet: Fleet, kind: str) -> list[Any]:
    answer = fleet.client("GET", f"/v1/audit/events?kind={kind}", fleet.people["auditor"])
    assert answer.status_code == 200, answer.text
    return list(answer.json()["items"])


def follow(fleet: Fleet, folder: Path, stack: ExitStack) -> KnownEpochs | None:
    """Open a door's record and epochs; what it acts by."""
    connection, clock = fleet.connect(), SystemClock()
    stack.callback(connection.close)
    record = open_door_record(settings_of(folder, "door"), connection, clock, stack)
    return follow_epochs(connection, clock, DoorMetrics(), stack, lease_seconds=60.0, record=record)()


def test_what_a_door_acts_by_is_on_record_until_its_end(fleet: Fleet, tmp_path: Path) -> None:
    with ExitStack() as stack:
        assert follow(fleet, tmp_path, stack) is not None
    fleet.erase()
    with ExitStack() as stack:
        known = follow(fleet, tmp_path, stack)
        assert known is not None and known.epochs.version > 0
    taken = recorded(fleet, "epochs-taken")
    assert {one["leaf"]["door"] for one in taken} == {"door"}
    assert max(one["leaf"]["version"] for one in taken) == known.epochs.version
    assert len(recorded(fleet, "worker-stopped")) == 2
    doors = fleet.client("GET", "/v1/doors", fleet.people["operator"]).json()["items"]
    assert [(one["name"], one["role"]) for one in doors] == [("door", "door")]


def test_clipped_hints_are_on_record_with_both_values(fleet: Fleet, tmp_path: Path, signers: Signers) -> None:
    with ExitStack() as stack:
        connection = fleet.connect()
        stack.callback(connection.close)
        record = open_door_record(settings_of(tmp_path, "door"), connection, SystemClock(), stack)
        bounds = HintBounds(priority=(-1, 3), retain_seconds=60)
        edge = FleetEdge(tmp_path, signers, record_hints=record.hints, hints=bounds)
        for priority in (2, 9, 9, 10**40):
            action = {"action_id": "a", "action_type": "ann@example.org", "action_version": "1"}
            body = {"prompt": "p", "priority": priority, "kv_hints": {"actions": [action]}}
            passed = edge.send(edge.clients.alice, body).json
            assert passed["priority"] == min(priority, 3) and "kv_hints" not in passed
        assert edge.send(edge.clients.alice, {"prompt": "p", "nvext": {"cache_control": {"ttl": "5m"}}})
    [leaf] = [one["leaf"] for one in recorded(fleet, "hints-clipped")]
    rows = list(zip(leaf["hints"], leaf["asked"], leaf["passed"], leaf["requests_each"], strict=True))
    assert sorted(rows) == [
        ("kv_hints.action", "another", "nothing", 4),
        ("nvext.cache_control.ttl", "300", "60", 1),
        ("priority", "9", "3", 2),
        ("priority", f"{1 << 53}", "3", 1),
    ]
    assert leaf["door"] == "door" and leaf["others"] == 0
    assert "ann@" not in str(recorded(fleet, "hints-clipped"))


class Kept(list[Any]):
    """What a door hands over."""

    def submit(self, events: Any) -> int:
        self.extend(events)
        return len(self)


def test_hints_are_one_leaf_a_minute_of_bounded_rows() -> None:
    clock, kept = VirtualClock(), Kept()
    record = DoorRecord(kept, clock, "door")  # type: ignore[arg-type]
    for asked in range(1, 101):
        clock.advance(MICROSECONDS // 2)
        record.hints([ClippedHint("priority", asked, 0), ClippedHint("osl", 5, 5)])
    assert not kept, "control: a minute has not passed"
    clock.advance(10 * MICROSECONDS)
    record.write_hints()
    record.hints([ClippedHint("priority", 7, 0)])
    record.close()
    [first, last, stopped] = kept
    assert (len(first.hints), first.others, sum(first.requests_each), first.seconds) == (64, 36, 64, 60)
    assert set(first.hints) == {"priority"}, "what went on as it was asked for is not clipped"
    assert (last.asked, last.passed, last.requests_each) == (("7",), ("0",), (1,))
    assert isinstance(stopped, WorkerStopped)


def test_an_engines_own_door_follows_and_acknowledges_nothing(fleet: Fleet, tmp_path: Path) -> None:
    (tmp_path / "identity.yaml").write_text("schema: kvcustody/identity@1\ndoors: {keys: doors.vkeys}\n")
    (tmp_path / "doors.vkeys").write_text(f"{door_key().verifier}\n")
    (tmp_path / "worker.key").write_text(fleet.people["worker"])
    (tmp_path / "worker.key").chmod(0o600)
    settings = Settings(
        policy_path=tmp_path / "policy.yaml",
        identity_path=tmp_path / "identity.yaml",
        scope_token_key_path=tmp_path / "scope.key",
        keyring_path=tmp_path / "keys.json",
        control_plane=fleet.server.address,
        control_plane_key_path=tmp_path / "worker.key",
        clock_path=tmp_path / "clock.json",
    )
    fleet.erase()
    with ExitStack() as stack:
        gate = open_request_gate(settings, SystemClock(), stack=stack)
        names = gate._authentication._namespaces
        named = names.of(Principal(issuer="corp", tenant="acme", subject="ana"))
        assert named.epochs.private > 0 and not named.is_past_lease
    assert fleet.service.epochs.takers.listed() == []


def test_a_door_of_another_name_does_not_open(fleet: Fleet, tmp_path: Path) -> None:
    with ExitStack() as stack, pytest.raises(ConfigError):
        connection = fleet.connect()
        stack.callback(connection.close)
        open_door_record(settings_of(tmp_path, "other"), connection, SystemClock(), stack)
