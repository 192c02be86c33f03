"""API keys: stored as hashes, ended at once, and equally dear for all that do not work."""

from __future__ import annotations

import time
import zlib
from pathlib import Path

import pytest
from sqlalchemy import func, insert, select

from kvcustody.audit.store.database.engine import WRITE
from kvcustody.audit.store.schema.ledger import events
from kvcustody.audit.store.schema.service import service_keys
from kvcustody.clock import SystemClock, VirtualClock
from kvcustody.governance.credentials import api_key
from kvcustody.governance.credentials.api_key import KeyHasher, prefix_of
from kvcustody.governance.service.access.authenticator import ServiceAuthenticator
from kvcustody.governance.service.access.rate_limiter import RateLimiter
from kvcustody.governance.service.access.roles import Role
from kvcustody.governance.service.held.what_changed import CredentialsSeen, read_orders_seen
from kvcustody.governance.service.problem_details import ProblemError
from kvcustody.governance.service.service import Service
from standins import builders

ROOT = Path(__file__).resolve().parents[3]


def test_a_key_is_nowhere_in_the_database(service: Service, people, client) -> None:
    key = people["auditor"]
    assert client("GET", "/v1/whoami", key).status_code == 200
    raw = b"".join(path.read_bytes() for path in builders.ledger_file(service.engine).parent.glob("ledger.db*"))
    secret = key.split("_")[2].encode()
    assert secret not in raw and key.split("_")[1].encode() in raw, "void: the prefix is there, the secret is not"


def test_keys_expire_are_revoked_and_replaced(service: Service, client) -> None:
    book = service.principals
    book.enrol("carol", [Role.AUDITOR], by="test")
    first = book.issue_key("carol", days=1, by="test")
    assert client("GET", "/v1/whoami", first.key).status_code == 200
    second = client("POST", "/v1/keys:rotate", first.key, json={"days": 5, "overlap_days": 0}).json()
    assert client("GET", "/v1/whoami", first.key).status_code == 401, "the overlap is over"
    assert client("GET", "/v1/whoami", second["key"]).status_code == 200
    third = book.issue_key("carol", days=0.0000001, by="test")
    time.sleep(0.02)
    assert client("GET", "/v1/whoami", third.key).status_code == 401, "expired"
    assert client("DELETE", f"/v1/keys/{second['prefix']}", second["key"]).status_code == 204
    assert client("GET", "/v1/whoami", second["key"]).status_code == 401, "revoked, though it was remembered"
    fourth = book.issue_key("carol", days=1, by="test")
    assert client("GET", "/v1/whoami", fourth.key).status_code == 200
    assert service.principals.keys("carol")[0].used_us is not None
    book.disable("carol", by="test")
    assert client("GET", "/v1/whoami", fourth.key).status_code == 401, "disabled"
    with pytest.raises(ProblemError, match="never reused"):
        book.enrol("carol", [Role.AUDITOR], by="test")


def test_another_principals_key_is_absent(service: Service, client, people) -> None:
    theirs = people["dpo"].split("_")[1]
    foreign = client("DELETE", f"/v1/keys/{theirs}", people["auditor"])
    absent = client("DELETE", "/v1/keys/000000000000", people["auditor"])
    assert foreign.status_code == absent.status_code == 404 and foreign.content == absent.content
    assert client("GET", "/v1/whoami", people["dpo"]).status_code == 200


def test_changes_of_principals_are_on_record(service: Service, client, people) -> None:
    with service.reading() as connection:
        count = select(func.count()).select_from(events).where(events.c.kind == "principal-changed")
        assert connection.scalar(count) >= 2 * len(people.keys)


def _forge(prefix: str, secret: str) -> str:
    body = f"{api_key.SERVICE_MARK}_{prefix}_{secret}"
    return f"{body}_{zlib.crc32(body.encode()):08x}"


