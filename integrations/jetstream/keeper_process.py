"""The process of a keeper: epochs from the control plane, the stream, and health and metrics, until a signal ends it.

`/ready` says 200 while a round succeeded in the last `READY_SECONDS`.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from contextlib import ExitStack
from functools import partial
from typing import Final

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from kvcustody.clock import SystemClock
from kvcustody.errors import ConfigError
from kvcustody.governance.control_plane.epoch_feed import EpochFeed
from kvcustody.governance.control_plane.opening import connect
from kvcustody.governance.edge.custody_lease import lease_seconds
from kvcustody.governance.settings import Settings
from kvcustody.integrations.door.envoy_configuration import ListenPlace
from kvcustody.integrations.door.server import served
from kvcustody.integrations.jetstream.connection import NatsPlace
from kvcustody.integrations.jetstream.keeper import ROUND_SECONDS, StreamBounds, StreamKeeper

READY_SECONDS: Final = 3 * ROUND_SECONDS
_SHOWN: Final = (
    ("version", "Newest erase epoch that the keeper acts by."),
    ("rounds", "Rounds that succeeded."),
    ("failures", "Rounds that failed."),
    ("purged_subjects", "Subjects purged, because an erasure ended their names."),
    ("purged_messages", "Messages that were in them."),
    ("hints", "Hints of epochs sent."),
    ("made", "How often the stream was made."),
    ("subjects", "Subjects in the stream."),
    ("messages", "Messages in the stream."),
    ("bytes", "Bytes in the stream."),
    ("age_seconds", "How long the stream holds a message at most."),
)


def run_keeper(settings: Settings, about: str, memory_bytes: int, age_seconds_max: float) -> None:
    """Keep the stream until SIGTERM or SIGINT. Raises `ConfigError` where it cannot begin."""
    try:
        place = ListenPlace.parse(about)
    except ValueError as problem:
        raise ConfigError(str(problem)) from None
    nats = NatsPlace(settings.nats, settings.nats_credentials_path, settings.nats_ca_path)
    keeper = StreamKeeper(nats, StreamBounds(memory_bytes, age_seconds_max=age_seconds_max))
    with ExitStack() as stack:
        connection = connect(settings, stack)
        lease = lease_seconds(settings.custody_lease_seconds, erased_within_us=0)
        feed = EpochFeed(connection, SystemClock(), lease_seconds=lease, on_known=keeper.take, acknowledges=False)
        stack.callback(feed.stop)
        feed.start()
        asyncio.run(_run(keeper, place))


async def _run(keeper: StreamKeeper, about: ListenPlace) -> None:
    ending = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.set)
    async with served(about_application(keeper), about):
        task = asyncio.ensure_future(keeper.run())
        await ending.wait()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _figure(keeper: StreamKeeper, name: str) -> float:
    return float(getattr(keeper.stats, name))


def about_application(keeper: StreamKeeper) -> Starlette:
    """`/ready`, `/live` and `/metrics` of a keeper."""
    registry = CollectorRegistry()
    for name, said in _SHOWN:
        gauge = Gauge(f"kvcustody_events_{name}", said, registry=registry)
        gauge.set_function(partial(_figure, keeper, name))

    async def ready(_: Request) -> Response:
        at = keeper.stats.kept_at
        is_ready = bool(at) and time.monotonic() - at <= READY_SECONDS
        return PlainTextResponse("ready" if is_ready else "not kept", 200 if is_ready else 503)

    async def live(_: Request) -> Response:
        return PlainTextResponse("live")

    async def metrics(_: Request) -> Response:
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4")

    return Starlette(routes=[Route("/ready", ready), Route("/live", live), Route("/metrics", metrics)])
