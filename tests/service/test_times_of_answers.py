"""Every moment of an answer is in microseconds and in ISO 8601: in the API document, its examples and answers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import BaseModel

from kvcustody.governance.api.http.answer_times import (
    _COLUMN_MIN,
    LENGTHS,
    MOMENTS,
    answer_bytes,
    date_schemas,
    dated_data,
    iso_field,
    times_of,
)
from kvcustody.governance.api.openapi_document import whole_document
from kvcustody.times import iso
from standins.service.service_world import Worker, register, ship

AT_US = 1_780_000_000_000_001
_OLDEST_US = 10**15  # September 2001: what is smaller is a length


@pytest.fixture(scope="module")
def document() -> Any:
    return whole_document()


def _schemas(document: Any, part: str) -> dict[str, Any]:
    """The schemas that this part of operations leads to, by name; signed documents stay as they were signed."""
    every, reached = document["components"]["schemas"], {}

    def walk(value: Any) -> None:
        if isinstance(value, list):
            for item in value:
                walk(item)
        elif isinstance(value, dict):
            name = str(value.get("$ref", "")).rpartition("/")[2]
            if name and name not in reached and "signature" not in every[name].get("properties", {}):
                reached[name] = every[name]
                walk(every[name])
            walk(list(value.values()))

    walk([at[part] for path in document["paths"].values() for at in path.values() if part in at])
    return reached


def undated(schemas: dict[str, Any]) -> list[str]:
    """Moments that no field beside them gives in ISO 8601."""
    return [
        f"{name}.{field}"
        for name, schema in schemas.items()
        for field in schema.get("properties", {})
        if (added := iso_field(field)) is not None and "date-time" not in str(schema["properties"].get(added))
    ]


def _pairs(value: Any) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Every field of time, its value, and the object that it stands in; leaves are as they were written."""
    if isinstance(value, list):
        for item in value:
            yield from _pairs(item)
    elif isinstance(value, dict):
        for name, item in value.items():
            if name.endswith("_us"):
                yield name, item, value
            elif name != "leaf":
                yield from _pairs(item)


def test_every_moment_of_the_document_stands_in_it_twice(document: Any) -> None:
    answers, requests = _schemas(document, "responses"), _schemas(document, "requestBody")
    assert not undated(answers)
    fields = {field for schema in answers.values() for field in schema.get("properties", {})}
    assert fields >= LENGTHS - {"offset_us"} and sum(iso_field(field) is not None for field in fields) > 30
    assert undated(requests)  # a request states a time once


def undeclared(models: Iterable[type[BaseModel]], document: Any) -> list[str]:
    """Fields of time that are declared neither as a moment nor as a length, or as both."""
    of_models = {(model.__name__, field) for model in models for field in model.model_fields}
    of_document = {
        (name, field)
        for name, schema in document["components"]["schemas"].items()
        for field in schema.get("properties", {})
    }
    asked = {
        (path, one["name"])
        for path, of in document["paths"].items()
        for operation in of.values()
        for one in operation.get("parameters", [])
    }
    fields = {(of, name) for of, name in of_models | of_document | asked if name.endswith("_us")}
    return sorted(f"{of}.{name}" for of, name in fields if (name in MOMENTS) is (name in LENGTHS))


