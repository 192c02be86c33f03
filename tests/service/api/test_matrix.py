"""Every operation x every role x own, foreign and absent tenant, from the API document: 100 % as written down here.

An operation without a row fails `test_every_operation_has_a_row`. A row says whose tenant alone it answers (`own`), who
is answered about all (`every`), and how to ask about a tenant; everybody else gets 403, nobody known gets 401.
"""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import orjson
import pytest

from kvcustody.audit.kinds import AccessRecorded
from kvcustody.governance.api.declarations import every_operation
from kvcustody.governance.api.local_calls import LocalCalls
from kvcustody.governance.api.operation_request import OperationRequest
from kvcustody.governance.service.access.rate_limiter import RateLimiter
from kvcustody.governance.service.access.roles import OF_TENANTS, Permission, Reach, Role, reach
from kvcustody.governance.service.service import Service
from standins.service.service_world import OFFSET_US, Worker, register, ship

PEOPLE = [role.value for role in Role if role not in OF_TENANTS]
TENANT_PEOPLE = [f"{role}@acme" for role in sorted(OF_TENANTS)]
POLICY = (Path(__file__).resolve().parents[3] / "policies/library/regulated-saas.yaml").read_text()
CASES = "schema: kvcustody/policy-tests@1\ncases: []\n"
QUESTION = {"reader": "acme", "classification": "internal"}
CASE_LETTER = {"addressee": "A. Person", "date": "2026-06-01", "kind": "identity"}
STEP = {"record": "{}"}
POLICY_READERS = "auditor author approver"
POLICY_STEPPERS = "auditor author approver operator break-glass"
OPERATORS = "auditor operator"
CERTIFIERS = {"own": "tenant-admin", "every": "dpo"}
CERTIFICATE_READERS = {"own": "tenant-admin", "every": "dpo auditor"}
READERS = {"own": "tenant-viewer tenant-admin", "every": "dpo auditor"}
JOBS = {"own": READERS["own"], "every": "dpo auditor operator"}
SELF = {"every": " ".join(role.value for role in Role if role is not Role.BOOTSTRAP)}


class Row(NamedTuple):
    """Who may, and how to ask. `{…}` are of the tenant that is asked about; without any, no tenant is named."""

    path: str
    own: str = ""
    every: str = ""
    body: dict[str, Any] | None = None
    ok: int = 200
    absent: int = 0  # what those who see all get for a tenant that does not exist; 0: the same as for others
    own_refused: int = 0  # what those of a tenant get although they may ask: it is about all tenants
    of_caller: bool = False  # the object belongs to the principal: another's and none are the same 404


