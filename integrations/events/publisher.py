"""Publishes governed block events to subscribers in a foreign engine's format, without ever slowing our engine.

1. `publish` takes a lock, appends, and returns: encoding and sockets belong to a thread of the publisher's own.
2. Every batch has a sequence number, and they are contiguous. A batch that found the queue full, or could not be
   encoded, keeps its number and is never sent: consumers see the hole, and the next batch begins with a clear.
3. Memory is bounded: batches and blocks that wait, batches and bytes that can be replayed, messages to slow peers.
4. What leaves the process is decided once, when the publisher is made: token ids, salts and namespaces are withheld
   unless they are published; scope, residency and block keys always leave.
5. The stream begins with a clear: whatever an earlier process published at this address is gone.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Literal, NamedTuple, Protocol

import zmq

from kvcustody.allocator.prefix.node import KEY_BYTES
from kvcustody.clock import SystemClock
from kvcustody.errors import ConfigError
from kvcustody.governance.credentials.scope_token_secret import open_scope_key
from kvcustody.governance.edge.current_namespaces import CurrentNamespaces
from kvcustody.governance.edge.erase_epochs import KnownEpochs
from kvcustody.governance.edge.router_namespace import RouterNamespaces
from kvcustody.governance.settings import Settings
from kvcustody.guarding_thread import GuardingThread
from kvcustody.integrations.events import sglang_wire, vllm_wire
from kvcustody.integrations.events.block_event import BlockEvent, check_event, cleared
from kvcustody.integrations.events.dynamo_wire import DynamoWire
from kvcustody.integrations.events.endpoint import at_rank, check_bind
from kvcustody.integrations.events.mooncake_wire import MooncakeWire
from kvcustody.integrations.events.names.told_blocks import ToldBlocks, takes_fleet_hashes
from kvcustody.logger import get_logger

END = (-1).to_bytes(8, "big", signed=True)
_POLL_MS = 500
_REQUEST_BYTES_MAX = 1024
_log = get_logger(__name__)
Form = Literal["vllm", "sglang", "dynamo", "mooncake"]
_FOR_ROUTERS = ("dynamo", "mooncake")


class EventWire(Protocol):
    """A foreign engine's format."""

    def payload_of(
        self,
        events: Sequence[BlockEvent],
        ts_seconds: float,
        rank: int,
        incarnation: str,
        *,
        tokens_published: bool,
    ) -> bytes:
        """Return the events of one step, encoded."""

    def replay_frames(self, topic: bytes, sequence: bytes, payload: bytes) -> tuple[bytes, ...]:
        """Return the frames of a batch that is sent again."""


class PublisherLimits(NamedTuple):
    """Sizes of a publisher (rule 3)."""

    waiting_batches: int = 10_000
    waiting_blocks: int = 1_000_000
    replay_batches: int = 10_000
    replay_bytes: int = 64 << 20
    peer_messages: int = 20_000
    close_seconds: float = 1.0


class PublisherStats(NamedTuple):
    """The counters of a publisher; `lost_batches` never reached a subscriber (rule 2)."""

    batches: int
    events: int
    lost_batches: int
    lost_events: int
    replays: int
    waiting: int
    next_sequence: int


class _Waiting(NamedTuple):
    sequence: int
    ts_seconds: float
    events: Sequence[BlockEvent]
    blocks: int


