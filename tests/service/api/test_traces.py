"""Traces through the service: what a request does is on record under the trace it came with, and found by it."""

from __future__ import annotations

from typing import Any

import pytest

from standins.service.service_world import Worker, register, ship

TRACE, OTHER, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "ab" * 16, "00f067aa0ba902b7"
CARRIED = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
NOT_CARRIED = {
    "nothing": {},
    "capitals": {"traceparent": CARRIED["traceparent"].upper()},
    "zeros": {"traceparent": f"00-{'0' * 32}-{SPAN}-01"},
    "no traceparent": {"traceparent": TRACE},
    "another header": {"x-trace-id": TRACE, "tracestate": TRACE},
}


def found(client: Any, key: str, trace: str, **more: str) -> list[dict[str, Any]]:
    asked = "&".join(f"{name}={value}" for name, value in {"trace": trace, **more}.items())
    answer = client("GET", f"/v1/audit/events?limit=1000&{asked}", key)
    assert answer.status_code == 200, answer.text
    return [item["leaf"] for item in answer.json()["items"]]


def newest_read(service: Any, client: Any, people: Any) -> dict[str, Any]:
    page = client("GET", "/v1/audit/events?kind=access&actor=dpo&limit=1000", people["dpo"]).json()["items"]
    return [item["leaf"] for item in page if item["leaf"]["operation"] == "listGaps"][-1]


def test_acts_and_reads_are_recorded_under_their_requests_trace(service, client, people) -> None:
    asked = {"tenant": "acme", "subject": "user-7"}
    erased = client("POST", "/v1/erasures", people["tenant-admin@acme"], json=asked, headers=CARRIED)
    read = client("GET", "/v1/audit/gaps", people["dpo"], headers=CARRIED)
    enrolled = {"name": "traced", "roles": ["auditor"]}
    made = client("POST", "/v1/principals", people["bootstrap"], json=enrolled, headers=CARRIED)
    assert (erased.status_code, read.status_code, made.status_code) == (202, 200, 201)
    client("GET", "/v1/audit/gaps", people["dpo"])  # control: the next request has no trace of the last one
    leaves = found(client, people["auditor"], TRACE)
    assert {leaf["kind"] for leaf in leaves} == {
        "access",
        "decision",
        "erasure-requested",
        "principal-changed",
    }
    assert {leaf["trace"] for leaf in leaves} == {TRACE}
    assert "trace" not in newest_read(service, client, people)
    [decided, mine] = found(client, people["tenant-viewer@acme"], TRACE)
    assert decided["kind"] == "decision" and decided["action"] == "administer"
    assert mine["kind"] == "erasure-requested" and mine["erasure"] == erased.json()["erasure"]
    assert found(client, people["tenant-viewer@labs"], TRACE) == [] == found(client, people["auditor"], OTHER)


@pytest.mark.parametrize("case", NOT_CARRIED)
def test_what_is_no_trace_is_not_recorded_and_refuses_nothing(service, client, people, case: str) -> None:
    assert client("GET", "/v1/audit/gaps", people["dpo"], headers=NOT_CARRIED[case]).status_code == 200
    assert "trace" not in newest_read(service, client, people)


def test_two_traces_are_none(service, client, people) -> None:
    twice = [("Authorization", f"Bearer {people['dpo']}"), *(("traceparent", CARRIED["traceparent"]),) * 2]
    assert client.run(client._http.get("/v1/audit/gaps", headers=twice)).status_code == 200
    assert "trace" not in newest_read(service, client, people)
    once = twice[:2]
    assert client.run(client._http.get("/v1/audit/gaps", headers=once)).status_code == 200
    assert newest_read(service, client, people)["trace"] == TRACE, "control"


@pytest.mark.parametrize("trace", ["", "0" * 32, OTHER.upper(), OTHER[1:], OTHER + "0", "zz" * 16, OTHER + "%0A"])
def test_a_filter_that_is_no_trace_is_refused(client, people, trace: str) -> None:
    answer = client("GET", f"/v1/audit/events?trace={trace}", people["auditor"])
    assert answer.status_code == 422 and answer.json()["type"].endswith(":invalid")
    assert client("GET", f"/v1/audit/events?trace={OTHER}", people["auditor"]).status_code == 200, "control"


def test_a_workers_leaves_keep_their_own_trace(service, client, people) -> None:
    """A worker's batch is stored as it came: its request's header is not what its leaves are about."""
    worker = Worker()
    assert register(client, people["worker"], worker).status_code == 200
    traced = [event._replace(trace=OTHER) for event in worker.request("acme") if "trace" in event.__struct_fields__]
    batch = worker.batch([worker.started(), *traced, *worker.request("labs")])
    path = f"{worker.path}/batches/{batch.first}"
    media = {"Content-Type": "application/x-ndjson"}
    stored = client("PUT", path, people["worker"], content=batch.body, headers={**media, **CARRIED})
    assert stored.status_code == 200 and ship(client, people["worker"], worker, batch).status_code == 200
    mine = found(client, people["tenant-viewer@acme"], OTHER)
    assert [leaf["kind"] for leaf in mine] == ["residency-opened", "residency-released"]
    assert {leaf["kind"] for leaf in found(client, people["auditor"], TRACE)} & {"residency-opened"} == set()
    first, second = (found(client, people["auditor"], OTHER, kind=leaf["kind"]) for leaf in mine)
    assert [*first, *second] == mine
