"""Erase epochs as the control plane gives them out: what a door or a worker knows, and until when it may act by it.

1. One question is open at all times, and is answered at once where an erasure raised something. It names the version
   that is known: so it is the acknowledgement, too.
2. What is known is acted by for a lease, which runs in boot time from when the question was sent that was answered.
   Past it, `known` gives nothing.
3. A snapshot of many pages is known once its last page is there. One whose digest is another than that of what was put
   together is asked for anew, as a whole.
4. What the control plane says under a new key replaces what was known. A version below the known one is refused: the
   control plane went back, and would bring names back that erasures ended.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from kvcustody.clock import MICROSECONDS, Clock
from kvcustody.errors import ServiceError
from kvcustody.governance.control_plane.connection import ControlPlaneConnection
from kvcustody.governance.edge.custody_lease import spread
from kvcustody.governance.edge.erase_epochs import EpochTags, EraseEpochs, KnownEpochs, RaisedEpoch
from kvcustody.governance.edge.route_receipt import ReceiptRule
from kvcustody.guarding_thread import GuardingThread
from kvcustody.logger import get_logger

EPOCHS_PATH: Final = "/v1/worker/epochs"
WAIT_SECONDS_MAX: Final = 15
_END_SECONDS = 0.5
_PAUSE_SECONDS, _PAUSE_SECONDS_MAX = 0.2, 5.0
_log = get_logger(__name__)


class _Heard(NamedTuple):
    """A snapshot, under which key it is, and the end of its lease in boot time (µs)."""

    known: KnownEpochs
    key: bytes
    until_us: int


class EpochFeed:
    """Asks for erase epochs on a thread of its own; `stop` ends it. Any thread may call `known`."""

    def __init__(
        self,
        connection: ControlPlaneConnection,
        clock: Clock,
        *,
        lease_seconds: float,
        on_known: Callable[[KnownEpochs, int], None] = lambda _known, _until_us: None,
        spread: Callable[[float], float] = spread,
    ) -> None:
        """`on_known(known, until_us)`: called on the feed's thread for each answer, `until_us` in boot time.

        `spread`: the length of this feed's own lease, around `lease_seconds`.
        """
        self.lease_us = int(spread(lease_seconds) * MICROSECONDS)
        self._wait_seconds = max(1, min(WAIT_SECONDS_MAX, self.lease_us // (6 * MICROSECONDS)))
        self._connection, self._clock, self._on_known = connection, clock, on_known
        self._heard: _Heard | None = None
        self._pause_seconds = _PAUSE_SECONDS
        self.problem = ""  # why the last question had no answer that could be taken; empty when it had
        self._stop = threading.Event()
        self._thread = GuardingThread(self._run, name="kvcustody-epochs", pause=self._stop.wait)

    def start(self) -> None:
        """Ask once and then from now on: where the control plane answers, something is known when this returns."""
        self._try(wait_seconds=0)
        self._thread.start()

    def stop(self) -> None:
        """Ask no more; a second time changes nothing. An open question is left to end with the connection."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.end(_END_SECONDS)

    def known(self) -> KnownEpochs | None:
        """What to act by now; None before the first answer, and past the lease (rule 2)."""
        heard = self._heard
        return None if heard is None or self._clock.now_us() >= heard.until_us else heard.known

    def last_known(self) -> KnownEpochs | None:
        """What was heard last, whether or not the lease is over; None before the first answer."""
        return None if self._heard is None else self._heard.known

    def ask(self, *, wait_seconds: int = 0) -> None:
        """Ask once, to the last page, and take the answer; raises `ServiceError` where there is none to take."""
        heard = self._heard
        sent_us = self._clock.now_us()
        key, epochs = (b"", EraseEpochs()) if heard is None else (heard.key, heard.known.epochs)
        acknowledged = epochs.version
        while True:
            answer = self._connection.get(
                EPOCHS_PATH,
                known=acknowledged,
                after=epochs.version,
                floor=epochs.floor,
                wait=wait_seconds or None,
            )
            given, wait_seconds = bytes.fromhex(answer["key"]), 0
            if (
                given != key and key and epochs.version
            ):  # what follows a version under another key is no snapshot
                key, epochs, sent_us = b"", EraseEpochs(), self._clock.now_us()
                continue
            key = given
            raised = [RaisedEpoch(int(number), bytes.fromhex(tag)) for number, tag in answer["raised"]]
            epochs = epochs.extended(raised, version=int(answer["version"]), floor=int(answer["floor"]))
            if not answer["digest"]:
                if not raised:
                    raise ServiceError("erase epochs: a page that is not the last must not be empty")
                continue
            if epochs.digest == answer["digest"]:
                break
            if acknowledged == 0 and heard is None:
                raise ServiceError("erase epochs: the digest is not that of the snapshot")
            heard, acknowledged = None, 0
            epochs, sent_us = EraseEpochs(), self._clock.now_us()
        days, last = int(answer["namespace_days"]), self._heard
        known = KnownEpochs(epochs, EpochTags(key), days, _rule_of(answer.get("receipts")))
        if last is not None and last.known.epochs is epochs and last.known[2:] == known[2:]:
            known = last.known  # the same object says that nothing is new
        self._heard = _Heard(known, key, sent_us + self.lease_us)
        self._on_known(known, sent_us + self.lease_us)

    def _run(self) -> None:
        while not self._stop.is_set():
            if self._try(wait_seconds=self._wait_seconds):
                self._pause_seconds = _PAUSE_SECONDS
                continue
            self._stop.wait(self._pause_seconds * random.uniform(0.75, 1.25))  # noqa: S311 - spacing, no secret
            self._pause_seconds = min(2 * self._pause_seconds, _PAUSE_SECONDS_MAX)

    def _try(self, *, wait_seconds: int) -> bool:
        try:
            self.ask(wait_seconds=wait_seconds)
        except ServiceError as error:
            if not self.problem and not self._stop.is_set():
                _log.warning("erase epochs are not heard", reason=error.message)
            self.problem = error.message
            self._pause_seconds = max(self._pause_seconds, float(error.operands.get("wait_seconds") or 0.0))
            return False
        self.problem = ""
        return True


def _rule_of(said: dict[str, Any] | None) -> ReceiptRule:
    """Which requests have a route receipt; the default where the control plane does not say."""
    if said is None:
        return ReceiptRule()
    return ReceiptRule(
        int(said["share_millionths"]) / 1_000_000, frozenset(map(bytes.fromhex, said["always"]))
    )
