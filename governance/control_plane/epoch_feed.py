"""Erase epochs from the control plane: what a door or a worker knows, and until when it may act by it.

1. One question is open at all times, and is answered at once where an erasure raised something. It names the version
   that is known: so it is the acknowledgement, too.
2. What is known is acted by for a lease, which runs in boot time from when the question was sent that was answered.
   Past it, `known` gives nothing.
3. A snapshot of many pages is known once its last page is there. One whose digest is another than that of what was put
   together is asked for anew, as a whole.
4. What was raised stays raised: a snapshot that lacks something that was known is not acted by, unless the fleet was
   raised above all that. So the feed says what a control plane has lost, as one whose database was restored, and takes
   what it then raises. Nothing is restarted, and no name comes back that an erasure ended.
5. With the epochs comes what policies say to doors (`edge.name_scopes`), where it is news.
6. Somebody may hint that there is news (`ask_at_once`): then a further question is sent, one a second at most. A hint
   says nothing that is acted by: the answer alone does.
"""

from __future__ import annotations

import random
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from kvcustody.clock import MICROSECONDS, Clock
from kvcustody.errors import ServiceError
from kvcustody.governance.control_plane.connection import ControlPlaneConnection
from kvcustody.governance.edge.custody_lease import spread
from kvcustody.governance.edge.erase_epochs import EpochTags, EraseEpochs, KnownEpochs, RaisedEpoch
from kvcustody.governance.edge.name_scopes import NameScopes
from kvcustody.guarding_thread import GuardingThread
from kvcustody.logger import get_logger

EPOCHS_PATH: Final = "/v1/worker/epochs"
WAIT_SECONDS_MAX: Final = 15
_END_SECONDS = 0.5
_PAUSE_SECONDS, _PAUSE_SECONDS_MAX = 0.2, 5.0
HINTS_APART_SECONDS: Final = 1.0  # rule 6
_asking: weakref.WeakSet[EpochFeed] = weakref.WeakSet()
_log = get_logger(__name__)


def ask_at_once() -> None:
    """Have every feed of this process ask now, because epochs were raised (rule 6). Any thread; never waits."""
    for feed in list(_asking):
        feed.hint()


class _Heard(NamedTuple):
    """A snapshot, under which key it is, when it was asked for, and the end of its lease, in boot time (µs)."""

    known: KnownEpochs
    key: bytes
    sent_us: int
    until_us: int


def _scopes(answer: Mapping[str, Any], last: _Heard | None) -> NameScopes:
    """Those of an answer, which says them where they are other than those that were heard last."""
    said = answer.get("scopes")
    if said is None:
        return NameScopes() if last is None else last.known.scopes
    return NameScopes.from_data(said)


