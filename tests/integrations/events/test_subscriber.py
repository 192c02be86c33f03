"""The subscriber on real sockets: replay over the wire, restarts, silence, hostile peers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import zmq

from kvcustody.errors import ConfigError
from kvcustody.integrations.events.publisher import EventPublisher, PublisherLimits
from kvcustody.integrations.events.sequence_gaps import Arrival, Delivered, Missed, Restarted
from kvcustody.integrations.events.subscriber import Reading, Subscriber
from standins.integrations.kv_wires import sockets, some_removed, some_stored
from standins.waiting import until

LOCAL = "tcp://127.0.0.1:0"
QUICK = Reading(check_seconds=0.1, replay_seconds=0.5)


def gather(subscriber: Subscriber, until: int, seconds: float = 60.0) -> list[Arrival]:
    """Arrivals until batch `until` has come."""
    out: list[Arrival] = []
    stop = time.monotonic() + seconds
    while not any(isinstance(item, Delivered) and item.sequence >= until for item in out):
        assert time.monotonic() < stop, f"waited in vain for {until}: {out[-3:]}"
        out += subscriber.poll(50)
    return out


def numbers(arrivals: list[Arrival]) -> list[object]:
    return [item.sequence if isinstance(item, Delivered) else item for item in arrivals]


@contextmanager
def pair(
    limits: PublisherLimits | None = None, reading: Reading = QUICK
) -> Iterator[tuple[EventPublisher, Subscriber]]:
    with (
        EventPublisher(LOCAL, LOCAL, limits=limits) as publisher,
        Subscriber(publisher.endpoint, publisher.replay_endpoint, reading=reading) as subscriber,
    ):
        yield publisher, subscriber


def test_what_was_published_before_we_came_is_replayed() -> None:
    with EventPublisher(LOCAL, LOCAL) as publisher:
        for _ in range(5):
            publisher.publish([some_stored()])
        until(lambda: publisher.stats().batches == 5)
        with Subscriber(publisher.endpoint, publisher.replay_endpoint, reading=QUICK) as subscriber:
            found = gather(subscriber, 4)
            assert numbers(found) == [0, 1, 2, 3, 4]
            assert all(isinstance(item, Delivered) and item.replayed for item in found)
            publisher.publish([some_stored()])
            assert numbers(gather(subscriber, 5)) == [5]


def test_a_stream_under_load_comes_whole() -> None:
    with pair() as (publisher, subscriber):
        for number in range(3000):
            publisher.publish([some_removed(number, 1)])
        assert numbers(gather(subscriber, 2999)) == list(range(3000))
        assert subscriber.stats().connected


def test_messages_that_the_wire_dropped_come_by_replay() -> None:
    """A queue of ten messages at the subscriber, and a publisher that drops what finds a full one."""
    tight = Reading(waiting_messages=10, check_seconds=60, replay_seconds=2)
    limits = PublisherLimits(peer_messages=10)
    with pair(limits, tight) as (publisher, subscriber):
        publisher.publish([some_stored()])
        gather(subscriber, 0)
        until(lambda: subscriber.poll(10) or subscriber.stats().connected)
        for number in range(3000):  # 6 KiB each: more than the kernel's buffers hold
            publisher.publish([some_stored(number, 200, block_tokens=0, tokens=())])
            until(lambda: publisher.stats().waiting < 100)
        until(lambda: publisher.stats().waiting == 0, 30)
        arrivals: list[Arrival] = []
        last = 0
        for _ in range(100):
            last = publisher.publish([some_stored()])
            arrivals += subscriber.poll(100)
            if arrivals and isinstance(arrivals[-1], Delivered) and arrivals[-1].sequence == last:
                break
        expected = 1
        for item in arrivals:
            first = item.first if isinstance(item, Missed) else item.sequence  # type: ignore[union-attr]
            assert first == expected, "nothing is skipped in silence"
            expected = item.last + 1 if isinstance(item, Missed) else first + 1
        assert any(isinstance(item, Delivered) and item.replayed for item in arrivals), "the control: some were dropped"


def test_a_gap_that_no_replay_fills_is_reported() -> None:
    with EventPublisher(LOCAL) as publisher, Subscriber(publisher.endpoint, reading=QUICK) as subscriber:
        until = time.monotonic() + 60
        found: list[Arrival] = []
        while not found and time.monotonic() < until:  # until the subscription is there, batches are lost
            publisher.publish([some_stored()])
            found = subscriber.poll(20)
        first = found[0]
        if isinstance(first, Missed):
            assert first.first == 0 and first.cause == "before observation began"
        assert subscriber.stats().replays == 0


def test_a_restarted_engine_at_the_same_address_is_recognised() -> None:
    first = EventPublisher(LOCAL, LOCAL)
    endpoint, replay = first.endpoint, first.replay_endpoint
    assert replay is not None
    with Subscriber(endpoint, replay, reading=QUICK) as subscriber:
        for _ in range(4):
            first.publish([some_stored()])
        assert numbers(gather(subscriber, 3)) == [0, 1, 2, 3]
        first.close()
        with EventPublisher(endpoint, replay) as second:
            second.publish([some_stored(50, 1)])
            assert numbers(gather(subscriber, 0)) == [Restarted(4), 0]
            assert subscriber.stats().disconnects >= 1


def test_a_restart_that_reached_the_same_number_is_recognised_too() -> None:
    first = EventPublisher(LOCAL, LOCAL)
    endpoint, replay = first.endpoint, first.replay_endpoint
    assert replay is not None
    slow = Reading(check_seconds=60, replay_seconds=1)
    with Subscriber(endpoint, replay, reading=slow) as subscriber:
        for _ in range(4):
            first.publish([some_stored()])
        gather(subscriber, 3) if subscriber.poll(200) == [] else None
        until(lambda: subscriber.stats().next_sequence >= 4, meanwhile=lambda: subscriber.poll(50))
        first.close()
        with EventPublisher(endpoint, replay) as second:
            for number in range(4):
                second.publish([some_stored(60 + number, 1)])
            until(lambda: second.stats().batches == 4)
            until(lambda: subscriber.poll(20) or subscriber.stats().connected)
            second.publish([some_stored(99, 1)])
            found = until(lambda: subscriber.poll(100), meanwhile=lambda: second.publish([some_stored(99, 1)]))
            assert Restarted(4) in found and numbers(found)[:3] == [Restarted(4), 0, 1]


def test_nobody_there_is_no_error_and_no_wait() -> None:
    with Subscriber("tcp://127.0.0.1:9", "tcp://127.0.0.1:9", reading=QUICK) as subscriber:
        started = time.monotonic()
        assert [subscriber.poll(10) for _ in range(5)] == [[]] * 5
        assert time.monotonic() - started < 30
        assert not subscriber.stats().connected and subscriber.stats().failed_replays >= 1


def test_frames_of_no_protocol_are_counted() -> None:
    with sockets(zmq.PUB) as [pub]:
        port = pub.bind_to_random_port("tcp://127.0.0.1")
        with Subscriber(f"tcp://127.0.0.1:{port}", reading=QUICK) as subscriber:
            until(lambda: subscriber.poll(10) or subscriber.stats().connected)
            until(lambda: (pub.send_multipart([b"", bytes(8), b"x"]), subscriber.poll(20))[1])
            strange = ([b""], [b"", b"short", b"x"], [b"", b"\xff" * 8, b""], [b"", bytes(8), b"x", b"y"])
            for frames in strange:
                pub.send_multipart(frames)
            until(lambda: subscriber.poll(20) or subscriber.stats().malformed == len(strange))


def test_a_message_beyond_the_limit_breaks_its_connection_and_nothing_else() -> None:
    reading = Reading(message_bytes=100_000, check_seconds=60, renew_seconds=0.3)
    with sockets(zmq.PUB) as [pub]:
        port = pub.bind_to_random_port("tcp://127.0.0.1")
        with Subscriber(f"tcp://127.0.0.1:{port}", reading=reading) as subscriber:
            until(lambda: subscriber.poll(10) or subscriber.stats().connected)
            pub.send_multipart([b"", bytes(8), bytes(1_000_000)])
            until(lambda: subscriber.poll(20) or subscriber.stats().disconnects >= 1)
            found = until(lambda: subscriber.poll(50), meanwhile=lambda: pub.send_multipart([b"", bytes(8), b"small"]))
            assert numbers(found)[0] == 0


@pytest.mark.parametrize("answer", ["nothing", "no end", "garbage", "other numbers"])
def test_a_replay_socket_that_lies_costs_a_counter(answer: str) -> None:
    with sockets(zmq.PUB, zmq.ROUTER) as [pub, router]:
        ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in (pub, router)]
        endpoints = [f"tcp://127.0.0.1:{port}" for port in ports]
        reading = Reading(check_seconds=60, replay_seconds=0.3)
        with Subscriber(*endpoints, reading=reading) as subscriber:
            import threading

            def lie() -> None:
                while router.poll(700):
                    client, *_ = router.recv_multipart()
                    end = [client, b"", b"", b"\xff" * 8, b""]
                    if answer == "no end":
                        router.send_multipart([client, b"", b"", bytes(8), b"zero"])
                    elif answer == "garbage":
                        router.send_multipart([client, b"x", b"y"])
                        router.send_multipart([client, b"", b"", b"abc", b"y"])
                        router.send_multipart(end)
                    elif answer == "other numbers":
                        for number in (7, 3, 3):
                            frames = [client, b"", b"", number.to_bytes(8, "big"), b"%d" % number]
                            router.send_multipart(frames)
                        router.send_multipart(end)

            liar = threading.Thread(target=lie)
            liar.start()
            started = time.monotonic()
            arrivals = subscriber.poll(50)
            assert time.monotonic() - started < 30
            liar.join()
            stats = subscriber.stats()
            if answer == "nothing":
                assert arrivals == [] and stats.failed_replays == 1
            elif answer == "garbage":
                assert arrivals == [] and stats.malformed >= 2
            elif answer == "no end":
                assert numbers(arrivals) == [0]
            else:
                assert numbers(arrivals) == [
                    Missed(0, 2, "before observation began"),
                    3,
                    Missed(4, 6, "not to be replayed"),
                    7,
                ]


def test_wrong_endpoints_are_one_line() -> None:
    for wrong in (("here",), ("tcp://127.0.0.1:1", "there")):
        with pytest.raises(ConfigError, match="is no endpoint"):
            Subscriber(*wrong)
    with pytest.raises(ConfigError, match="cannot be reached"):
        Subscriber("tcp://no host:1")