def test_unknown_keys_cost_what_known_ones_with_a_wrong_secret_do(service: Service, people) -> None:
    """The same work for both, counted exactly."""
    known = people["auditor"].split("_")[1]
    wrong = [_forge(known, f"{number:043d}") for number in range(6)]
    unknown = [_forge(f"{number:012x}", f"{number:043d}") for number in range(6)]
    hasher = service.principals._hasher
    for keys in (wrong, unknown):
        before = hasher.verifications
        assert all(service.principals.by_key(prefix_of(key), key) is None for key in keys)
        assert hasher.verifications - before == 6


def test_a_remembered_key_is_not_verified_again(service: Service, people) -> None:
    key, hasher = people["operator"], service.principals._hasher
    service.principals.by_key(prefix_of(key), key)
    before = hasher.verifications
    for _ in range(10):
        assert service.principals.by_key(prefix_of(key), key)
    assert hasher.verifications == before


def test_a_caller_who_is_known_showed_the_same_a_moment_ago(service: Service) -> None:
    """Neither another certificate nor another scheme is what was proven; nor is it proven for longer than a second."""
    own, other, book, who = "A" * 43, "B" * 43, service.principals, service.authenticator
    book.enrol("gpu-known", [Role.WORKER], by="test")
    shown = f"Bearer {book.issue_key('gpu-known', days=1, certificate=own, by='test').key}"
    assert who.known(shown, own) is None
    assert who.caller(shown, None, "192.0.2.1", own) == who.known(shown, own), "control"
    assert [who.known(shown, other), who.known(shown), who.known(shown.replace("Bearer", "Basic"), own)] == [None] * 3
    bound = time.monotonic() + 30
    while who.known(shown, own) is not None and time.monotonic() < bound:
        time.sleep(0.05)
    assert who.known(shown, own) is None
    found = who.caller(shown, None, "192.0.2.1", own)
    assert who.known(shown, own) == found
    book.revoke_keys("gpu-known", by="test")
    assert who.known(shown, own) is None


def test_the_checksum_finds_every_changed_character() -> None:
    key = KeyHasher().make().key
    assert prefix_of(key) is not None
    for place in range(len(key)):
        other = "a" if key[place] != "a" else "b"
        assert prefix_of(key[:place] + other + key[place + 1 :]) is None


@pytest.mark.parametrize(
    "authorization",
    [
        *(
            "",
            "Bearer",
            "Bearer ",
            "Basic YTpi",
            "Bearer kvcs_",
            "Bearer kvcs_000000000000_x_0",
            "Bearer \u00ff",
        ),
        *("Bearer a b", "Bearer " + "x" * 9000, "bearer eyJhbGciOiJub25lIn0.e30."),
    ],
)
def test_malformed_credentials_are_one_answer(client, authorization: str) -> None:
    none = client("GET", "/v1/whoami")
    answer = client("GET", "/v1/whoami", headers={"Authorization": authorization.encode("latin-1")})
    assert answer.status_code == none.status_code == 401
    assert answer.content == none.content and answer.headers["www-authenticate"] == "Bearer"


def test_a_path_tells_nothing_without_a_credential(client) -> None:
    answers = {
        client("GET", path).content for path in ("/v1/whoami", "/v1/nothing", "/v1/audit/events", "/metrics", "/")
    }
    assert len(answers) == 1


@pytest.mark.parametrize(("address", "prefix"), [("1.1.1.1", "same"), ("1.1.1.1", "other"), ("2.2.2.2", "same")])
def test_bad_keys_are_told_to_wait_and_a_good_one_never_is(make_service, address: str, prefix: str) -> None:
    """Of the same address, of the same prefix, of both; nothing of it was verified before."""
    service = make_service(failures_per_minute=3, key_failures_per_minute=3)
    check: ServiceAuthenticator = service.authenticator
    service.principals.enrol("good", [Role.AUDITOR], by="test")
    good = service.principals.issue_key("good", days=1, by="test").key
    bad = _forge(good.split("_")[1] if prefix == "same" else "0" * 12, "0" * 43)
    statuses = []
    for place in ("1.1.1.1",) * 5 + (address,):
        with pytest.raises(ProblemError) as caught:
            check.caller(f"Bearer {bad}", None, place)
        statuses.append(caught.value.type.status)
    assert statuses == [401, 401, 401, 429, 429, 429]
    with pytest.raises(ProblemError) as caught:
        check.caller("Bearer " + _forge("1" * 12, "0" * 43), None, "3.3.3.3")
    assert caught.value.type.status == 401, "control: another address with another prefix"
    for where in ("1.1.1.1", address):
        assert check.caller(f"Bearer {good}", None, where).name == "good"