ROWS = {
    "live": Row("/health/live"),
    "ready": Row("/health/ready"),
    "getHealth": Row("/v1/health", every="dpo auditor operator"),
    "getMetrics": Row("/metrics", every="dpo auditor operator"),
    "listInbox": Row("/v1/inbox", **SELF),
    "whoami": Row("/v1/whoami", **SELF),
    "version": Row("/v1/version", **SELF),
    "listOwnKeys": Row("/v1/keys", **SELF),
    "apiDocument": Row("/v1/openapi.json", **SELF),
    "rotateOwnKey": Row("/v1/keys:rotate", **SELF, body={"days": 1, "overlap_days": 1}, ok=201),
    "revokeOwnKey": Row("/v1/keys/{key}", **SELF, ok=204, of_caller=True),
    "beginSession": Row("/v1/session", **SELF, ok=201),
    "endSession": Row("/v1/session", **SELF, ok=204),
    "listPrincipals": Row("/v1/principals", every="bootstrap key-custodian"),
    "getPrincipal": Row("/v1/principals/auditor", every="bootstrap key-custodian"),
    "listKeys": Row("/v1/principals/auditor/keys", every="bootstrap key-custodian"),
    "disablePrincipal": Row("/v1/principals:disable", every="key-custodian", body={"name": "nobody"}, ok=404),
    "revokeKeys": Row("/v1/principals:revoke-keys", every="key-custodian", body={"name": "nobody"}, ok=404),
    "keepKey": Row(
        "/v1/principals:keep-key",
        every="bootstrap key-custodian",
        body={"name": "nobody", "prefix": "0" * 12},
        ok=404,
    ),
    "enablePrincipal": Row("/v1/principals:enable", every="bootstrap", body={"name": "auditor"}),
    "enrolPrincipal": Row("/v1/principals", every="bootstrap", body={"name": "new-{fresh}", "roles": ["dpo"]}, ok=201),
    "issueKey": Row("/v1/principals/auditor/keys", every="bootstrap", body={"days": 1}, ok=201),
    "listSigningKeys": Row("/v1/keys/signing", every="key-custodian"),
    "rotateSigningKey": Row("/v1/keys/signing:rotate", every="key-custodian", body={}),
    "confirmBreak": Row("/v1/keys/signing:confirm-break", every="key-custodian", body={"reason": "x"}, ok=409),
    "unlinkSubject": Row(
        "/v1/keys/subjects:destroy",
        every="key-custodian",
        body={"tenant": "acme", "subject": "nobody", "reason": "test"},
    ),
    "rotateTenantKeys": Row(
        "/v1/keys/tenants:rotate",
        every="key-custodian",
        body={"tenant": "acme", "reason": "test"},
        ok=202,
    ),
    "destroyTenantKeys": Row(
        "/v1/keys/tenants:destroy",
        every="key-custodian",
        body={"tenant": "acme", "reason": "test"},
        ok=202,
    ),
    "getEnforcement": Row("/v1/policies/enforcement", every=POLICY_STEPPERS),
    "orderEnforcement": Row(
        "/v1/policies/enforcement:order",
        every="approver",
        body={"mode": "enforce", "reason": "test"},
        ok=202,
    ),
    "enforcePolicy": Row(
        "/v1/policies/enforcement:enforce", every="approver break-glass", body={"reason": "test"}, ok=202
    ),
    "listKeyOrders": Row("/v1/keys/tenants", every="key-custodian"),
    "listResidencies": Row("/v1/custody/residencies?tenant={tenant}&subject=user-1", **READERS),
    "getSubject": Row("/v1/custody/subject?tenant={tenant}&subject=user-1", **READERS),
    "listLive": Row("/v1/custody/live?tenant={tenant}", **READERS),
    "listTotals": Row("/v1/custody/totals?tenant={tenant}", **READERS),
    "getCoverage": Row("/v1/custody/coverage?tenant={tenant}", **READERS),
    "listHourlyCoverage": Row("/v1/custody/coverage/hours?tenant={tenant}", **READERS),
    "countEvents": Row("/v1/audit/counts?tenant={tenant}", **READERS),
    "listCrossedReuse": Row("/v1/custody/reuse?tenant={tenant}", **READERS),
    "listDenials": Row("/v1/custody/denials?tenant={tenant}", **READERS),
    "listTiers": Row("/v1/tiers?tenant={tenant}", **JOBS),
    "listTransfers": Row("/v1/tiers/transfers?tenant={tenant}", **JOBS),
    "explainTransfers": Row("/v1/tiers/requests?residency=1&tenant={tenant}", **JOBS),
    "listGaps": Row("/v1/audit/gaps", **READERS, own_refused=403),
    "listFindings": Row("/v1/orphans/findings?tenant={tenant}", **READERS),
    "getBlockHistory": Row("/v1/custody/blocks/{incarnation}/0/{generation}", **READERS, absent=404),
    "listEvents": Row("/v1/audit/events?tenant={tenant}", **READERS),
    "streamEvents": Row("/v1/audit/stream?tenant={tenant}", **READERS),
    "summarizeEvents": Row("/v1/audit/summary?tenant={tenant}", **READERS),
    "listOddTimes": Row("/v1/audit/times?log=tenant/{tenant}", **READERS),
    "listLogs": Row("/v1/audit/logs?tenant={tenant}", **READERS),
    "getLatestCheckpoint": Row("/v1/audit/checkpoints/latest", **READERS),
    "getCheckpoint": Row("/v1/audit/checkpoints/1", **READERS),
    "proveEvent": Row("/v1/audit/proofs/inclusion?log=tenant/{tenant}&idx=0", **READERS, absent=404),
    "proveConsistency": Row(
        "/v1/audit/proofs/consistency?log=tenant/{tenant}&old_size=1&size=2", **READERS, absent=404
    ),
    "getTile": Row("/v1/audit/tiles/0/0?log=tenant/{tenant}&width=1", **READERS, absent=404),
    "listRevisions": Row("/v1/policies", every=POLICY_READERS, ok=409),
    "getRevision": Row("/v1/policies/1", every=POLICY_READERS, ok=409),
    "reviewRevision": Row("/v1/policies/1/review", every=POLICY_READERS, ok=409),
    "getRelease": Row("/v1/policies/release", every=POLICY_STEPPERS, own="tenant-admin", ok=409),
    "getPolicyInEffect": Row("/v1/policies/in-effect", every=POLICY_STEPPERS),
    "listReleaseRecords": Row("/v1/policies/records", every=POLICY_STEPPERS, ok=409),
    "listConsents": Row("/v1/policies/consents", own="tenant-admin", ok=409),
    "listOwnGrants": Row("/v1/policies/grants", own="tenant-admin"),
    "withdrawGrants": Row("/v1/policies:withdraw", own="tenant-admin", body=STEP, ok=409),
    "validatePolicy": Row("/v1/policies:validate", every="author approver", body={"source": POLICY}),
    "lintPolicy": Row("/v1/policies:lint", every="author approver", body={"source": POLICY}),
    "testPolicy": Row("/v1/policies:test", every="author approver", body={"source": POLICY, "cases": CASES}),
    "diffPolicy": Row("/v1/policies:diff", every="author approver", body={"source": POLICY, "old": POLICY}),
    "provePolicy": Row("/v1/policies:prove", every="author approver", body={"source": POLICY}),
    "simulatePolicy": Row("/v1/policies:simulate", every="author approver", body={"source": POLICY, "old": POLICY}),
    "explainDecision": Row("/v1/decisions:explain", every="author approver", body=QUESTION | {"source": POLICY}),
    "proposePolicy": Row("/v1/policies:propose", every="author approver", body=STEP, ok=409),
    "approvePolicy": Row("/v1/policies:approve", every="approver", body=STEP, ok=409),
    "consentToPolicy": Row("/v1/policies:consent", own="tenant-admin", body=STEP, ok=409),
    "activatePolicy": Row("/v1/policies:activate", every="approver", body=STEP, ok=428),
    "stagePolicy": Row("/v1/policies:stage", every="approver operator", body=STEP, ok=428),
    "revokeGrants": Row("/v1/policies:revoke", every="approver break-glass", body=STEP, ok=409),
    "breakGlass": Row("/v1/policies:break-glass", every="approver break-glass", body=STEP, ok=409),
    "requestErasure": Row(
        "/v1/erasures",
        own="tenant-admin",
        every="dpo",
        body={"tenant": "{tenant}", "subject": "user-9"},
        ok=202,
        absent=422,
    ),
    "previewErasure": Row(
        "/v1/erasures:preview", own="tenant-admin", every="dpo", body={"tenant": "{tenant}"}, absent=422
    ),
    "listErasures": Row("/v1/erasures?tenant={tenant}", **READERS),
    "openCase": Row(
        "/v1/cases",
        own="tenant-admin",
        every="dpo",
        body={"tenant": "{tenant}", "subject": "user-1", "right": "erasure", "channel": "mail"},
        ok=201,
        absent=422,
    ),
    "listCases": Row("/v1/cases?tenant={tenant}", **READERS),
    "getCase": Row("/v1/cases/{case}", **READERS, absent=404),
    "takeCaseStep": Row(
        "/v1/cases/{case}/steps",
        **CERTIFIERS,
        body={"step": "identity", "outcome": "confirmed"},
        absent=404,
    ),
    "writeCaseLetter": Row("/v1/cases/{case}/letter", **CERTIFIERS, body=CASE_LETTER, absent=404),
    "getErasure": Row("/v1/erasures/{erasure}", **READERS, absent=404),
    "getCertificate": Row("/v1/erasures/{erasure}/certificate", **CERTIFICATE_READERS, absent=404),
    "getCertificatePage": Row("/v1/erasures/{erasure}/certificate.html", **CERTIFICATE_READERS, absent=404),
    "getOpening": Row("/v1/erasures/{erasure}/opening", **CERTIFIERS, absent=404),
    "makeReport": Row(
        "/v1/reports",
        **READERS,
        body={"framework": "soc2", "tenant": "{tenant}", "formats": ["json"]},
        ok=202,
        absent=422,
    ),
    "listFrameworks": Row("/v1/reports/frameworks", **READERS),
    "listReports": Row("/v1/reports?tenant={tenant}", **READERS),
    "listReportDestinations": Row("/v1/reports/destinations", **READERS),
    "listReportSchedules": Row("/v1/reports/schedules", **READERS),
    "makeReportSchedule": Row(
        "/v1/reports/schedules",
        **READERS,
        body={"framework": "soc2", "tenant": "{tenant}", "every": "weekly", "formats": ["json"]},
        ok=201,
        absent=422,
    ),
    "pauseReportSchedule": Row(f"/v1/reports/schedules/{'ab' * 8}/pause", **READERS, body={}, ok=404),
    "resumeReportSchedule": Row(f"/v1/reports/schedules/{'ab' * 8}/resume", **READERS, body={}, ok=404),
    "deleteReportSchedule": Row(f"/v1/reports/schedules/{'ab' * 8}/delete", **READERS, body={}, ok=404),
    "retryReport": Row(f"/v1/reports/{'ab' * 16}/retry", **READERS, ok=404),
    "makeProcessingRecord": Row("/v1/reports:processing", **READERS, body={"policy": POLICY}, own_refused=403),
    "checkLedger": Row("/v1/checks", **READERS, body={}, ok=202, own_refused=403),
    "startScan": Row("/v1/orphans/scans", every="operator", ok=202),
    "listScans": Row("/v1/orphans/scans", every=OPERATORS),
    "getScan": Row("/v1/orphans/scans/{scan}", every=OPERATORS),
    "orderScan": Row("/v1/workers/worker/scans", every="operator", body={}, ok=202),
    "listScanOrders": Row("/v1/orphans/orders", every=OPERATORS),
    "getScanOrder": Row("/v1/orphans/orders/{order}", every=OPERATORS),
    "listQuotas": Row("/v1/quotas", every=OPERATORS),
    "getShowback": Row("/v1/showback", every=OPERATORS),
    "listPrefixes": Row("/v1/prefixes", every=OPERATORS),
    "getCapacity": Row("/v1/capacity", every=OPERATORS),
    "getClock": Row("/v1/clock", every=OPERATORS),
    "confirmClock": Row("/v1/clock:confirm", every="operator", body={"reason": "set by hand"}, ok=409),
    "listSinks": Row("/v1/sinks", every=OPERATORS),
    "detachSink": Row("/v1/sinks/none/detach", every="operator", body={}, ok=404),
    "attachSink": Row("/v1/sinks/none/attach", every="operator", body={}, ok=404),
    "acknowledgeSink": Row("/v1/sinks/none/acknowledge", every="operator", body={}, ok=404),
    "retrySink": Row("/v1/sinks/none/retry", every="operator", body={}, ok=404),
    "exportLedger": Row("/v1/exports", **READERS, body={"tenant": "{tenant}"}, ok=202),
    "listJobs": Row("/v1/jobs", **JOBS),
    "getJob": Row("/v1/jobs/{job}", **JOBS, of_caller=True),
    "cancelJob": Row("/v1/jobs/{job}/cancel", **JOBS, of_caller=True),
    "getJobFile": Row("/v1/jobs/{job}/files/export.tar", **READERS, of_caller=True),
    "listDoors": Row("/v1/doors", every="auditor operator"),
    "getRoutes": Row("/v1/routes", every="auditor operator"),
    "listRouteReceipts": Row("/v1/routes/receipts", every="auditor operator"),
    "listRouteFindings": Row("/v1/routes/findings", every="auditor operator"),
    "takeEpochs": Row("/v1/worker/epochs", every="worker door"),
    "listWorkers": Row("/v1/workers", every="auditor operator"),
    "closeWorker": Row(
        "/v1/workers:close",
        every="operator",
        body={"incarnation": "0" * 32, "spill_lost": True, "reason": "test"},
        ok=404,
    ),
    "pullPolicy": Row("/v1/worker/policy/records", every="worker"),
    "takeErasures": Row("/v1/worker/erasures", every="worker"),
    "assignIssuer": Row("/v1/worker/issuers", every="worker", body={"issuer": "corp", "tenants": "bare"}),
    "requestWorkersErasure": Row(
        "/v1/worker/erasures/e-{fresh}",
        every="worker",
        body={"selector": '{"tenant":"nobody-here"}', "deadline_us": 1},
    ),
    "checkPseudonyms": Row("/v1/worker/pseudonyms:check", every="worker", body={"names": []}),
    "reportAttempts": Row(
        "/v1/worker/attempts",
        every="worker",
        body={"seconds": 1, "items": [{"reason": "missing", "source": "", "attempts": 1}]},
    ),
    "takeScans": Row("/v1/worker/scans", every="worker"),
    "answerScan": Row(
        "/v1/worker/incarnations/{life}/scans/{order}",
        every="worker",
        body={"reason": "test"},
        of_caller=True,
    ),
    "registerIncarnation": Row(
        "/v1/worker/incarnations/{life}", every="worker door", body={"offset_us": OFFSET_US}, of_caller=True
    ),
    "reportStatus": Row("/v1/worker/incarnations/{life}/status", every="worker", body={"status": {}}, of_caller=True),
    "checkKept": Row("/v1/worker/incarnations/{life}/kept", every="worker door", body={"runs": []}, of_caller=True),
    "shipBatch": Row("/v1/worker/incarnations/{life}/batches/1", every="worker door", of_caller=True),
}
OPEN = {"live", "ready"}