class EpochFeed:
    """Asks for erase epochs on its own thread; `stop` ends it. Any thread may call `known`."""

    def __init__(
        self,
        connection: ControlPlaneConnection,
        clock: Clock,
        *,
        lease_seconds: float,
        on_known: Callable[[KnownEpochs, int], None] = lambda _known, _until_us: None,
        spread: Callable[[float], float] = spread,
        acknowledges: bool = True,
    ) -> None:
        """`on_known(known, until_us)`: called on the feed's thread for each answer, `until_us` in boot time.

        `spread`: the length of this feed's own lease, around `lease_seconds`. `acknowledges`: whether what this feed
        heard is what its principal acts by.
        """
        self.lease_us = int(spread(lease_seconds) * MICROSECONDS)
        self._wait_seconds = max(1, min(WAIT_SECONDS_MAX, self.lease_us // (6 * MICROSECONDS)))
        self._connection, self._clock, self._on_known = connection, clock, on_known
        self._heard: _Heard | None = None
        self._acted_by = 0  # the version that whoever is told has taken
        self._acknowledges = acknowledges
        self._pause_seconds = _PAUSE_SECONDS
        self.problem = ""  # why the last question had no answer that could be taken; empty when it had
        self._taking = threading.Lock()  # questions may overlap (rule 6); one answer is taken at a time
        self._hinted = threading.Event()
        self.hinted_questions = 0
        self._stop = threading.Event()
        self._thread = GuardingThread(self._run, name="kvcustody-epochs", pause=self._stop.wait)
        self._hint_thread = GuardingThread(self._follow_hints, name="kvcustody-epoch-hints", pause=self._stop.wait)

    def start(self) -> None:
        """Ask once, then start the thread. If the control plane answers, epochs are known when this returns."""
        self._try(wait_seconds=0)
        self._thread.start()
        self._hint_thread.start()
        _asking.add(self)

    def stop(self) -> None:
        """Stop asking; a second call changes nothing. An open request ends with the connection."""
        _asking.discard(self)
        self._stop.set()
        self._hinted.set()
        for thread in (self._thread, self._hint_thread):
            if thread.is_alive():
                thread.end(_END_SECONDS)

    def hint(self) -> None:
        """Ask soon, because there is news (rule 6). Any thread; never waits."""
        self._hinted.set()

    def known(self) -> KnownEpochs | None:
        """Return the epochs to act by now; None before the first answer, and past the lease (rule 2)."""
        heard = self._heard
        return None if heard is None or self._clock.now_us() >= heard.until_us else heard.known

    def last_known(self) -> KnownEpochs | None:
        """Return the last epochs heard, even past the lease; None before the first answer."""
        return None if self._heard is None else self._heard.known

    def ask(self, *, wait_seconds: int = 0) -> None:
        """Ask once, to the last page, and take the answer; raises `ServiceError` without one."""
        last = self._heard
        heard = self._fetched(last, wait_seconds)
        if heard is None and last is not None:
            heard = self._fetched(None, 0)
        if last is not None and heard is not None and not heard.known.follows(last.known):
            lost = last.known.epochs.version
            heard = self._fetched(None, 0, lost=lost)  # it raises the fleet for that (rule 4)
            if heard is not None and not heard.known.follows(last.known):
                raise ServiceError(f"erase epochs: the control plane's version is lower than the seen version {lost}")
        if heard is None:
            raise ServiceError("erase epochs: the digest is not that of the snapshot")
        with self._taking:
            now = self._heard
            if now is not None and now is not last and not heard.known.follows(now.known):
                return  # a later question was answered first
            if now is not None and now.known.epochs.digest == heard.known.epochs.digest:
                if heard.sent_us < now.sent_us:
                    return  # the same epochs, and what comes with them is older
                heard = heard._replace(until_us=max(heard.until_us, now.until_us))
            self._heard = heard
            self._on_known(heard.known, heard.until_us)
            self._acted_by = heard.known.epochs.version

    def _fetched(self, start: _Heard | None, wait_seconds: int, *, lost: int = 0) -> _Heard | None:
        """What there is, to the last page, from a snapshot on or, without one, whole; None where it is no snapshot.

        `lost`: a version that is known, and that was not in what the control plane gave.
        """
        sent_us, acted_by, last = self._clock.now_us(), self._acted_by, self._heard
        key, epochs = (b"", EraseEpochs()) if start is None else (start.key, start.known.epochs)
        while True:
            answer = self._connection.get(
                EPOCHS_PATH,
                known=acted_by if self._acknowledges else None,
                after=epochs.version,
                floor=epochs.floor,
                scopes=None if last is None else last.known.scopes.digest,
                lost=lost or None,
                wait=wait_seconds or None,
            )
            given, wait_seconds, lost = bytes.fromhex(answer["key"]), 0, 0
            if key and given != key:  # what follows a version under another key is no snapshot
                return None
            key = given
            raised = [RaisedEpoch(int(number), bytes.fromhex(tag)) for number, tag in answer["raised"]]
            try:
                epochs = epochs.extended(raised, version=int(answer["version"]), floor=int(answer["floor"]))
            except ServiceError:
                if start is None:
                    raise
                return None
            if answer["digest"]:
                break
            if not raised:
                raise ServiceError("erase epochs: a page that is not the last must not be empty")
        if epochs.digest != answer["digest"]:
            return None
        known = KnownEpochs(
            epochs,
            EpochTags(key),
            int(answer["namespace_days"]),
            _scopes(answer, last),
            answer.get("shortest_ceiling_us"),
        )
        if start is not None and start.known.epochs is epochs and start.known[2:] == known[2:]:
            known = start.known  # the same object says that nothing is new
        return _Heard(known, key, sent_us, sent_us + self.lease_us)

    def _run(self) -> None:
        while not self._stop.is_set():
            if self._try(wait_seconds=self._wait_seconds):
                self._pause_seconds = _PAUSE_SECONDS
                continue
            self._stop.wait(self._pause_seconds * random.uniform(0.75, 1.25))  # noqa: S311 - spacing, no secret
            self._pause_seconds = min(2 * self._pause_seconds, _PAUSE_SECONDS_MAX)

    def _follow_hints(self) -> None:
        while not self._stop.is_set():
            self._hinted.wait()
            self._hinted.clear()
            if self._stop.is_set():
                return
            self.hinted_questions += 1
            self._try(wait_seconds=0)
            self._stop.wait(HINTS_APART_SECONDS)

    def _try(self, *, wait_seconds: int) -> bool:
        try:
            self.ask(wait_seconds=wait_seconds)
        except ServiceError as error:
            if not self.problem and not self._stop.is_set():
                _log.warning("erase epochs cannot be read", reason=error.message)
            self.problem = error.message
            self._pause_seconds = max(self._pause_seconds, float(error.operands.get("wait_seconds") or 0.0))
            return False
        self.problem = ""
        return True
