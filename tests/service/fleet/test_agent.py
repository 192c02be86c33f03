"""The engine-side agent: a real worker tells a real service how it is, and goes on telling it (control_plane.agent)."""

from __future__ import annotations

import os
import subprocess
from typing import Any

import orjson
import pytest

from kvcustody.audit.evidence.subjects.subject_key_store import SubjectKeys
from kvcustody.audit.evidence.subjects.subject_table import subject_names, unlinkings
from kvcustody.audit.keep.unlink_subject import unlink_subject
from kvcustody.audit.store.database.engine import open_store
from kvcustody.errors import ServiceError
from kvcustody.governance.admission_outcome import Admission
from kvcustody.governance.control_plane import agent as agents
from kvcustody.governance.control_plane import erasures
from kvcustody.governance.control_plane.remote_ledger import ControlPlaneSink
from kvcustody.governance.identity.principal import identify
from kvcustody.governance.observability.metrics import worker_status
from kvcustody.governance.observability.tenant_counters import TenantCounters
from kvcustody.governance.release import worker_follow as feed
from kvcustody.governance.worker.worker import Worker
from standins.service.control_plane_world import MODEL, PROMPT, ControlPlane, ask, known, until


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.upper().startswith("KVCUSTODY_"):
            monkeypatch.delenv(name)
    for module in (agents, erasures, feed):
        monkeypatch.setattr(module, "_END_SECONDS", 0.05)
    monkeypatch.setattr(agents, "REPORT_SECONDS", 0.02)
    monkeypatch.setattr(agents, "_WAIT_SECONDS_MAX", 0.1)
    monkeypatch.setattr(agents, "_WAIT_SECONDS", 0.05)


def test_a_workers_counters_revision_and_charges_are_known_there(plane: ControlPlane) -> None:
    with plane.worker() as worker, plane.connect("olive") as operator:
        life = worker.writer.incarnation
        assert ask(worker, "holder") == 0
        until(lambda: known(plane, life)["charged"] == {"holder": 4}, worker)  # and the partial block is CLEAN
        found = known(plane, life)
        said = found["status"]
        assert found["policy_revision"] == worker.governor.table.revision > 0
        assert (said["blocks.total"], said["blocks.cached"], said["bytes_per_block"]) == (128, 4, 1024)
        assert (said["running"], said["overdue"], said["overdue_seconds"], said["drift"]) == (0, 0, 0, 0)
        assert said["ledger.spilled_bytes"] == 0 and said["status_age_seconds"] >= 0
        assert said["requests"] == 1 and dict(worker.governor.stats().charged) == {"holder": 4}
        [quota] = operator.get("/v1/quotas", tenant="holder")["items"]
        assert quota["charged_blocks"] == 4
        [mine] = [row for row in operator.get("/v1/capacity")["items"] if row["worker"] == "gpu-0"]
        assert mine["blocks"] == 128 and mine["by_state"]["cached"] == 4
        text = operator.request("GET", "/metrics").text
        assert 'kvcustody_kv_cache_capacity_blocks{worker="gpu-0"} 128.0' in text


def test_an_engine_that_stands_still_is_heard_with_the_age_of_its_counters(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents, "_SNAPSHOT_SECONDS", 0.02)
    with plane.worker() as worker:
        life = worker.writer.incarnation
        until(lambda: "blocks.total" in known(plane, life)["status"], worker)
        before = known(plane, life)

        def heard_again() -> bool:
            found = known(plane, life)
            older = found["status"]["status_age_seconds"] > before["status"]["status_age_seconds"]
            return bool(found["seen_us"] > before["seen_us"] and older)

        until(heard_again)  # without a step
        ask(worker, "holder")
        until(lambda: known(plane, life)["status"].get("requests") == 1, worker)  # control: with steps


def test_a_governor_that_nobody_steps_when_it_is_idle_is_known_as_it_is(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents, "_SNAPSHOT_SECONDS", 0.02)
    with plane.worker() as worker:
        life, governor = worker.writer.incarnation, worker.governor
        until(lambda: known(plane, life)["status"].get("allocated") == 0)  # without a first step
        governor.step()
        for _ in range(2):
            answer = governor.admit(identify(issuer="idp", tenant="holder"), MODEL, PROMPT)
            assert isinstance(answer, Admission)
            governor.commit([answer.request_id], [len(PROMPT)])
            governor.release(answer.request_id)
        allocated = governor.stats().pools[0].allocated
        until(lambda: known(plane, life)["status"]["allocated"] == allocated > 0)  # and nobody steps it
        assert known(plane, life)["status"]["hit_requests"] == 1


