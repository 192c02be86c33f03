"""The exchange of a hand-over: one request with a ticket, one answer with sealed objects, over its own connection.

    fetch   := length, msgpack {ticket, worker, life, at_ms, signature}
    answer  := length, msgpack {reason, life, copies: [[name, size, sum], …], signature}, then the objects

1. The decode worker signs what it asks: a ticket that somebody else got hold of gives him nothing.
2. A ticket is used up by the first fetch that is authentic, whatever becomes of it.
3. The prefill worker signs names, sizes and sums, keyed by the ticket's nonce. Bytes of another exchange, torn, older
   or zeroed ones do not match, and count as not come.
4. Objects are sealed. Names, sizes and the ticket are in clear on the wire, unless both sides have TLS (`tls`): then
   who has no certificate of their authority is not answered.
5. Every length is bounded before anything is read, every exchange ends by its deadline, and so many run at once.
6. What the other side says of itself is put on record: it is of few characters, and whoever is not authentic is counted
   alone. A fetch whose answer broke off is on record as given.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import socket
import ssl
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple, Protocol

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from kvcustody.audit.tlog.signed_note import VerifierKey
from kvcustody.clock import Clock
from kvcustody.governance.credentials.scope_token import FUTURE_MS_MAX
from kvcustody.governance.handover.peers import PeerKey, Peers
from kvcustody.governance.handover.ticket import RefusedTicket, Ticket, read_ticket
from kvcustody.governance.tiers.tier import SealedObject
from kvcustody.guarding_thread import GuardingThread
from kvcustody.logger import get_logger

_LENGTH = struct.Struct(">I")
_FETCH_BYTES_MAX: Final = 4_096
_HEAD_BYTES_MAX: Final = 1 << 20
COPIES_MAX: Final = 8_192
_AT_ONCE_MAX: Final = 16
_FETCH_SIGNED: Final = b"kvcustody/handover-fetch/1\x00"
_ANSWER_SIGNED: Final = b"kvcustody/handover-answer/1\x00"
_SUM_BYTES: Final = 32
_SAID_SECONDS, _ACCEPT_AGAIN_SECONDS = 10.0, 0.1
_USED_MAX: Final = 4_096
_LIFE, _REASON = re.compile(r"[0-9a-f]{32}"), re.compile(r"[a-z-]{1,32}")
_log = get_logger(__name__)


class _Fetch(msgspec.Struct, forbid_unknown_fields=True):
    ticket: str
    worker: str
    life: str
    at_ms: int
    signature: bytes = b""

    def signed(self) -> bytes:
        text = "\x00".join((self.ticket, self.worker, self.life, str(self.at_ms)))
        return _FETCH_SIGNED + text.encode()


class _Answer(msgspec.Struct, forbid_unknown_fields=True):
    reason: str = ""
    life: str = ""
    copies: list[tuple[bytes, int, bytes]] = []
    signature: bytes = b""

    def signed(self, asked: bytes) -> bytes:
        """`asked`: the signature of the fetch that this answers."""
        return _ANSWER_SIGNED + asked + msgspec.msgpack.encode((self.reason, self.life, self.copies))


class Fetched(NamedTuple):
    """The result of a fetch; `reason` says why it has no objects."""

    objects: tuple[SealedObject, ...] = ()
    reason: str = ""


class AnsweredFetch(NamedTuple):
    """The answer to one fetch, for the record. `peer_life`: the authenticated worker that asked."""

    nonce: bytes
    peer: str
    peer_life: str
    objects: int
    size: int
    reason: str


class Offers(Protocol):
    """A prefill worker's offers."""

    def take(self, ticket: Ticket, deadline: float) -> Sequence[SealedObject] | str:
        """Return the objects of an offer and use it up (rule 2), or why there are none; by `deadline` (monotonic)."""


class _RefusedFetches:
    """Fetches that are not authentic: said in the log once in `_SAID_SECONDS`, with how many there were."""

    def __init__(self) -> None:
        self._count, self._said = 0, 0.0
        self._lock = threading.Lock()

    def note(self, peer: str, reason: str) -> None:
        """One more."""
        with self._lock:
            self._count += 1
            now = time.monotonic()
            if now - self._said < _SAID_SECONDS:
                return
            count, self._count, self._said = self._count, 0, now
        _log.warning("hand-over refused", peer=peer, reason=reason, since_last=count)


