"""What one caller may send that would trouble all: bounded, named and refused at the door."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import orjson
import pytest
from sqlalchemy import update
from typer.testing import CliRunner

from kvcustody.audit.store.database.engine import WRITE
from kvcustody.audit.store.schema.service import service_workers
from kvcustody.console.main import app
from kvcustody.console.web.app import Console
from kvcustody.errors import IdentityError
from kvcustody.files import private_folder
from kvcustody.governance.api.http.session_cookie import PLAIN_COOKIE, SECURE_COOKIE, cookie_of
from kvcustody.governance.api.operations import fleet
from kvcustody.governance.service.access.roles import Role
from standins.service.service_world import Worker, register, ship

HUGE = 1.7e308


@pytest.fixture(scope="module")
def worker(client: Any, people: Any) -> Worker:
    made = Worker()
    assert register(client, people["worker"], made).status_code == 200
    return made


@pytest.mark.parametrize("value", [HUGE, -HUGE, float(1 << 64)])
def test_a_worker_says_no_number_that_others_cannot_show(
    client: Any, people: Any, worker: Worker, value: float
) -> None:
    for what in (
        {"status": {"blocks.total": value}},
        {"tenants": {"active_tokens": {"acme": abs(value)}}},
    ):
        answer = client("PUT", f"{worker.path}/status", people["worker"], json=what)
        assert answer.status_code == 422, answer.text
    assert client("GET", "/v1/capacity", people["operator"]).status_code == 200
    for number in (float((1 << 53) - 1), -1.0):
        said = {"status": {"blocks.total": number}}
        assert client("PUT", f"{worker.path}/status", people["worker"], json=said).status_code == 200
        assert client("GET", "/v1/capacity", people["operator"]).status_code == 200


def test_such_a_number_that_is_in_the_table_already_is_shown_bounded(
    service: Any, client: Any, people: Any, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: shown as it is, it is an error to everybody."""

    def put(value: float) -> None:
        status = orjson.dumps({"blocks.total": value}).decode()
        with service.engine.connect().execution_options(**WRITE) as connection, connection.begin():
            connection.execute(update(service_workers).values(status=status))

    put(HUGE)
    assert client("GET", "/v1/capacity", people["operator"]).status_code == 200
    monkeypatch.setattr(fleet, "whole", int)
    assert client("GET", "/v1/capacity", people["operator"]).status_code == 500
    put(1.0)


@pytest.mark.parametrize("column", ["status", "charged", "tenants"])
@pytest.mark.parametrize("text", ["", "{", "null", "[]"])
def test_what_a_worker_said_and_nobody_can_read_ends_no_list(
    service: Any, client: Any, people: Any, worker: Worker, column: str, text: str
) -> None:
    """Control: what can be read is shown."""

    def put(value: str) -> None:
        with service.engine.connect().execution_options(**WRITE) as connection, connection.begin():
            connection.execute(update(service_workers).values({column: value}))

    put(text)
    for path in ("/v1/workers", "/v1/capacity", "/v1/health", "/v1/showback", "/v1/prefixes", "/metrics"):
        assert client("GET", path, people["operator"]).status_code == 200, path
    told = {"blocks.total": 3.0} if column == "status" else {}
    put(orjson.dumps(told).decode())
    shown = client("GET", "/v1/workers", people["operator"]).json()["items"]
    assert shown and all(item[column] == told for item in shown)


def test_over_tls_the_cookie_with_the_prefix_alone_counts() -> None:
    """Control: without TLS the plain one is the session's, and the other is not."""
    plain, secure, both = (
        f"{PLAIN_COOKIE}=planted",
        f"{SECURE_COOKIE}=ours",
        f"{PLAIN_COOKIE}=planted; {SECURE_COOKIE}=ours",
    )
    assert [cookie_of(header, tls=True) for header in (plain, secure, both, None)] == [
        None,
        "ours",
        "ours",
        None,
    ]
    assert [cookie_of(header, tls=False) for header in (plain, secure, both)] == ["planted", None, "planted"]


