"""The keeper of the stream of KV events, and its process.

The keeper makes the stream, bounds it, purges what erasures ended, and hints that epochs were raised. The process gets
epochs from the control plane, serves health and metrics, and ends with a signal.

`/ready` says 200 while a round succeeded in the last `READY_SECONDS`.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import orjson
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from kvcustody.clock import MICROSECONDS, SystemClock
from kvcustody.errors import ConfigError, ServiceError
from kvcustody.governance.control_plane.epoch_feed import EpochFeed
from kvcustody.governance.control_plane.opening import connect
from kvcustody.governance.edge.custody_lease import lease_seconds
from kvcustody.governance.edge.erase_epochs import KnownEpochs
from kvcustody.governance.settings import Settings
from kvcustody.integrations.door.envoy_configuration import ListenPlace
from kvcustody.integrations.door.server import served
from kvcustody.integrations.jetstream.connection import NatsPlace, open_connection
from kvcustody.integrations.jetstream.subjects import EVENTS, HINTS, STREAM, EventSubject
from kvcustody.logger import get_logger

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.js.client import JetStreamContext

# The keeper of the stream of KV events.
#
# Rules of this section:
# 1. The control plane's epochs decide what is purged, never a message. Each subject carries the epoch of its name and
#    is purged once a newer epoch ends the name. So the next round catches up after a failed purge or an absence, and
#    purges what a worker with an older epoch sends later.
# 2. Messages live no longer than the shortest ceiling of the active policies, or one minute where that is unknown.
# 3. The stream is in memory, replaces its oldest messages beyond its bound, and is created again where it is gone.
# 4. Several keepers may run; all do the same.
# 5. A round purges at most `PURGES_MAX` subjects. Where more have ended, the next round follows at once.

AGE_SECONDS_UNKNOWN: Final = 60.0  # rule 2
AGE_SECONDS_MAX: Final = 3600.0
ROUND_SECONDS: Final = 5.0
PURGES_MAX: Final = 1000
_PAUSE_SECONDS, _PAGES_MAX = 0.5, 100
_log = get_logger(__name__)


class StreamBounds(NamedTuple):
    """The stream's limits."""

    memory_bytes: int = 128 << 20
    message_bytes: int = 1 << 20
    age_seconds_max: float = AGE_SECONDS_MAX

    def age_seconds(self, known: KnownEpochs | None) -> float:
        """Return the stream's maximum age by rule 2: at least a second, which is less than any ceiling."""
        shortest_us = None if known is None else known.shortest_ceiling_us
        if shortest_us is None:
            return min(AGE_SECONDS_UNKNOWN, self.age_seconds_max)
        return max(1.0, min(self.age_seconds_max, shortest_us / MICROSECONDS))


class KeeperStats(NamedTuple):
    """The counters of a keeper."""

    version: int  # the newest epoch that it acts by
    rounds: int
    purged_subjects: int
    purged_messages: int
    hints: int
    made: int  # how often the stream was
    failures: int
    subjects: int
    messages: int
    bytes: int
    age_seconds: float
    is_connected: bool
    kept_at: float  # monotonic seconds of the last round that succeeded; 0: none