class World(NamedTuple):
    """What there is to ask about: names by whose they are."""

    ask: Callable[..., Any]
    names: dict[str, dict[str, str]]
    methods: dict[str, str]
    keys: dict[str, str]
    fresh: list[int]

    def send(self, operation: str, who: str | None, about: str = "own") -> Any:
        row, names = ROWS[operation], dict(self.names[about])
        self.fresh[0] += 1
        names["fresh"] = str(self.fresh[0])
        if row.of_caller:
            theirs = self.names.get(f"of:{who}") if about == "own" else None
            names |= theirs or {}
        how: dict[str, Any] = {}
        if row.body is not None:
            how["json"] = json.loads(_filled(json.dumps(row.body), names))
        if operation == "shipBatch":
            how["content"] = b"[]\n"
        key = None if who is None else self.keys[who]
        return self.ask(self.methods[operation], _filled(row.path, names), key, **how)


def _filled(text: str, names: dict[str, str]) -> str:
    for name, value in names.items():
        text = text.replace("{" + name + "}", value)
    return text


@pytest.fixture(scope="module")
def document(client, people) -> dict[str, Any]:
    return client("GET", "/v1/openapi.json", people["auditor"]).json()


@pytest.fixture(scope="module")
def operations(document) -> dict[str, dict[str, Any]]:
    return {
        operation["operationId"]: {**operation, "method": method.upper()}
        for item in document["paths"].values()
        for method, operation in item.items()
    }


