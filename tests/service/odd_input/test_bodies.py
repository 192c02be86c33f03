"""Bodies that no client of ours sends: each is accepted, or refused as a problem with a code. None is an error of ours.

Every operation with a body, as listed in the API's own document, receives these:

- no JSON, and JSON of another kind;
- endless nesting;
- its own example, with each property in turn of another type, larger than any number, or of odd text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from kvcustody.audit.store.database.dialect import dialect_of
from kvcustody.governance.api.http import json_body
from kvcustody.governance.api.models import base
from kvcustody.governance.api.models.privacy.cases import CaseRequest
from kvcustody.governance.api.openapi_document import whole_document
from kvcustody.governance.service.problem_details import ProblemError
from standins.service.service_world import Worker, register, who_may

WHOLE = (
    b"", b"{", b"not JSON", b"[]", b'"text"', b"null", b"7", b"true", b"NaN", b"\xff", b"\xef\xbb\xbf{}", b"{}",
    b"[" * 10_000, b"[" * 10_000 + b"]" * 10_000, b'{"a":' * 10_000 + b"7" + b"}" * 10_000, b'{"a":1,"a":2}',
)  # fmt: skip
FEW = (
    "7", '"text"', "[[]]", str(1 << 63), str(1 << 200), "1e308", '{"a\\u0000b":"a\\u0000b"}', '"\\ud800"',
)  # fmt: skip
MORE = (
    "null", "true", "-1", "2.5", "[]", "{}", "[null]", "NaN", "1e999", '"a\\u0000b"', '["a\\u0000b"]', '["\\ud800"]',
    '{"\\ud800":1}', '"\\u202e"', '"\\u202e\\u00e4 \\ufeff"', '""',
)  # fmt: skip
LARGE = json.dumps("x" * (1 << 20))
DEEP = "[" * 900 + "]" * 900


class Asked:
    """One operation: where it is, who may ask it, and its example."""

    def __init__(self, method: str, path: str, operation: dict[str, Any], document: dict[str, Any]) -> None:
        self.method, self.path, self.name = method, path, operation["operationId"]
        self.action = operation["x-kvcustody-action"]
        self.headers = {
            one["name"]: str(one.get("example", one["schema"].get("examples", ["x"])[0]))
            for one in operation.get("parameters", ())
            if one["in"] == "header" and one.get("required") and one["name"] != "Idempotency-Key"
        }
        ((self.media, content),) = operation["requestBody"]["content"].items()
        schema = content["schema"]
        if "$ref" in schema:
            schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        self.properties = list(schema.get("properties", ()))
        self.example = (schema.get("examples") or [{}])[0]


@pytest.fixture(scope="module")
def ask(service_on_each: Any, make_people: Any, make_client: Any) -> Callable[[Asked, bytes], httpx.Response]:
    service = service_on_each
    people, client = make_people(service), make_client(service)
    worker = Worker()
    assert register(client, people["worker"], worker).status_code == 200
    places = {
        "incarnation": worker.incarnation, "sequence": "1", "name": "alice", "case": "ca5e", "erasure": "4f1c0e",
        "schedule": "ab12" * 4, "order": "cd" * 16, "worker": "worker",
    }  # fmt: skip

    def ask(asked: Asked, body: bytes) -> httpx.Response:
        key = who_may(people, asked.action)
        headers = asked.headers | {"Content-Type": asked.media}
        return client(asked.method, asked.path.format(**places), key, content=body, headers=headers)

    return ask


@pytest.fixture(scope="module")
def operations() -> list[Asked]:
    document = whole_document()
    return [
        Asked(method.upper(), path, operation, document)
        for path, item in document["paths"].items()
        for method, operation in item.items()
        if "requestBody" in operation
    ]


def bodies(asked: Asked, *, is_whole: bool) -> Iterator[bytes]:
    yield from WHOLE
    if asked.media != "application/json":
        return
    for place, name in enumerate(asked.properties):
        others = ",".join(
            f"{json.dumps(key)}:{json.dumps(value)}" for key, value in asked.example.items() if key != name
        )
        for value in (*FEW, *MORE) if is_whole else (FEW[place % len(FEW)], MORE[place % len(MORE)]):
            yield f"{{{others}{',' * bool(others)}{json.dumps(name)}:{value}}}".encode()
    yield json.dumps(asked.example | {"unknown": 1}).encode()
    if asked.properties and (is_whole or len(asked.properties) > 4):
        yield f"{{{json.dumps(asked.properties[0])}:{DEEP}}}".encode()
        yield f"{{{json.dumps(asked.properties[0])}:{LARGE}}}".encode()


def test_no_body_is_an_error_of_ours(
    ask: Callable[[Asked, bytes], httpx.Response], operations: list[Asked], service_on_each: Any
) -> None:
    """Where nobody waits for the test, with every odd value of each property; else with some, each for another one."""
    is_whole = not dialect_of(service_on_each.engine).in_file
    assert len(operations) > 45
    refused = 0
    for asked in operations:
        for body in bodies(asked, is_whole=is_whole):
            answer = ask(asked, body)
            where = (asked.name, body[:200], answer.status_code, answer.text[:500])
            assert answer.status_code < 500 or _is_full(answer), where
            if answer.status_code >= 400:
                refused += 1
                assert answer.headers["content-type"] == "application/problem+json", where
                assert answer.json()["type"].startswith("urn:kvcustody:problem:"), where
    assert refused > 1000


def _is_full(answer: httpx.Response) -> bool:
    """Whether it was taken, and waits for other long work to end."""
    return answer.status_code == 503 and answer.json().get("detail") == "too many jobs are waiting"


def test_control_without_a_bound_on_nesting_reading_a_body_fails() -> None:
    """The bound is of levels: one less is taken."""
    deep = b"[" * 990 + b"]" * 990
    with pytest.raises(RecursionError):
        CaseRequest.model_validate({"tenant": json.loads(deep)})
    with pytest.raises(ProblemError, match="nested"):
        json_body.check_json(deep, "application/json")
    most = json_body.DEPTH_MAX - 1
    json_body.check_json(b"[" * most + b"]" * most, "application/json")
    with pytest.raises(ProblemError, match="nested"):
        json_body.check_json(b"[" * (most + 2) + b"]" * (most + 2), "application/json")


def test_control_without_the_check_for_nul_postgresql_refuses_a_body(
    ask: Callable[[Asked, bytes], httpx.Response],
    operations: list[Asked],
    service_on_each: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SQLite takes the character, as its texts have a length."""
    monkeypatch.setattr(base, "_has_nul", lambda value: False)
    asked = next(one for one in operations if one.name == "disablePrincipal")
    in_file = dialect_of(service_on_each.engine).in_file
    assert ask(asked, b'{"name":"a\\u0000b"}').status_code == (404 if in_file else 503)