def test_counters_that_come_late_are_as_old_as_they_are(plane: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "_SNAPSHOT_SECONDS", 0.02)
    with plane.worker() as worker:
        agent = agents.Agent(plane.connect("gpu-0"), worker.governor, worker.writer, None, bytes_per_block=1)  # type: ignore[arg-type]
        agent._count()
        waits = agent._pending
        agent._count()
        assert agent._pending is waits and waits is not None, "asked once"
        worker.governor.step()
        at = worker.governor.counted
        agent._count()
        assert waits.done() and agent._pending is not waits, "and anew, once that was answered"
        assert at is not None and worker.governor.counted is at


def test_a_worker_that_is_told_nothing_waits_longer_each_time(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents, "_WAIT_SECONDS_MAX", 60.0)
    agent = agents.Agent(plane.connect("olive"), None, None, None, bytes_per_block=1)  # type: ignore[arg-type]
    away = ServiceError("away", problem="unreachable")
    waits = [agent._refused(away) for _ in range(16)]
    # each is within a quarter of twice the one before, up to the bound
    for number, wait in enumerate(waits):
        meant = min(0.05 * 2**number, 60.0)
        assert 0.75 * meant <= wait <= 1.25 * meant
    assert agent.problem == "away"
    slow = ServiceError("later", problem="too-many-requests", wait_seconds=300.0)
    assert agent._refused(slow) >= 225.0


