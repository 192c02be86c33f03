"""Follows workers' KV events from the fleet's NATS server, for an index of one tenant's blocks or of all tenants'.

    reader = StreamReader(place, index, tenant=EVERY)
    await reader.run()                                    # until cancelled
    reader.streams.is_usable(worker, tenant)              # before a location is used

A reader's name is that of its credentials. Where NATS was away, or its memory lost, what was missed shows as holes, and
snapshots close them (`locations`).
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from kvcustody.integrations.jetstream.connection import NatsPlace, open_connection
from kvcustody.integrations.jetstream.publisher import LIFE, NUMBER, PART, PARTS, QUESTION, TENANT
from kvcustody.integrations.jetstream.subjects import (
    EVENTS,
    EVERY,
    READERS_API,
    STREAM,
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
    from nats.js.client import JetStreamContext

_AT_ONCE: Final = 500
_FETCH_SECONDS, _TICK_SECONDS, _PAUSE_SECONDS = 1.0, 0.5, 0.5
_FORGOTTEN_SECONDS: Final = 60.0  # after which the server forgets a reader that is gone
_log = get_logger(__name__)


class StreamReader:
    """A reader; used on one event loop."""

    def __init__(self, place: NatsPlace, index: BlockIndex, *, tenant: str = EVERY) -> None:
        """Prepare the reader. `tenant`: its tag, or every tenant's. Raises `ConfigError` as `NatsPlace.check` does."""
        self._place, self._tenant = place, tenant
        self.name = name_in_subject(place.check().name)
        self.streams = WorkerStreams(index)

    async def run(self) -> None:
        """Follow the stream until it is cancelled."""
        while True:
            client: Client | None = None
            try:
                client = await open_connection(self._place)
                which = "*" if self._tenant == EVERY else self._tenant
                await client.subscribe(beat_subject(which, "*"), cb=self._beat)
                await client.subscribe(snapshot_subject(self.name, "*"), cb=self._snapshot)
                await asyncio.gather(self._follow(client), self._ask(client))
            except Exception as error:
                _log.info("KV events are not followed", problem=f"{type(error).__name__}: {error}"[:200])
            finally:
                if client is not None:
                    with suppress(Exception):
                        await client.close()
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _follow(self, client: Client) -> None:
        from nats.js import errors

        events = EVENTS if self._tenant == EVERY else f"kv.{self._tenant}.>"
        stream = client.jetstream(prefix=READERS_API)
        while True:
            pulled = None
            try:
                await self._make_consumer(stream, events)
                pulled = await stream.pull_subscribe_bind(consumer=self.name, stream=STREAM)
                while True:
                    with suppress(TimeoutError):
                        for one in await pulled.fetch(_AT_ONCE, timeout=_FETCH_SECONDS):
                            self.streams.take_message(one.subject, one.headers, one.data)
                        continue
                    await stream.consumer_info(STREAM, self.name)  # silent: is there one still?
            except (errors.Error, TimeoutError) as error:
                _log.debug("KV events: no consumer", problem=type(error).__name__)
                if client.is_closed:
                    raise
                await asyncio.sleep(_PAUSE_SECONDS)
            finally:
                if pulled is not None:
                    with suppress(Exception):
                        await pulled.unsubscribe()

    async def _make_consumer(self, stream: JetStreamContext, events: str) -> None:
        from nats.js import api, errors

        with suppress(errors.NotFoundError):
            await stream.consumer_info(STREAM, self.name)
            return
        wanted = api.ConsumerConfig(
            name=self.name,
            filter_subject=events,
            deliver_policy=api.DeliverPolicy.NEW,  # what was before is in snapshots
            ack_policy=api.AckPolicy.NONE,
            inactive_threshold=_FORGOTTEN_SECONDS,
            mem_storage=True,
        )
        await stream.add_consumer(STREAM, wanted)

    async def _ask(self, client: Client) -> None:
        while True:
            for worker, tenant, question in self.streams.due():
                said = f"{question} {tenant}" if self._tenant == EVERY else question
                with suppress(Exception):  # it is asked again
                    await client.publish(ask_subject(self._tenant, self.name, worker), said.encode())
            await asyncio.sleep(_TICK_SECONDS)
            if client.is_closed:
                raise ConnectionError("the connection ended")

    async def _beat(self, message: Msg) -> None:
        self.streams.beat(message.subject, message.headers)

    async def _snapshot(self, message: Msg) -> None:
        self.streams.snapshot(message.subject, message.headers, message.data)