class HandoverServer:
    """Answers fetches at one address, on its own threads. Raises `OSError` where it cannot listen."""

    def __init__(
        self,
        address: tuple[str, int],
        offers: Offers,
        key: PeerKey,
        peers: Callable[[], Peers],
        *,
        worker: str,
        life: str,
        clock: Clock,
        seconds: float = 5.0,
        tls: ssl.SSLContext | None = None,
        on_given: Callable[[AnsweredFetch], object] = lambda given: None,
    ) -> None:
        self._offers, self._key, self._peers = offers, key, peers
        self._worker, self._life, self._clock, self._seconds = worker, life, clock, seconds
        self._tls, self._on_given = tls, on_given
        self._slots = threading.BoundedSemaphore(_AT_ONCE_MAX)
        self._answering = ThreadPoolExecutor(_AT_ONCE_MAX, thread_name_prefix="kvcustody-handover")
        self._refused = _RefusedFetches()
        self._used: OrderedDict[bytes, None] = OrderedDict()  # tickets of which it is on record that they came again
        self._socket = socket.create_server(address)
        self._socket.settimeout(0.2)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self._is_over = threading.Event()
        self._thread = GuardingThread(self._run, name="kvcustody-handover")
        self._thread.start()

    def close(self) -> None:
        """Stop answering."""
        self._is_over.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # whoever waits for the next connection waits no more
        self._thread.join(2.0)
        self._socket.close()
        self._answering.shutdown(wait=False, cancel_futures=True)

    def _run(self) -> None:
        while not self._is_over.is_set():
            try:
                connection, _ = self._socket.accept()
            except TimeoutError:
                continue
            except OSError as error:  # while the process has no descriptor left, for one
                if not self._is_over.wait(_ACCEPT_AGAIN_SECONDS):
                    _log.warning("hand-over not answered", why=str(error))
                continue
            if not self._slots.acquire(blocking=False):
                connection.close()
                continue
            try:
                self._answering.submit(self._serve, connection)
            except RuntimeError:  # no thread can be had
                connection.close()
                self._slots.release()

    def _serve(self, connection: socket.socket) -> None:
        given: AnsweredFetch | None = None
        try:
            deadline = time.monotonic() + self._seconds
            with _wrapped(connection, self._tls, deadline, server_side=True) as peer:
                asked = _receive(peer, _FETCH_BYTES_MAX, deadline)
                answer, objects, given = self.answer(asked, deadline)
                _send(peer, answer, deadline)
                for one in objects:
                    _send_all(peer, one.data, deadline)
        except (OSError, ValueError) as error:
            self._refused.note("", str(error) or type(error).__name__)
        finally:
            self._slots.release()
            if given is not None:
                self._tell(given)

    def _tell(self, given: AnsweredFetch) -> None:
        """Rule 6; that a ticket came again is told once."""
        if not given.nonce:
            self._refused.note(given.peer, given.reason)
            return
        if given.reason == "used":
            if given.nonce in self._used:
                return
            self._used[given.nonce] = None
            if len(self._used) > _USED_MAX:
                self._used.popitem(last=False)
        self._on_given(given)

    def answer(self, asked: bytes, deadline: float) -> tuple[bytes, Sequence[SealedObject], AnsweredFetch]:
        """Return the answer's head, its body and its record. Raises `ValueError` for a malformed request."""
        try:
            fetch = msgspec.msgpack.decode(asked, type=_Fetch)
        except msgspec.MsgspecError:
            raise ValueError("is no request for a hand-over") from None
        ticket, reason = self._authentic(fetch)
        objects: Sequence[SealedObject] = ()
        if ticket is not None:
            taken = self._offers.take(ticket, deadline)
            objects, reason = ((), taken) if isinstance(taken, str) else (taken[:COPIES_MAX], "")
        nonce = b"" if ticket is None else ticket.nonce
        copies = [(one.name, len(one.data), _sum(nonce, one.data)) for one in objects]
        head = _Answer(reason, self._life, copies)
        head.signature = self._key.sign(head.signed(fetch.signature))
        peer_life = "" if ticket is None else fetch.life
        size = sum(len(one.data) for one in objects)
        given = AnsweredFetch(nonce, fetch.worker[:128], peer_life, len(objects), size, reason)
        return msgspec.msgpack.encode(head), objects, given

    def _authentic(self, fetch: _Fetch) -> tuple[Ticket | None, str]:
        ticket = read_ticket(fetch.ticket, {self._worker: self._key.verifier}, self._clock)
        if isinstance(ticket, RefusedTicket):
            return None, ticket.reason
        key = self._peers().keys.get(fetch.worker)
        now_ms = self._clock.utc_us() // 1000
        if ticket.life != self._life:
            return None, "other-life"
        if fetch.worker != ticket.peer or key is None:
            return None, "other-peer"
        if abs(fetch.at_ms - now_ms) > FUTURE_MS_MAX or not _LIFE.fullmatch(fetch.life):
            return None, "expired"
        if not _verifies(key, fetch.signature, fetch.signed()):
            return None, "forged"
        return ticket, ""


