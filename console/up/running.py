"""Shared parts of commands that run a control plane on this machine until a signal ends it."""

from __future__ import annotations

import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvcustody.console.command import say
from kvcustody.errors import ConfigError

if TYPE_CHECKING:
    from kvcustody.governance.service.service import Service

READY_SECONDS = 120.0


class Progress:
    """Prints what is being started, one line each on stderr."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def __call__(self, what: str) -> None:
        """Print a line with the seconds since the start."""
        say(f"{time.monotonic() - self._began:6.1f} s  {what}", file=sys.stderr, flush=True)


@contextmanager
def served(service: Service, stop: threading.Event) -> Iterator[None]:
    """Yield the service while it answers on a thread; the caller handles signals."""
    from kvcustody.console.web.app import Console
    from kvcustody.governance.api.app import create_app
    from kvcustody.governance.api.http.server import serve

    ready, problems = threading.Event(), list[Exception]()

    def run() -> None:
        try:
            serve(service, app=create_app(service, pages=Console(service)), ready=ready.set)
        except Exception as error:
            problems.append(error)
            ready.set()

    thread = threading.Thread(target=run, name="kvcustody-service", daemon=True)
    thread.start()
    try:
        wait_for(ready, stop, "the service")
        if problems:
            raise problems[0]
        yield
    finally:
        service.stopping.set()
        thread.join(30.0)


def wait_for(event: threading.Event, stop: threading.Event, what: str, seconds: float = READY_SECONDS) -> None:
    """Wait until the event is set.

    Raises `KeyboardInterrupt` where it is told to end, `ConfigError` where it takes too long.
    """
    until = time.monotonic() + seconds
    while not event.wait(0.1):
        go_on(stop)
        if time.monotonic() > until:
            raise ConfigError(f"{what} does not answer after {seconds:g} s")
    go_on(stop)


def go_on(stop: threading.Event) -> None:
    """Raise `KeyboardInterrupt` after a stop was requested."""
    if stop.is_set():
        raise KeyboardInterrupt


@contextmanager
def signals(stop: threading.Event) -> Iterator[None]:
    """Make Ctrl-C and SIGTERM set `stop` within the block; a second Ctrl-C interrupts at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: object) -> None:
        stop.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def stay(
    stop: threading.Event,
    seconds: float | None,
    *,
    has_ended: Callable[[], object],
    on_enter: Callable[[], object],
) -> None:
    """Wait for a stop, the end of the time, or `has_ended`; `on_enter` is called for each line on stdin."""
    until = float("inf") if seconds is None else time.monotonic() + seconds
    asks = sys.stdin is not None and sys.stdin.isatty()
    while not stop.wait(0.0 if asks else 0.1) and time.monotonic() < until and not has_ended():
        if asks and select.select([sys.stdin], [], [], 0.1)[0]:
            asks = sys.stdin.readline() != ""
            if asks:
                on_enter()