@pytest.fixture(scope="module")
def world(service, client, people, operations) -> World:
    keys = {who: people[who] for who in [*PEOPLE, *TENANT_PEOPLE]}
    assert service.writer.seal()  # the system log alone: the checkpoint of one root leaf
    worker = Worker()
    assert register(client, people["worker"], worker).status_code == 200
    generations = {}
    events = [worker.started()]
    for tenant in ("acme", "labs"):
        generations[tenant] = str(10 * (worker.residency + 1))
        events += worker.request(tenant)
    batch = worker.batch(events)
    assert ship(client, people["worker"], worker, batch).json() == {
        "added": len(batch.leaves), "known": 0, "last_sequence": batch.last, "unlinkings": 0,
    }  # fmt: skip
    other = Worker("another")
    people.add("another", Role.WORKER)
    assert register(client, people["another"], other).status_code == 200
    names: dict[str, dict[str, str]] = {}
    for about, tenant in (("own", "acme"), ("foreign", "labs"), ("absent", "nobody")):
        names[about] = {
            "tenant": tenant,
            "incarnation": worker.incarnation,
            "generation": generations.get(tenant, "77"),
        }
        names[about] |= {
            "scan": f"{'0' * 32}/1",
            "job": "0" * 32,
            "key": "0" * 12,
            "life": "0" * 32,
            "erasure": "absent",
            "case": "absent",
            "order": "0" * 32,
        }
        if tenant in generations:
            asked = client("POST", "/v1/erasures", people["dpo"], json={"tenant": tenant, "subject": "user-1"})
            names[about]["erasure"] = asked.json()["erasure"]
            request = {"tenant": tenant, "subject": "user-1", "right": "erasure", "channel": "mail"}
            case = client("POST", "/v1/cases", people["dpo"], json=request).json()["case_id"]
            step = {"step": "identity", "outcome": "asked"}
            assert client("POST", f"/v1/cases/{case}/steps", people["dpo"], json=step).status_code == 200
            names[about]["case"] = case
    for about, name in (("own", "worker"), ("foreign", "another")):
        asked = client("POST", f"/v1/workers/{name}/scans", people["operator"], json={})
        names[about]["order"] = asked.json()["order"]
    foreign = client("POST", "/v1/exports", people.add("someone", Role.AUDITOR), json={}).json()["job"]
    names["foreign"] |= {"job": foreign, "key": people["someone"].split("_")[1], "life": other.incarnation}
    door = Worker("door")
    assert register(client, people["door"], door).status_code == 200
    for who in [*PEOPLE, *TENANT_PEOPLE]:
        process = door if who == "door" else worker
        mine = {"life": process.incarnation, "key": "0" * 12, "job": "0" * 32}
        if who != "bootstrap":
            mine["key"] = service.principals.issue_key(who, days=1, by="test").prefix
        if who in ("dpo", "auditor", *TENANT_PEOPLE):
            mine["job"] = client("POST", "/v1/exports", people[who], json={}).json()["job"]
        elif who == "operator":
            mine["job"] = client("POST", "/v1/orphans/scans", people[who]).json()["job"]
        names[f"of:{who}"] = mine
    deadline = service.clock.now_us() + 20_000_000
    while service.clock.now_us() < deadline:
        jobs = [
            client("GET", f"/v1/jobs/{names[f'of:{who}']['job']}", people[who]).json()
            for who in ("dpo", *TENANT_PEOPLE)
        ]
        if all(job["state"] == "finished" for job in jobs):
            break
    assert [job["state"] for job in jobs] == ["finished"] * 3, jobs
    names["own"]["scan"] = _scanned(client, people, names["of:operator"]["job"])
    methods = {name: operation["method"] for name, operation in operations.items()}
    return World(client, names, methods, keys, [0])


