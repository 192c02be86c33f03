"""Sockets and events that the tests share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import zmq

from kvcustody.integrations.events.block_event import BlockEvent, EventScope, removed, stored

ACME = EventScope("acme", "tenant", "internal", 3, 5)
BETA = EventScope("beta", "subject", "confidential", 4, 5)
TOKEN_CANARY = 1_234_567_891  # as msgpack: 5 bytes that nothing else makes
SALT_CANARY = "pepper-of-acme"


def key(number: int) -> bytes:
    return number.to_bytes(4, "big") * 8


def keys(first: int, count: int) -> bytes:
    return b"".join(key(number) for number in range(first, first + count))


def some_stored(first: int = 0, count: int = 2, scope: EventScope = ACME, **more: Any) -> BlockEvent:
    tokens = [TOKEN_CANARY] * (4 * count)
    fields = {"residency": 7, "block_tokens": 4, "tokens": tokens, "salt": SALT_CANARY, **more}
    return stored(scope, keys(first, count), **fields)


def some_removed(first: int = 0, count: int = 2, scope: EventScope = ACME) -> BlockEvent:
    return removed(scope, keys(first, count), cause="expired", residency=7)


@contextmanager
def sockets(*kinds: int) -> Iterator[list[zmq.Socket[bytes]]]:
    context = zmq.Context()
    try:
        yield [context.socket(kind) for kind in kinds]
    finally:
        context.destroy(linger=0)


def receive(socket: zmq.Socket[bytes], timeout_ms: int = 60_000) -> list[bytes]:
    assert socket.poll(timeout_ms), "nothing arrived"
    return socket.recv_multipart()


def replay(socket: zmq.Socket[bytes], first: int) -> list[list[bytes]]:
    """Everything a ROUTER has from `first` on, without the end marker."""
    socket.send_multipart([b"", first.to_bytes(8, "big")])
    got: list[list[bytes]] = []
    while (frames := receive(socket)[1:])[-2] != b"\xff" * 8:
        got.append(frames)
    return got