def _shown(plane: ControlPlane, worker: Worker, *words: str) -> str:
    command = plane.command("olive", *words)
    if "--ledger" in words:
        command = command[: command.index("--server")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as ran:
        until(lambda: ran.poll() is not None, worker)
        assert ran.returncode == 0 and ran.stdout is not None
        return ran.stdout.read()


@pytest.mark.system("`top` misreads a worker's status")
def test_top_shows_workers_and_tenants_as_they_said(plane: ControlPlane) -> None:
    """From a control plane and from its ledger; a tenant that thrashes stands first."""
    with plane.worker() as worker:
        life = worker.writer.incarnation
        for _ in range(2):
            ask(worker, "holder")
        until(lambda: known(plane, life)["status"].get("hit_requests") == 1, worker)
        worker.governor.tenant_counters["reader"] = TenantCounters()
        worker.governor.tenant_counters["reader"].recomputed_blocks = 500
        worker.governor.tenant_counters["reader"].denials = {"no-restricted": 2, "no-confidential": 1}
        worker.governor.admit(identify(issuer="idp", tenant="reader"), MODEL, [*range(900, 920)], request_id="r")
        until(lambda: known(plane, life)["tenants"].get("thrashing") == {"reader": 1.0}, worker)
        ledger = str(plane.folder / "ledger.db")
        for where in ((), ("--ledger", f"sqlite:///{ledger}")):
            found = orjson.loads(_shown(plane, worker, "top", "--json", *where))
            [said] = found["workers"]
            assert said["worker"] == "gpu-0" and said["running"] == 1 and said["recomputed_blocks"] == 500
            assert 0 < said["hit_share"] < 0.5 and not said["silent"]
            first, second = found["tenants"]
            assert (first["tenant"], first["thrashing"], first["active_tokens"]) == ("reader", True, 20)
            assert (second["tenant"], second["charged_blocks"], second["thrashing"]) == ("holder", 4, False)
            text = _shown(plane, worker, "top", "--once", *where)
            assert "gpu-0" in text and "thrashing" in text and "since each began" in text
            assert (first["denials"], first["hit_share"], second["denials"]) == (3, 0.0, 0)
            assert 0.3 < second["hit_share"] < 0.6, "the second of two requests found the first one's blocks"
            sorted_rows = orjson.loads(_shown(plane, worker, "top", "--json", "--sort", "blocks", *where))["tenants"]
            assert [row["tenant"] for row in sorted_rows] == ["holder", "reader"]
            of_reader = orjson.loads(_shown(plane, worker, "top", "--json", "--tenant", "reader", *where))
            assert [(row["worker"], row["active_tokens"]) for row in of_reader["workers"]] == [("gpu-0", 20)]
        with plane.connect("olive") as operator:
            shown = operator.request("GET", "/metrics").text
        assert 'kvcustody_tenant_cache_thrashing{tenant="' in shown
        assert 'kvcustody_time_to_first_token_seconds_bucket{cached="hit",le="' in shown
        worker.governor.release(("reader", "r"))


@pytest.mark.system("`advise` misreads a worker's status")
def test_advise_answers_from_what_a_worker_said(plane: ControlPlane) -> None:
    """From a control plane and from its ledger, which alone knows of orphans and coverage."""
    with plane.worker() as worker:
        life = worker.writer.incarnation
        for _ in range(2):
            ask(worker, "holder")
        until(lambda: known(plane, life)["status"].get("hit_requests") == 1, worker)
        for where in ((), ("--ledger", f"sqlite:///{plane.folder / 'ledger.db'}")):
            found = orjson.loads(_shown(plane, worker, "advise", "--json", *where))
            assert found["workers"] == ["gpu-0"] and len(found["answers"]) == 7
            size, budgets, *_, cleanup = found["answers"]
            assert size["answer"] == f"`gpu-0` {1024 // worker.governor.block_tokens:,} bytes of a shard"
            assert "128 blocks" in budgets["answer"] and "charged to tenants (1): 4 blocks" in budgets["answer"]
            assert any(one.startswith("orphans:") for one in cleanup["unknown"]) == (where == ())
            text = _shown(plane, worker, "advise", *where)
            assert "7. What cleanup is required?" in text and "kvcustody_kv_cache_bytes_per_block" in text


def order_of(plane: ControlPlane, order: str) -> dict[str, Any]:
    with plane.connect("olive") as operator:
        return dict(operator.get(f"/v1/orphans/orders/{order}"))


def _by_command(plane: ControlPlane, worker: Worker) -> dict[str, Any]:
    """What `kvcustody scan worker --wait` prints."""
    command = plane.command("olive", "scan", "worker", "gpu-0", "--wait", "--json")
    with subprocess.Popen(command, stdout=subprocess.PIPE) as ran:
        until(lambda: ran.poll() is not None, worker)
        assert ran.returncode == 0 and ran.stdout is not None
        found: dict[str, Any] = orjson.loads(ran.stdout.read())
    return found


@pytest.mark.system("a scan that was asked for is made and never answered")
def test_a_scan_that_was_asked_for_finds_and_repairs_and_is_on_record(plane: ControlPlane) -> None:
    with plane.worker() as worker, plane.connect("olive") as operator, plane.connect("dora") as officer:
        ask(worker, "holder")
        [manager] = worker.governor.managers
        assert worker_status(worker.governor.stats(), 16)["active_tokens"] == 0
        lost = worker.governor.admit(identify(issuer="idp", tenant="holder"), MODEL, PROMPT, request_id="lost")
        assert isinstance(lost, Admission)
        assert worker_status(worker.governor.stats(), 16)["active_tokens"] == len(PROMPT)
        (handle,) = worker.governor.running
        del worker.governor._live[handle]  # planted: the finish of this request will never come
        first = operator.post("/v1/workers/gpu-0/scans", {})
        again = operator.post("/v1/workers/gpu-0/scans", {})
        assert first["outcome"] in ("waiting", "taken") and again["order"] == first["order"], "one waits (D1)"
        until(lambda: order_of(plane, first["order"])["outcome"] == "scanned", worker)
        done = order_of(plane, first["order"])
        assert (done["incarnation"], done["findings"], done["reason"]) == (worker.writer.incarnation, 1, None)
        shown = operator.get(f"/v1/orphans/scans/{done['incarnation']}/{done['scan']}")
        assert shown["scan"]["worker"] == "gpu-0" and shown["scan"]["mode"] == "full"
        [finding] = shown["findings"]
        assert (finding["orphan"], finding["outcome"]) == ("lost finish", "recovered")
        assert finding in officer.get("/v1/orphans/findings", tenant="holder")["items"]
        assert worker.governor.check() == [] and manager.decode.sequences.count(None) == len(manager.decode.sequences)
        anew = _by_command(plane, worker)  # control: what was done is done anew when asked anew
        assert anew["order"] != first["order"] and (anew["findings"], anew["found"]) == (0, [])
        found = operator.get("/v1/orphans/orders", limit=1)
        assert found["items"][0]["order"] == anew["order"] and found["next"]
        older = operator.get("/v1/orphans/orders", limit=1, cursor=found["next"])["items"]
        assert older[0]["order"] == first["order"]


def test_an_order_outlives_the_process_that_took_it(plane: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "_SNAPSHOT_SECONDS", 0.02)
    with plane.worker() as worker, plane.connect("olive") as operator:
        order = operator.post("/v1/workers/gpu-0/scans", {})["order"]
        until(lambda: order_of(plane, order)["outcome"] == "taken")  # and the engine takes no step
    with plane.worker() as worker:
        until(lambda: order_of(plane, order)["outcome"] == "scanned", worker)
        assert order_of(plane, order)["incarnation"] == worker.writer.incarnation


def test_a_worker_that_cannot_be_reached_is_named(plane: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "_SNAPSHOT_SECONDS", 0.02)
    with plane.worker() as worker, plane.connect("olive") as operator:
        with pytest.raises(ServiceError, match="Nothing here"):
            operator.post("/v1/workers/nobody/scans", {})
        order = operator.post("/v1/workers/gpu-0/scans", {"deadline_seconds": 1})["order"]
        until(lambda: order_of(plane, order)["outcome"] == "unreachable")  # it takes no step
        later = operator.post("/v1/workers/gpu-0/scans", {})["order"]
        until(lambda: order_of(plane, later)["outcome"] == "scanned", worker)  # control: it does
        gpu_1 = plane.connect("gpu-1")
        life = f"/v1/worker/incarnations/{worker.writer.incarnation}/scans/{later}"
        with gpu_1, pytest.raises(ServiceError, match="Nothing here"):
            gpu_1.put(life, {"scan": 1})
    with plane.connect("olive") as operator, pytest.raises(ServiceError, match="has no process"):
        operator.post("/v1/workers/gpu-0/scans", {})


def test_a_scan_that_the_ledger_does_not_have_is_no_answer(plane: ControlPlane) -> None:
    with plane.worker(erasure_poll_ms=10) as worker, plane.connect("olive") as operator:
        order = operator.post("/v1/workers/gpu-0/scans", {})["order"]
        place = f"/v1/worker/incarnations/{worker.writer.incarnation}/scans/{order}"
        with plane.connect("gpu-0") as key, pytest.raises(ServiceError, match="does not have this scan"):
            key.put(place, {"scan": 4711})
        until(lambda: order_of(plane, order)["outcome"] == "scanned", worker)  # control: the worker's own
        with plane.connect("gpu-0") as key:  # the first answer stays
            assert key.put(place, {"reason": "too late"})["outcome"] == "scanned"


@pytest.mark.parametrize("is_told", [True, False])
def test_a_worker_forgets_a_subject_that_was_redacted(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch, is_told: bool
) -> None:
    if not is_told:  # positive control: what it kept in memory would come back as the unlinked pseudonym
        monkeypatch.setattr(ControlPlaneSink, "note_unlinkings", lambda *_: None)
    engine = open_store(plane.folder / "ledger.db", timeout_seconds=5.0)
    ada, bob = f"ada-{is_told}", f"bob-{is_told}"
    keys = SubjectKeys.open(plane.folder / "ledger-subjects.db")

    def names() -> list[list[str]]:
        with engine.connect() as connection:
            return [subject_names(connection, "reader", who, keys) for who in (ada, bob)]

    with plane.worker() as worker:
        for who in (ada, bob):
            ask(worker, "reader", who)
        assert worker.writer.flush()
        before = names()
        redacted = unlink_subject(engine, "reader", ada, keys=keys, actor="dpo", reason="test")
        with engine.connect() as connection:
            count = unlinkings(connection)
        if is_told:
            until(lambda: worker.writer._plane._unlinkings == count, worker)  # without any event of its own
        for who in (ada, bob):
            ask(worker, "reader", who)
        assert worker.writer.flush()
    after = names()
    engine.dispose()
    keys.close()
    assert redacted.pseudonyms == 1 and [len(found) for found in before] == [1, 1]
    assert after[1] == before[1], "nobody else gets another"
    assert bool(after[0]) == is_told and after[0] != before[0]