class EventPublisher:
    """Owns a PUB socket, a ROUTER socket for replays, and the thread that serves both. Close it at the end."""

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        form: Form = "vllm",
        namespaces: CurrentNamespaces | None = None,
        backend: str = "kvcustody",
        tokens_published: bool = False,
        remote_allowed: bool = False,
        revision: int = 0,
        incarnation: str = "",
        rank: int = 0,
        topic: str = "",
        limits: PublisherLimits | None = None,
    ) -> None:
        """Open the sockets. namespaces: routers' names for requesters; backend: this cache's name in Mooncake's form.

        Raises `ConfigError` for a form that only routers read where there are no `namespaces`.
        """
        if namespaces is None and form in _FOR_ROUTERS:
            raise ConfigError(f"KV events in the form of `{form}` need the namespaces of tenants", form=form)
        self._wire = wire_of(form, backend, tokens_published=tokens_published)
        hashed = takes_fleet_hashes(form)
        self._told = None if namespaces is None else ToldBlocks(namespaces, fleet_hashes=hashed)
        self._known: KnownEpochs | None = None
        self._tokens_published = tokens_published
        self._incarnation = incarnation
        self._revision = revision
        self._rank = rank
        self._topic = topic.encode()
        self._limits = limits or PublisherLimits()
        self._lock = threading.Lock()
        self._queue: deque[_Waiting] = deque()
        self._queued_blocks = 0
        self._sequence = 0
        self._due = -1  # the sequence that is sent next; after a hole, and at first, a clear goes before it
        self._closing = False
        self._stop_at = float("inf")
        self._counts = {"batches": 0, "events": 0, "lost_batches": 0, "lost_events": 0, "replays": 0}
        self._buffer: deque[tuple[bytes, bytes]] = deque()
        self._buffer_bytes = 0
        self._context = zmq.Context()
        self._bell, self._ring = os.pipe()
        os.set_blocking(self._bell, False)
        os.set_blocking(self._ring, False)
        try:
            self._pub = self._bind(zmq.PUB, at_rank(endpoint, rank), remote_allowed)
            self._router = (
                self._bind(zmq.ROUTER, at_rank(replay_endpoint, rank), remote_allowed) if replay_endpoint else None
            )
        except BaseException:
            self._context.destroy(linger=0)
            os.close(self._bell)
            os.close(self._ring)
            raise
        self.endpoint = self._pub.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay_endpoint = self._router and self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._thread = GuardingThread(self._run, name="kvcustody-events")
        self._thread.start()

    # -- the engine's side --------------------------------------------------------------------------------------------

    def publish(self, events: Sequence[BlockEvent]) -> int:
        """Hand over the events of one step without waiting; return their sequence number, -1 for none.

        The sequence of events must not be changed afterwards. Raises `IsolationError` for an event without a scope.
        """
        return self._hand_over(events) if events else -1

    def take_epochs(self, known: KnownEpochs) -> None:
        """Name requesters by these erase epochs from now on, and publish what they end. Any thread; never waits."""
        with self._lock:
            if self._told is None or known is self._known:
                return
            self._known = known
        self._hand_over(())

    def _hand_over(self, events: Sequence[BlockEvent]) -> int:
        blocks = 0
        for event in events:
            check_event(event)
            blocks += len(event.keys) // KEY_BYTES
        limits = self._limits
        with self._lock:
            sequence = self._sequence
            self._sequence += 1
            full = (
                self._closing
                or len(self._queue) >= limits.waiting_batches
                or self._queued_blocks + blocks > limits.waiting_blocks
            )
            if full:
                self._lose(len(events))
                return sequence
            self._queue.append(_Waiting(sequence, time.time(), events, blocks))
            self._queued_blocks += blocks
            idle = len(self._queue) == 1
        if idle:
            self._wake()
        return sequence

    def stats(self) -> PublisherStats:
        """Return a snapshot of the counters."""
        with self._lock:
            return PublisherStats(**self._counts, waiting=len(self._queue), next_sequence=self._sequence)

    def figures(self) -> dict[str, float]:
        """Return the figures for a worker's report; blocks only where they are published under names."""
        stats = self.stats()
        figures: dict[str, float] = {
            "events_sent.socket": stats.batches,
            "events_lost.socket": stats.lost_batches,
            "events_connected.socket": 1,
        }
        return figures if self._told is None else figures | {"events_told_blocks.socket": len(self._told)}

    def close(self) -> None:
        """Send what waits, within a second, and stop; a second call does nothing."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self._stop_at = time.monotonic() + self._limits.close_seconds
        self._wake()
        self._thread.join()
        self._context.destroy(linger=int(self._limits.close_seconds * 1000))
        os.close(self._bell)
        os.close(self._ring)

    def __enter__(self) -> EventPublisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _lose(self, events: int) -> None:
        """Count a batch as lost; the caller holds the lock."""
        self._counts["lost_batches"] += 1
        self._counts["lost_events"] += events

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # a bell full of rings is heard anyway
            os.write(self._ring, b"\0")

    # -- the publisher's thread ---------------------------------------------------------------------------------------

    def _bind(self, kind: int, endpoint: str, remote_allowed: bool) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        # A whole replay fits the pipe to its client; only a client that does not read loses some.
        room = self._limits.replay_batches + 1 if kind == zmq.ROUTER else 0
        socket.set_hwm(max(room, self._limits.peer_messages))
        socket.setsockopt(zmq.MAXMSGSIZE, _REQUEST_BYTES_MAX)  # of what comes in
        socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        try:
            socket.bind(check_bind(endpoint, remote_allowed=remote_allowed))
        except zmq.ZMQError as error:
            raise ConfigError(f"KV events at `{endpoint}`: {error.strerror}", endpoint=endpoint) from None
        return socket

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._bell, zmq.POLLIN)
        if self._router is not None:
            poller.register(self._router, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(_POLL_MS))
            if self._bell in ready:
                os.read(self._bell, 4096)
            if self._router is not None and self._router in ready:
                self._guarded(self._serve_replay)
            while self._queue and time.monotonic() < self._stop_at:
                self._guarded(self._send_next)
            if self._closing:
                return

    def _guarded(self, act: Callable[[], None]) -> None:
        """Run a call whose failure costs one batch or one replay, never the thread."""
        try:
            act()
        except Exception as error:
            _log.warning("KV events: not sent", cause=f"{type(error).__name__}: {error}"[:200])

    def _send_next(self) -> None:
        with self._lock:
            waiting = self._queue.popleft()
            self._queued_blocks -= waiting.blocks
            known = self._known
        events = waiting.events
        if waiting.sequence != self._due:
            events = (cleared(self._revision, "resync" if self._due >= 0 else "start"), *events)
        try:
            if self._told is not None:
                events = (*self._told.take_epochs(known), *self._told.tell(events))
            payload = self._wire.payload_of(
                events,
                waiting.ts_seconds,
                self._rank,
                self._incarnation,
                tokens_published=self._tokens_published,
            )
        except Exception:
            with self._lock:
                self._lose(len(waiting.events))
            raise
        sequence = waiting.sequence.to_bytes(8, "big")
        self._pub.send_multipart((self._topic, sequence, payload))
        self._due = waiting.sequence + 1
        self._keep(sequence, payload)
        with self._lock:
            self._counts["batches"] += 1
            self._counts["events"] += len(events)

    def _keep(self, sequence: bytes, payload: bytes) -> None:
        """Remember a batch for replay, and drop the oldest beyond the limits."""
        self._buffer.append((sequence, payload))
        self._buffer_bytes += len(payload)
        limits = self._limits
        while len(self._buffer) > limits.replay_batches or self._buffer_bytes > limits.replay_bytes:
            self._buffer_bytes -= len(self._buffer.popleft()[1])

    def _serve_replay(self) -> None:
        assert self._router is not None
        client, *request = self._router.recv_multipart(zmq.NOBLOCK)
        if len(request) != 2 or request[0] or len(request[1]) != 8:
            return
        for sequence, payload in self._buffer:  # equal lengths, big-endian: bytes compare as numbers do
            if sequence >= request[1]:
                frames = self._wire.replay_frames(self._topic, sequence, payload)
                self._router.send_multipart((client, b"", *frames))
        end = self._wire.replay_frames(b"", END, b"")
        self._router.send_multipart((client, b"", *end))
        with self._lock:
            self._counts["replays"] += 1


def wire_of(form: Form, backend: str, *, tokens_published: bool) -> EventWire:
    """Return the writer for a format. `backend`: this cache's name in Mooncake's."""
    if form == "vllm":
        return vllm_wire
    if form == "sglang":
        return sglang_wire
    return DynamoWire(tokens_published=tokens_published) if form == "dynamo" else MooncakeWire(backend)


class OpenedPublisher(Protocol):
    """The publisher for the settings: one, or several combined."""

    def publish(self, events: Sequence[BlockEvent], /) -> int:
        """Hand over events without waiting."""

    def take_epochs(self, known: KnownEpochs, /) -> None:
        """Name by these epochs from now on, and publish at once what they end."""

    def figures(self) -> dict[str, float]:
        """Return the figures for a worker's report."""

    def close(self) -> None:
        """Send what waits, and stop."""


