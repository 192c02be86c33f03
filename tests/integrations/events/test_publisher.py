"""The publisher on real sockets: frames, replay, losses, bounds, where it binds and what it withholds."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from kvcustody.clock import SystemClock
from kvcustody.errors import ConfigError, IsolationError
from kvcustody.governance.credentials.scope_token_secret import open_scope_key
from kvcustody.governance.edge.current_namespaces import CurrentNamespaces
from kvcustody.governance.edge.named_requester import NamedRequester
from kvcustody.governance.edge.router_namespace import RouterNamespaces
from kvcustody.governance.settings import Settings
from kvcustody.integrations.events import vllm_wire
from kvcustody.integrations.events.block_event import cleared
from kvcustody.integrations.events.endpoint import at_rank, check_bind, check_endpoint
from kvcustody.integrations.events.publisher import EventPublisher, PublisherLimits, open_publisher
from standins.integrations.kv_wires import (
    ACME,
    BETA,
    SALT_CANARY,
    TOKEN_CANARY,
    receive,
    replay,
    sockets,
    some_removed,
    some_stored,
)
from standins.waiting import until

LOCAL = "tcp://127.0.0.1:0"
SMALL = PublisherLimits(waiting_batches=3, waiting_blocks=8)


@pytest.fixture
def publisher() -> Iterator[EventPublisher]:
    with EventPublisher(LOCAL, LOCAL, revision=5, incarnation="inc") as made:
        yield made


class Slow:
    """The wire format behind a gate: what a publisher's thread that cannot keep up looks like."""

    def __init__(self, wire: Any) -> None:
        self.wire = wire
        self.gate = threading.Event()
        self.replay_frames = wire.replay_frames

    def payload_of(self, *arguments: Any, **more: Any) -> bytes:
        assert self.gate.wait(60)
        made: bytes = self.wire.payload_of(*arguments, **more)
        return made


def subscribed(publisher: EventPublisher, sub: zmq.Socket[bytes]) -> None:
    """Connect, and publish until something arrives: only then is the subscription known to be there."""
    sub.setsockopt(zmq.SUBSCRIBE, b"")
    sub.connect(publisher.endpoint)
    until = time.monotonic() + 60
    while not sub.poll(20):
        publisher.publish([some_removed(0, 1)])
        assert time.monotonic() < until
    while sub.poll(100):
        sub.recv_multipart()


def test_frames_are_topic_sequence_payload(publisher: EventPublisher) -> None:
    with sockets(zmq.SUB) as [sub]:
        subscribed(publisher, sub)
        sequences = [publisher.publish([some_stored(), some_removed()]) for _ in range(3)]
        got = [receive(sub) for _ in range(3)]
        assert [int.from_bytes(frames[1], "big") for frames in got] == sequences
        assert sequences == list(range(sequences[0], sequences[0] + 3))
        assert [frames[0] for frames in got] == [b""] * 3
        batch = vllm_wire.decode(got[0][2])
        assert [type(event).__name__ for event in batch.events] == ["GovernedStored", "GovernedRemoved"]
        assert abs(batch.ts - time.time()) < 10 and batch.data_parallel_rank == 0
        assert publisher.publish([]) == -1


def test_the_stream_begins_with_a_clear_of_what_was_before(publisher: EventPublisher) -> None:
    with sockets(zmq.DEALER) as [dealer]:
        publisher.publish([some_stored()])
        publisher.publish([some_stored()])
        until(lambda: publisher.stats().batches == 2)
        dealer.connect(publisher.replay_endpoint)
        first, second = (vllm_wire.decode(frames[2]) for frames in replay(dealer, 0))
        assert isinstance(first.events[0], vllm_wire.GovernedCleared) and len(first.events) == 2
        assert first.events[0].kvcustody is not None and first.events[0].kvcustody.cause == "start"
        assert len(second.events) == 1


def test_replay_gives_the_last_batches_from_a_number_on_and_an_end_marker() -> None:
    limits = PublisherLimits(replay_batches=4)
    with EventPublisher(LOCAL, LOCAL, limits=limits) as publisher, sockets(zmq.DEALER) as [dealer]:
        for _ in range(6):
            publisher.publish([some_removed()])
        until(lambda: publisher.stats().batches == 6)
        dealer.connect(publisher.replay_endpoint)
        assert [int.from_bytes(f[1], "big") for f in replay(dealer, 0)] == [2, 3, 4, 5]
        assert [int.from_bytes(f[1], "big") for f in replay(dealer, 4)] == [4, 5]
        assert replay(dealer, 2**63) == []


