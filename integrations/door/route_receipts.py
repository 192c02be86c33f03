"""The door's half of route receipts: a request's worker, as far as response headers show it.

1. A request of which a receipt is written has one half, whatever becomes of it: where no answer's headers came, or not
   within `ANSWER_US_MAX`, the half has status 0.
2. Headers say who answered (the worker's own door), where a router says that it went, and by what it chose. What is no
   short printable text, or no number, says nothing.
3. A tenant is named as the ledger names it. Where the ledger knows no such issuer yet, halves wait in memory, at most
   `HALVES_WAITING_MAX`; those beyond are counted as lost.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Final, NamedTuple, Protocol

from kvcustody.audit.kinds import Event, RouteSent
from kvcustody.audit.kinds.route_events import ANSWER_US_MAX, UNSAID
from kvcustody.clock import Clock
from kvcustody.errors import CustodyError
from kvcustody.governance.edge.erase_epochs import Epochs
from kvcustody.guarding_thread import GuardingThread
from kvcustody.integrations.door.door_metrics import DoorMetrics
from kvcustody.integrations.identity.request_headers import WORKER_HEADER
from kvcustody.logger import get_logger
from kvcustody.tenants import Issuers

HALVES_WAITING_MAX: Final = 10_000
_TEXT_MAX = 128
_NUMBER_MAX = 1 << 40
_LOOK_SECONDS = 1.0
_UNANSWERED_SECONDS = 30.0
_END_SECONDS = 2.0
_log = get_logger("kvcustody.door")
Headers = Iterable[tuple[str, bytes]]


class RouterHeaders(NamedTuple):
    """The response headers with which a router reports a request's worker and the reason for it."""

    targets: tuple[str, ...] = (
        "x-smg-routed-worker-id",
        "x-gateway-destination-endpoint-served",
        "x-gateway-destination-endpoint",
    )
    promised: str = "x-kvcustody-promised-tokens"
    score: str = "x-kvcustody-score"

    def all(self) -> frozenset[str]:
        """Return all of them; none is returned to a client."""
        return frozenset((*self.targets, self.promised, self.score, WORKER_HEADER))


class SentRequest(NamedTuple):
    """A forwarded request as the door knows it. `scope`: whose name routers get."""

    issuer: str
    tenant: str
    receipt: str
    scope: str
    epochs: Epochs
    requests: int
    uses: int


class ReceiptLedger(Protocol):
    """The ledger to which a door writes."""

    def submit(self, events: Sequence[Event]) -> int:
        """Submit events without waiting."""

    def issuers(self) -> Issuers:
        """Return the issuers of the tenants in the ledger; may wait for the control plane.

        Raises:
            CustodyError: it does not answer.
        """


class OpenReceipt:
    """The half of one request, until its answer's headers arrive or it ends without them."""

    def __init__(self, receipts: DoorReceipts, sent: SentRequest) -> None:
        self.sent, self.sent_us = sent, receipts.clock.now_us()
        self._receipts = receipts

    def answered(self, status: int, headers: Headers) -> None:
        """Take the answer's headers; a second call does nothing."""
        self._receipts.write(self, status, headers)

    def close(self) -> None:
        """Close the half; a missing answer is recorded."""
        self.answered(0, ())