# The workers whose locations a reader may use: gaps in their streams, and the snapshots that close the gaps.
#
#     streams = WorkerStreams(index)
#     streams.take_message(subject, headers, payload)      # from the stream, in the order of its numbers
#     streams.beat(subject, headers)
#     streams.snapshot(subject, headers, payload)
#     for worker, tenant, question in streams.due(): …   # ask the worker
#     streams.is_usable(worker, tenant)
#
# Rules of this section:
# 1. A worker's locations for a tenant are usable while every number of its life has arrived, or a snapshot replaces
#    it. A gap ends that at once. They are usable again after a complete snapshot and all later messages.
# 2. A repeated message, or one from an earlier life, changes nothing. A later life discards the earlier one. The
#    lives of one process are numbered. A new process is later than all processes heard before it, and a replaced
#    process never returns. No clock orders them.
# 3. A beat whose number is not reached within `GRACE_SECONDS` is a gap. A worker without a beat for `SILENT_SECONDS`
#    is not usable.
# 4. Memory is bounded, per worker and tenant and in total: workers with tenants, and the number and bytes of messages
#    and parts kept for a snapshot. What exceeds a bound is dropped, and another snapshot is requested.
# 5. All locations are hints: their user asks an engine, which decides by its own blocks.
#
# There are no sockets here; `now` is monotonic seconds.

GRACE_SECONDS: Final = 2.0
SILENT_SECONDS: Final = 10.0
ASKED_AGAIN_SECONDS: Final = 3.0
STREAMS_MAX: Final = 1 << 16
KEPT_MAX: Final = 10_000
PARTS_MAX: Final = 4096
KEPT_BYTES_MAX: Final = 128 << 20  # of one worker's tenant; a snapshot of as many blocks as a publisher keeps has less
ALL_KEPT_BYTES_MAX: Final = 512 << 20
FOLLOWED_MAX: Final = 8  # processes of one worker's tenant that others have followed


class BlockIndex(Protocol):
    """A reader's index of workers' blocks; `payload` is a batch in the worker's own form."""

    def apply(self, worker: str, tenant: str, payload: bytes) -> None:
        """Apply one message's events, in order."""

    def forget(self, worker: str, tenant: str) -> None:
        """Forget everything that a worker published for a tenant."""


class PublisherLife(NamedTuple):
    """One life of a publisher: its process, and the life's number."""

    incarnation: str
    number: int


class SnapshotQuestion(NamedTuple):
    """A request for a snapshot."""

    worker: str
    tenant: str
    text: str


@dataclass(slots=True)
class _Stream:
    """One worker's messages for one tenant."""

    life: PublisherLife | None = None
    followed: deque[str] = field(default_factory=lambda: deque(maxlen=FOLLOWED_MAX))
    expected: int = 0
    is_whole: bool = False
    heard: float = 0.0
    promised: int = 0  # by the last beat
    promised_at: float = 0.0
    question: str = ""
    asked: float = float("-inf")
    parts: dict[int, bytes] = field(default_factory=dict)
    parts_number: int = 0
    kept: dict[int, bytes] = field(default_factory=dict)
    kept_bytes: int = 0  # with those of parts

    def is_earlier(self, life: PublisherLife) -> bool:
        """Return whether a life is earlier than the followed one (rule 2)."""
        if self.life is None or life.incarnation != self.life.incarnation:
            return life.incarnation in self.followed
        return life.number < self.life.number


