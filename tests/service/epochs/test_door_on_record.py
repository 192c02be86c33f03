"""A door on record: what it acts by and its end are leaves, and the list of doors has it."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvcustody.clock import SystemClock
from kvcustody.errors import ConfigError
from kvcustody.governance.edge.erase_epochs import KnownEpochs
from kvcustody.governance.settings import Settings
from kvcustody.integrations.door.door_metrics import DoorMetrics
from kvcustody.integrations.door.door_record import open_door_record
from kvcustody.integrations.door.follow_epochs import follow_epochs
from standins.service.epoch_fleet import Fleet


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
    return follow_epochs(connection, clock, DoorMetrics(), stack, lease_seconds=60.0, record=record.taken)()


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


def test_a_door_of_another_name_does_not_open(fleet: Fleet, tmp_path: Path) -> None:
    with ExitStack() as stack, pytest.raises(ConfigError):
        connection = fleet.connect()
        stack.callback(connection.close)
        open_door_record(settings_of(tmp_path, "other"), connection, SystemClock(), stack)
