"""A worker's erase epochs: heard on a thread of their own, taken on the thread that owns the blocks.

1. A version is acknowledged to the control plane by the next question. So that waits until the owning thread has taken
   a version that is new to it.
2. An engine that sleeps has one renewal of its lease waiting, for the newest time.
"""

from __future__ import annotations

from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from contextlib import ExitStack
from threading import Event, get_ident

from kvcustody.clock import Clock
from kvcustody.governance.control_plane.connection import ControlPlaneConnection
from kvcustody.governance.control_plane.epoch_feed import EpochFeed
from kvcustody.governance.decisions.access_plan import DomainPool
from kvcustody.governance.decisions.authority import Authority
from kvcustody.governance.edge.custody_lease import ERASURES
from kvcustody.governance.edge.erase_epochs import KnownEpochs

_LOOK_SECONDS = 0.2


class TakenEpochs:
    """Hands what a feed hears to one authority."""

    def __init__(self, authority: Authority[DomainPool]) -> None:
        self._authority = authority
        self._newest: tuple[KnownEpochs, int] | None = None
        self._taken_digest = ""
        self._pending: Future[None] | None = None
        self._stop = Event()
        self._owner = get_ident()

    def take(self, known: KnownEpochs, until_us: int) -> None:
        """On the feed's thread: returns once a version that is new was taken, or `stop` was called.

        At the start on the owning thread itself.
        """
        if get_ident() == self._owner:
            self._authority.take_epochs(known, until_us)
            self._taken_digest = known.epochs.digest
            return
        self._newest = known, until_us
        if self._pending is None or self._pending.done():
            self._pending = self._authority.call(lambda owner: owner.take_epochs(*self._last()))
        if known.epochs.digest == self._taken_digest:
            return
        while not self._stop.is_set():
            try:
                self._pending.result(_LOOK_SECONDS)
            except NotYet:
                continue
            self._taken_digest = known.epochs.digest
            return

    def stop(self) -> None:
        """Wait for nothing any more."""
        self._stop.set()

    def _last(self) -> tuple[KnownEpochs, int]:
        assert self._newest is not None
        return self._newest


def follow_epochs(
    connection: ControlPlaneConnection | None,
    authority: Authority[DomainPool],
    clock: Clock,
    stack: ExitStack,
    *,
    lease_seconds: float,
) -> EpochFeed | None:
    """Start hearing of epochs until `stack` ends; None where this process keeps the ledger. On the owning thread.

    From here on nothing is reused while the newest erasures are not known (`edge.custody_lease`), and nothing by
    requests through a door while no epochs are.
    """
    if connection is None:
        return None
    authority.custody.require(ERASURES)
    authority.epochs.are_awaited = True
    taken = TakenEpochs(authority)
    feed = EpochFeed(connection, clock, lease_seconds=lease_seconds, on_known=taken.take)
    feed.start()
    stack.callback(feed.stop)
    stack.callback(taken.stop)
    return feed