def test_bytes_kept_for_replay_are_bounded() -> None:
    limits = PublisherLimits(replay_bytes=2000)
    with EventPublisher(LOCAL, LOCAL, limits=limits) as publisher, sockets(zmq.DEALER) as [dealer]:
        for number in range(50):
            publisher.publish([some_removed(number, 10)])
        until(lambda: publisher.stats().batches == 50)
        dealer.connect(publisher.replay_endpoint)
        kept = replay(dealer, 0)
        assert 0 < sum(len(frames[2]) for frames in kept) <= 2000
        assert int.from_bytes(kept[-1][1], "big") == 49


def test_malformed_replay_requests_are_ignored(publisher: EventPublisher) -> None:
    with sockets(zmq.DEALER) as [dealer]:
        dealer.connect(publisher.replay_endpoint)
        for frames in (
            [b"x"],
            [b"", b"short"],
            [b"", b"12345678", b""],
            [b"y", b"12345678"],
            [b"", bytes(2000)],
        ):
            dealer.send_multipart(frames)
        assert not dealer.poll(200)
    with sockets(zmq.DEALER) as [dealer]:
        dealer.connect(publisher.replay_endpoint)
        assert replay(dealer, 0) == []


def test_sglang_replay_has_no_topic() -> None:
    with EventPublisher(LOCAL, LOCAL, form="sglang") as publisher, sockets(zmq.DEALER) as [dealer]:
        publisher.publish([some_stored()])
        until(lambda: publisher.stats().batches == 1)
        dealer.connect(publisher.replay_endpoint)
        dealer.send_multipart([b"", bytes(8)])
        assert [len(receive(dealer)) for _ in range(2)] == [3, 3]


def test_a_full_queue_loses_batches_in_the_open_and_never_waits() -> None:
    with EventPublisher(LOCAL, LOCAL, limits=SMALL) as publisher, sockets(zmq.DEALER) as [dealer]:
        slow = Slow(publisher._wire)
        publisher._wire = slow  # type: ignore[assignment]
        started = time.monotonic()
        for _ in range(50):
            publisher.publish([some_removed(0, 1)])
        assert time.monotonic() - started < 30, "publish waited for the stalled thread"
        lost = publisher.stats().lost_batches
        assert 46 <= lost <= 47  # three wait, and perhaps one is in the thread's hands
        slow.gate.set()
        until(lambda: publisher.stats().batches == 50 - lost)
        after = publisher.publish([some_removed(0, 1)])
        until(lambda: publisher.stats().batches == 51 - lost)
        dealer.connect(publisher.replay_endpoint)
        got = {int.from_bytes(frames[1], "big"): frames[2] for frames in replay(dealer, 0)}
        assert sorted(got) == [*range(50 - lost), after] and after == 50
        last = vllm_wire.decode(got[50]).events
        assert isinstance(last[0], vllm_wire.GovernedCleared), "the batch after a hole begins with a clear"
        assert last[0].kvcustody is not None and last[0].kvcustody.cause == "resync"
        assert not any(
            isinstance(event, vllm_wire.GovernedCleared)
            for number in range(1, 50 - lost)
            for event in vllm_wire.decode(got[number]).events
        )


def test_waiting_blocks_are_bounded_too() -> None:
    with EventPublisher(LOCAL, limits=SMALL) as publisher:
        publisher.publish([some_removed(0, 9)])
        assert publisher.stats().lost_batches == 1
        publisher.publish([some_removed(0, 8)])
        assert publisher.stats().lost_batches == 1


def test_a_batch_that_cannot_be_encoded_is_a_hole_and_not_the_end() -> None:
    with EventPublisher(LOCAL, LOCAL, tokens_published=True) as publisher, sockets(zmq.DEALER) as [dealer]:
        publisher.publish([some_stored()])
        publisher.publish([some_stored(tokens=["not a token"] * 8)])
        publisher.publish([some_removed()])
        until(lambda: publisher.stats().batches == 2)
        assert publisher.stats().lost_batches == 1
        dealer.connect(publisher.replay_endpoint)
        got = {int.from_bytes(frames[1], "big"): frames[2] for frames in replay(dealer, 0)}
        assert sorted(got) == [0, 2]
        assert isinstance(vllm_wire.decode(got[2]).events[0], vllm_wire.GovernedCleared)


def test_an_event_without_scope_is_refused_at_the_door(publisher: EventPublisher) -> None:
    with pytest.raises(IsolationError, match="without a scope"):
        publisher.publish([some_removed(), some_removed()._replace(scope=None)])  # type: ignore[arg-type]
    assert publisher.stats().next_sequence == 0


