"""With a real NATS server: what each may read and write, what erasures purge, and what is left where it is away."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.client import Client
from nats.js import errors

from kvcustody.governance.edge.erase_epochs import EpochScope
from kvcustody.integrations.jetstream import keeper_process as keeper_module
from kvcustody.integrations.jetstream import subjects
from kvcustody.integrations.jetstream.connection import NatsPlace, open_connection
from kvcustody.integrations.jetstream.keeper_process import StreamBounds, StreamKeeper
from kvcustody.integrations.jetstream.publisher import StreamPublisher
from kvcustody.integrations.jetstream.reader import StreamReader
from kvcustody.integrations.jetstream.subjects import READERS_API, EventSubject
from kvcustody.integrations.jetstream.watched_blocks import WatchedBlocks
from standins.certificates import Authority
from standins.integrations.jetstream.nats_server import ABSENT, BINARY, NatsServer
from standins.integrations.jetstream.told_world import (
    ACME,
    ANN,
    BOB,
    EVE,
    GLOBEX,
    ISSUER,
    LlmdIndex,
    epochs,
    key,
    remove,
    store,
    told_stream,
)

pytestmark = pytest.mark.skipif(BINARY is None, reason=ABSENT)
SECONDS = 30.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    made = NatsServer(tmp_path)
    yield made
    made.close()


async def until(holds: Callable[[], Any], seconds: float = SECONDS) -> Any:
    end = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < end, "it did not come to be"
        await asyncio.sleep(0.02)
    return found


@contextlib.asynccontextmanager
async def beside(*runs: Any) -> AsyncIterator[None]:
    """These run while the block does."""
    tasks = [asyncio.ensure_future(one) for one in runs]
    try:
        yield
    finally:
        for one in tasks:
            one.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def reader(server: NatsServer, name: str, tenant: str = "all") -> tuple[StreamReader, LlmdIndex]:
    index = LlmdIndex()
    return StreamReader(server.reader(name, tenant), index, tenant=tenant), index


async def publisher(server: NatsServer, worker: str = "gpu-1") -> StreamPublisher:
    """One that has connected: what is told before goes to readers by a snapshot."""
    told = told_stream(worker)
    made = StreamPublisher(server.worker(worker), told, limits=told._limits)
    await until(lambda: made.stats().is_connected)
    return made


def held(index: LlmdIndex, tenant: str = ACME, worker: str = "gpu-1") -> set[bytes]:
    return set(index.blocks.get((worker, tenant), {}))


async def kept(keeper: StreamKeeper) -> None:
    before = keeper.stats.rounds
    keeper._wake.set()
    await until(lambda: keeper.stats.rounds > before)


def test_events_reach_their_tenants_readers_alone_and_erasures_purge(server: NatsServer) -> None:
    async def run() -> None:
        keeper = StreamKeeper(server.keeper(), StreamBounds(memory_bytes=8 << 20))
        keeper.take(epochs())
        (every, all_index), (own, own_index) = reader(server, "router"), reader(server, "acme-index", ACME)
        async with beside(keeper.run(), every.run(), own.run()):
            await until(lambda: keeper.stats.rounds)
            stream = await publisher(server)
            try:
                stream.take_epochs(epochs())
                stream.publish([store(ANN, 0, 3), store(BOB, 0), store(EVE, 0, 2)])
                await until(lambda: every.streams.is_usable("gpu-1", ACME) and len(held(all_index)) == 4)
                await until(lambda: len(held(all_index, GLOBEX)) == 2)
                await until(lambda: own.streams.is_usable("gpu-1", ACME) and len(held(own_index)) == 4)
                for number in range(3, 100):  # by the stream, not by snapshots alone, once consumers are there
                    stream.publish([store(ANN, number)])
                    await until(lambda number=number: len(held(all_index)) == number + 2 == len(held(own_index)))
                    if all(one.streams.counts["messages"] for one in (every, own)):
                        break
                assert own.streams.counts["messages"], "it has a consumer of its own"
                stream.publish([remove(ANN, *range(3, number + 1))])
                await until(lambda: len(held(all_index)) == 4 == len(held(own_index)))
                await until(lambda: every.streams.is_usable("gpu-1", ACME) and own.streams.is_usable("gpu-1", ACME))
                assert set(own_index.blocks) == {("gpu-1", ACME)}, "nothing of another tenant"
                await kept(keeper)
                before = keeper.stats.messages
                known = epochs(EpochScope(ISSUER, "acme", "ann"))
                stream.take_epochs(known)
                await until(lambda: held(all_index) == {key(BOB, 0)} == held(own_index))
                keeper.take(known)
                await until(lambda: keeper.stats.purged_subjects == 1)
                await kept(keeper)
                assert keeper.stats.purged_messages == before - 2 and keeper.stats.age_seconds == 600
            finally:
                await asyncio.to_thread(stream.close)

    asyncio.run(run())


def test_an_operator_sees_what_workers_tell(server: NatsServer) -> None:
    async def run() -> None:
        keeper, index = StreamKeeper(server.keeper()), WatchedBlocks()
        keeper.take(epochs())
        reader = StreamReader(server.reader("operator"), index)
        async with beside(keeper.run(), reader.run()):
            await until(lambda: keeper.stats.rounds)
            stream = await publisher(server)
            try:
                stream.take_epochs(epochs())
                stream.publish([store(ANN, 0, 3), store(BOB, 0), store(EVE, 0, 2)])
                counts = {ACME: 4, GLOBEX: 2}
                await until(lambda: {row.tenant: row.blocks for row in index.rows(reader)} == counts)
                assert all(row.worker == "gpu-1" and row.is_usable for row in index.rows(reader))
                stream.publish([remove(ANN, 1, 2)])
                await until(lambda: {row.tenant: row.blocks for row in index.rows(reader)}[ACME] == 2)
                stream.take_epochs(epochs(EpochScope(ISSUER, "globex")))
                await until(lambda: {row.tenant: row.blocks for row in index.rows(reader)}[GLOBEX] == 0)
            finally:
                await asyncio.to_thread(stream.close)

    asyncio.run(run())


async def refusals(place: NatsPlace, act: Callable[[Client], Any]) -> list[str]:
    """What the server refused of what a user did."""
    errors: list[str] = []

    async def note(error: Exception) -> None:
        errors.append(str(error))

    client = await open_connection(place)
    client._error_cb = note
    try:
        await act(client)
        await client.flush()
        await asyncio.sleep(0.1)
    finally:
        await client.close()
    return errors


@pytest.mark.system("a worker, reader or door does what its credentials do not allow")
def test_nobody_does_more_than_its_credentials_say(server: NatsServer) -> None:
    async def run() -> None:
        keeper = StreamKeeper(server.keeper())
        keeper.take(epochs())
        async with beside(keeper.run()):
            await until(lambda: keeper.stats.rounds)
            ours, theirs = f"kv.{ACME}.{ACME}.0.gpu-1", f"kv.{GLOBEX}.{GLOBEX}.0.gpu-1"
            foreign = f"kv.{ACME}.{ACME}.0.gpu-2"
            worker, tenant = server.worker("gpu-1"), server.reader("acme-index", ACME)

            def publishes(*wanted: str) -> Callable[[Client], Any]:
                async def act(client: Client) -> None:
                    for one in wanted:
                        await client.publish(one, b"x")

                return act

            def subscribes(*wanted: str) -> Callable[[Client], Any]:
                async def act(client: Client) -> None:
                    for one in wanted:
                        await client.subscribe(one)

                return act

            assert await refusals(worker, publishes(ours, theirs, "beat.t.gpu-1", "snap.r.gpu-1")) == [], "control"
            refused = (
                foreign,
                "beat.t.gpu-2",
                "snap.r.gpu-2",
                "epochs",
                "ask.all.r.gpu-1",
                "$JS.API.STREAM.PURGE.KV",
            )
            assert len(await refusals(worker, publishes(*refused))) == len(refused)
            assert await refusals(worker, subscribes("ask.*.*.gpu-1", "epochs")) == [], "control"
            assert len(await refusals(worker, subscribes("kv.>", "ask.*.*.gpu-2", ">", "_INBOX.>"))) == 4
            assert await refusals(tenant, publishes(f"ask.{ACME}.acme-index.gpu-1")) == [], "control"
            refused = (
                ours,
                f"ask.{GLOBEX}.acme-index.gpu-1",
                "ask.all.acme-index.gpu-1",
                f"ask.{ACME}.other.gpu-1",
                "epochs",
                "$JS.API.STREAM.PURGE.KV",
                "$JS.API.STREAM.MSG.GET.KV",
                "$JS.API.DIRECT.GET.KV",
                f"$JS.API.CONSUMER.CREATE.KV.acme-index.kv.{ACME}.>",
                f"{READERS_API}.STREAM.PURGE.KV",
                f"{READERS_API}.CONSUMER.CREATE.KV.acme-index.kv.{GLOBEX}.>",
                f"{READERS_API}.CONSUMER.CREATE.KV.acme-index",
                f"{READERS_API}.CONSUMER.MSG.NEXT.KV.router",
            )
            assert len(await refusals(tenant, publishes(*refused))) == len(refused)
            refused = (f"kv.{GLOBEX}.>", "kv.>", "snap.router.>", f"beat.{GLOBEX}.*", "_INBOX.router.>")
            assert len(await refusals(tenant, subscribes(*refused))) == len(refused)
            door = server.door()
            assert await refusals(door, subscribes("epochs")) == [], "control"
            assert len(await refusals(door, subscribes("kv.>"))) == 1
            assert len(await refusals(door, publishes("epochs", ours))) == 2

            client = await open_connection(tenant)
            stream = client.jetstream(prefix=READERS_API)
            wanted = {"name": "acme-index", "filter_subject": f"kv.{ACME}.>", "ack_policy": "none"}
            await stream.add_consumer("KV", **wanted)  # control
            # The subject says what is allowed, and the body asks for another's: the server compares them.
            body = b'{"stream_name":"KV","config":{"name":"acme-index","filter_subject":"kv.%s.>","ack_policy":"none"}}'
            asked = f"{READERS_API}.CONSUMER.CREATE.KV.acme-index.kv.{ACME}.>"
            answer = await client.request(asked, body % GLOBEX.encode(), timeout=10)
            assert b'"error"' in answer.data
            answer = await client.request(
                asked,
                body.replace(b"filter_subject", b"filter_subjects").replace(b'"kv.%s.>"', b'["kv.>"]'),
                timeout=10,
            )
            assert b'"error"' in answer.data
            await client.close()

    asyncio.run(run())


@pytest.mark.system("a reader has the server's answers arrive as a worker's events or as hints")
def test_no_answer_of_the_server_goes_where_a_reader_sends_it(server: NatsServer) -> None:
    async def run() -> None:
        keeper = StreamKeeper(server.keeper())
        keeper.take(epochs())
        async with beside(keeper.run()):
            await until(lambda: keeper.stats.rounds)
            own = server.reader("evil", ACME)
            allowed = str(subjects.reader_permissions("evil", ACME)).replace(READERS_API, "$JS.API")
            in_the_fleet = server.place("evil", ast.literal_eval(allowed))
            found = {}
            for place, api in ((in_the_fleet, "$JS.API"), (own, READERS_API)):
                found[api] = await _abused(server, keeper, place, api)
            assert found["$JS.API"] == (True, True), "the control: in the fleet's account both arrive"
            assert found[READERS_API] == (False, False)

    asyncio.run(run())


async def _abused(server: NatsServer, keeper: StreamKeeper, place: NatsPlace, api: str) -> tuple[bool, bool]:
    """Whether a door heard a hint that no keeper sent, and whether the stream has an event that no worker did."""
    hints: list[bytes] = []

    async def heard(message: Any) -> None:
        hints.append(message.data)

    door, client = await open_connection(server.door()), await open_connection(place)
    try:
        await door.subscribe("epochs", cb=heard)
        await door.flush()
        await kept(keeper)
        before = keeper.stats.messages
        stream = client.jetstream(prefix=api)
        await stream.add_consumer("KV", name="evil", filter_subject=f"kv.{ACME}.>", ack_policy="none")
        for answered_at in (f"kv.{GLOBEX}.{GLOBEX}.0.gpu-2", "epochs", "$JS.API.STREAM.PURGE.KV"):
            await client.publish(f"{api}.CONSUMER.INFO.KV.evil", b"", reply=answered_at)
        assert (await stream.consumer_info("KV", "evil")).name == "evil", "all was answered before"
        await door.flush()
        await kept(keeper)
        return bool(hints), keeper.stats.messages > before
    finally:
        await client.close()
        await door.close()


@pytest.mark.system("a credential outlives its end, or a stranger connects")
def test_credentials_end_and_a_strangers_are_refused(server: NatsServer, tmp_path: Path) -> None:
    async def run() -> None:
        async def connects(place: NatsPlace) -> bool:
            try:
                client = await asyncio.wait_for(open_connection(place), 2)
            except Exception:
                return False
            await client.close()
            return True

        assert await connects(server.worker("gpu-1"))
        ended = server.place("gpu-9", {"pub": {"allow": [">"]}}, seconds=60, now=int(time.time()) - 120)
        assert not await connects(ended)
        (tmp_path / "other").mkdir()
        other = NatsServer(tmp_path / "other")
        other.close()
        assert not await connects(other.worker("gpu-1")._replace(url=server.url))
        with pytest.raises(Exception):  # noqa: B017 - whatever the client calls it
            await nats.connect(server.url, allow_reconnect=False)

    asyncio.run(run())


@pytest.mark.system("what is shown to a server goes over a network in clear")
def test_tls_cannot_be_talked_away(server: NatsServer, tmp_path: Path) -> None:
    async def run() -> None:
        authority = Authority(tmp_path, "fleet")
        (tmp_path / "tls").mkdir()
        pair = authority.issue("localhost", server=True)
        behind = NatsServer(tmp_path / "tls", tls=(pair.certificate, pair.key))
        try:
            place = behind.worker("gpu-1")._replace(url=f"tls://127.0.0.1:{behind.port}", authority=authority.pem)
            client = await open_connection(place)
            assert client.is_connected
            await client.close()
            strangers = place._replace(authority=None)
            clear = server.worker("gpu-1")._replace(url=f"tls://127.0.0.1:{server.port}", authority=authority.pem)
            for other in (strangers, clear):
                with pytest.raises(Exception):  # noqa: B017 - whatever the client calls it
                    await asyncio.wait_for(open_connection(other), 10)
        finally:
            behind.close()

    asyncio.run(run())


@pytest.mark.system("a publisher waits for a server that reads nothing")
def test_a_stopped_server_keeps_no_publisher(server: NatsServer) -> None:
    async def run() -> None:
        stream = await publisher(server)
        stream.take_epochs(epochs())
        server.signal(signal.SIGSTOP)
        try:
            for place in range(1_000):
                stream.publish([store(ANN, place * 256, 256)])
            closing = asyncio.ensure_future(asyncio.to_thread(stream.close))
            done, _ = await asyncio.wait({closing}, timeout=20)
            assert done, "it waits until the server goes on"
        finally:
            server.signal(signal.SIGCONT)

    asyncio.run(run())


@pytest.mark.system("a server that was killed or stopped leaves readers with what is not so")
def test_a_killed_or_stopped_server_costs_time_alone(server: NatsServer) -> None:
    async def run() -> None:
        keeper = StreamKeeper(server.keeper())
        keeper.take(epochs())
        every, index = reader(server, "router")
        async with beside(keeper.run(), every.run()):
            await until(lambda: keeper.stats.rounds)
            stream = await publisher(server)
            try:
                stream.take_epochs(epochs())
                stream.publish([store(ANN, 0, 4)])
                await until(lambda: len(held(index)) == 4 and every.streams.is_usable("gpu-1", ACME))
                for fault in ("kill", "stop"):
                    if fault == "kill":
                        server.kill()
                    else:
                        server.signal(signal.SIGSTOP)
                    stream.publish([remove(ANN, 3)] if fault == "kill" else [remove(ANN, 2)])
                    await asyncio.sleep(1)
                    if fault == "kill":
                        await asyncio.to_thread(server.start)
                    else:
                        server.signal(signal.SIGCONT)
                    wanted = {key(ANN, at) for at in range(3 if fault == "kill" else 2)}
                    await until(lambda wanted=wanted: every.streams.is_usable("gpu-1", ACME) and held(index) == wanted)
                assert keeper.stats.made >= 2, "its memory was gone: the stream was made anew"
            finally:
                await asyncio.to_thread(stream.close)

    asyncio.run(run())


@pytest.mark.system("the stream outgrows its bound, or a purge ends what is not ended")
def test_the_stream_is_bounded_and_a_purge_takes_ended_subjects_alone(server: NatsServer) -> None:
    async def run() -> None:
        keeper = StreamKeeper(server.keeper(), StreamBounds(memory_bytes=1 << 20, age_seconds_max=5.0))
        after = epochs(EpochScope(ISSUER, "acme", "ann"))
        async with beside(keeper.run()):
            await until(lambda: keeper.stats.rounds)
            assert keeper.stats.age_seconds == 5.0
            client = await open_connection(server.worker("gpu-1"))
            subjects = {
                str(EventSubject.of(one, known, "gpu-1")): (one, known)
                for one in (ANN, BOB, EVE)
                for known in (epochs(), after)
            }
            assert len(subjects) == 4, "of ann before and after; of the others one each"
            for subject in subjects:
                await client.publish(subject, b"x")
            await client.flush()
            keeper.take(after)
            await until(lambda: keeper.stats.purged_subjects == 1)
            await kept(keeper)
            assert keeper.stats.messages == 3
            await client.publish(str(EventSubject.of(ANN, epochs(), "gpu-1")), b"a straggler")
            await client.flush()
            await kept(keeper)
            assert keeper.stats.purged_subjects == 2
            for _ in range(300):
                await client.publish(str(EventSubject.of(BOB, after, "gpu-1")), bytes(10_000))
            await client.flush()
            await kept(keeper)
            assert 0 < keeper.stats.bytes <= 1 << 20 and keeper.stats.messages < 300
            await until(lambda: (keeper._wake.set(), keeper.stats.messages == 0)[1])
            await client.close()

    asyncio.run(run())


@pytest.mark.system("a round of the keeper takes as long as erasures are many, or leaves what they ended")
def test_rounds_are_bounded_and_leave_nothing_that_ended(server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_module, "PURGES_MAX", 3)
    people = [ANN._replace(subject=f"s{number}") for number in range(8)]
    after = epochs(*(EpochScope(ISSUER, "acme", one.subject) for one in people))

    async def run() -> None:
        keeper = StreamKeeper(server.keeper())
        async with beside(keeper.run()):
            await until(lambda: keeper.stats.rounds)
            client = await open_connection(server.worker("gpu-1"))
            for one in (*people, BOB, EVE):
                await client.publish(str(EventSubject.of(one, epochs(), "gpu-1")), b"x")
            await client.flush()
            before = keeper.stats.rounds
            keeper.take(after)
            await until(lambda: keeper.stats.purged_subjects == 8, keeper_module.ROUND_SECONDS)
            await kept(keeper)
            assert keeper.stats.messages == 2 and keeper.stats.rounds - before >= 3
            await client.close()

    asyncio.run(run())


def test_a_stream_on_disk_is_refused(server: NatsServer) -> None:
    async def run() -> None:
        client = await open_connection(server.keeper())
        stream = client.jetstream()
        with pytest.raises(errors.APIError):
            await stream.add_stream(name="DISK", subjects=["kv.>"], storage="file")
        await stream.add_stream(name="KV", subjects=["kv.>"], storage="memory", max_bytes=1 << 20)  # control
        await client.close()

    asyncio.run(run())
