"""Long polling: an answer is held open until there is news, without a thread.

1. Whoever was disabled, or whose key was revoked, while a question was held open is told nothing new.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from anyio.to_thread import run_sync

from kvcustody.governance.api.http.places import no_place
from kvcustody.governance.service.access.caller import Caller
from kvcustody.governance.service.held.held_questions import LOOK_SECONDS
from kvcustody.governance.service.operations.parameters import NUMBER, Query

if TYPE_CHECKING:
    from kvcustody.governance.service.service import Service

Wait = Annotated[int, Query(ge=0, le=30, description="Seconds to wait for news."), NUMBER]


async def long_poll(
    service: Service,
    caller: Caller,
    wait_seconds: int,
    ask: Callable[[], dict[str, Any]],
    news: Callable[[dict[str, Any]], bool],
    *,
    looks: bool = False,
    kept: tuple[str, Callable[[dict[str, Any]], bool]] | None = None,
) -> dict[str, Any]:
    """Return what `ask` gives as soon as it is news, or when the wait or the service ends.

    Whatever this process changes is seen at once; what another process does, within two seconds (`HeldQuestions`).
    `looks`: what it waits for is in no `OrdersSeen`, so it is asked anew that often.
    `kept`: the question's name, and which answers may be given again to the same question while nothing changes.
    """
    ends = time.monotonic() + wait_seconds
    check: Callable[[], None] | None = None
    held_key = None if kept is None else (caller.name, kept[0])
    if held_key is not None and wait_seconds:
        seen, known = service.held.version, service.held.known(held_key)
        if known is not None and not news(known):
            with no_place():
                if not await service.held.wait(seen, wait_seconds):
                    return known
    while True:
        seen, asked = service.held.version, time.monotonic()
        answer = await run_sync(_after(check, ask), limiter=service.held.threads)
        check = partial(service.authenticator.check_still_valid, caller)
        if held_key is not None and kept is not None and kept[1](answer):
            service.held.keep(held_key, seen, answer)
        if news(answer) or asked >= ends or service.stopping.is_set():
            return answer
        left = max(0.0, ends - time.monotonic())
        with no_place():
            may_be_news = await service.held.wait(seen, min(left, LOOK_SECONDS) if looks else left)
        if not (may_be_news or looks):
            return answer


@asynccontextmanager
async def told_within(seconds: float) -> AsyncIterator[Callable[[], None]]:
    """Give a callback for another thread, and wait at the end of the block until it was called.

    Past the seconds it goes on all the same: whoever began asks what came of it.
    """
    loop, notified = asyncio.get_running_loop(), asyncio.Event()

    def tell() -> None:
        with suppress(RuntimeError):  # the loop has ended, and the request with it
            loop.call_soon_threadsafe(notified.set)

    yield tell
    with suppress(TimeoutError):  # it may be through in the last moment
        async with asyncio.timeout(seconds):
            await notified.wait()


def _after(check: Callable[[], None] | None, ask: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    """`ask`, and then the check, in one call to a thread (rule 1)."""

    def both() -> dict[str, Any]:
        answer = ask()
        if check is not None:
            check()
        return answer

    return ask if check is None else both