def test_no_session_begins_over_tls_with_the_plain_cookie(
    service: Any, client: Any, make_client: Any, people: Any
) -> None:
    begun = client("POST", "/v1/session", people["auditor"])
    session = {"Cookie": begun.headers["set-cookie"].split(";")[0]}
    assert client("GET", "/v1/whoami", headers=session).status_code == 200
    plain = service.settings
    service.settings = plain.model_copy(update={"tls_certificate_path": Path("c.pem"), "tls_key_path": Path("k.pem")})
    try:
        assert service.settings.tls
        over_tls = make_client(service)
        assert over_tls("GET", "/v1/whoami", headers=session).status_code == 401
        prefixed = {"Cookie": session["Cookie"].replace(PLAIN_COOKIE, SECURE_COOKIE, 1)}
        assert over_tls("GET", "/v1/whoami", headers=prefixed).status_code == 200
    finally:
        service.settings = plain


def test_a_private_folder_is_in_private_folders(tmp_path: Path) -> None:
    """Each that is missing is made for its user alone, whatever the umask; control: `parents=True` leaves them open."""
    before = os.umask(0o022)
    try:
        private_folder(tmp_path / "spill" / "worker-1")
        (tmp_path / "other" / "worker-1").mkdir(mode=0o700, parents=True)
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "spill", tmp_path / "other")}
    assert modes == {"spill": 0o700, "other": 0o755}
    assert stat.S_IMODE((tmp_path / "spill" / "worker-1").stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("who", "path", "body", "place"),
    [
        ("operator", "/v1/clock:confirm", {"reason": "told\0so"}, "body.reason"),
        ("approver", "/v1/policies/enforcement:enforce", {"reason": "now\0"}, "body.reason"),
        ("author", "/v1/policies:validate", {"source": "a: \0"}, "body.source"),
        ("auditor", "/v1/reports/schedules", {"framework": "a", "every": "weekly", "formats": ["\0"]}, "formats"),
    ],
)  # fmt: skip
def test_text_that_no_database_takes_is_refused_with_its_place(
    client: Any, people: Any, who: str, path: str, body: dict[str, Any], place: str
) -> None:
    answer = client("POST", path, people[who], json=body)
    assert answer.status_code == 422, answer.text
    assert any(place in error["at"] and "U+0000" in error["what"] for error in answer.json()["errors"])


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/v1/principals/a%00b", {}),
        ("/v1/audit/events?tenant=a%00b", {}),
        ("/v1/audit/events?a%00b=c", {}),
        ("/v1/audit/events", {"If-None-Match": "a\0b"}),
    ],
)
def test_u0000_in_path_query_or_headers_is_refused(
    service_on_each: Any, make_client: Any, make_people: Any, path: str, headers: dict[str, str]
) -> None:
    """Control: another character at the same place is no malformed request."""
    client, people = make_client(service_on_each), make_people(service_on_each)
    who = people.add(f"who-{len(service_on_each.principals.listed()[0])}", Role.AUDITOR)
    answer = client("GET", path, who, headers=headers)
    assert (answer.status_code, "U+0000" in answer.text) == (400, True), answer.text
    others = {name: value.replace("\0", "1") for name, value in headers.items()}
    assert "U+0000" not in client("GET", path.replace("%00", "1"), who, headers=others).text


@pytest.mark.parametrize(("old", "new"), [(b'"cpu"', b'"c\\u0000pu"'), (b'"own-scope"', b'"own\\\\\\u0000"')])
def test_u0000_in_a_leaf_is_refused_with_its_place(
    service_on_each: Any, make_client: Any, make_people: Any, old: bytes, new: bytes
) -> None:
    """Control: the six characters of the escape are a text like any other."""
    client, people = make_client(service_on_each), make_people(service_on_each)
    worker = Worker(f"w{len(service_on_each.principals.listed()[0])}")
    key = people.add(worker.name, Role.WORKER)
    assert register(client, key, worker).status_code == 200
    batch = worker.batch([worker.started(), *worker.request("acme")])
    answer = ship(client, key, worker, batch._replace(body=batch.body.replace(old, new)))
    assert answer.status_code == 422 and "contains the character U+0000" in answer.text, answer.text
    assert answer.json()["leaf"] == batch.body.split(b"\n").index(*_lines_with(batch.body, old)) - 1
    escaped = new.replace(b"\\u0000", b"\\\\u0000") if b"cpu" in old else b'"own\\\\u0000"'
    spelled = batch._replace(body=batch.body.replace(old, escaped))
    assert ship(client, key, worker, spelled).status_code == 200


def _lines_with(body: bytes, part: bytes) -> list[bytes]:
    return [line for line in body.split(b"\n") if part in line]


def test_u0000_in_an_argument_of_a_command_is_refused() -> None:
    answer = CliRunner().invoke(app, ["case", "list", "--tenant", "a\0b"])
    assert answer.exit_code == 2 and "U+0000" in answer.output


