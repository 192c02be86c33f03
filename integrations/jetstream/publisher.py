"""Publishes a worker's KV events to the fleet's NATS server, each under the subject of its name.

1. `publish` takes a lock, appends, and returns. Everything else is on a thread of its own; nothing waits for NATS.
2. Every tenant's messages have contiguous numbers in one life of the publisher. What could not be sent keeps its
   number. A beat says the next one, so that the loss of the last message is seen, too.
3. What finds the queue full is lost, and a new life begins: consumers forget all that the earlier one told. Lives of
   one process are numbered; no clock orders them.
4. A reader that missed something asks for a snapshot: what is told of and not taken back, up to a number. Of one reader
   one question a second is answered.
5. Blocks that are told under no name leave nothing here, and nothing leaves before erase epochs are known: subjects are
   made of them.
6. A tenant without blocks and messages for `IDLE_BEATS` is let go. Where it comes back its numbers begin above all that
   were used, so readers ask for a snapshot.
7. Whatever comes from NATS is a hint: questions are answered with what their subject may have, and a hint of epochs
   makes this process ask the control plane.
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvcustody.allocator.prefix.node import KEY_BYTES
from kvcustody.governance.control_plane.epoch_feed import ask_at_once
from kvcustody.governance.edge.current_namespaces import CurrentNamespaces
from kvcustody.governance.edge.erase_epochs import KnownEpochs
from kvcustody.governance.edge.named_requester import NamedRequester
from kvcustody.governance.settings import Settings
from kvcustody.guarding_thread import GuardingThread
from kvcustody.integrations.events.block_event import CLEARED, STORED, BlockEvent, check_event, cleared, split_keys
from kvcustody.integrations.events.names.told_blocks import ToldBlocks, takes_fleet_hashes
from kvcustody.integrations.jetstream.connection import NatsPlace, open_connection
from kvcustody.integrations.jetstream.subjects import (
    EVERY,
    HINTS,
    EventSubject,
    ask_subject,
    beat_subject,
    name_in_subject,
    snapshot_subject,
)
from kvcustody.logger import get_logger

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg

# The published blocks that were not withdrawn, from which a snapshot is made.
#
# Rules of this section:
# 1. A snapshot never has a withdrawn block. It may lack the oldest ones, where more than `blocks_max` are published.
# 2. It has each chain's blocks after their parents, in the order of publication.
# 3. A tenant's snapshot costs as much as the tenant's own blocks, whatever others have.

BLOCKS_MAX: Final = 1 << 18


class _Id(NamedTuple):
    key: bytes
    namespace: str
    medium: str
    group: int | None


class LiveBlocks:
    """The published blocks that were not withdrawn, from which a snapshot is made. Used on one thread."""

    def __init__(self, blocks_max: int = BLOCKS_MAX) -> None:
        self._blocks_max = blocks_max
        self._told: OrderedDict[_Id, NamedRequester | None] = OrderedDict()  # each block's tenant; None: of no name
        self._of: dict[NamedRequester | None, dict[_Id, BlockEvent]] = {}  # one block each
        self.let_go = 0

    def __len__(self) -> int:
        return len(self._told)

    def take(self, events: Iterable[BlockEvent]) -> None:
        """Take published events, in order."""
        for event in events:
            if event.kind == CLEARED:
                self._told.clear()
                self._of.clear()
            elif event.kind == STORED:
                self._store(event)
            else:
                for key in split_keys(event.keys):
                    self._drop(_Id(key, event.namespace, event.medium, event.group))

    def of(self, tenant: NamedRequester) -> list[BlockEvent]:
        """Return the stored events under all names of a tenant."""
        return [*self._of.get(tenant, {}).values()]

    def has(self, tenant: NamedRequester) -> bool:
        """Return whether any block is published under a tenant's names."""
        return tenant in self._of

    def _drop(self, one: _Id) -> None:
        if one in self._told:
            tenant = self._told.pop(one)
            blocks = self._of[tenant]
            del blocks[one]
            if not blocks:
                del self._of[tenant]

    def _store(self, event: BlockEvent) -> None:
        parent, size = event.parent, event.block_tokens
        tenant = None if event.place is None else event.place.whole_tenant
        for at, key in enumerate(split_keys(event.keys)):
            tokens = event.tokens[at * size : (at + 1) * size]
            one = _Id(key, event.namespace, event.medium, event.group)
            if self._told.setdefault(one, tenant) != tenant:
                self._drop(one)
                self._told[one] = tenant
            self._of.setdefault(tenant, {})[one] = event._replace(keys=key, parent=parent, tokens=tokens)
            parent = key
        while len(self._told) > self._blocks_max:
            self._drop(next(iter(self._told)))
            self.let_go += 1


