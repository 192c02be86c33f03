"""Follows workers' KV events from the fleet's NATS server, for an index of a tenant's blocks or of every tenant's.

    reader = StreamReader(place, index, tenant=EVERY)
    await reader.run()                                    # until cancelled
    reader.streams.is_usable(worker, tenant)              # before a location is used

A reader's name is that of its credentials. Where NATS was away, or its memory lost, what was missed shows as holes, and
snapshots close them (`locations`).
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from kvcustody.integrations.jetstream.connection import NatsPlace, open_connection
from kvcustody.integrations.jetstream.locations import BlockIndex, WorkerStreams
from kvcustody.integrations.jetstream.subjects import (
    EVENTS,
    EVERY,
    READERS_API,
    STREAM,
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
    """One reader; used on one event loop."""

    def __init__(self, place: NatsPlace, index: BlockIndex, *, tenant: str = EVERY) -> None:
        """`tenant`: its tag, or every tenant's. Raises `ConfigError` as `NatsPlace.check`."""
        self._place, self._tenant = place, tenant
        self.name = name_in_subject(place.check().name)
        self.streams = WorkerStreams(index)

    async def run(self) -> None:
        """Until it is cancelled."""
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