@pytest.mark.parametrize("form", ["vllm", "sglang"])
@pytest.mark.parametrize("switch", ["withheld", "published"])
def test_a_canary_on_the_wire_is_found_only_where_the_switch_is_on(form: Any, switch: Any, tmp_path: Path) -> None:
    settings = Settings(
        scope_token_key_path=tmp_path / "scope.key",
        kv_events_endpoint=LOCAL,
        kv_events_replay_endpoint=LOCAL,
        kv_events_format=form,
        kv_events_tokens=switch,
    )
    publisher = open_publisher(settings, revision=1)
    assert publisher is not None
    with publisher, sockets(zmq.SUB, zmq.DEALER) as [sub, dealer]:
        subscribed(publisher, sub)
        publisher.publish([some_stored(), some_removed(), some_stored(9, 1, BETA)])
        wire = b"".join(receive(sub))
        dealer.connect(publisher.replay_endpoint)
        wire += b"".join(frame for frames in replay(dealer, 0) for frame in frames)
        leaked = switch == "published"
        assert (msgspec.msgpack.encode(TOKEN_CANARY) in wire) is leaked
        assert (SALT_CANARY.encode() in wire) is leaked
        assert b"acme" in wire and b"beta" in wire, "scope leaves either way"


def test_no_endpoint_no_publisher() -> None:
    assert open_publisher(Settings(), revision=1) is None


@pytest.mark.parametrize(
    "endpoint", ["tcp://*:5557", "tcp://0.0.0.0:5557", "tcp://10.0.0.1:1", "tcp://[::]:5557", "tcp://host:1"]
)
def test_other_machines_need_a_setting(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="kv_events_remote"):
        EventPublisher(endpoint)
    assert check_bind(endpoint, remote_allowed=True) == endpoint


@pytest.mark.parametrize("endpoint", ["tcp://127.9.0.1:1", "tcp://[::1]:1", "tcp://localhost:0", "ipc:///tmp/x"])
def test_loopback_needs_none(endpoint: str) -> None:
    assert check_bind(endpoint, remote_allowed=False) == endpoint


@pytest.mark.parametrize(
    "endpoint", ["", "tcp://", "tcp://x", "tcp://x:y", "tcp://:1", "udp://x:1", "ipc://", "x:99999"]
)
def test_what_is_no_endpoint_is_said_so(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="is no endpoint"):
        check_endpoint(endpoint)


def test_an_address_in_use_is_one_line(publisher: EventPublisher) -> None:
    with pytest.raises(ConfigError, match="in use"):
        EventPublisher(publisher.endpoint)


def test_ranks_have_their_own_ports() -> None:
    assert at_rank("tcp://127.0.0.1:5557", 2) == "tcp://127.0.0.1:5559"
    assert at_rank("tcp://127.0.0.1:0", 2) == "tcp://127.0.0.1:0"
    assert at_rank("inproc://cache", 2) == "inproc://cache_dp2"
    assert at_rank("tcp://127.0.0.1:5557", 0) == "tcp://127.0.0.1:5557"


def test_close_sends_what_waits_and_later_batches_count_as_lost() -> None:
    publisher = EventPublisher(LOCAL)
    for _ in range(100):
        publisher.publish([some_removed(scope=ACME)])
    publisher.close()
    publisher.close()
    assert publisher.stats().batches == 100
    publisher.publish([some_removed()])
    assert publisher.stats().lost_batches == 1


@pytest.mark.parametrize("form", ["dynamo", "mooncake"])
def test_settings_give_routers_the_namespace_that_the_door_makes(form: Any, tmp_path: Path) -> None:
    key = tmp_path / "scope.key"
    with open_scope_key(key) as secret:
        namespace = CurrentNamespaces(RouterNamespaces(secret), SystemClock()).of("issuer", "acme")
    settings = Settings(
        kv_events_endpoint=LOCAL,
        kv_events_format=form,
        kv_events_tokens="published",
        scope_token_key_path=key,
    )
    publisher = open_publisher(settings, revision=1)
    assert publisher is not None
    owned = ACME._replace(owner=NamedRequester("issuer", "acme"))
    with publisher, sockets(zmq.SUB) as [sub]:
        subscribed(publisher, sub)
        publisher.publish([some_stored(scope=owned), some_stored(9, 1, BETA)])
        wire = receive(sub)[2]
        assert namespace.encode() in wire and SALT_CANARY.encode() not in wire
        assert b"beta" not in wire, "what nobody owns is not told"
        said = publisher.figures()
        assert said["events_told_blocks.socket"] == 2 and said["events_sent.socket"] >= 1
        publisher.publish([cleared(1, "reset")])
        until(lambda: publisher.figures()["events_told_blocks.socket"] == 0)
    if form == "dynamo":
        withheld = settings.model_copy(update={"kv_events_tokens": "withheld"})
        with pytest.raises(ConfigError, match="kv_events_tokens"):
            open_publisher(withheld, revision=1)
