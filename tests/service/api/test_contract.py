"""Idempotency, cursors, rates, headers: the contract of every operation, each defence with a control."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import func, select

from kvcustody.audit.store.schema.service import service_answers, service_keys
from kvcustody.governance.credentials.service_secret import ServiceSecret
from kvcustody.governance.service.access.rate_limiter import RateLimiter
from kvcustody.governance.service.access.roles import Role
from kvcustody.governance.service.page_cursor import CursorBinding, Cursors
from kvcustody.governance.service.problem_details import ProblemError
from kvcustody.governance.service.service import Service

ROOT = Path(__file__).resolve().parents[3]


def test_a_repeated_request_is_answered_and_not_done_again(service: Service, client, people) -> None:
    key, headers = people["bootstrap"], {"Idempotency-Key": "same"}
    first = client("POST", "/v1/principals", key, json={"name": "once", "roles": ["dpo"]}, headers=headers)
    again = client("POST", "/v1/principals", key, json={"name": "once", "roles": ["dpo"]}, headers=headers)
    other = client("POST", "/v1/principals", key, json={"name": "twice", "roles": ["dpo"]}, headers=headers)
    assert (first.status_code, again.status_code, other.status_code) == (201, 201, 422)
    assert first.content == again.content and again.headers["idempotency-replayed"] == "true"
    assert other.json()["type"].endswith(":key-reused")
    with service.reading() as connection:
        rows = connection.execute(
            select(func.count()).select_from(service_keys).where(service_keys.c.principal == "once")
        )
        assert rows.scalar() == 1
    elsewhere = client("POST", "/v1/keys:rotate", people["dpo"], json={}, headers=headers)
    assert elsewhere.status_code == 201, "another principal's key is another key"


def test_a_path_without_parameters_has_its_own_methods_alone(client, people) -> None:
    """`DELETE /v1/keys/{prefix}` is there; `/v1/keys/signing` is another path, not the key of that prefix."""
    for path, allowed in (("/v1/keys/signing", "GET, HEAD"), ("/v1/keys/signing:rotate", "POST")):
        answer = client("DELETE", path, people["bootstrap"])
        assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
        assert answer.json()["type"].endswith(":method-not-allowed")
    answer = client("PATCH", "/v1/keys/0123456789ab", people["bootstrap"])
    assert (answer.status_code, answer.headers["allow"]) == (405, "DELETE")
    assert client("DELETE", "/v1/keys/0123456789ab", people["dpo"]).status_code == 404


def test_a_kept_answer_cannot_be_read_from_the_database(service: Service, client, people) -> None:
    """An answer can hold a new API key: it is sealed under the caller's own idempotency key."""
    made = client("POST", "/v1/keys:rotate", people["author"], json={}, headers={"Idempotency-Key": "sealed"}).json()
    people.keys["author"] = made["key"]
    with service.reading() as connection:
        kept = b"".join(bytes(row.sealed) for row in connection.execute(select(service_answers)) if row.sealed)
    assert kept and made["key"].split("_")[2].encode() not in kept and b'"key"' not in kept


def test_a_request_in_work_holds_its_key(service: Service, client, people) -> None:
    answers = service.answers
    request = b"/v1/session?\0\0"
    claim = answers.claim("auditor", "held", request)
    held = client("POST", "/v1/session", people["auditor"], headers={"Idempotency-Key": "held"})
    assert held.status_code == 409 and held.json()["type"].endswith(":in-flight") and "retry-after" in held.headers
    answers.give_up(claim)
    assert client("POST", "/v1/session", people["auditor"], headers={"Idempotency-Key": "held"}).status_code == 201


def test_a_failure_on_our_side_frees_the_key(client, people, service: Service, monkeypatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("disk")

    with monkeypatch.context() as patch:
        patch.setattr(service.sessions, "begin", broken)
        failed = client("POST", "/v1/session", people["auditor"], headers={"Idempotency-Key": "again"})
    assert failed.status_code == 500 and b"disk" not in failed.content
    assert client("POST", "/v1/session", people["auditor"], headers={"Idempotency-Key": "again"}).status_code == 201


def test_a_mutating_post_needs_a_key(client, people) -> None:
    answer = client("POST", "/v1/session", people["auditor"], keyed=False)
    assert answer.status_code == 400 and answer.json()["type"].endswith(":idempotency-key-required")


def test_every_changed_bit_of_a_cursor_is_refused() -> None:
    cursors = Cursors(ServiceSecret(bytes(32)))
    binding = CursorBinding("list", "alice", {"tenant": "acme", "as_of": 4})
    cursor = cursors.write(binding, [3, 7])
    assert cursors.read(binding, cursor) == [3, 7]
    raw = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4))
    for bit in range(8 * len(raw)):
        changed = bytearray(raw)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ProblemError):
            cursors.read(binding, base64.urlsafe_b64encode(changed).rstrip(b"=").decode())
    others = [
        binding._replace(operation="other"),
        binding._replace(principal="bob"),
        binding._replace(filters={"tenant": "labs", "as_of": 4}),
        binding._replace(filters={"tenant": "acme", "as_of": 5}),
        binding._replace(filters={"tenant": "acme"}),
    ]
    for other in others:
        with pytest.raises(ProblemError):
            cursors.read(other, cursor)
    for text in ("", "!", cursor + "A", cursor[:-1], "A" * 2000):
        with pytest.raises(ProblemError):
            cursors.read(binding, text)
    with pytest.raises(ProblemError):
        Cursors(ServiceSecret(bytes(31) + b"x")).read(binding, cursor)


