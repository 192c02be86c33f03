"""What a door may do at the control plane: take erase epochs, and hand in its own kinds of leaves. Nothing else."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from kvcustody.audit.kinds import KINDS, EpochsTaken, RouteSent
from kvcustody.audit.kinds.examples import example_of
from kvcustody.audit.leaf.leaf_schema import DOORS_KINDS, FOLDED
from kvcustody.governance.api.declarations import every_operation
from kvcustody.governance.service.access.roles import Permission, Reach, Role, reach
from kvcustody.governance.service.ingest.worker_protocol import HEADER, PROTOCOL
from standins.service.service_world import MEDIA, Batch, Worker, register

SENT = MEDIA | {HEADER: str(PROTOCOL)}
WRITES = {
    "epochs-taken",
    "hints-clipped",
    "route-sent",
    "worker-stopped",
    "spill-started",
    "replay-completed",
    "gap",
}
EVERY = [kind for kind in KINDS if kind not in FOLDED and KINDS[kind].outage != "C"]


@pytest.fixture(scope="module")
def door(client: Any, people: Any) -> Worker:
    made = Worker("door")
    assert register(client, people["door"], made).status_code == 200
    return made


def handed(client: Any, key: str, sender: Worker, batch: Batch) -> Any:
    """The answer to a batch of a process that speaks today's protocol."""
    return client("PUT", f"{sender.path}/batches/{batch.first}", key, content=batch.body, headers=SENT)


def own(kind: Any, sender: Worker) -> Any:
    """An event of the kind, by this process as far as it has fields for that."""
    said = {
        "door": sender.name, "worker": sender.name, "incarnation": "", "first_sequence": 1, "last_sequence": 1,
        "at_us": sender.now_us, "trace": "",
    }  # fmt: skip
    names = kind.__struct_fields__
    return example_of(kind)._replace(**{name: value for name, value in said.items() if name in names})


@pytest.mark.parametrize("kind", EVERY, ids=lambda kind: KINDS[kind].name)
def test_a_door_hands_in_its_own_kinds_and_no_other(client: Any, people: Any, door: Worker, kind: Any) -> None:
    if door.sequence == 0:
        assert handed(client, people["door"], door, door.batch([own(EpochsTaken, door)])).status_code == 200
    batch = door.batch([own(kind, door)])
    body = b"\n".join((b"[]", *batch.leaves))
    answer = client("PUT", f"{door.path}/batches/{batch.first}", people["door"], content=body, headers=SENT)
    if KINDS[kind].name in WRITES:
        assert answer.status_code == 200, answer.text
        return
    assert answer.status_code == 422 and "doors may not send" in answer.text, answer.text
    door.sequence -= 1


def test_the_kinds_of_doors_are_those_that_a_door_writes() -> None:
    assert DOORS_KINDS == WRITES


@pytest.mark.parametrize("kind", [EpochsTaken, RouteSent], ids=lambda kind: KINDS[kind].name)
def test_a_worker_says_nothing_of_doors(client: Any, people: Any, kind: Any) -> None:
    worker = Worker("worker")
    assert register(client, people["worker"], worker).status_code == 200
    answer = handed(client, people["worker"], worker, worker.batch([own(kind, worker)]))
    assert answer.status_code == 422 and "workers may not send" in answer.text


def test_a_door_names_no_other_door_and_nobody(client: Any, people: Any, door: Worker) -> None:
    batch = door.batch([own(EpochsTaken, door)._replace(door="door-2")])
    answer = handed(client, people["door"], door, batch)
    assert answer.status_code == 422 and "this worker" in answer.text
    door.sequence -= 1
    names = orjson.dumps([["p" * 24, "acme", "ana", "", None]])
    batch = door.batch([own(EpochsTaken, door)])
    body = b"\n".join((names, *batch.leaves))
    answer = client("PUT", f"{door.path}/batches/{batch.first}", people["door"], content=body, headers=SENT)
    assert answer.status_code == 400 and "may not send names" in answer.text
    assert handed(client, people["door"], door, batch).status_code == 200, "control"


def test_a_door_reaches_epochs_and_its_ledger_alone(client: Any, people: Any) -> None:
    """Of all operations: what names erased people, policies and orders is for workers."""
    reached = {
        each.name
        for each in every_operation().operations.by_name.values()
        if each.action is not None and reach(frozenset({Role.DOOR}), each.action) is not Reach.NONE
    }
    own_keys = {each.name for each in every_operation().operations.by_name.values() if each.action is Permission.SELF}
    assert reached - own_keys == {"takeEpochs", "registerIncarnation", "shipBatch", "checkKept"}
    for path in (
        "/v1/worker/erasures",
        "/v1/worker/scans",
        "/v1/worker/policy/records",
        "/v1/workers",
        "/v1/doors",
    ):
        assert client("GET", path, people["door"]).status_code == 403, path
    assert client("GET", "/v1/worker/epochs", people["door"]).status_code == 200
    assert client("GET", "/v1/worker/epochs", people["worker"]).status_code == 200
    assert client("GET", "/v1/worker/epochs", people["auditor"]).status_code == 403
    assert client("GET", "/v1/worker/epochs").status_code == 401


def test_a_door_is_no_worker(client: Any, people: Any, door: Worker) -> None:
    assert client("GET", "/v1/worker/epochs?known=0", people["door"]).status_code == 200
    workers = client("GET", "/v1/workers", people["operator"]).json()["items"]
    assert door.incarnation not in {each["incarnation"] for each in workers}
    doors = client("GET", "/v1/doors", people["operator"]).json()["items"]
    assert [each["role"] for each in doors if each["name"] == "door"] == [Role.DOOR.value]
    scraped = client("GET", "/metrics", people["operator"]).text
    assert "kvcustody_epoch_behind_seconds 0" in scraped


def test_workers_and_who_is_behind_are_shown_from_the_same_rows(service: Any, client: Any, people: Any) -> None:
    worker = Worker("worker")
    assert register(client, people["worker"], worker).status_code == 200
    service.raise_above(None)
    assert client("GET", "/v1/worker/epochs?known=0", people["worker"]).status_code == 200
    rows = client("GET", "/v1/doors", people["operator"]).json()["items"]
    [taker] = [one for one in rows if one["name"] == "worker"]
    listed = client("GET", "/v1/workers?limit=1000", people["operator"]).json()["items"]
    [shown] = [one for one in listed if one["incarnation"] == worker.incarnation]
    assert taker["state"] == "behind" and taker["behind_since_us"] and taker["since_us"]
    for name in ("version", "since_us", "behind_since_us"):
        assert shown[f"epoch_{name}"] == taker[name], name
    scraped = client("GET", "/metrics", people["operator"]).text
    assert 'kvcustody_epoch_takers_behind{role="worker"} 1' in scraped
