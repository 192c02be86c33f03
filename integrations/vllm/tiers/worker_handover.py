"""The worker's half of hand-overs: it answers fetches of its first tier's sealed objects, and fetches from others.

1. What another worker fetches is read by the tier's thread, sealed as it rests there.
2. What this one fetches comes on threads of its own; the tier's thread keeps it. Nothing waits for it but the request.
3. Shards hand over to shards: shard n listens n ports behind the address, and asks there.
"""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from queue import SimpleQueue
from typing import NamedTuple, Protocol

from kvcustody.clock import Clock
from kvcustody.errors import ConfigError
from kvcustody.governance.handover.exchange import AnsweredFetch, Fetched, HandoverServer, fetch_objects
from kvcustody.governance.handover.offers import OfferedPart, OfferTable
from kvcustody.governance.handover.peers import PeerKey, watch_peers
from kvcustody.governance.handover.ticket import Ticket
from kvcustody.governance.handover.tls import handover_tls
from kvcustody.governance.settings import Settings
from kvcustody.governance.tiers.copies.index import TierTerms
from kvcustody.governance.tiers.seal.object_layout import object_bytes
from kvcustody.governance.tiers.stores.store_protocol import TierStore
from kvcustody.governance.tiers.tier import GivenObjects
from kvcustody.http_exchange import host_and_port
from kvcustody.integrations.vllm.tiers.tier_messages import CopyReply, FetchCopies, OfferCopies

FETCH_SECONDS = 2.0
_GIVE_SECONDS = 1.0  # that a read for another worker may wait for its turn


class GivePart(NamedTuple):
    """Read the tier's part of a chain for another worker; the answer goes into the queue."""

    part: OfferedPart
    answer: SimpleQueue[GivenObjects]


class KeepCopies(NamedTuple):
    """Keep fetched copies; the answer is the fetch's. `narrowed`: the thread's value when the fetch began."""

    fetch: FetchCopies
    fetched: Fetched
    narrowed: int

    @property
    def number(self) -> int:
        """The fetch's number."""
        return self.fetch.number


class GivingThread(Protocol):
    """The thread of the tier from which others get copies."""

    name: str
    store: TierStore
    terms: TierTerms
    narrowed: int  # how often policy or keys have changed

    def put(self, job: KeepCopies) -> None:
        """Append this to the thread's work."""

    def give(self, part: OfferedPart, seconds: float) -> GivenObjects:
        """Return the tier's part of a chain; nothing where that takes too long."""


class WorkerHandover:
    """What one worker gives to others from its first tier, and fetches from them."""

    def __init__(
        self,
        settings: Settings,
        thread: GivingThread,
        results: deque[CopyReply],
        clock: Clock,
        shard: int,
        stack: ExitStack,
    ) -> None:
        """Open the hand-over.

        Raises:
            CustodyError: the key or the peers cannot be read.
        """
        assert settings.handover_peers_path is not None
        self._thread, self._results, self._clock, self._shard = thread, results, clock, shard
        self._worker, self._address, self._stack = settings.worker_name, settings.handover_address, stack
        self._key = PeerKey.open(settings.handover_key_file, settings.worker_name)
        self._peers = watch_peers(settings.handover_peers_path, clock)
        self._tls = handover_tls(settings)
        self._offers = OfferTable(lambda part: thread.give(part, _GIVE_SECONDS), clock)
        self._life = ""
        self._fetching: dict[str, Future[Fetched]] = {}  # by ticket, in this step
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="kvcustody-fetch")
        stack.callback(self._threads.shutdown, wait=False, cancel_futures=True)

    def begin(self, tier: str, life: str) -> None:
        """Begin to answer fetches, because this incarnation has opened a tier."""
        if tier != self._thread.name or self._life:
            return
        self._life = life
        if not self._address:
            return
        host, port = host_and_port(self._address)
        try:
            server = HandoverServer(
                (host, port + self._shard),
                self._offers,
                self._key,
                self._peers,
                worker=self._worker,
                life=life,
                clock=self._clock,
                tls=None if self._tls is None else self._tls.server,
                on_given=self._note,
            )
        except (OSError, OverflowError) as error:  # the last shards' ports may be beyond the last there is
            raise ConfigError(
                f"setting `handover_address`: `{self._address}` cannot be listened on ({error})"
            ) from None
        self._stack.callback(server.close)

    def put(self, job: FetchCopies | OfferCopies) -> None:
        """Offer, or start a fetch beside everything else; parts of one ticket are fetched together."""
        if isinstance(job, OfferCopies):
            self._offers.put(job.offer)
            self._results.append(CopyReply(job.number, job.tier, self._shard))
            return
        fetching, narrowed = self._fetching.get(job.text), self._thread.narrowed
        if fetching is None:
            by = time.monotonic() + FETCH_SECONDS
            fetching = self._fetching[job.text] = self._threads.submit(self._fetch, job.ticket, job.text, by)
        fetching.add_done_callback(lambda fetched: self._thread.put(KeepCopies(job, fetched.result(), narrowed)))

    def end_step(self) -> None:
        """End a step's jobs: the same ticket again is another fetch."""
        self._fetching.clear()

    def _fetch(self, ticket: Ticket, text: str, by: float) -> Fetched:
        if time.monotonic() > by:  # behind other fetches; its request waits no more
            return Fetched(reason="late")
        sealed = object_bytes(self._thread.terms.block_bytes, enclosed=True, checked=False)
        try:
            peers = self._peers()
            host, port = peers.addresses[ticket.worker]
            return fetch_objects(
                ticket,
                text,
                self._key,
                peers._replace(addresses={ticket.worker: (host, port + self._shard)}),
                worker=self._worker,
                life=self._life,
                clock=self._clock,
                bytes_max=min(self._thread.store.capacity_bytes, ticket.blocks * sealed),
                seconds=FETCH_SECONDS,
                tls=None if self._tls is None else self._tls.client,
            )
        except Exception as error:  # whatever it was: nothing came, and the request computes
            return Fetched(reason=f"unreachable: {type(error).__name__}")

    def _note(self, given: AnsweredFetch) -> None:
        self._results.append(CopyReply(0, self._thread.name, self._shard, given=(given,)))
