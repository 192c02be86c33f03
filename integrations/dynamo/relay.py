"""A relay between an engine's events and Dynamo's indexer, which forwards only what Dynamo stores in a namespace.

    python -m kvcustody.integrations.dynamo.relay --engine tcp://127.0.0.1:5557 --publish tcp://127.0.0.1:5560

1. A store that Dynamo would index for everybody is refused and counted: an array, a salt in `extra_keys` only, no salt.
   Removals and clears always pass: they end what was told.
2. Its batches have numbers of their own. Where the engine's have a hole, or begin again, a clear goes first: what the
   indexer has may be gone.
3. It does not know whose a salt is. In front of an engine of ours nothing is refused, and it is not needed.
"""

from __future__ import annotations

import argparse
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import NamedTuple

import msgspec
import zmq

from kvcustody.errors import ConfigError
from kvcustody.integrations.events.dynamo_wire import DynamoCleared, screen
from kvcustody.integrations.events.endpoint import check_bind
from kvcustody.integrations.events.sequence_gaps import Arrival, Delivered
from kvcustody.integrations.events.subscriber import Subscriber
from kvcustody.logger import get_logger

_STEP_MS = 200
_PEER_MESSAGES = 20_000
_log = get_logger(__name__)


class RelayStats(NamedTuple):
    """Counters of a relay."""

    passed: int
    refused: int
    clears: int


class ScopedRelay:
    """One engine's filtered stream. Not thread-safe; close it at the end."""

    def __init__(
        self,
        engine: str,
        publish: str,
        *,
        replay: str | None = None,
        topic: str = "",
        remote_allowed: bool = False,
    ) -> None:
        """Raises `ConfigError` where an endpoint cannot be used."""
        self._topic = topic.encode()
        self._sequence = self._passed = self._refused = self._clears = 0
        self._context = zmq.Context()
        self._pub: zmq.Socket[bytes] = self._context.socket(zmq.PUB)
        self._pub.set_hwm(_PEER_MESSAGES)
        self._pub.setsockopt(zmq.LINGER, 0)
        try:
            self._pub.bind(check_bind(publish, remote_allowed=remote_allowed))
            self.endpoint = self._pub.getsockopt_string(zmq.LAST_ENDPOINT)
            self._subscriber = Subscriber(engine, replay, topic=topic)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"`{publish}` cannot be bound: {error.strerror}", endpoint=publish) from None
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def step(self, timeout_ms: int) -> None:
        """Forward what arrived within `timeout_ms`."""
        for arrival in self._subscriber.poll(timeout_ms):
            self._arrive(arrival)

    def stats(self) -> RelayStats:
        """Return a snapshot of the counters."""
        return RelayStats(self._passed, self._refused, self._clears)

    def close(self) -> None:
        """Stop the relay; a second call does nothing."""
        if not self._context.closed:
            self._subscriber.close()
            self._context.destroy(linger=0)

    def __enter__(self) -> ScopedRelay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _arrive(self, arrival: Arrival) -> None:
        if not isinstance(arrival, Delivered):
            self._clears += 1
            self._send([DynamoCleared()])
            return
        screened = screen(arrival.payload)
        if screened.refused and not self._refused:
            _log.warning("events that Dynamo would index for every tenant are refused", events=screened.refused)
        self._refused += screened.refused
        if screened.events:
            self._passed += len(screened.events)
            self._send(screened.events)

    def _send(self, events: Sequence[object]) -> None:
        payload = msgspec.msgpack.encode((time.time(), events, 0))
        self._pub.send_multipart((self._topic, self._sequence.to_bytes(8, "big"), payload))
        self._sequence += 1


def main(arguments: Sequence[str] | None = None) -> None:
    """Relay until a signal ends it."""
    parser = argparse.ArgumentParser(prog="kvcustody.integrations.dynamo.relay", description=__doc__)
    parser.add_argument("--engine", required=True, help="where the engine publishes")
    parser.add_argument("--replay", help="where the engine replays missed batches")
    parser.add_argument("--publish", required=True, help="where the indexer subscribes")
    parser.add_argument("--topic", default="", help="the engine's topic")
    parser.add_argument("--remote", action="store_true", help="let other machines subscribe")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        opened = ScopedRelay(
            given.engine,
            given.publish,
            replay=given.replay,
            topic=given.topic,
            remote_allowed=given.remote,
        )
    except ConfigError as error:
        parser.exit(2, f"error: {error}\n")
    with suppress(KeyboardInterrupt), opened as relay:
        while True:
            relay.step(_STEP_MS)


if __name__ == "__main__":
    main()
