"""Lets a process that publishes nothing to NATS, such as a door, receive hints about epochs.

A hint makes the feeds of this process ask the control plane at once (`control_plane.epoch_feed`). Without NATS they ask
as they do anyway.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack, suppress
from typing import Any, Final

from kvcustody.governance.control_plane.epoch_feed import ask_at_once
from kvcustody.guarding_thread import GuardingThread
from kvcustody.integrations.jetstream.connection import NatsPlace, open_connection
from kvcustody.integrations.jetstream.subjects import HINTS

_PAUSE_SECONDS: Final = 1.0
_END_SECONDS: Final = 2.0


def hear_hints(place: NatsPlace, stack: ExitStack) -> None:
    """Receive hints until `stack` ends. Raises `ConfigError` as `NatsPlace.check` does."""
    place.check()
    loop, ending = asyncio.new_event_loop(), asyncio.Event()
    thread = GuardingThread(_run, name="kvcustody-nats-hints", args=(loop, place, ending))

    def end() -> None:
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(ending.set)
        thread.end(_END_SECONDS)

    thread.start()
    stack.callback(end)


def _run(loop: asyncio.AbstractEventLoop, place: NatsPlace, ending: asyncio.Event) -> None:
    loop.run_until_complete(_hear(place, ending))


async def _hear(place: NatsPlace, ending: asyncio.Event) -> None:
    async def hinted(_message: Any) -> None:
        ask_at_once()

    client = None
    while not ending.is_set():
        if client is None or client.is_closed:
            with suppress(Exception):  # NATS is away: epochs come as without it
                connected = await open_connection(place)
                await connected.subscribe(HINTS, cb=hinted)
                client = connected
        with suppress(TimeoutError):
            await asyncio.wait_for(ending.wait(), _PAUSE_SECONDS)
    if client is not None:
        with suppress(Exception):
            await client.close()
