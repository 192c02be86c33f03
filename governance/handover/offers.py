"""A prefill worker's offers: one run of blocks a ticket, for one fetch, until the ticket's deadline.

1. An offer is used up by the first fetch, and ends with its deadline: then nothing is given for it any more. The blocks
   and copies themselves live on under their own terms.
2. What is offered may be on its way into the tier still: a fetch waits for it, within its own deadline.
3. At most `OFFERS_MAX` are kept; the one that ends first makes room.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from kvcustody.clock import Clock
from kvcustody.governance.decisions.access_plan import DomainLabel
from kvcustody.governance.handover.ticket import Ticket
from kvcustody.governance.tiers.tier import GivenObjects, SealedObject

OFFERS_MAX: Final = 4_096
_PAUSE_SECONDS = 0.005


class OfferedPart(NamedTuple):
    """Blocks of one domain, from block `first` of the chain. keys: of the chain up to the part's end, 32 bytes
    a block.
    """

    label: DomainLabel
    first: int
    keys: bytes


class Offer(NamedTuple):
    """The blocks that one ticket opens."""

    nonce: bytes
    parts: tuple[OfferedPart, ...]
    deadline_ms: int


Give = Callable[[OfferedPart], GivenObjects]
"""The sealed objects of a part, as far as they are there, read by the thread that owns them."""


class OfferTable:
    """The offers of one worker. Thread-safe."""

    def __init__(self, give: Give, clock: Clock) -> None:
        self._give = give
        self._clock = clock
        self._offers: dict[bytes, Offer] = {}
        self._used: dict[bytes, int] = {}
        self._lock = threading.Lock()

    def put(self, offer: Offer) -> None:
        """Add an offer."""
        with self._lock:
            self._forget_ended()
            if len(self._offers) >= OFFERS_MAX:
                first = min(self._offers.values(), key=lambda one: one.deadline_ms)
                del self._offers[first.nonce]
            self._offers[offer.nonce] = offer

    def take(self, ticket: Ticket, deadline: float) -> Sequence[SealedObject] | str:
        """Return the objects of the ticket's offer (rule 1), or why there are none."""
        with self._lock:
            self._forget_ended()
            if ticket.nonce in self._used:
                return "used"
            self._used[ticket.nonce] = ticket.deadline_ms
        offer = self._offered(ticket.nonce, deadline)
        if offer is None:
            return "unknown"
        objects: list[SealedObject] = []
        for part in offer.parts:
            given = self._wait_for(part, deadline)
            objects += given.objects
            if not given.is_whole:
                break  # what follows a hole is of no use
        return objects or "gone"

    def _offered(self, nonce: bytes, deadline: float) -> Offer | None:
        """The offer may come a step behind its ticket."""
        while True:
            with self._lock:
                offer = self._offers.pop(nonce, None)
            if offer is not None or time.monotonic() + 2 * _PAUSE_SECONDS > deadline:
                return offer
            time.sleep(_PAUSE_SECONDS)

    def _wait_for(self, part: OfferedPart, deadline: float) -> GivenObjects:
        half = time.monotonic() + (deadline - time.monotonic()) / 2  # the rest is for the way
        while True:
            found = self._give(part)
            if found.is_whole or time.monotonic() > half:
                return found
            time.sleep(_PAUSE_SECONDS)

    def _forget_ended(self) -> None:
        now_ms = self._clock.utc_us() // 1000
        for nonce in [nonce for nonce, one in self._offers.items() if one.deadline_ms <= now_ms]:
            del self._offers[nonce]
        for nonce in [nonce for nonce, ends_ms in self._used.items() if ends_ms <= now_ms]:
            del self._used[nonce]
