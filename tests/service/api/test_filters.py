"""What a question may be narrowed by: times in both forms, the reader, the owner, a hand-out, a period of denials."""

from __future__ import annotations

from typing import Any

import pytest

from kvcustody.governance.api.openapi_document import whole_document
from kvcustody.policies.document.model import Effect
from kvcustody.times import iso
from standins.service.service_world import Worker, register, ship


@pytest.fixture(scope="module")
def filled(service: Any, people: Any, client: Any) -> Any:
    worker = Worker()
    register(client, people["worker"], worker)
    made = [worker.started(), *worker.request("acme"), *worker.request("labs")]
    ship(client, people["worker"], worker, worker.batch(made))
    return service, people, client


def items(filled: Any, path: str) -> list[Any]:
    _, people, client = filled
    answer = client("GET", path, people["auditor"])
    assert answer.status_code == 200, answer.text
    return list(answer.json()["items"])


def test_a_time_is_the_same_in_iso_8601_and_in_microseconds(filled: Any) -> None:
    every = items(filled, "/v1/audit/events?limit=1000&tenant=acme")
    at_us = max(item["at_us"] for item in every)
    known = [item["at_us"] for item in every]
    for name, kept in (("since", lambda us: us >= at_us), ("until", lambda us: us < at_us)):
        for given in (str(at_us), iso(at_us)):
            found = items(filled, f"/v1/audit/events?limit=1000&tenant=acme&{name}={given}")
            assert [item["at_us"] for item in found] == [us for us in known if kept(us)]
    _, people, client = filled
    for wrong in ("yesterday", "2026-13-01", "-1"):
        assert client("GET", f"/v1/audit/events?since={wrong}", people["auditor"]).status_code == 422


def test_a_hand_out_is_found_by_its_number(filled: Any) -> None:
    every = items(filled, "/v1/audit/events?limit=1000&tenant=acme")
    opened = next(item["leaf"] for item in every if item["leaf"].get("runs"))
    generation = opened["runs"][0][1]
    found = items(filled, f"/v1/audit/events?tenant=acme&generation={generation}")
    assert opened in [item["leaf"] for item in found]
    assert not items(filled, "/v1/audit/events?tenant=acme&generation=9000000000000")


def test_nobody_reads_from_an_owner_that_is_not_there(filled: Any) -> None:
    for name in ("reader", "owner"):
        assert not items(filled, f"/v1/audit/events?{name}=nobody")


def test_denials_take_a_period(filled: Any) -> None:
    assert not items(filled, "/v1/custody/denials?until=1970-01-02")
    _, people, client = filled
    first = client("GET", "/v1/custody/denials?since=0", people["auditor"])
    assert first.status_code == 200


def test_the_document_says_what_is_true_of_outcomes_generations_and_times() -> None:
    listing = whole_document()["paths"]["/v1/audit/events"]["get"]
    said = {one["name"]: one for one in listing["parameters"]}
    for effect in Effect:
        assert f"`{effect.value}`" in said["outcome"]["description"]
    assert "`allow`" not in said["outcome"]["description"]
    assert {one.get("type") for one in said["since"]["schema"]["anyOf"]} >= {"string", "integer"}