class DoorReceipts:
    """Writes halves to a ledger; `close` it before the ledger. `open` and `write` never wait."""

    def __init__(
        self,
        ledger: ReceiptLedger,
        clock: Clock,
        metrics: DoorMetrics,
        *,
        headers: RouterHeaders | None = None,
        look_seconds: float = _LOOK_SECONDS,
        unanswered_seconds: float = _UNANSWERED_SECONDS,
    ) -> None:
        """Prepare the receipts. `unanswered_seconds`: the interval of the search for requests without an answer."""
        self.clock = clock
        self.headers = RouterHeaders() if headers is None else headers
        self._ledger, self._metrics, self._look_seconds = ledger, metrics, look_seconds
        self._unanswered_seconds = unanswered_seconds
        self._issuers = Issuers()
        self._waiting: deque[tuple[SentRequest, RouteSent]] = deque()
        self._open: dict[OpenReceipt, None] = {}  # in the order in which they were opened
        self._lock = threading.Lock()
        self._wake, self._stop = threading.Event(), threading.Event()
        self._thread = GuardingThread(self._run, name="kvcustody-receipts", pause=self._stop.wait)
        self._thread.start()

    def open(self, sent: SentRequest) -> OpenReceipt:
        """Return the half of a request that goes to the router now."""
        receipt = OpenReceipt(self, sent)
        with self._lock:
            self._open[receipt] = None
        return receipt

    def write(self, receipt: OpenReceipt, status: int, headers: Headers) -> None:
        """Write a half as soon as its tenant's issuer is known; do nothing where it was written before."""
        with self._lock:
            if receipt not in self._open:
                return
            del self._open[receipt]
        sent, sent_us = receipt.sent, receipt.sent_us
        route_headers = {name: value for name, value in headers if name in self.headers.all()}
        now_us = self.clock.now_us()
        event = RouteSent(
            now_us,
            sent.tenant,
            sent.receipt,
            sent.scope,
            *sent.epochs,
            _text(route_headers.get(WORKER_HEADER)),
            next(filter(None, (_text(route_headers.get(name)) for name in self.headers.targets)), ""),
            status,
            max(0, now_us - sent_us) // 1000,
            sent.requests,
            sent.uses,
            _number(route_headers.get(self.headers.promised), 1),
            _number(route_headers.get(self.headers.score), 1_000_000),
        )
        with self._lock:
            if self._issuers.knows(sent.issuer):
                self._submit([(sent, event)])
                return
            if len(self._waiting) >= HALVES_WAITING_MAX:
                self._metrics.receipt("lost")
                return
            self._waiting.append((sent, event))
        self._wake.set()

    def close(self) -> None:
        """Write the waiting halves where that is possible now; the others are lost and counted."""
        self._stop.set()
        self._wake.set()
        self._thread.end(_END_SECONDS)
        self._look()
        with self._lock:
            for _ in range(len(self._waiting)):
                self._waiting.popleft()
                self._metrics.receipt("lost")

    def _run(self) -> None:
        while not self._stop.is_set():
            self._wake.wait(self._unanswered_seconds)
            self._wake.clear()
            self.close_unanswered()
            while self._waiting and not self._stop.is_set():
                self._look()
                if self._waiting:
                    self._stop.wait(self._look_seconds)

    def close_unanswered(self) -> None:
        """Write the halves of requests whose answers did not begin in time (rule 1)."""
        before_us = self.clock.now_us() - ANSWER_US_MAX
        with self._lock:
            late = [*takewhile(lambda one: one.sent_us <= before_us, self._open)]
        for receipt in late:
            receipt.close()

    def _look(self) -> None:
        """Read the tenants' issuers and write the halves that they permit."""
        if not self._waiting:
            return
        try:
            issuers = self._ledger.issuers()
        except CustodyError as problem:
            _log.debug("issuers are not known", reason=problem.message)
            return
        with self._lock:
            self._issuers = issuers
            waiting, self._waiting = self._waiting, deque()
            known = [one for one in waiting if issuers.knows(one[0].issuer)]
            self._waiting += (one for one in waiting if not issuers.knows(one[0].issuer))
            self._submit(known)

    def _submit(self, halves: Sequence[tuple[SentRequest, RouteSent]]) -> None:
        if halves:
            self._ledger.submit(
                [event._replace(tenant=self._issuers.name(sent.issuer, sent.tenant)) for sent, event in halves]
            )
        for _ in halves:
            self._metrics.receipt("written")


def _text(value: bytes | None) -> str:
    """Return a header's text by rule 2."""
    text = (value or b"").decode("utf-8", "replace").strip()
    return text if len(text) <= _TEXT_MAX and text.isprintable() and "\ufffd" not in text else ""


def _number(value: bytes | None, scale: int) -> int:
    """Return a number from 0 on, times `scale`, by rule 2."""
    try:
        number = float(_text(value))
    except ValueError:
        return UNSAID
    return round(number * scale) if 0 <= number <= _NUMBER_MAX else UNSAID
