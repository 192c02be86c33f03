"""A real worker over a real `kvcustody serve`, from its settings alone: policy, ledger and erasures over the API."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import orjson
import pytest
from sqlalchemy import select

from kvcustody.audit.evidence.processes.sequence_gaps import gaps
from kvcustody.audit.leaf.change_items import plain_bodies
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.schema.ledger import events, incarnations
from kvcustody.clock import MICROSECONDS
from kvcustody.errors import ConfigError, CustodyError, ServiceError
from kvcustody.governance.control_plane import agent, erasures, opening, remote_ledger
from kvcustody.governance.release import worker_follow as feed
from kvcustody.governance.settings import load_settings
from standins.service.control_plane_world import (
    APART,
    READS,
    ControlPlane,
    MovedClock,
    ask,
    glance,
    known,
    opened,
    until,
)

pytestmark = pytest.mark.system

HOUR_US = 3600 * MICROSECONDS


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.upper().startswith("KVCUSTODY_"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(remote_ledger, "_WAIT_SECONDS_MAX", 1.0)
    monkeypatch.setattr(agent, "_WAIT_SECONDS_MAX", 1.0)
    monkeypatch.setattr(opening, "_WAIT_SECONDS_MAX", 1)
    monkeypatch.setattr(agent, "REPORT_SECONDS", 0.5)
    for module in (agent, erasures, feed):  # questions that are held open end with the connection
        monkeypatch.setattr(module, "_END_SECONDS", 0.05)


def leaves_of(plane: ControlPlane, incarnation: str) -> list[tuple[int, bytes]]:
    """(sequence, bytes) of every leaf of an incarnation, as they stand in the ledger's file."""
    engine = open_store(plane.folder / "ledger.db", read_only=True)
    with engine.connect() as connection:
        life = select(incarnations.c.id).where(incarnations.c.uuid == incarnation).scalar_subquery()
        query = select(events.c.sequence, events.c.leaf).where(events.c.incarnation == life)
        rows = [(row.sequence, bytes(row.leaf)) for row in connection.execute(query)]
        assert [gap for gap in gaps(connection) if gap.incarnation == incarnation] == []
    engine.dispose()
    return sorted(rows)


def test_a_revision_activated_at_the_control_plane_reaches_the_worker(plane: ControlPlane) -> None:
    with plane.worker() as worker:
        assert (ask(worker, "holder"), ask(worker, "holder"), glance(worker)) == (0, 64, 64)
        narrowed = plane.release(APART)
        until(lambda: worker.governor.table.revision == narrowed, worker)
        assert (ask(worker, "holder"), glance(worker)) == (64, 0)
        widened = plane.release(READS)  # control: the same way back
        until(lambda: worker.governor.table.revision == widened, worker)
        assert glance(worker) == 64


def test_every_event_is_in_the_ledger_once_across_a_kill_of_the_server(plane: ControlPlane) -> None:
    plane.end()
    plane.start_process()
    with plane.worker() as worker:
        life = worker.writer.incarnation
        for number in range(40):
            ask(worker, "holder")
            if number == 20:
                plane.kill()
        until(lambda: not worker.writer.status().healthy)
        assert worker.writer.admitting  # what happens meanwhile goes to the spill
        for _ in range(20):
            ask(worker, "holder")
        plane.start()
        until(lambda: worker.writer.status().healthy)
        until(lambda: known(plane, life)["status"].get("requests") == 60, worker)  # and its status, as before
    rows = leaves_of(plane, life)
    sequences = [sequence for sequence, _ in rows]
    kinds = [body["kind"] for _, leaf in rows for body in plain_bodies(orjson.loads(leaf))]
    assert sequences == sorted(set(sequences)) and kinds.count("residency-opened") == 60
    assert kinds.count("residency-released") == 60 and "spill-started" in kinds and kinds[-1] == "worker-stopped"


def test_an_erasure_is_received_acknowledged_and_certified(plane: ControlPlane) -> None:
    with plane.worker() as worker, plane.connect("dora") as officer:
        assert (ask(worker, "reader", "user-7"), ask(worker, "reader", "user-7")) == (0, 64)
        assert worker.writer.flush()
        asked = officer.post("/v1/erasures", {"tenant": "reader", "subject": "user-7"})["erasure"]

        def answered() -> bool:
            return "gpu-0" not in officer.get(f"/v1/erasures/{asked}")["waiting"]

        until(answered, worker)
        shown = officer.get(f"/v1/erasures/{asked}")
        assert shown["outcome"] == "complete" and shown["answers"][0]["worker"] == "gpu-0", shown
        assert ask(worker, "reader", "user-7") == 0
        certificates: list[bytes] = []

        def certified() -> bool:
            with contextlib.suppress(ServiceError):  # until the next checkpoint is signed
                certificates.append(officer.request("GET", f"/v1/erasures/{asked}/certificate").content)
            return bool(certificates)

        until(certified, worker)
        assert asked.encode() in certificates[0]