LIFE: Final = "Kvc-Life"
NUMBER: Final = "Kvc-Number"
QUESTION, PART, PARTS, TENANT = "Kvc-Question", "Kvc-Part", "Kvc-Parts", "Kvc-Tenant"
IDLE_BEATS: Final = 300
_ASKED_APART_SECONDS: Final = 1.0
_READERS_MAX: Final = 4096
_PAUSE_SECONDS: Final = 1.0
_log = get_logger(__name__)


Encode = Callable[[Sequence[BlockEvent], float], bytes]


class StreamLimits(NamedTuple):
    """The sizes of a publisher."""

    waiting_batches: int = 10_000
    waiting_blocks: int = 1_000_000
    live_blocks: int = BLOCKS_MAX
    part_blocks: int = 512
    beat_seconds: float = 2.0
    close_seconds: float = 1.0


class StreamStats(NamedTuple):
    """The counters of a publisher. `unnamed`: events under no name; `early`: before epochs were known."""

    messages: int
    events: int
    lost_messages: int
    lost_batches: int
    unnamed: int
    early: int
    snapshots: int
    lives: int
    waiting: int
    live_blocks: int
    is_connected: bool


class Message(NamedTuple):
    """One message: events under one name in the stream, or another message."""

    subject: str
    payload: bytes
    headers: dict[str, str]


class ToldStream:
    """Makes messages from events, without a connection. Used on one thread."""

    def __init__(
        self,
        worker: str,
        namespaces: CurrentNamespaces,
        encode: Encode,
        *,
        rank: int = 0,
        fleet_hashes: bool = False,
        limits: StreamLimits | None = None,
    ) -> None:
        """Prepare the stream. `encode(events, at)` encodes a batch in the published form; `at` is UTC seconds.

        `fleet_hashes`: as `ToldBlocks` has it.
        """
        self.worker = name_in_subject(worker if not rank else f"{worker}-{rank}")
        self._namespaces, self._payload = namespaces, encode
        self._fleet_hashes = fleet_hashes
        self._limits = limits or StreamLimits()
        self.counts = {"messages": 0, "events": 0, "unnamed": 0, "early": 0, "snapshots": 0, "lives": 0}
        self._known: KnownEpochs | None = None
        self._asked: OrderedDict[tuple[str, str], float] = OrderedDict()
        self._incarnation = uuid.uuid4().hex
        self.begin()

    def begin(self) -> None:
        """Begin a new life (rule 3)."""
        self.counts["lives"] += 1
        self.life = f"{self._incarnation}.{self.counts['lives']}"
        self._told = ToldBlocks(self._namespaces, fleet_hashes=self._fleet_hashes)
        self._told.take_epochs(self._known)
        self.live = LiveBlocks(self._limits.live_blocks)
        self._next: dict[str, int] = {}
        self._tenants: dict[str, NamedRequester] = {}  # whole tenants by their tags
        self._idle: dict[str, int] = {}  # beats since the last message
        self._first_number = 0  # of a tenant that comes, above all numbers of those that were let go
        self._early: set[NamedRequester] = set()  # of whom something was not sent (rule 5)

    def messages(self, events: Sequence[BlockEvent], known: KnownEpochs | None, at: float) -> list[Message]:
        """Return the messages for one step; `at` is UTC seconds."""
        if known is not None and known is not self._known:
            if self._known is not None and not known.has_key_of(self._known):
                self._known = known
                self.begin()
            self._known = known
        events_told = [*self._told.take_epochs(self._known), *self._told.tell(events)]
        self.live.take(events_told)
        messages: list[Message] = []
        run: list[BlockEvent] = []
        for event in events_told:
            if event.kind == CLEARED:
                messages += self._sent(run, at)
                run = []
                messages += [self._numbered(None, tenant, (event,), at) for tenant in list(self._tenants)]
            elif event.place is None:
                self.counts["unnamed"] += 1
            else:
                if run and run[-1].place != event.place:
                    messages += self._sent(run, at)
                    run = []
                run.append(event)
        return messages + self._sent(run, at)

    def _sent(self, run: Sequence[BlockEvent], at: float) -> list[Message]:
        """Return a message with events under one name."""
        if not run:
            return []
        place = run[0].place
        assert place is not None
        if self._known is None:
            self.counts["early"] += len(run)
            self._early.add(place.whole_tenant)
            return []
        subject = EventSubject.of(place, self._known, self.worker)
        if subject.tenant not in self._tenants:
            self._tenants[subject.tenant] = place.whole_tenant
            is_late = place.whole_tenant in self._early  # something is missing before
            self._early.discard(place.whole_tenant)
            self._next[subject.tenant] = max(self._first_number, int(is_late))
        return [self._numbered(subject, subject.tenant, run, at)]

    def _numbered(self, subject: EventSubject | None, tenant: str, events: Sequence[BlockEvent], at: float) -> Message:
        number = self._next[tenant]
        self._next[tenant] = number + 1
        self._idle[tenant] = 0
        self.counts["messages"] += 1
        self.counts["events"] += len(events)
        where = subject or EventSubject(tenant, tenant, self._epoch(tenant), self.worker)
        return Message(str(where), self._payload(events, at), {LIFE: self.life, NUMBER: str(number)})

    def _epoch(self, tenant: str) -> int:
        assert self._known is not None
        return max(self._known.of(*self._tenants[tenant]))

    def beats(self) -> list[Message]:
        """Return each tenant's next number (rule 2), after dropping idle tenants (rule 6)."""
        for tenant in list(self._tenants):
            self._idle[tenant] += 1
            if self._idle[tenant] > IDLE_BEATS and not self.live.has(self._tenants[tenant]):
                del self._tenants[tenant], self._idle[tenant]
                self._first_number = max(self._first_number, self._next.pop(tenant) + 1)
        return [
            Message(beat_subject(tenant, self.worker), b"", {LIFE: self.life, NUMBER: str(number)})
            for tenant, number in self._next.items()
        ]

    def answer(self, subject: str, payload: bytes, now: float, at: float) -> list[Message]:
        """Return the requested snapshot; nothing where there is none, or the request came too soon (rule 4).

        `now` is monotonic seconds, `at` UTC seconds.
        """
        parts = subject.split(".")
        if len(parts) != 4 or len(payload) > 256:
            return []
        _, tenant, reader, _ = parts
        number, _, said = payload.decode("ascii", "replace").partition(" ")
        tenant = said if tenant == EVERY else tenant
        whole = self._tenants.get(tenant)
        last = self._asked.get((reader, tenant))
        if whole is None or not number.isalnum() or (last is not None and now - last < _ASKED_APART_SECONDS):
            return []
        self._asked[reader, tenant] = now
        self._asked.move_to_end((reader, tenant))
        while len(self._asked) > _READERS_MAX:
            self._asked.popitem(last=False)
        self.counts["snapshots"] += 1
        events = self.live.of(whole)
        size = self._limits.part_blocks
        runs = [events[first : first + size] for first in range(0, len(events), size)] or [[]]
        head = {
            LIFE: self.life,
            NUMBER: str(self._next[tenant]),
            QUESTION: number,
            TENANT: tenant,
            PARTS: str(len(runs)),
        }
        where = snapshot_subject(reader, self.worker)
        return [Message(where, self._payload(run, at), {**head, PART: str(place)}) for place, run in enumerate(runs)]


