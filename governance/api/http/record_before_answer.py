"""An event that has to be durable before a request goes on, without a thread that waits for it.

R1 The writer tells the loop of the request when the event is durable, or cannot be.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from kvcustody.audit.events import Event
from kvcustody.governance.service.service import Service


async def record_before_answer(service: Service, event: Event) -> None:
    """Return once a class A event is durable; raises `unavailable` where it is not within the ledger's deadline."""
    loop, decided = asyncio.get_running_loop(), asyncio.Event()

    def tell() -> None:  # on the writer's thread
        with suppress(RuntimeError):  # the loop has ended, and the request with it
            loop.call_soon_threadsafe(decided.set)

    awaited = service.writer.begin_durable(event, tell)
    try:
        async with asyncio.timeout(service.writer.durable_seconds):
            await decided.wait()
    except TimeoutError:
        pass  # it may have been committed in the last moment
    service.end_record(awaited)
