"""A small answer that decompresses to a large one is refused unread, by everything that calls another server."""

from __future__ import annotations

import contextlib
import gzip
import socket
import threading
import tracemalloc
from collections.abc import Callable, Iterator

import httpx
import pytest
import zstandard

from kvcustody.audit.siem.formats import BATCH_TYPE
from kvcustody.audit.siem.sink import SinkError, WebhookSink
from kvcustody.audit.tlog.signed_note import KeyKind
from kvcustody.audit.tlog.signing_key import SigningKey
from kvcustody.audit.tlog.witness.client import WitnessAddress, cosign
from kvcustody.audit.tlog.witness.rfc3161_timestamp import TimestampAuthority, TimestampError, ask
from kvcustody.audit.tlog.witness.state import WitnessError
from kvcustody.errors import ServiceError
from kvcustody.governance.control_plane.connection import ControlPlaneConnection
from kvcustody.governance.credentials import issuer_keys
from kvcustody.governance.service.schedules.s3_delivery import S3Delivery
from kvcustody.governance.tiers.stores.s3_requests import S3Key
from kvcustody.http_exchange import deadline_transport, exchange, read_bounded

UNPACKED_BYTES = 48 << 20
MOST_BYTES = 8 << 20  # what a refusal may take: a sixth of what is unpacked


def _zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=19).compress(data)


def _gzip(data: bytes) -> bytes:
    return gzip.compress(data, 9)


BOMBS = {
    "zstd": _zstd(bytes(UNPACKED_BYTES)),
    "zstd, zstd": _zstd(_zstd(bytes(UNPACKED_BYTES))),
    "gzip, gzip": _gzip(_gzip(bytes(UNPACKED_BYTES))),
}


class PackedServer:
    """Gives every caller one packed answer, and keeps what each asked for."""

    def __init__(self, encoding: str) -> None:
        body = BOMBS[encoding]
        head = f"HTTP/1.1 200 OK\r\nContent-Encoding: {encoding}\r\nContent-Length: {len(body)}\r\n"
        self._answer = head.encode() + b"Connection: close\r\n\r\n" + body
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.place = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self.asked: list[str] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                caller, _ = self._listening.accept()
                with contextlib.suppress(OSError), caller:
                    self.asked.append(caller.recv(1 << 16).decode("latin-1").lower())
                    caller.sendall(self._answer)

    def close(self) -> None:
        """Its thread ends first: it would accept callers of whatever is given the same descriptor."""
        self._listening.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listening.close()


@pytest.fixture(params=BOMBS)
def server(request: pytest.FixtureRequest) -> Iterator[PackedServer]:
    made = PackedServer(request.param)
    yield made
    made.close()


def read_webhook(place: str) -> None:
    WebhookSink("hook", f"http://{place}/", b"k" * 32, content_type=BATCH_TYPE).deliver("1", b"[]")


def read_witness(place: str) -> None:
    key = SigningKey.generate("witness.example", KeyKind.COSIGNATURE).verifier
    cosign(WitnessAddress(f"http://{place}", key), b"note", 9, 0, lambda old, new: [], timeout_seconds=20)


def read_timestamp(place: str) -> None:
    pytest.importorskip("rfc3161_client")
    from tests.audit.tlog.test_exchange import certificate

    own = certificate()
    ask(TimestampAuthority("tsa", f"http://{place}/", own, (own,)), b"checkpoint", timeout_seconds=20)


def read_jwks(place: str) -> None:
    issuer_keys._fetched(f"http://{place}/keys")


def read_s3(place: str) -> None:
    key = S3Key("id", b"secret", "eu")
    S3Delivery("s3", f"http://{place}", "reports", "", key)._put("name", b"data")


def read_control_plane(place: str) -> None:
    with ControlPlaneConnection(f"http://{place}", "key") as connection:
        connection.get("/v1/whoami")


def read_exchange(place: str) -> None:
    exchange("GET", f"http://{place}/", deadline_seconds=20, bytes_max=1000)


READERS: list[tuple[Callable[[str], None], type[Exception]]] = [
    (read_webhook, SinkError),
    (read_witness, WitnessError),
    (read_timestamp, TimestampError),
    (read_jwks, OSError),
    (read_s3, SinkError),
    (read_control_plane, ServiceError),
    (read_exchange, OSError),
]


def peak_of(act: Callable[[], object]) -> int:
    """How many bytes were taken at once while this ran."""
    tracemalloc.start()
    try:
        act()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("read", "problem"), READERS)
def test_a_packed_answer_is_refused_before_it_is_unpacked(
    server: PackedServer, read: Callable[[str], None], problem: type[Exception]
) -> None:
    def refused() -> None:
        with pytest.raises(problem):
            read(server.place)

    assert peak_of(refused) < MOST_BYTES
    assert server.asked and all("accept-encoding: identity\r\n" in asked for asked in server.asked)


def test_without_the_refusal_the_same_answer_takes_what_it_unpacks_to(server: PackedServer) -> None:
    """Positive control: a reader that unpacks, bounded after each part only."""

    def unpacked() -> None:
        with (
            contextlib.suppress(httpx.DecodingError),  # of two layers of zstd, once both are unpacked
            httpx.Client(timeout=20, trust_env=False) as client,
            client.stream("GET", f"http://{server.place}/") as answer,
        ):
            for _ in answer.iter_bytes():
                pass

    assert peak_of(unpacked) >= UNPACKED_BYTES


def test_a_long_answer_is_read_no_further_than_its_bound() -> None:
    def endless() -> Iterator[bytes]:
        while True:
            yield bytes(1 << 16)

    transport = httpx.MockTransport(lambda _request: httpx.Response(200, content=endless()))
    with httpx.Client(transport=transport) as client:
        request = client.build_request("GET", "http://testserver/")
        with pytest.raises(httpx.DecodingError, match="longer than 1000000 bytes"):
            read_bounded(client, request, deadline_seconds=60, bytes_max=1_000_000)
        with pytest.raises(httpx.ReadTimeout, match="within the deadline"):
            read_bounded(client, request, deadline_seconds=0, bytes_max=1_000_000)


@pytest.mark.parametrize("bounded", [True, False], ids=["deadline transport", "control: httpx's own"])
def test_headers_that_trickle_end_with_the_exchange(bounded: bool) -> None:
    """Each byte begins the timeout of a part anew: without the deadline the client goes on reading."""
    stop, sent = threading.Event(), threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def trickle() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.recv(65_536)
                connection.sendall(b"HTTP/1.1 200 OK\r\nx-slow: ")
                for _ in range(200):
                    if stop.wait(0.02):
                        break
                    connection.sendall(b"a")
                sent.set()
                connection.sendall(b"\r\ncontent-length: 0\r\n\r\n")

        thread = threading.Thread(target=trickle)
        thread.start()
        transport = deadline_transport() if bounded else httpx.HTTPTransport()
        with httpx.Client(transport=transport, timeout=20, trust_env=False) as client:
            request = client.build_request("GET", f"http://127.0.0.1:{listener.getsockname()[1]}/")
            if bounded:
                with pytest.raises(httpx.TimeoutException):
                    read_bounded(client, request, deadline_seconds=0.2, bytes_max=1_000)
            else:
                read_bounded(client, request, deadline_seconds=0.2, bytes_max=1_000)
            assert sent.is_set() is not bounded, "it was read to the end of the headers, or not"
        stop.set()
        thread.join()