@pytest.mark.parametrize("name", ["control-plane", "governor", "local", "unknown", "Governor", "LOCAL"])
def test_nobody_has_the_name_of_a_part_of_the_product(service: Any, name: str) -> None:
    """Records of what these did would be taken for a person's. Control: a name beside them."""
    with pytest.raises(IdentityError, match="another name"):
        service.principals.enrol(name, [Role.AUDITOR], by="test")
    assert service.principals.find(name) is None
    assert service.principals.enrol(f"{name}-2-{name}", [Role.AUDITOR], by="test").name


def test_a_health_check_by_head_is_answered_and_no_attempt_to_get_in(service: Any, client: Any, people: Any) -> None:
    """Nor is another method. Control: where a credential is needed, a request without one is an attempt."""
    service.attempts.attempts.take()
    shown = client("GET", "/health/live")
    answer = client("HEAD", "/health/live")
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["content-length"] == str(len(shown.content))
    other = client("OPTIONS", "/health/ready")
    assert (other.status_code, other.headers["allow"]) == (405, "GET, HEAD")
    head = client("HEAD", "/v1/whoami", people["auditor"])
    assert (head.status_code, head.content) == (200, b"")
    assert service.attempts.attempts.take() == []
    assert client("HEAD", "/v1/whoami").status_code == 401
    assert len(service.attempts.attempts.take()) == 1


@pytest.mark.parametrize(
    ("trusted", "proto", "secure"),
    [(("127.0.0.1",), "https", True), (("127.0.0.1",), "http", False), ((), "https", False)],
)
def test_behind_a_trusted_proxy_that_ends_tls_the_cookie_is_secure(
    service: Any, make_client: Any, people: Any, trusted: tuple[str, ...], proto: str, secure: bool
) -> None:
    """Controls: without the proxy's word, or from a proxy that nobody trusts, it is the plain cookie."""
    plain = service.settings
    service.settings = plain.model_copy(update={"trusted_proxies": trusted})
    by_proxy = {"X-Forwarded-Proto": proto}
    client = make_client(service)
    try:
        new = {"Idempotency-Key": f"{proto} by {trusted}"}  # each client counts its own keys from 0
        begun = client("POST", "/v1/session", people["auditor"], headers=by_proxy | new)
        cookie = begun.headers["set-cookie"]
        assert ("; Secure" in cookie, cookie.startswith("__Host-")) == (secure, secure)
        assert ("strict-transport-security" in begun.headers) is secure
        session = {"Cookie": cookie.split(";")[0]} | by_proxy
        assert client("GET", "/v1/whoami", headers=session).status_code == 200
    finally:
        service.settings = plain


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("kv.example:443", "https://kv.example", 204),
        ("KV.example", "https://kv.example", 204),
        ("kv.example:80", "http://kv.example", 204),
        ("kv.example:80", "https://kv.example", 403),
        ("kv.example:8443", "https://kv.example", 403),
        ("kv.example", "https://other.example", 403),
    ],
)
def test_a_host_may_name_the_default_port_of_its_origin(
    client: Any, people: Any, host: str, origin: str, status: int
) -> None:
    """Controls: another port and another host are another origin."""
    begun = client("POST", "/v1/session", people["auditor"])
    headers = {"Cookie": begun.headers["set-cookie"].split(";")[0], "X-CSRF-Token": begun.json()["csrf"]}
    answer = client("DELETE", "/v1/session", headers=headers | {"Host": host, "Origin": origin})
    assert answer.status_code == status


def test_a_wrong_key_at_the_console_counts_for_whom_the_trusted_proxy_names(
    service: Any, make_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: without a trusted proxy it counts for the connection's own address."""
    counted: list[str] = []
    monkeypatch.setattr(service.authenticator._failures, "take", lambda address: counted.append(address) or 0.0)
    plain = service.settings
    try:
        for trusted in (("127.0.0.1",), ()):
            service.settings = plain.model_copy(update={"trusted_proxies": trusted})
            client = make_client(service, pages=Console(service))
            form = {
                "Content-Type": "application/x-www-form-urlencoded",
                "X-Forwarded-For": "198.51.100.7:5678",
            }
            answer = client("POST", "/console/login", content="key=kvc_wrong", headers=form, keyed=False)
            assert (answer.status_code, "<html" in answer.text) == (401, True), answer.text[:200]
    finally:
        service.settings = plain
    assert counted == ["198.51.100.7", "127.0.0.1"]