class StreamKeeper:
    """The keeper of one stream. Used on one event loop; `take` may be called on any thread."""

    def __init__(self, place: NatsPlace, bounds: StreamBounds | None = None) -> None:
        """Raises `ConfigError` as `NatsPlace.check`."""
        place.check()
        self._place, self._bounds = place, bounds or StreamBounds()
        self._known: KnownEpochs | None = None
        self._hinted = 0
        self.problem = ""  # why the last round failed; empty where it did not
        self._wake = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.stats = KeeperStats(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0, False, 0.0)

    def take(self, known: KnownEpochs, _until_us: int = 0) -> None:
        """Take the control plane's epochs."""
        is_new = known is not self._known
        self._known = known
        if is_new and self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._wake.set)

    async def run(self) -> None:
        """Keep the stream until it is cancelled."""
        self._loop = asyncio.get_running_loop()
        client: Client | None = None
        try:
            while True:
                try:
                    if client is None or client.is_closed:
                        client = await open_connection(self._place)
                    await self._round(client)
                except Exception as error:
                    self._count(failures=1, is_connected=False)
                    problem = f"{type(error).__name__}: {error}"[:200]
                    if problem != self.problem:
                        _log.warning("the stream could not be maintained", problem=problem)
                    self.problem = problem
                    await asyncio.sleep(_PAUSE_SECONDS)
                    continue
                self.problem = ""
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), ROUND_SECONDS)
                self._wake.clear()
        finally:
            if client is not None:
                await client.close()

    async def _round(self, client: Client) -> None:
        """Bring the stream to its intended state, and hint."""
        known, stream = self._known, client.jetstream()
        version = 0 if known is None else known.epochs.version
        if version > self._hinted:  # before the purge: it tells the living
            await client.publish(HINTS, str(version).encode())
            self._hinted = version
            self._count(hints=1)
        state = await self._ensure(stream, self._bounds.age_seconds(known))
        if known is not None:
            await self._purge(client, known)
        self.stats = self.stats._replace(
            version=version,
            subjects=int(state.get("num_subjects", 0)),
            messages=int(state.get("messages", 0)),
            bytes=int(state.get("bytes", 0)),
            is_connected=True,
            kept_at=time.monotonic(),
        )
        self._count(rounds=1)

    async def _ensure(self, stream: JetStreamContext, age_seconds: float) -> dict[str, Any]:
        """Return the stream's state, once it is as it should be (rule 3)."""
        from nats.js import api, errors

        wanted = api.StreamConfig(
            name=STREAM,
            subjects=[EVENTS],
            storage=api.StorageType.MEMORY,
            retention=api.RetentionPolicy.LIMITS,
            discard=api.DiscardPolicy.OLD,
            max_bytes=self._bounds.memory_bytes,
            max_msg_size=self._bounds.message_bytes,
            max_age=age_seconds,
            num_replicas=1,
            duplicate_window=min(2.0, age_seconds),
            deny_delete=False,
            deny_purge=False,
        )
        self.stats = self.stats._replace(age_seconds=age_seconds)
        try:
            info = await stream.stream_info(STREAM)
        except errors.NotFoundError:
            info = await stream.add_stream(wanted)
            self._count(made=1)
        if any(getattr(info.config, name) != getattr(wanted, name) for name in _HELD):
            info = await stream.update_stream(wanted)
        state: dict[str, Any] = vars(info.state)
        return state

    async def _purge(self, client: Client, known: KnownEpochs) -> None:
        """Purge what erasures ended (rules 1 and 5); subjects are read page by page."""
        stream, purged, offset = client.jetstream(), 0, 0
        for _ in range(_PAGES_MAX):
            question = orjson.dumps({"subjects_filter": EVENTS, "offset": offset})
            reply = await client.request(f"$JS.API.STREAM.INFO.{STREAM}", question, timeout=10)
            info = orjson.loads(reply.data)
            if "error" in info:
                raise ServiceError(f"NATS: {info['error'].get('description', 'refused')}")
            page = info["state"].get("subjects") or {}
            for subject, messages in page.items():
                where = EventSubject.parse(subject)
                if where is not None and not where.is_ended(known):
                    offset += 1  # what was purged is no longer before the next page
                    continue
                if purged == PURGES_MAX:
                    self._wake.set()
                    return
                await stream.purge_stream(STREAM, subject=subject)
                self._count(purged_subjects=1, purged_messages=messages)
                purged += 1
            if not page or offset >= int(info.get("total", 0)) - purged:
                return

    def _count(self, *, is_connected: bool | None = None, **more: int) -> None:
        changed: dict[str, Any] = {name: getattr(self.stats, name) + by for name, by in more.items()}
        if is_connected is not None:
            changed["is_connected"] = is_connected
        self.stats = self.stats._replace(**changed)


_HELD: Final = ("subjects", "storage", "discard", "max_bytes", "max_msg_size", "max_age")


READY_SECONDS: Final = 3 * ROUND_SECONDS
_SHOWN: Final = (
    ("version", "Newest erase epoch that the keeper applies."),
    ("rounds", "Rounds that succeeded."),
    ("failures", "Rounds that failed."),
    ("purged_subjects", "Subjects purged because an erasure ended their names."),
    ("purged_messages", "Messages in purged subjects."),
    ("hints", "Hints of epochs sent."),
    ("made", "Number of times that the stream was created."),
    ("subjects", "Subjects in the stream."),
    ("messages", "Messages in the stream."),
    ("bytes", "Bytes in the stream."),
    ("age_seconds", "Maximum age of a message in the stream."),
)


def run_keeper(settings: Settings, about: str, memory_bytes: int, age_seconds_max: float) -> None:
    """Keep the stream until SIGTERM or SIGINT.

    Raises:
        ConfigError: it cannot begin.
    """
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
    """Return the application with a keeper's `/ready`, `/live` and `/metrics`."""
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
