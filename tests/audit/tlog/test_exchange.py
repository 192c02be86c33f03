"""Every request for a signature, a timestamp or a delivery has a deadline for its whole duration."""

from __future__ import annotations

import contextlib
import datetime
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ed25519

from kvcustody.audit.siem.formats import BATCH_TYPE
from kvcustody.audit.siem.sink import SinkError, WebhookSink
from kvcustody.audit.tlog.signed_note import KeyKind
from kvcustody.audit.tlog.signing_key import SigningKey
from kvcustody.audit.tlog.witness.client import WitnessAddress, cosign
from kvcustody.audit.tlog.witness.rfc3161_timestamp import TimestampAuthority, TimestampError, ask
from kvcustody.audit.tlog.witness.state import WitnessError
from kvcustody.http_exchange import exchange

HEAD = b"HTTP/1.1 200 OK\r\nX-Padding: " + b"x" * 400
SECONDS = 0.2  # of a deadline; what trickles takes at least five times as long


class Trickle:
    """A server that gives each caller a byte every few milliseconds, for the whole answer."""

    def __init__(self, answer: bytes, pause_seconds: float) -> None:
        self._answer, self._pause_seconds = answer, pause_seconds
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # closed, or the caller is gone
            while True:
                caller, _ = self._listening.accept()
                with contextlib.suppress(OSError), caller:
                    caller.recv(1 << 16)
                    for byte in self._answer:
                        caller.sendall(bytes([byte]))
                        time.sleep(self._pause_seconds)

    def close(self) -> None:
        """Its thread ends first: it would accept callers of whatever is given the same descriptor."""
        self._listening.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listening.close()


@pytest.fixture
def trickle() -> Iterator[Callable[[bytes, float], str]]:
    servers: list[Trickle] = []

    def start(answer: bytes, pause_seconds: float) -> str:
        servers.append(Trickle(answer, pause_seconds))
        return f"127.0.0.1:{servers[-1].port}"

    yield start
    for server in servers:
        server.close()


def certificate() -> x509.Certificate:
    key, name = ed25519.Ed25519PrivateKey.generate(), x509.Name([])
    begun = datetime.datetime(2026, 1, 1)
    made = x509.CertificateBuilder(name, name, key.public_key(), 1, begun, begun + datetime.timedelta(9))
    return made.sign(key, None)


def push(place: str) -> None:
    WebhookSink("hook", f"http://{place}/", b"k" * 32, content_type=BATCH_TYPE, deadline_seconds=SECONDS).deliver(
        "1", b"[]"
    )


def witness(place: str) -> None:
    key = SigningKey.generate("witness.example", KeyKind.COSIGNATURE).verifier
    cosign(WitnessAddress(f"http://{place}", key), b"note", 9, 0, lambda old, new: [], timeout_seconds=SECONDS)


def stamp(place: str) -> None:
    pytest.importorskip("rfc3161_client")
    own = certificate()
    ask(TimestampAuthority("tsa", f"http://{place}/", own, (own,)), b"checkpoint", timeout_seconds=SECONDS)


@pytest.mark.parametrize(("act", "problem"), [(push, SinkError), (witness, WitnessError), (stamp, TimestampError)])
def test_a_server_that_trickles_costs_the_deadline_alone(
    trickle: Callable[[bytes, float], str], act: Callable[[str], None], problem: type[Exception]
) -> None:
    with pytest.raises(problem, match="no answer within the deadline"):
        act(trickle(HEAD, 0.003))


@pytest.mark.parametrize(
    ("scheme", "answer"),
    [
        ("http", b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + b"x" * 400),  # a body that never ends
        ("https", b"\x16\x03\x03\x40\x00" + b"\x02" * 400),  # a handshake
    ],
)
def test_every_part_of_an_answer_is_under_the_deadline(
    trickle: Callable[[bytes, float], str], scheme: str, answer: bytes
) -> None:
    with pytest.raises(TimeoutError, match="no answer within the deadline"):
        exchange("POST", f"{scheme}://{trickle(answer, 0.003)}/", deadline_seconds=SECONDS, bytes_max=1000)


def test_an_answer_in_time_is_read_up_to_its_bound(trickle: Callable[[bytes, float], str], tmp_path: Path) -> None:
    """Positive control: the same server, let finish."""
    place = trickle(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\nyes", 0.0)
    answer = exchange("POST", f"http://{place}/", deadline_seconds=60, bytes_max=3)
    assert (answer.status, answer.kind, answer.body) == (200, "text/plain", b"yes")
    with pytest.raises(OSError, match="longer than 2 bytes"):
        exchange("POST", f"http://{place}/", deadline_seconds=60, bytes_max=2)