def fetch_objects(
    ticket: Ticket,
    text: str,
    key: PeerKey,
    peers: Peers,
    *,
    worker: str,
    life: str,
    clock: Clock,
    bytes_max: int,
    seconds: float = 2.0,
    tls: ssl.SSLContext | None = None,
) -> Fetched:
    """Fetch a ticket's objects from its worker; any failure becomes a reason, without objects.

    `text`: the ticket as it came. `worker`, `life`: who asks.
    """
    deadline = time.monotonic() + seconds
    address = peers.addresses.get(ticket.worker)
    if address is None:
        return Fetched(reason="other-key")
    asked = _Fetch(text, worker, life, clock.utc_us() // 1000)
    asked.signature = key.sign(asked.signed())
    try:
        with _wrapped(socket.create_connection(address, seconds), tls, deadline) as connection:
            _send(connection, msgspec.msgpack.encode(asked), deadline)
            head = msgspec.msgpack.decode(_receive(connection, _HEAD_BYTES_MAX, deadline), type=_Answer)
            if not _verifies(peers.keys[ticket.worker], head.signature, head.signed(asked.signature)):
                return Fetched(reason="forged")
            if head.reason:
                return Fetched(reason=head.reason if _REASON.fullmatch(head.reason) else "malformed")
            if head.life != ticket.life:
                return Fetched(reason="other-life")
            sizes = [size for _, size, _ in head.copies]
            if len(sizes) > COPIES_MAX or min(sizes, default=1) < 1 or sum(sizes) > bytes_max:
                return Fetched(reason="too-large")
            objects = [
                SealedObject(name, _receive_exactly(connection, size, deadline)) for name, size, _ in head.copies
            ]
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        return Fetched(reason=f"unreachable: {str(error)[:80] or type(error).__name__}")
    sums = [kept for _, _, kept in head.copies]
    matching = [one for one, kept in zip(objects, sums, strict=True) if kept == _sum(ticket.nonce, one.data)]
    return Fetched(tuple(matching), "" if len(matching) == len(objects) else "torn")


def _wrapped(
    connection: socket.socket, tls: ssl.SSLContext | None, deadline: float, *, server_side: bool = False
) -> socket.socket:
    """The connection, over TLS where there is any; closed where the other side's is not as it should be."""
    if tls is None:
        return connection
    try:
        connection.settimeout(_left(deadline))
        return tls.wrap_socket(connection, server_side=server_side)
    except BaseException:
        connection.close()
        raise


def _verifies(key: VerifierKey, signature: bytes, signed: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(key.public).verify(signature, signed)
    except InvalidSignature:
        return False
    return True


def _sum(nonce: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(data, key=nonce, digest_size=_SUM_BYTES).digest()


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("no answer within the deadline")
    return left


def _send(connection: socket.socket, data: bytes, deadline: float) -> None:
    _send_all(connection, _LENGTH.pack(len(data)) + data, deadline)


def _send_all(connection: socket.socket, data: bytes, deadline: float) -> None:
    view = memoryview(data)
    while view:
        connection.settimeout(_left(deadline))
        view = view[connection.send(view[: 1 << 20]) :]


def _receive(connection: socket.socket, most: int, deadline: float) -> bytes:
    (size,) = _LENGTH.unpack(_receive_exactly(connection, _LENGTH.size, deadline))
    if size > most:
        raise ValueError(f"announces {size} bytes; the limit is {most}")
    return _receive_exactly(connection, size, deadline)


def _receive_exactly(connection: socket.socket, size: int, deadline: float) -> bytes:
    into = bytearray(size)
    view = memoryview(into)
    while view:
        connection.settimeout(_left(deadline))
        count = connection.recv_into(view)
        if not count:
            raise ConnectionError("the peer closed the connection")
        view = view[count:]
    return bytes(into)