def test_pages_add_up_and_repeat_as_of_a_checkpoint(service: Service, client, people) -> None:
    key = people["auditor"]
    size = client("GET", "/v1/audit/checkpoints/latest", key).json()["size"]
    whole = client("GET", f"/v1/audit/events?as_of={size}&limit=1000", key).json()
    items, cursor = [], None
    while True:
        more = f"&cursor={cursor}" if cursor else ""
        page = client("GET", f"/v1/audit/events?as_of={size}&limit=3{more}", key).json()
        items += page["items"]
        cursor = page["next"]
        if cursor is None:
            break
        stolen = client("GET", f"/v1/audit/events?as_of={size}&limit=3&cursor={cursor}", people["dpo"])
        assert stolen.status_code == 400, "another principal's cursor"
    assert items == whole["items"] and len(items) > 6
    assert client("GET", f"/v1/audit/events?as_of={size}&limit=1000", key).json() == whole, "reads were added meanwhile"
    assert client("GET", "/v1/audit/events?as_of=99999999", key).status_code == 404


def test_rates_are_by_name_and_refill() -> None:
    now = [0.0]
    rates = RateLimiter(2.0, 3, names_max=2, seconds=lambda: now[0])
    assert [rates.take("a") for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]
    assert rates.take("b") == 0.0, "another name's bucket"
    now[0] = 1.0
    assert [rates.take("a") for _ in range(3)] == [0.0, 0.0, 0.5]


def test_a_principal_is_told_to_wait(make_service: Callable[..., Service], make_client) -> None:
    service = make_service(requests_per_second=0.001, requests_burst=2)
    service.principals.enrol("fast", [Role.AUDITOR], by="test")
    key = service.principals.issue_key("fast", days=1, by="test").key
    client = make_client(service)
    answers = [client("GET", "/v1/whoami", key) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert int(answers[2].headers["retry-after"]) > 100 and answers[0].headers["ratelimit-remaining"] == "1"


def test_every_answer_has_the_headers_of_a_closed_door(client, people) -> None:
    for answer in (
        client("GET", "/v1/whoami", people["auditor"]),
        client("GET", "/v1/whoami"),
        client("GET", "/health/live"),
        client("GET", "/nothing", people["auditor"]),
    ):
        headers = answer.headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "frame-ancestors 'none'" in headers["content-security-policy"] and headers["x-frame-options"] == "DENY"
        assert headers["x-content-type-options"] == "nosniff" and headers["cache-control"] == "no-store"
        assert len(headers["x-request-id"]) == 20 and "access-control-allow-origin" not in headers
        assert "server" not in headers


def test_an_unchanged_answer_is_not_sent_again(client, people) -> None:
    first = client("GET", "/v1/version", people["auditor"])
    again = client("GET", "/v1/version", people["auditor"], headers={"If-None-Match": first.headers["etag"]})
    assert again.status_code == 304 and again.content == b""
    other = client("GET", "/v1/version", people["auditor"], headers={"If-None-Match": '"0"'})
    assert other.status_code == 200 and other.headers["etag"] == first.headers["etag"]


def test_bodies_have_a_limit(client, people) -> None:
    answer = client("POST", "/v1/principals", people["bootstrap"], content=b" " * (5 << 20))
    assert answer.status_code == 413


@pytest.mark.parametrize("path", ["/v1/prefixes", "/v1/showback", "/v1/tiers"])
def test_a_period_that_ends_before_a_day_has_passed_begins_at_the_beginning(client, people, path: str) -> None:
    for until, status in ((0, 422), (1, 200), (10, 200)):
        answer = client("GET", path, people["operator"], params={"until": until})
        assert answer.status_code == status, answer.text