def test_without_the_control_plane_reuse_ends_with_the_lease_and_comes_back(plane: ControlPlane) -> None:
    clock = MovedClock()
    with plane.worker(clock=clock, policy_lease_seconds=600) as worker:
        ask(worker, "holder")
        assert glance(worker) == 64
        clock.ahead_us += 1200 * MICROSECONDS  # control: with word from the control plane it goes on
        until(lambda: glance(worker) == 64, worker)
        plane.end()
        ask(worker, "holder")
        until(lambda: not worker.writer.status().healthy, worker)
        assert glance(worker) == 64, "the last signed policy is still enforced"
        clock.ahead_us += 1200 * MICROSECONDS
        assert (ask(worker, "holder"), glance(worker)) == (64, 0)
        plane.start()
        until(lambda: worker.writer.status().healthy and glance(worker) == 64, worker)


def test_a_worker_starts_without_the_control_plane_on_what_it_kept_until_that_expires(
    plane: ControlPlane, tmp_path: Path
) -> None:
    clock = MovedClock()
    plane.release(READS, seconds=7200)
    with plane.worker("gpu-1", clock=clock) as worker:
        ask(worker, "holder")  # a tenant's first key is recorded before it is used: not without the control plane
        assert glance(worker) == 64
    plane.end()
    try:
        with pytest.raises(CustodyError, match="cannot be reached"):  # nothing kept: no start
            opened(plane.settings("gpu-1", policy_mark_path=tmp_path / "mark", spill_path=tmp_path / "s"))
        with plane.worker("gpu-1", clock=clock) as worker:
            life = worker.writer.incarnation
            assert worker.writer.durable_sequence > 0, "the start is on record in the spill"
            assert (ask(worker, "holder"), ask(worker, "holder"), glance(worker)) == (0, 64, 0)
            plane.start()
            until(lambda: worker.writer.status().healthy and glance(worker) == 64, worker)
            clock.ahead_us += 3 * HOUR_US  # heard a moment ago, and expired all the same
            until(lambda: glance(worker) == 0, worker)
            assert ask(worker, "holder") == 0, "an expired policy reuses nothing, the own scope neither"
            renewed = plane.release(READS)
            until(lambda: worker.governor.table.revision == renewed, worker)
            ask(worker, "holder")  # what was computed meanwhile is not cached
            assert glance(worker) == 64
    finally:
        plane.end()
        plane.start()
    kinds = [orjson.loads(leaf)["kind"] for _, leaf in leaves_of(plane, life)]
    assert kinds[:2] == ["worker-started", "policy-activated"] and kinds.count("spill-started") == 1


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"control_plane": "ftp://x"}, "must be https"),
        ({"control_plane": "http://192.0.2.1:80"}, "without TLS only this machine"),
        ({"control_plane_key_path": Path("/nonexistent")}, "cannot be read"),
        ({"worker_name": "gpu-1"}, "knows the key's holder as `gpu-0`"),
        (
            {"policy_trust": "", "policy_release": "", "control_plane": "http://127.0.0.1:9"},
            "without signatures",
        ),
    ],
)
def test_what_cannot_be_used_is_named_at_the_start(
    plane: ControlPlane, tmp_path: Path, values: dict[str, Any], words: str
) -> None:
    (tmp_path / "policy.yaml").write_text(APART)
    with pytest.raises(ConfigError, match=words):
        opened(plane.settings(policy_path=tmp_path / "policy.yaml", **values))
    with plane.worker() as worker:  # control, and no lock or file was left behind
        assert worker.governor.check() == []


def test_a_refused_key_is_no_absence(plane: ControlPlane, tmp_path: Path) -> None:
    """A worker whose key was revoked does not go on with what it kept."""
    wrong = tmp_path / "wrong.key"
    wrong.write_text(plane.keys["gpu-0"][:-8] + "AAAAAAAA")
    wrong.chmod(0o600)
    with pytest.raises(CustodyError, match="No valid credential"):
        opened(plane.settings(control_plane_key_path=wrong))
    with pytest.raises(CustodyError, match="this needs the role worker"):
        opened(plane.settings(control_plane_key_path=plane.key_file("dora")))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"control_plane": ""}, "needs `control_plane`"),
        ({"control_plane_key_path": None}, "is needed with `control_plane`"),
        ({"control_plane_certificate_path": Path("c.pem")}, "belong together"),
        ({"policy_release": "ledger"}, "use `control-plane`"),
        ({"witnesses_path": Path("w")}, "belongs to the process that keeps the ledger"),
        ({"subject_keys_url": "sqlite:///s.db"}, "belongs to the process that keeps the ledger"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(tmp_path: Path, values: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {
        "control_plane": "unix:/x",
        "control_plane_key_path": tmp_path / "k",
        "policy_trust": "t",
        "policy_release": "control-plane",
    }
    with pytest.raises(ConfigError, match=words):
        load_settings(**(given | values))
    assert load_settings(**given).control_plane == "unix:/x"