class WorkerStreams:
    """The streams of all workers, with their gaps. Used on one thread."""

    def __init__(self, index: BlockIndex, now: Callable[[], float] = time.monotonic) -> None:
        self._index, self._now = index, now
        self._streams: OrderedDict[tuple[str, str], _Stream] = OrderedDict()
        self._kept_bytes = 0
        self.counts = dict.fromkeys(("messages", "repeated", "malformed", "gaps", "lives", "snapshots", "let_go"), 0)

    def is_usable(self, worker: str, tenant: str) -> bool:
        """Return whether the worker's locations may be used (rules 1 and 3)."""
        stream = self._streams.get((worker, tenant))
        return (
            stream is not None
            and stream.is_whole
            and not self._is_behind(stream)
            and self._now() - stream.heard <= SILENT_SECONDS
        )

    def take_message(self, subject: str, headers: Mapping[str, str] | None, payload: bytes) -> None:
        """Take a message from the stream."""
        where, said = EventSubject.parse(subject), _said(headers)
        if where is None or said is None:
            self.counts["malformed"] += 1
            return
        self.counts["messages"] += 1
        life, number = said
        key = (where.worker, where.tenant)
        stream = self._stream(key)
        if stream.is_earlier(life) or (life == stream.life and number < stream.expected):
            self.counts["repeated"] += 1
            return
        stream.heard = self._now()
        if life != stream.life:
            self._begin(key, stream, life, is_whole=number == 0)
        if number == stream.expected and stream.is_whole:
            stream.expected += 1
            self._apply(key, stream, payload)
            return
        if number > stream.expected and stream.is_whole:
            self._lose(stream)
        if len(stream.kept) < KEPT_MAX:
            self._keep(stream, stream.kept, number, payload)
        else:  # it would be a hole after the snapshot, too
            self._ask_anew(stream)

    def beat(self, subject: str, headers: Mapping[str, str] | None) -> None:
        """Take a worker's sign of life, with its next number."""
        parts, said = subject.split("."), _said(headers)
        if len(parts) != 3 or said is None:
            self.counts["malformed"] += 1
            return
        life, number = said
        key = (parts[2], parts[1])
        stream = self._stream(key)
        if stream.is_earlier(life):
            self.counts["repeated"] += 1
            return
        if life != stream.life:
            self._begin(key, stream, life, is_whole=number == 0)
        stream.heard = self._now()
        if number > stream.promised:
            if stream.expected >= stream.promised:
                stream.promised_at = stream.heard
            stream.promised = number

    def snapshot(self, subject: str, headers: Mapping[str, str] | None, payload: bytes) -> None:
        """Take a part of a snapshot."""
        parts, life_and_sequence = subject.split("."), _said(headers)
        given = headers or {}
        tenant, part, of = given.get(TENANT, ""), _number(given.get(PART)), _number(given.get(PARTS))
        if len(parts) != 3 or life_and_sequence is None or part is None or of is None or not part < of <= PARTS_MAX:
            self.counts["malformed"] += 1
            return
        key = (parts[2], tenant)
        stream = self._streams.get(key)
        if stream is None or not stream.question or given.get(QUESTION) != stream.question:
            self.counts["repeated"] += 1
            return
        life, number = life_and_sequence
        if stream.is_earlier(life) or (life == stream.life and number < stream.expected):
            self.counts["repeated"] += 1
            return
        if life != stream.life:
            self._begin(key, stream, life, is_whole=False)
        if stream.parts_number != number:
            self._drop(stream, stream.parts)
            stream.parts_number = number
        self._keep(stream, stream.parts, part, payload)
        if len(stream.parts) == of:
            self._close_gap(key, stream, number)

    def due(self) -> list[SnapshotQuestion]:
        """Return the snapshots to request now; each is requested again until it arrives."""
        now, questions = self._now(), list[SnapshotQuestion]()
        for (worker, tenant), stream in self._streams.items():
            if stream.is_whole and self._is_behind(stream):
                self._lose(stream)
            if stream.is_whole or now - stream.asked < ASKED_AGAIN_SECONDS:
                continue
            if stream.heard and now - stream.heard > SILENT_SECONDS:
                continue
            self._ask_anew(stream)
            stream.question, stream.asked = secrets.token_hex(8), now
            questions.append(SnapshotQuestion(worker, tenant, stream.question))
        return questions

    def _stream(self, key: tuple[str, str]) -> _Stream:
        stream = self._streams.get(key)
        if stream is None:
            stream = self._streams[key] = _Stream()
            while len(self._streams) > STREAMS_MAX:
                oldest, gone = self._streams.popitem(last=False)
                self._kept_bytes -= gone.kept_bytes
                self._index.forget(*oldest)
        return stream

    def _keep(self, stream: _Stream, among: dict[int, bytes], place: int, payload: bytes) -> None:
        """Keep a message that follows a gap (rule 4)."""
        more = len(payload) - len(among.get(place, b""))
        if stream.kept_bytes + more > KEPT_BYTES_MAX or self._kept_bytes + more > ALL_KEPT_BYTES_MAX:
            self.counts["let_go"] += 1
            self._drop(stream, stream.parts)
            self._drop(stream, stream.kept)
            stream.question = ""
            return
        among[place] = payload
        stream.kept_bytes += more
        self._kept_bytes += more

    def _drop(self, stream: _Stream, among: dict[int, bytes]) -> None:
        gone = sum(map(len, among.values()))
        stream.kept_bytes -= gone
        self._kept_bytes -= gone
        among.clear()

    def _begin(self, key: tuple[str, str], stream: _Stream, life: PublisherLife, *, is_whole: bool) -> None:
        """Begin another life, which voids all earlier events."""
        if stream.life is not None:
            self.counts["lives"] += 1
            self._index.forget(*key)
            if stream.life.incarnation != life.incarnation:
                stream.followed.append(stream.life.incarnation)
        stream.life, stream.expected, stream.is_whole, stream.heard = life, 0, is_whole, self._now()
        stream.promised = 0
        self._drop(stream, stream.parts)
        self._drop(stream, stream.kept)

    def _lose(self, stream: _Stream) -> None:
        self.counts["gaps"] += 1
        stream.is_whole = False
        stream.asked = float("-inf")

    def _ask_anew(self, stream: _Stream) -> None:
        stream.question = ""
        self._drop(stream, stream.parts)
        if len(stream.kept) >= KEPT_MAX:
            self._drop(stream, stream.kept)

    def _close_gap(self, key: tuple[str, str], stream: _Stream, number: int) -> None:
        """Apply a complete snapshot, which replaces every number below `number`; kept messages follow it."""
        self._index.forget(*key)
        parts, kept = dict(stream.parts), dict(stream.kept)
        stream.question = ""
        self._drop(stream, stream.parts)
        self._drop(stream, stream.kept)
        stream.expected, stream.is_whole = number, True
        for part in sorted(parts):
            if not self._apply(key, stream, parts[part]):
                return
        self.counts["snapshots"] += 1
        while stream.expected in kept:
            stream.expected += 1
            if not self._apply(key, stream, kept[stream.expected - 1]):
                return
        later = {at: payload for at, payload in kept.items() if at > stream.expected}
        if later:
            for at, payload in later.items():
                self._keep(stream, stream.kept, at, payload)
            self._lose(stream)
        stream.promised_at = self._now()

    def _apply(self, key: tuple[str, str], stream: _Stream, payload: bytes) -> bool:
        """Apply a worker's events; unreadable ones make its locations unusable."""
        try:
            self._index.apply(*key, payload)
        except Exception:  # a worker's own words: another's are not lost for them
            self.counts["malformed"] += 1
            self._index.forget(*key)
            self._lose(stream)
            return False
        return True

    def _is_behind(self, stream: _Stream) -> bool:
        return stream.expected < stream.promised and self._now() - stream.promised_at > GRACE_SECONDS


def _said(headers: Mapping[str, str] | None) -> tuple[PublisherLife, int] | None:
    """Return a message's life and number; None where it has none."""
    if not headers:
        return None
    incarnation, _, of_process = headers.get(LIFE, "").partition(".")
    life, number = _number(of_process), _number(headers.get(NUMBER))
    if number is None or life is None or not 16 <= len(incarnation) <= 64:
        return None
    return PublisherLife(incarnation, life), number


def _number(text: str | None) -> int | None:
    if text is None or len(text) > 18 or not (text.isascii() and text.isdigit()):
        return None
    return int(text)