class Seen:
    """What a look into the database saw of all credentials: tests change it."""

    value: int | None = 1

    def __call__(self) -> int | None:
        return self.value


@pytest.mark.parametrize(("role", "kept"), [(Role.WORKER, True), (Role.DOOR, True), (Role.AUDITOR, False)], ids=str)
def test_a_process_key_is_not_looked_up_again_while_no_credential_changes(
    service: Service, role: Role, *, kept: bool
) -> None:
    """Control: a person's key is looked up after a second, and everybody's where nobody looks."""
    kind = "machine" if kept else "person"
    service.principals.enrol(f"asks-{role}", [role], kind=kind, by="test")
    shown = "Bearer " + service.principals.issue_key(f"asks-{role}", days=1, by="test").key
    clock, seen = VirtualClock(utc_us=SystemClock().utc_us()), Seen()
    who = ServiceAuthenticator(
        service.principals,
        service.authenticator._tokens,
        service.sessions,
        RateLimiter(1.0, 100),
        RateLimiter(1.0, 100),
        lambda *_: None,
        clock,
        seen,
    )
    found = who.caller(shown, None, "192.0.2.1")
    assert who.known(shown) == found, "within the second"
    clock.advance(30_000_000)
    assert who.known(shown) == (found if kept else None)
    seen.value = 2
    assert who.known(shown) is None, "another process changed some credential"
    who.caller(shown, None, "192.0.2.1")
    seen.value = None
    clock.advance(2_000_000)
    assert who.known(shown) is None, "nobody looks"
    seen.value = 2
    clock.advance(60_000_000)
    assert who.known(shown) is None, "a minute has passed"


@pytest.mark.parametrize("narrow", ["revoke", "disable", "replace", "issue"])
def test_a_look_sees_whatever_another_process_changes_of_credentials(service: Service, narrow: str) -> None:
    """Control: two looks at the same credentials are equal."""
    book, name = service.principals, f"changes-{narrow}"
    book.enrol(name, [Role.WORKER], kind="machine", by="test")
    first = book.issue_key(name, days=1, by="test")

    def look() -> CredentialsSeen:
        with service.reading() as connection:
            return read_orders_seen(connection).credentials

    before = look()
    assert look() == before
    if narrow == "revoke":
        book.revoke_key(first.prefix, principal=name, by="test")
    elif narrow == "disable":
        book.disable(name, by="test")
    elif narrow == "replace":
        book.issue_key(name, days=1, overlap_days=0.1, by="test")
    else:
        book.issue_key(name, days=1, by="test")
    assert look() != before


def test_a_look_counts_more_keys_than_a_sum_of_their_ends_in_microseconds_can_have(service: Service) -> None:
    """Control: the ends of all of them, to the microsecond, are what it sees."""
    ends_us = [SystemClock().utc_us() + number for number in range(5_200)]
    row = {"principal": "nobody", "hash": "$blake2b$x", "issued_us": 0}
    rows = [row | {"prefix": f"{at:016x}", "expires_us": end} for at, end in enumerate(ends_us)]

    def look() -> CredentialsSeen:
        with service.reading() as connection:
            return read_orders_seen(connection).credentials

    before = look()
    with service.engine.connect().execution_options(**WRITE) as connection, connection.begin():
        connection.execute(insert(service_keys), rows)
    assert sum(ends_us) > 1 << 63
    assert look() == before._replace(keys=before.keys + len(rows), ends_us=before.ends_us + sum(ends_us))
