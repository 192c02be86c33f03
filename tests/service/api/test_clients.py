"""Slow, huge and many clients at a real server on loopback: each limit, that it ends what it limits, and nobody else.

Each attack has a control: the same bytes within the limit are answered, or a server with a wide limit lets it be.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import httpx
import pytest

from kvcustody.errors import ConfigError
from kvcustody.governance.api.http.bounded_protocol import Connections
from kvcustody.governance.api.http.exchange import client_address
from kvcustody.governance.api.http.server import serve
from kvcustody.governance.service.access.roles import Role
from kvcustody.governance.service.service import Service
from kvcustody.governance.service.settings import load_service_settings

pytestmark = pytest.mark.system

MIB = 1 << 20


class Server(NamedTuple):
    """A service that answers on loopback, and a key that is good."""

    service: Service
    port: int
    key: str

    def connect(self) -> socket.socket:
        made = socket.create_connection(("127.0.0.1", self.port))
        made.settimeout(20)
        return made

    def client(self, **how: Any) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self.key}"} | how.pop("headers", {})
        return httpx.Client(base_url=f"http://127.0.0.1:{self.port}", headers=headers, timeout=20, **how)

    def raw(self, *parts: bytes) -> bytes:
        """What is answered to these bytes, until the server closes."""
        with self.connect() as sock:
            answer = b""
            with contextlib.suppress(ConnectionError):
                for part in parts:
                    sock.sendall(part)
            with contextlib.suppress(ConnectionError):
                while part := sock.recv(65_536):
                    answer += part
            return answer

    def issue(self, name: str, role: Role = Role.WORKER, tenant: str | None = None) -> str:
        """A key of another principal."""
        self.service.principals.enrol(name, [role], tenant=tenant, by="test")
        return self.service.principals.issue_key(name, days=1, by="test").key

    def head(self, *lines: str, path: str = "/v1/whoami", method: str = "GET", key: str = "") -> bytes:
        mine = (f"{method} {path} HTTP/1.1", f"Authorization: Bearer {key or self.key}", *lines, "", "")
        return "\r\n".join(mine).encode()


@pytest.fixture
def server(make_service: Callable[..., Service]) -> Iterator[Callable[..., Server]]:
    with contextlib.ExitStack() as stack:

        def start(**settings: Any) -> Server:
            with socket.create_server(("127.0.0.1", 0)) as probe:
                port = probe.getsockname()[1]
            service = make_service(listen=f"127.0.0.1:{port}", **settings)
            service.principals.enrol("good", [Role.AUDITOR], by="test")
            key = service.principals.issue_key("good", days=1, by="test").key
            ready = threading.Event()
            thread = threading.Thread(target=serve, args=(service,), kwargs={"ready": ready.set})
            thread.start()
            stack.callback(thread.join, 30)
            stack.callback(service.stopping.set)
            assert ready.wait(30)
            return Server(service, port, key)

        yield start


def closed_within(sock: socket.socket, seconds: float) -> bool:
    """Whether the server ends a connection by itself."""
    sock.settimeout(seconds)
    try:
        return sock.recv(1) == b""
    except ConnectionError:
        return True
    except TimeoutError:
        return False


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0


def test_a_head_has_a_bound_in_bytes_and_in_headers(server) -> None:
    here = server(header_bytes_max=8192, headers_max=40)
    host = "Host: kv"
    for lines, wanted in (
        ([f"X-A: {'a' * 4000}"], 200),
        ([f"X-A: {'a' * 9000}"], 431),
        ([f"X-{number}: a" for number in range(30)], 200),
        ([f"X-{number}: a" for number in range(40)], 431),
    ):
        answer = here.raw(here.head(host, "Connection: close", *lines))
        assert status(answer) == wanted, answer[:200]
        if wanted == 431:
            assert b"headers-too-large" in answer and b"connection: close" in answer
    long_path = here.raw(here.head(host, "Connection: close", path="/v1/" + "a" * 9000))
    assert status(long_path) == 431


def test_one_header_that_does_not_end_costs_next_to_nothing(server) -> None:
    """It is cut off soon after the bound, whatever its sender goes on sending."""
    here = server()
    before = time.process_time()
    with here.connect() as sock:
        sent = 0
        with contextlib.suppress(ConnectionError):
            sock.sendall(here.head("Host: kv")[:-2] + b"X-A: ")
            while sent < 64 * MIB:
                sock.sendall(b"a" * 65_536)
                sent += 65_536
        assert sent < 16 * MIB
    assert time.process_time() - before < 2.0
    with here.client() as client:
        assert client.get("/v1/whoami").status_code == 200


@pytest.mark.parametrize(
    "begun", [b"", b"GET /v1/whoami HTTP/1.1\r\nHost: kv\r\nX-", b"\r\n\r\n"], ids=["silent", "half", "blank"]
)
def test_a_head_has_its_time(server, begun: bytes) -> None:
    here = server(header_seconds=0.4)
    with here.connect() as sock:
        sock.sendall(begun)
        assert closed_within(sock, 10)
    with here.connect() as sock:  # a drop at a time does not prolong it
        ended = time.monotonic() + 10
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < ended and not closed_within(sock, 0.05):
                sock.sendall(b"\r\n")
        assert time.monotonic() < ended
    with here.client() as client:  # control: whoever keeps a connection for longer than that between requests
        assert client.get("/v1/whoami").status_code == 200
        stream = client._transport._pool.connections[0]
        time.sleep(0.8)
        assert client.get("/v1/whoami").status_code == 200 and client._transport._pool.connections == [stream]


def test_a_body_has_its_time(server) -> None:
    here = server(body_seconds=0.4)
    whole = here.head(
        "Host: kv", "Content-Length: 20", "Content-Type: application/json", "Idempotency-Key: a",
        method="POST", path="/v1/exports",
    )  # fmt: skip
    with here.connect() as sock:
        sock.sendall(whole + b"{")
        assert closed_within(sock, 10)
    with here.connect() as sock:  # control
        sock.sendall(whole + b"{" + b" " * 18 + b"}")
        assert status(sock.recv(65_536)) == 202


def test_a_body_that_is_too_large_is_a_clean_413(server) -> None:
    here = server(body_bytes_max=MIB, batch_bytes_max=MIB)
    with here.client(headers={"Idempotency-Key": "large", "Content-Type": "application/json"}) as client:
        for body in (b" " * (2 * MIB), iter([b" " * 65_536] * 32)):  # with a length, and in chunks
            answer = client.post("/v1/exports", content=body)
            assert answer.status_code == 413 and answer.json()["type"].endswith(":too-large")
        assert client.post("/v1/exports", content=b"{}").status_code == 202, "control"


def test_a_body_that_does_not_end_is_cut_off(server) -> None:
    here = server(body_bytes_max=MIB, batch_bytes_max=MIB)
    head = here.head("Host: kv", "Transfer-Encoding: chunked", "Idempotency-Key: b", method="POST", path="/v1/exports")
    with here.connect() as sock:
        sent = 0
        with contextlib.suppress(ConnectionError):
            sock.sendall(head)
            while sent < 64 * MIB:
                sock.sendall(b"10000\r\n" + b" " * 65_536 + b"\r\n")
                sent += 65_536
        assert sent < 32 * MIB


def test_half_requests_hold_no_place_that_a_whole_one_needs(server) -> None:
    here = server(connections_max=20, address_connections_max=1000, header_seconds=60.0)
    half = []
    try:
        for _ in range(100):
            half.append(here.connect())
            half[-1].sendall(b"GET /v1/whoami HTTP/1.1\r\nX-A: ")
            if len(half) % 10 == 0:
                with here.client() as client:
                    assert client.get("/v1/whoami").status_code == 200
        assert closed_within(half[0], 10) and not closed_within(half[-1], 0.2)
    finally:
        for sock in half:
            sock.close()


@pytest.mark.parametrize(("trusted", "gives_way"), [((), True), (("127.0.0.0/8",), False)])
def test_one_address_has_a_bound_of_its_own(server, trusted: tuple[str, ...], gives_way: bool) -> None:
    """Control: behind a proxy that is trusted there are many, and the bound of all holds alone."""
    here = server(address_connections_max=5, header_seconds=60.0, trusted_proxies=trusted)
    held = [here.connect() for _ in range(5)]
    for sock in held:
        sock.sendall(b"GET /")
    time.sleep(0.2)
    with here.connect() as sock:
        sock.sendall(here.head("Host: kv", "Connection: close"))
        assert status(sock.recv(65_536)) == 200, "half requests of its neighbours hold no place that it needs"
    assert closed_within(held[0], 1.0) == gives_way and not closed_within(held[-1], 0.2)
    for sock in held:
        sock.close()


def test_many_workers_behind_one_address_are_not_one_caller(server) -> None:
    """Twice as many as an address may have: each was authenticated, so it counts for itself. Strangers do not."""
    here = server(address_connections_max=4, header_seconds=60.0)
    keys = [here.issue(f"worker-{number}") for number in range(8)]
    held = []
    for key in keys:
        held.append(here.connect())
        held[-1].sendall(here.head("Host: kv", key=key))
        assert status(held[-1].recv(65_536)) == 200
    assert not any(closed_within(sock, 0.05) for sock in held)
    strangers = [here.connect() for _ in range(5)]
    assert closed_within(strangers[0], 20.0), "control: an address has a bound while nobody is known"
    own = []
    for _ in range(5):
        own.append(here.connect())
        own[-1].sendall(here.head("Host: kv", key=keys[0]))
        assert status(own[-1].recv(65_536)) == 200
    assert closed_within(held[0], 20.0), "control: one principal has a bound wherever it asks from"
    assert not closed_within(held[1], 0.05)
    for sock in (*held, *strangers, *own):
        sock.close()


def test_a_tenants_people_share_one_bound(server) -> None:
    """Else whoever adds people to a tenant would have as many connections as there are people, from one address."""
    here = server(address_connections_max=4, header_seconds=60.0)
    names = [("acme", f"person-{number}") for number in range(5)] + [("globex", "other")]
    held = []
    for tenant, name in names:
        held.append(here.connect())
        held[-1].sendall(here.head("Host: kv", key=here.issue(name, Role.TENANT_VIEWER, tenant)))
        assert status(held[-1].recv(65_536)) == 200
    assert closed_within(held[0], 2.0)
    assert not any(closed_within(sock, 0.05) for sock in held[1:]), "control: four of one, and another tenant's"
    for sock in held:
        sock.close()


def test_what_works_gives_way_to_nobody_and_who_is_idle_goes_after_who_never_asked(server) -> None:
    here = server(connections_max=3, header_seconds=60.0, body_seconds=60.0)
    works = here.connect()
    works.sendall(here.head("Host: kv", "Content-Length: 9", method="POST", path="/v1/exports"))
    with here.connect() as idle, here.connect() as begun:
        idle.sendall(here.head("Host: kv"))
        assert status(idle.recv(65_536)) == 200
        begun.sendall(b"GET /")
        time.sleep(0.2)
        with here.connect() as first:
            assert closed_within(begun, 5) and not closed_within(idle, 0.2)
            first.sendall(here.head("Host: kv", "Content-Length: 9", method="POST", path="/v1/exports"))
            time.sleep(0.2)
            with here.connect() as second:
                assert closed_within(idle, 30) and not closed_within(works, 0.2)
                second.sendall(here.head("Host: kv", "Content-Length: 9", method="POST", path="/v1/exports"))
                time.sleep(0.2)
                with here.connect() as third:
                    assert closed_within(third, 5), "all three are at work"
    works.close()


def test_an_address_whose_last_connection_gave_way_is_counted_from_there() -> None:
    settings = load_service_settings(address_connections_max=1, connections_max=1)
    limits = Connections(settings)

    class Half:
        """A connection that never sends a whole request."""

        counts_for = "192.0.2.1"

        def abort(self) -> None:
            limits.closed(self)  # type: ignore[arg-type]

    connections = [Half() for _ in range(3)]
    assert all(limits.opened(one) for one in connections)  # type: ignore[arg-type]
    assert [group.count for group in (limits._all, *limits._of_one.values())] == [1, 1]
    limits.works(connections[-1])  # type: ignore[arg-type]
    assert not limits.opened(Half()), "what works gives way to nobody"  # type: ignore[arg-type]
    connections[-1].abort()
    assert limits._all.count == 0 and not limits._of_one


@pytest.mark.parametrize("hosts", [[], ["Host: a", "Host: b"], ["Host: "], ["Host: a b"], ["Host: a,b"], ["Host: a/b"]])
def test_a_request_says_once_whom_it_means(server, hosts: list[str]) -> None:
    here = server()
    assert status(here.raw(here.head(*hosts, "Connection: close"))) == 400
    for good in ("kv", "kv.example:8443", "[::1]:80", "127.0.0.1"):  # the control
        assert status(here.raw(here.head(f"Host: {good}", "Connection: close"))) == 200


@pytest.mark.parametrize(
    ("body", "kind", "wanted"),
    [
        (b'{"form": "csv", "form": "ndjson"}', "application/json", 400),
        (b'{"tenant": "acme", "form": "ndjson", "ten\\u0061nt": "labs"}', "application/json", 400),
        ('{"form": "ndjson"}'.encode("utf-16"), "application/json", 400),
        ('{"form": "ndjson"}'.encode("utf-16-le"), "application/json", 400),
        ('{"form": "ndjson"}'.encode("utf-32"), "application/json", 400),
        (b'\xef\xbb\xbf{"form": "ndjson"}', "application/json", 400),
        (b'{"form": "nd\xe9"}', "application/json", 400),
        (b'{"since": NaN}', "application/json", 400),
        (b"[" * 100_000, "application/json", 400),
        (b'{"form": "ndjson"}', "application/json; charset=latin-1", 415),
        (b'{"form": "ndjson"}', 'application/json; charset="UTF-8"', 202),
        (b'{"form": "ndjson"}', "application/json", 202),
    ],
)
def test_a_body_is_read_in_one_way_alone(server, body: bytes, kind: str, wanted: int) -> None:
    here = server()
    with here.client(headers={"Content-Type": kind, "Idempotency-Key": "one"}) as client:
        answer = client.post("/v1/exports", content=body)
        assert answer.status_code == wanted, answer.text


def test_bad_keys_from_one_address_lock_nobody_out(server) -> None:
    here = server(failures_per_minute=10, key_failures_per_minute=10)
    stop, refused = threading.Event(), []
    bad = here.key[:20] + ("0" if here.key[20] != "0" else "1") + here.key[21:]

    def storm() -> None:
        with httpx.Client(base_url=f"http://127.0.0.1:{here.port}", timeout=20) as client:
            while not stop.is_set():
                refused.append(client.get("/v1/whoami", headers={"Authorization": f"Bearer {bad}"}).status_code)

    threads = [threading.Thread(target=storm) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        with here.client() as client:
            answers = [client.get("/v1/whoami").status_code for _ in range(200)]
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert set(answers) == {200}
    assert set(refused) == {401, 429} and refused.count(401) <= 14, "control: what fails is told to wait"


def test_only_proxies_that_are_trusted_say_where_a_request_comes_from() -> None:
    proxies = load_service_settings(trusted_proxies=["10.0.0.0/8", "unix", "2001:db8::1"]).proxies
    for peer, forwarded, found in (
        ("192.0.2.1", ["198.51.100.1"], "192.0.2.1"),
        ("10.0.0.1", ["198.51.100.1"], "198.51.100.1"),
        ("10.0.0.1", ["203.0.113.9", "198.51.100.1", "10.1.1.1"], "198.51.100.1"),
        ("::ffff:10.0.0.1", ["198.51.100.1"], "198.51.100.1"),
        ("2001:db8::1", ["2001:db8::2"], "2001:db8::2"),
        ("unix", ["198.51.100.1"], "198.51.100.1"),
        ("10.0.0.1", ["unix"], "unix"),
        ("10.0.0.1", ["198.51.100.1:5678"], "198.51.100.1"),
        ("10.0.0.1", ["198.51.100.1:80", "10.1.1.1:443"], "198.51.100.1"),
        ("10.0.0.1", ["[2001:db8::2]:80"], "2001:db8::2"),
        ("10.0.0.1", ["[::1]"], "::1"),
        ("10.0.0.1", ["not an address"], ""),
        ("10.0.0.1", ["198.51.100.1:http"], ""),
        ("10.0.0.1", [], ""),
    ):
        assert client_address(peer, forwarded, proxies) == found, (peer, forwarded)
    assert client_address("unix", ["198.51.100.1"], ()) == "unix", "by default nobody is trusted"
    with pytest.raises(ConfigError, match="`everybody` is neither an address, a network nor `unix"):
        load_service_settings(trusted_proxies=["everybody"])