def _scanned(client: Any, people: Any, job: str) -> str:
    """The place of the operator's scan, once its job is done and certificates have a checkpoint to stand on."""
    while (found := client("GET", f"/v1/jobs/{job}", people["operator"]).json())["state"] != "finished":
        assert found["state"] in ("waiting", "running"), found
        time.sleep(0.02)
    return f"{found['result']['incarnation']}/{found['result']['scan']}"


def test_every_operation_has_a_row(operations) -> None:
    assert set(operations) - set(ROWS) == set(), "operations without a row"
    assert set(ROWS) - set(operations) == set(), "rows without an operation"


def _documented_needs() -> dict[str, str]:
    """The column `needs` of the page, by method and path."""
    page = (Path(__file__).parents[3] / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([A-Z]+ [^`]+)` \| `[^`]+` \| ([^|]+) \|", page, re.MULTILINE)
    return {place: needs.strip() for place, needs in rows}


def test_the_page_says_what_every_operation_needs() -> None:
    """From the column alone, with the table of roles, follows who is answered: as the matrix has it."""
    needs, declared = _documented_needs(), every_operation().operations.by_name
    assert len(needs) == len(ROWS)
    for name, row in ROWS.items():
        needed = needs[f"{declared[name].method} {declared[name].path}"]
        actions = [Permission(action) for action in re.findall(r"`([^`]+)`", needed)]
        reached = {
            role: max((reach(frozenset({role}), action) for action in actions), key=_far) for role in Role if actions
        }
        own = {role.value for role, far in reached.items() if far is not Reach.NONE and role in OF_TENANTS}
        every = {role.value for role, far in reached.items() if far is not Reach.NONE and role not in OF_TENANTS}
        whole = needed.endswith(", of all tenants")
        assert whole == bool(row.own_refused), name
        mine = set() if whole else own
        everybody = own | every if row.every == SELF["every"] else every  # what is one's own knows no tenants
        assert everybody == set(row.every.split()), (name, needed)
        if row.every != SELF["every"]:
            assert mine == (set() if whole else set(row.own.split())), (name, needed)


def _far(found: Reach) -> int:
    return found.value


def test_every_operation_is_documented(operations) -> None:
    for name, operation in operations.items():
        assert operation["summary"] and operation["description"], name
        assert operation["tags"], name
        assert ("security" in operation) == (name not in OPEN), name
        for status, answer in operation["responses"].items():
            if status.startswith("2") and "application/json" in answer.get("content", {}):
                assert "schema" in answer["content"]["application/json"], name


@pytest.mark.parametrize("operation", sorted(ROWS))
def test_everybody_is_answered_as_written_down(world: World, operation: str) -> None:
    row = ROWS[operation]
    if operation in OPEN:
        assert world.send(operation, None).status_code == 200
        return
    assert world.send(operation, None).status_code == 401
    every, own = set(row.every.split()), set(row.own.split())
    refused = set()
    for who in [*PEOPLE, *TENANT_PEOPLE]:
        role = who.partition("@")[0]
        answer = world.send(operation, who)
        if role in every or (role in own and not row.own_refused):
            if not (row.of_caller and row.ok in (200, 204) and answer.status_code == 409):
                assert answer.status_code == row.ok, (who, answer.text)
        else:
            assert answer.status_code == 403, (who, answer.text)
            refused.add(answer.content)
    assert len(refused) <= 1, "a refusal says nothing of who is refused"
    assert all(b'"detail":"this needs ' in each for each in refused), "it names the roles that may"


class LocalClient:
    """Asks in this process, as the caller that a key is of: called as `client` is."""

    def __init__(self, service: Service, calls: LocalCalls) -> None:
        self._service = service
        self._calls = calls
        self._keys = itertools.count()

    def __call__(self, method: str, path: str, key: str, **how: Any) -> httpx.Response:
        caller = self._service.authenticator.caller(f"Bearer {key}", None, "unix", None)
        asked = httpx.Request(method, f"http://local{path}", **how)
        headers = {"idempotency-key": f"local-{next(self._keys)}", **asked.headers}
        target, query = asked.url.path, dict(asked.url.params)
        found = self._calls.call(caller, OperationRequest(method, target, query, headers, asked.content))
        return httpx.Response(found.status, headers=found.headers, content=found.body)


@pytest.fixture(scope="module")
def local(world: World, service: Service) -> Iterator[World]:
    """The same world, asked without HTTP."""
    with LocalCalls(service) as calls:
        yield world._replace(ask=LocalClient(service, calls))


PASSING = re.compile(  # ids, moments, keys and new names in a text
    r"kvcs_\w+|new-[0-9]+|e-[0-9]+|[0-9a-f]{12,}|20[0-9]{2}-[0-9]{2}-[0-9]{2}T[0-9:.]+Z"
)
COUNTED = {
    "order",
    "sequence",
    "boot_us",
    "record",
    "vkey",
}  # one more with each call, or made with a new key
OF_THE_MOMENT = {  # figures of the ledger's growth, times or signatures: the answers' names and kinds are compared
    *("getCertificate", "getClock", "getHealth", "listLogs", "makeProcessingRecord", "proveEvent"),
    *("getCheckpoint", "getLatestCheckpoint", "rotateSigningKey"),
}
TEXTS_OF_THE_MOMENT = {"getMetrics", "getCertificatePage", "getJobFile"}


def steady(value: Any, *, kinds: bool = False) -> Any:
    """A value without what no two calls have alike; with `kinds`, the kinds of its values alone."""
    if isinstance(value, dict):
        return {name: steady(one, kinds=kinds) for name, one in value.items() if name not in COUNTED}
    if isinstance(value, list):
        return [] if kinds else [steady(one) for one in value]
    if kinds:
        return type(value).__name__
    if isinstance(value, str):
        return PASSING.sub("…", value)
    return "…" if isinstance(value, int) and abs(value) > 1 << 31 else value


def said(operation: str, answer: httpx.Response) -> tuple[int, str, Any]:
    """What a test compares of an answer: all of a refusal, and of others what two calls have alike."""
    media = answer.headers.get("content-type", "")
    if answer.status_code >= 400:
        return answer.status_code, media, answer.content
    if "json" in media:
        body = steady(answer.json(), kinds=operation in OF_THE_MOMENT)
    else:
        body = None if operation in TEXTS_OF_THE_MOMENT else answer.content
    return answer.status_code, media, body


class Recorded:
    """The leaves of one actor that came while something was done; jobs of before have ended."""

    def __init__(self, service: Service, actor: str) -> None:
        self._service, self._actor = service, actor
        self._record_all()
        sizes = self._rows("SELECT log, max(idx) FROM events GROUP BY log")
        self._before = " OR ".join(f"log = {log} AND idx <= {idx}" for log, idx in sizes)

    def leaves(self) -> list[tuple[str, Any]]:
        """Their kinds, and what they say."""
        self._record_all()
        rows = self._rows(
            f"SELECT kind, leaf FROM events WHERE leaf IS NOT NULL AND NOT ({self._before}) ORDER BY log, idx"
        )
        since = [(kind, orjson.loads(leaf)) for kind, leaf in rows]
        return [(kind, steady(body)) for kind, body in since if body.get("actor") == self._actor]

    def _record_all(self) -> None:
        ends = time.monotonic() + 60
        while (waiting := self._rows("SELECT job FROM service_jobs WHERE ended_us IS NULL")) and (
            time.monotonic() < ends
        ):
            time.sleep(0.01)
        assert not waiting and self._service.writer.flush()

    def _rows(self, query: str) -> list[Any]:
        with self._service.reading() as connection:
            return list(connection.exec_driver_sql(query))


def answered_and_two_refused(operation: str) -> list[str]:
    """Who is asked for: with each operation two others of those that are refused."""
    row, everybody = ROWS[operation], [*PEOPLE, *TENANT_PEOPLE]
    answered = [who for who in everybody if who.partition("@")[0] in f"{row.every} {row.own}".split()]
    refused = [who for who in everybody if who not in answered]
    first = sorted(ROWS).index(operation) * 2
    return answered + [refused[(first + at) % len(refused)] for at in range(min(2, len(refused)))]


def test_each_role_is_refused_without_http_by_some_operation() -> None:
    refused = {
        who
        for operation in set(ROWS) - OPEN
        for who in answered_and_two_refused(operation)
        if who.partition("@")[0] not in f"{ROWS[operation].every} {ROWS[operation].own}".split()
    }
    assert refused == {*PEOPLE, *TENANT_PEOPLE}


@pytest.mark.parametrize("operation", sorted(set(ROWS) - OPEN))
def test_a_call_without_http_is_answered_refused_and_recorded_alike(
    world: World, local: World, service: Service, operation: str
) -> None:
    """Every operation, for every role that it answers, and two that it refuses: the same status, the same refusal to
    the byte, the same answer, the same leaves. Each role is refused by some operation.
    """
    recorded_any = False
    if operation == "assignIssuer":  # said once of a ledger: a second issuer would give every tenant another name
        assert world.send(operation, "worker").status_code == 200
    for who in answered_and_two_refused(operation):
        answers, leaves = [], []
        for asked in (world, local):
            if operation == "revokeOwnKey":
                world.names[f"of:{who}"]["key"] = service.principals.issue_key(who, days=1, by="test").prefix
            recorded = Recorded(service, who)
            answers.append(said(operation, asked.send(operation, who)))
            leaves.append(recorded.leaves())
        assert answers[0] == answers[1], who
        assert leaves[0] == leaves[1], who
        recorded_any = recorded_any or bool(leaves[0])
    assert recorded_any or not every_operation().operations.by_name[operation].recorded, "control: it is recorded"


def test_an_act_that_was_done_over_http_is_not_done_again_without_it(world: World, local: World, people) -> None:
    """The same key and the same act: the same bytes, once on record. Another act under that key is refused."""
    asked = {"json": {"framework": "soc2", "formats": ["json"], "every": "weekly"}}
    how = asked | {"headers": {"Idempotency-Key": "once-for-both"}}
    key = people["auditor"]
    first = world.ask("POST", "/v1/reports/schedules", key, **how)
    again = local.ask("POST", "/v1/reports/schedules", key, **how)
    assert first.status_code == again.status_code == 201 and again.content == first.content
    assert again.headers["idempotency-replayed"] == "true" and "idempotency-replayed" not in first.headers
    other = local.ask("POST", "/v1/reports/schedules", key, **{**how, "json": {**asked["json"], "every": "monthly"}})
    assert other.status_code == 422 and other.json()["type"].endswith("key-reused")
    anew = local.ask("POST", "/v1/reports/schedules", key, **asked)
    assert anew.status_code == 201 and anew.json()["schedule"] != first.json()["schedule"], "control: another key"


def test_a_read_without_http_that_cannot_be_recorded_is_not_answered(local: World, service, monkeypatch) -> None:
    from kvcustody.errors import LedgerUnavailable

    def away(*_: object) -> None:
        raise LedgerUnavailable("away")

    monkeypatch.setattr(service.writer, "submit_durable", away)
    refused = local.send("listTotals", "auditor")
    assert refused.status_code == 503 and b"away" not in refused.content
    assert local.send("listTotals", "tenant-viewer@acme").status_code == 200, "control: nothing to record"


def test_a_call_without_http_is_held_to_the_limits_of_a_request(local: World, service, monkeypatch, people) -> None:
    """How often, how large, and which parameters there are."""
    key = people["auditor"]
    unknown = local.ask("GET", "/v1/custody/totals?tenent=acme", key)
    assert unknown.status_code == 422 and unknown.json()["errors"][0]["at"] == "query"
    large = local.ask("POST", "/v1/exports", key, content=b" " * (int(service.settings.body_bytes_max) + 1))
    assert large.status_code == 413
    twice = {
        "content": b'{"tenant": "acme", "tenant": "labs"}',
        "headers": {"content-type": "application/json"},
    }
    assert local.ask("POST", "/v1/exports", key, **twice).status_code == 400
    monkeypatch.setattr(service, "rates", RateLimiter(0.001, 1))
    assert local.send("whoami", "auditor").status_code == 200
    waits = local.send("whoami", "auditor")
    assert waits.status_code == 429 and int(waits.headers["retry-after"]) > 0


@pytest.mark.parametrize("operation", [name for name, row in ROWS.items() if row.own and not row.own_refused])
def test_foreign_and_absent_are_one_answer(world: World, operation: str) -> None:
    """The same bytes for a tenant that exists and one that does not; those who see all see the difference."""
    row = ROWS[operation]
    if re.search(r"\{[a-z]+\}", row.path + json.dumps(row.body)) is None:
        return
    for role in row.own.split():
        foreign, absent = (world.send(operation, f"{role}@acme", about) for about in ("foreign", "absent"))
        assert (foreign.status_code, foreign.content) == (404, absent.content) and absent.status_code == 404
        varies = ("x-request-id", "ratelimit-remaining")
        shown = [{k: v for k, v in answer.headers.items() if k not in varies} for answer in (foreign, absent)]
        assert shown[0] == shown[1]
    for role in row.every.split():
        if not row.of_caller:
            assert world.send(operation, role, "foreign").status_code == row.ok
            assert world.send(operation, role, "absent").status_code == (row.absent or row.ok)


@pytest.mark.parametrize("operation", [name for name, row in ROWS.items() if row.of_caller])
def test_another_principals_objects_are_absent(world: World, operation: str) -> None:
    row = ROWS[operation]
    for who in [*PEOPLE, *TENANT_PEOPLE]:
        if who.partition("@")[0] not in f"{row.every} {row.own}".split():
            continue
        if operation == "registerIncarnation":
            assert world.send(operation, who, "foreign").status_code == 404
            continue
        foreign, absent = (world.send(operation, who, about) for about in ("foreign", "absent"))
        assert (foreign.status_code, foreign.content) == (404, absent.content), who


def test_reads_of_those_who_see_others_are_on_record(world: World, service, people) -> None:
    """Each such read is one more `access` leaf; a viewer's read of the own tenant is none (control)."""

    def recorded() -> int:
        answer = world.ask("GET", "/v1/audit/events?kind=access&limit=1000&actor=auditor", people["auditor"])
        return len(answer.json()["items"])

    before = recorded()
    world.send("listTotals", "auditor", "foreign")
    world.send("listTotals", "tenant-viewer@acme")
    after = recorded()
    assert after - before == 2, "the read, and the count before it"
    page = world.ask("GET", "/v1/audit/events?kind=access&limit=1000&actor=auditor", people["auditor"]).json()["items"]
    mine = [item["leaf"] for item in page if item["leaf"]["operation"] == "listTotals"]
    assert mine[-1]["of_tenant"] == "labs" and mine[-1]["filters"] == ["tenant"] and mine[-1]["roles"] == ["auditor"]
    assert set(AccessRecorded.__struct_fields__) - {"at_us", "trace"} <= set(mine[-1])


def test_an_unrecordable_read_is_not_answered(world: World, service, monkeypatch) -> None:
    from kvcustody.errors import LedgerUnavailable

    def away(*_: object) -> None:
        raise LedgerUnavailable("away")

    monkeypatch.setattr(service.writer, "end_durable", away)
    refused = world.send("listTotals", "auditor")
    assert refused.status_code == 503 and b"away" not in refused.content
    assert world.send("listTotals", "tenant-viewer@acme").status_code == 200, "control: nothing to record"


def test_an_export_of_one_tenant_names_no_other(world: World, client, people) -> None:
    """The tar of acme's export holds acme's name and neither labs' name nor its subjects; all of it does (control)."""
    found = {}
    for who in ("tenant-viewer@acme", "auditor"):
        job = world.names[f"of:{who}"]["job"]
        found[who] = client("GET", f"/v1/jobs/{job}/files/export.tar", people[who]).content
    assert b"tenant/labs" in found["auditor"], "void: nothing to find"
    assert b"acme" in found["tenant-viewer@acme"] and b"labs" not in found["tenant-viewer@acme"]