class BothPublishers:
    """Two publishers that both get every event."""

    def __init__(self, first: OpenedPublisher, second: OpenedPublisher) -> None:
        self._both = first, second

    def publish(self, events: Sequence[BlockEvent]) -> int:
        """Hand over events without waiting."""
        first, second = self._both
        second.publish(events)
        return first.publish(events)

    def take_epochs(self, known: KnownEpochs) -> None:
        """Name by these epochs from now on, and publish at once what they end."""
        for one in self._both:
            one.take_epochs(known)

    def figures(self) -> dict[str, float]:
        """Return both publishers' figures for a worker's report."""
        first, second = self._both
        return first.figures() | second.figures()

    def close(self) -> None:
        """Send what waits, and stop."""
        for one in self._both:
            one.close()


def open_publisher(
    settings: Settings, *, revision: int, incarnation: str = "", rank: int = 0
) -> OpenedPublisher | None:
    """Return the publisher for the settings; None where `kv_events_endpoint` and `nats` are empty."""
    if not settings.publishes_kv_events:
        return None
    namespaces: CurrentNamespaces | None = None
    are_published = settings.kv_events_tokens == "published"
    if are_published or settings.nats or settings.kv_events_format in _FOR_ROUTERS:
        with open_scope_key(settings.scope_token_key_path) as secret:
            names = RouterNamespaces(secret)
        namespaces = CurrentNamespaces(names, SystemClock(), days=settings.namespace_days)
    streamed: OpenedPublisher | None = None
    if settings.nats:
        from kvcustody.integrations.jetstream.publisher import open_stream

        assert namespaces is not None
        wire = wire_of(settings.kv_events_format, settings.worker_name, tokens_published=are_published)

        def encode(events: Sequence[BlockEvent], at: float) -> bytes:
            return wire.payload_of(events, at, rank, incarnation, tokens_published=are_published)

        streamed = open_stream(settings, namespaces, encode, revision=revision, rank=rank)
        if not settings.kv_events_endpoint:
            return streamed
    try:
        own = EventPublisher(
            settings.kv_events_endpoint,
            settings.kv_events_replay_endpoint or None,
            form=settings.kv_events_format,
            namespaces=namespaces if are_published or settings.kv_events_format in _FOR_ROUTERS else None,
            backend=settings.worker_name,
            tokens_published=are_published,
            remote_allowed=settings.kv_events_remote,
            revision=revision,
            incarnation=incarnation,
            rank=rank,
        )
    except BaseException:
        if streamed is not None:
            streamed.close()
        raise
    return own if streamed is None else BothPublishers(own, streamed)