class _Waiting(NamedTuple):
    at: float
    events: Sequence[BlockEvent]
    blocks: int
    known: KnownEpochs | None
    is_after_loss: bool


class StreamPublisher:
    """Sends a `ToldStream`'s messages on its own thread and connection. Close it at the end."""

    def __init__(
        self, place: NatsPlace, told: ToldStream, *, revision: int = 0, limits: StreamLimits | None = None
    ) -> None:
        """Raises `ConfigError` where the server's address or the credentials cannot be used."""
        place.check()
        self._place, self._told, self._revision = place, told, revision
        self._limits = limits or StreamLimits()
        self._lock = threading.Lock()
        self._queue: deque[_Waiting] = deque()
        self._queued_blocks = 0
        self._known: KnownEpochs | None = None
        self._is_lost = False  # something did not fit the queue (rule 3)
        self._lost_batches = self._lost_messages = 0
        self._closing = False
        self._closing_until = float("inf")
        self._client: Client | None = None
        self._loop = asyncio.new_event_loop()
        self._wake = asyncio.Event()
        self._thread = GuardingThread(self._run, name="kvcustody-jetstream")
        self._thread.start()

    # -- the engine's side --------------------------------------------------------------------------------------------

    def publish(self, events: Sequence[BlockEvent]) -> int:
        """Hand over the events of one step without waiting; return their number. Raises `IsolationError` as
        `check_event` does.
        """
        blocks = 0
        for event in events:
            check_event(event)
            blocks += len(event.keys) // KEY_BYTES
        limits = self._limits
        with self._lock:
            is_full = (
                self._closing
                or len(self._queue) >= limits.waiting_batches
                or self._queued_blocks + blocks > limits.waiting_blocks
            )
            if is_full:
                self._is_lost = True
                self._lost_batches += 1
                return 0
            self._queue.append(_Waiting(time.time(), events, blocks, self._known, self._is_lost))
            self._is_lost = False
            self._queued_blocks += blocks
            is_first = len(self._queue) == 1
        if is_first:
            self._ring()
        return len(events)

    def take_epochs(self, known: KnownEpochs) -> None:
        """Name requesters by these erase epochs from now on, and publish what they end. Any thread; never waits."""
        with self._lock:
            if known is self._known:
                return
            self._known = known
        self.publish(())

    def stats(self) -> StreamStats:
        """Return a snapshot of the counters."""
        with self._lock:
            return StreamStats(
                **self._told.counts,
                lost_messages=self._lost_messages,
                lost_batches=self._lost_batches,
                waiting=len(self._queue),
                live_blocks=len(self._told.live),
                is_connected=self._client is not None and self._client.is_connected,
            )

    def figures(self) -> dict[str, float]:
        """Return the figures for a worker's report."""
        stats = self.stats()
        return {
            "events_told_blocks.nats": stats.live_blocks,
            "events_sent.nats": stats.messages,
            "events_lost.nats": stats.lost_messages + stats.lost_batches,
            "events_connected.nats": float(stats.is_connected),
        }

    def close(self) -> None:
        """Send what waits, within a second, and stop; a second call does nothing."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self._closing_until = time.monotonic() + self._limits.close_seconds
        self._ring()
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> StreamPublisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ring(self) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._wake.set)

    # -- the publisher's thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        connecting = asyncio.ensure_future(self._connect())
        beat_at = 0.0
        try:
            while True:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), self._limits.beat_seconds)
                self._wake.clear()
                while (waiting := self._take()) is not None:
                    await self._send(self._messages(waiting))
                if time.monotonic() >= beat_at:
                    beat_at = time.monotonic() + self._limits.beat_seconds
                    await self._send(self._told.beats())
                    if self._is_lost:
                        self.publish(())
                if self._closing:
                    return
        finally:
            connecting.cancel()
            await asyncio.wait({connecting}, timeout=self._limits.close_seconds)  # one that connects may not hear it
            if self._client is not None:
                with suppress(Exception):
                    await asyncio.wait_for(self._client.flush(), self._limits.close_seconds)
                with suppress(Exception):
                    await asyncio.wait_for(self._client.close(), self._limits.close_seconds)

    async def _connect(self) -> None:
        """Connect, and reconnect where the connection ended for good, as with expired credentials."""
        problem = ""
        while True:
            if self._client is None or self._client.is_closed:
                try:
                    client = await open_connection(self._place)
                    mine = ask_subject("*", "*", self._told.worker)
                    await client.subscribe(mine, cb=self._answer)
                    await client.subscribe(HINTS, cb=_hinted)
                    self._client = client
                    problem = ""
                except Exception as error:  # NATS is away: events are lost, and their numbers tell
                    if problem != type(error).__name__:
                        problem = type(error).__name__
                        _log.warning("KV events: NATS cannot be reached", problem=problem)
            await asyncio.sleep(_PAUSE_SECONDS)

    def _take(self) -> _Waiting | None:
        with self._lock:
            if not self._queue:
                return None
            waiting = self._queue.popleft()
            self._queued_blocks -= waiting.blocks
            return waiting

    def _messages(self, waiting: _Waiting) -> list[Message]:
        ends = self._resync(waiting) if waiting.is_after_loss else []
        try:
            return [*ends, *self._told.messages(waiting.events, waiting.known, waiting.at)]
        except Exception as error:  # what was told of is in doubt
            _log.warning("KV events could not be sent", cause=f"{type(error).__name__}: {error}"[:200])
            return [*ends, *self._resync(waiting)]

    def _resync(self, waiting: _Waiting) -> list[Message]:
        """Begin a new life where messages were lost (rule 3)."""
        ends = self._told.messages((cleared(self._revision, "resync"),), waiting.known, waiting.at)
        self._told.begin()
        return ends

    async def _send(self, messages: Sequence[Message]) -> None:
        for one in messages:
            client = self._client
            patience = min(self._limits.close_seconds, self._closing_until - time.monotonic())
            if client is None or client.is_closed or patience <= 0:
                self._lost_messages += 1
                continue
            try:
                sending = client.publish(one.subject, one.payload, headers=dict(one.headers))
                await asyncio.wait_for(sending, patience)  # it waits where the server does not read
            except Exception:  # what is kept for a connection is full, or the message is too large
                self._lost_messages += 1

    async def _answer(self, message: Msg) -> None:
        await self._send(self._told.answer(message.subject, message.data, time.monotonic(), time.time()))


def open_stream(
    settings: Settings, namespaces: CurrentNamespaces, encode: Encode, *, revision: int, rank: int
) -> StreamPublisher:
    """Return the publisher for the setting `nats`. Raises `ConfigError` as `StreamPublisher` does."""
    place = NatsPlace(settings.nats, settings.nats_credentials_path, settings.nats_ca_path)
    hashed = takes_fleet_hashes(settings.kv_events_format)
    told = ToldStream(settings.worker_name, namespaces, encode, rank=rank, fleet_hashes=hashed)
    return StreamPublisher(place, told, revision=revision)


async def _hinted(_message: Any) -> None:
    ask_at_once()
