"""Reads an engine's event stream: live batches and replays of missed ones, bounded whatever the other side does.

1. Every wait is bounded. A peer that is away, silent or hostile costs a counter, never the observer.
2. A message above `message_bytes` breaks its connection, for good as far as ZeroMQ is concerned: a socket that stays
   disconnected is made anew. Frames that are none of the protocol's are counted.
3. A silent stream is asked from time to time what was missed, and whether it is still the same engine.
"""

from __future__ import annotations

import time
from contextlib import suppress
from types import TracebackType
from typing import NamedTuple

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvcustody.errors import ConfigError
from kvcustody.integrations.events.endpoint import check_endpoint
from kvcustody.integrations.events.publisher import END
from kvcustody.integrations.events.sequence_gaps import Arrival, Continuity, ReplayedBatches

_AT_ONCE = 1000
_SEQUENCE_BYTES = 8


class Reading(NamedTuple):
    """The sizes and timeouts of a subscriber."""

    message_bytes: int = 16 << 20
    waiting_messages: int = 2000
    replay_messages: int = 20_000
    replay_seconds: float = 2.0
    replay_bytes: int = 256 << 20
    check_seconds: float = 5.0
    renew_seconds: float = 5.0


class SubscriberStats(NamedTuple):
    """Counters of a subscriber."""

    connected: bool
    disconnects: int
    messages: int
    malformed: int
    duplicates: int
    replays: int
    failed_replays: int
    next_sequence: int


class Subscriber:
    """One engine's stream. Not thread-safe; close it at the end."""

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        reading: Reading | None = None,
    ) -> None:
        self._reading = reading or Reading()
        self._endpoint = check_endpoint(endpoint)
        self._replay_endpoint = replay_endpoint and check_endpoint(replay_endpoint)
        self._topic = topic.encode()
        self._messages = self._malformed = self._replays = self._disconnects = 0
        self._connected = False
        self._context = zmq.Context()
        self._dealer: zmq.Socket[bytes] | None = None
        self._continuity = Continuity(self._ask if replay_endpoint else None)
        self._check_at = time.monotonic()  # at once: what was published before we came
        try:
            self._subscribe()
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def poll(self, timeout_ms: int) -> list[Arrival]:
        """Return what arrived, after at most about `timeout_ms` (plus a replay where one is due)."""
        self._watch()
        if not self._connected and time.monotonic() >= self._renew_at:
            self._unsubscribe()
            self._subscribe()
        if time.monotonic() >= self._check_at and self._replay_endpoint:
            self._postpone_check()
            found = self._continuity.check()
            if found:
                return found
        if not self._sub.poll(timeout_ms):
            return []
        self._watch()
        out: list[Arrival] = []
        for _ in range(_AT_ONCE):
            try:
                frames = self._sub.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            out += self._message(frames)
        self._postpone_check()
        return out

    def stats(self) -> SubscriberStats:
        """Return a snapshot of the counters."""
        return SubscriberStats(
            self._connected,
            self._disconnects,
            self._messages,
            self._malformed,
            self._continuity.duplicates,
            self._replays,
            self._continuity.failed_replays,
            self._continuity.expected,
        )

    def close(self) -> None:
        """Disconnect; a second call does nothing."""
        if not self._context.closed:
            self._unsubscribe()
            self._context.destroy(linger=0)

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _subscribe(self) -> None:
        self._sub = self._socket(zmq.SUB, self._reading.waiting_messages)
        self._sub.setsockopt(zmq.SUBSCRIBE, self._topic)
        events = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
        self._monitor = self._sub.get_monitor_socket(events)
        self._connect(self._sub, self._endpoint)
        self._renew_at = time.monotonic() + self._reading.renew_seconds

    def _unsubscribe(self) -> None:
        self._sub.disable_monitor()
        self._sub.close(linger=0)

    def _message(self, frames: list[bytes]) -> list[Arrival]:
        self._messages += 1
        if len(frames) != 3 or len(frames[1]) != _SEQUENCE_BYTES or frames[1] == END:
            self._malformed += 1
            return []
        return self._continuity.live(int.from_bytes(frames[1], "big"), frames[2])

    def _watch(self) -> None:
        """Note connections made and lost since the last look."""
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
            self._connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if not self._connected:
                self._disconnects += 1
                self._renew_at = time.monotonic() + self._reading.renew_seconds
                self._continuity.doubt()

    def _postpone_check(self) -> None:
        self._check_at = time.monotonic() + self._reading.check_seconds

    def _ask(self, first: int) -> ReplayedBatches | None:
        """Return every batch that the publisher still has from a number on; None where it did not answer in time."""
        assert self._replay_endpoint is not None
        if self._dealer is None:
            self._dealer = self._socket(zmq.DEALER, self._reading.replay_messages)
            self._connect(self._dealer, self._replay_endpoint)
        self._replays += 1
        until = time.monotonic() + self._reading.replay_seconds
        batches: list[tuple[int, bytes]] = []
        size = 0
        with suppress(zmq.Again):
            self._dealer.send_multipart([b"", first.to_bytes(_SEQUENCE_BYTES, "big")], zmq.NOBLOCK)
            while self._dealer.poll(max(0, int((until - time.monotonic()) * 1000))):
                frames = self._dealer.recv_multipart(zmq.NOBLOCK)
                # (empty, topic, sequence, payload), or without the topic: SGLang, and vLLM before it had one
                if len(frames) not in (3, 4) or frames[0] or len(frames[-2]) != _SEQUENCE_BYTES:
                    self._malformed += 1
                elif frames[-2] == END:
                    return ReplayedBatches(_in_order(batches, first))
                else:
                    size += len(frames[-1])
                    batches.append((int.from_bytes(frames[-2], "big"), frames[-1]))
                if size > self._reading.replay_bytes or time.monotonic() > until:
                    break
        # No end marker in time: what came is kept, and a late answer must not be taken for the next one.
        self._dealer.close(linger=0)
        self._dealer = None
        return ReplayedBatches(_in_order(batches, first)) if batches else None

    def _socket(self, kind: int, waiting_messages: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.set_hwm(waiting_messages)
        socket.setsockopt(zmq.MAXMSGSIZE, self._reading.message_bytes)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        return socket

    @staticmethod
    def _connect(socket: zmq.Socket[bytes], endpoint: str) -> None:
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(f"`{endpoint}` cannot be reached: {error.strerror}", endpoint=endpoint) from None


def _in_order(batches: list[tuple[int, bytes]], first: int) -> list[tuple[int, bytes]]:
    """Return the batches by number, each once; a publisher answers in order, and one that does not gains nothing."""
    return sorted({number: (number, payload) for number, payload in batches if number >= first}.values())