def _models(parent: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for model in parent.__subclasses__():
        yield model
        yield from _models(model)


def test_every_field_of_time_is_declared_as_a_moment_or_as_a_length(document: Any) -> None:
    models = [model for model in _models(BaseModel) if model.__module__.startswith("kvcustody.governance.api")]
    assert len(models) > 150
    assert undeclared(models, document) == []
    used = {name for model in models for name in model.model_fields}
    assert used >= MOMENTS | LENGTHS, "a declaration that nothing has"


def test_a_field_that_nobody_declared_is_found(document: Any) -> None:
    """The control of the test above; and such a field is taken for no moment."""

    class New(BaseModel):
        until_us: int
        stall_us: int

    assert undeclared([New], document) == ["New.stall_us"]
    assert json.loads(answer_bytes(New, {"until_us": 0, "stall_us": 7})).keys() == {
        "until_us",
        "until",
        "stall_us",
    }


def test_a_document_without_the_rule_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positive control: what FastAPI writes of the models states each moment once."""
    monkeypatch.setattr("kvcustody.governance.api.openapi_document.date_schemas", lambda made: None)
    plain = whole_document()
    assert len(undated(_schemas(plain, "responses"))) > 60
    date_schemas(plain)
    assert not undated(_schemas(plain, "responses"))


def test_examples_tell_lengths_from_moments(document: Any) -> None:
    examples = [schema.get("examples", []) for schema in _schemas(document, "responses").values()]
    seen = list(_pairs(examples))
    assert len(seen) > 60
    for name, value, beside in seen:
        added = iso_field(name)
        if value and value != 7:  # what an example that is made by itself has
            assert (added is not None) == (value >= _OLDEST_US), name
        if added is not None:
            assert beside[added] == (None if value is None else iso(value)), name


class Timed(BaseModel):
    until_us: int
    ended_us: int | None
    age_us: int


def test_what_no_calendar_has_is_null() -> None:
    ends = {"until_us": 1 << 62, "ended_us": None, "age_us": 7}
    assert json.loads(answer_bytes(Timed, ends)) == {
        "until_us": 1 << 62, "until": None, "ended_us": None, "ended": None, "age_us": 7,
    }  # fmt: skip
    last = {"until_us": 253_402_300_799_999_999, "ended_us": 0, "age_us": 7}
    dated = json.loads(answer_bytes(Timed, last))
    assert (dated["until"], dated["ended"]) == ("9999-12-31T23:59:59.999999Z", "1970-01-01T00:00:00Z")


STATED = st.none() | st.integers(-(1 << 70), 1 << 70) | st.integers(-(1 << 56), 1 << 58)
SECONDS = st.integers(0, 253_402_300_799).map(lambda second: second * 1_000_000)


@given(st.lists(STATED | SECONDS, min_size=1, max_size=2 * _COLUMN_MIN) | st.lists(SECONDS, min_size=_COLUMN_MIN))
@example([AT_US + item for item in range(_COLUMN_MIN)])
@example([253_402_300_800_000_000] * _COLUMN_MIN)
def test_every_moment_is_the_calendars_one_by_one_and_as_a_column(stated: list[int | None]) -> None:
    answers = [{"until_us": at_us, "ended_us": None, "age_us": 7} for at_us in stated]
    times = times_of(Timed)
    assert times is not None
    times.add(answers)
    written = json.loads(answer_bytes(None, {"items": [answer["until"] for answer in answers]}))["items"]
    assert written == [calendar(at_us) for at_us in stated]


def calendar(at_us: int | None) -> str | None:
    """ISO 8601 by `datetime`; None where no calendar has the moment."""
    if at_us is not None:
        with suppress(OverflowError):
            return iso(at_us)
    return None


def test_facts_that_no_model_describes_have_their_moments_twice() -> None:
    """A length has one form, and so has what no calendar has."""
    facts = {"erasure": "e", "deadline_us": 1, "age_us": 7, "rows": [{"heard_us": None}, {"at_us": 1 << 62}]}
    assert dated_data(facts) == facts | {
        "deadline": "1970-01-01T00:00:00.000001Z",
        "rows": [{"heard_us": None, "heard": None}, {"at_us": 1 << 62, "at": None}],
    }


def test_a_moment_is_not_written_over_another_field() -> None:
    class Twice(BaseModel):
        at_us: int
        at: str

    with pytest.raises(AssertionError, match="Twice: a field of this name is there"):
        times_of(Twice)


@pytest.fixture(scope="module")
def filled(service: Any, people: Any, client: Any) -> Any:
    worker = Worker()
    register(client, people["worker"], worker)
    made = [worker.started(), *worker.request("acme"), *worker.request("labs")]
    ship(client, people["worker"], worker, worker.batch(made))
    return people, client


@pytest.mark.parametrize(
    "path",
    [
        "/v1/audit/events?limit=1000",
        "/v1/audit/proofs/inclusion?log=system&idx=0",
        "/v1/audit/checkpoints/latest",
        "/v1/audit/summary",
        "/v1/custody/live",
        "/v1/custody/coverage?since=2026-01-01&until=2026-12-31",
        "/v1/keys",
        "/v1/health",
    ],
)
def test_answers_give_every_moment_twice(filled: Any, path: str) -> None:
    people, client = filled
    answer = client("GET", path, people["auditor"])
    assert answer.status_code == 200, answer.text
    moments = [entry for entry in _pairs(answer.json()) if iso_field(entry[0]) is not None]
    assert moments
    for name, value, beside in moments:
        assert beside[iso_field(name)] == (None if value is None else iso(value)), (name, beside)


def test_a_leaf_stays_as_it_was_written(filled: Any) -> None:
    people, client = filled
    item = client("GET", "/v1/audit/events?limit=1", people["auditor"]).json()["items"][0]
    assert "at_us" in item["leaf"] and "at" not in item["leaf"] and item["at"] == iso(item["at_us"])
