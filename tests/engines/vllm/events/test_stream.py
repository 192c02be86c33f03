"""A real vLLM publisher and a real block pool at the other end of our subscriber: protocol, truth, restarts."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

zmq = pytest.importorskip("zmq")
theirs = pytest.importorskip("vllm.distributed.kv_events")

from vllm.distributed.kv_events import KVEventBatch, ZmqEventPublisher  # noqa: E402

from kvcustody.clock import SystemClock  # noqa: E402
from kvcustody.integrations.events.observed_engine import ObservedEngine  # noqa: E402
from kvcustody.integrations.events.sequence_gaps import Arrival, Delivered, Missed, Restarted  # noqa: E402
from kvcustody.integrations.events.subscriber import Reading, Subscriber  # noqa: E402
from kvcustody.policies import library  # noqa: E402
from kvcustody.policies.table.compile import compile_policy  # noqa: E402

QUICK = Reading(check_seconds=0.2, replay_seconds=2.0)
TABLE = compile_policy(library.load("regulated-saas"), revision=1)
TENANT = TABLE.policy.tenants[0].id
SALT = "salt-of-the-first"


@pytest.fixture
def addresses() -> Iterator[tuple[str, str]]:
    """Where nobody else can bind. A short folder: a socket's path has 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="kv") as folder:
        yield f"ipc://{folder}/events", f"ipc://{folder}/replay"


@contextmanager
def vllm_publisher(endpoint: str, replay: str | None, **options: Any) -> Iterator[ZmqEventPublisher]:
    """vLLM's own publisher, which binds where the address is of its own machine."""
    made = ZmqEventPublisher(0, endpoint, replay, **options)
    try:
        yield made
    finally:
        made.shutdown()


def batch(number: int) -> KVEventBatch:
    event = theirs.BlockStored([number.to_bytes(32, "big")], None, [1] * 16, 16, None, "GPU", None, [(SALT,)])
    return KVEventBatch(ts=time.time(), events=[event])


def gather(subscriber: Subscriber, until: int, seconds: float = 20.0) -> list[Arrival]:
    out: list[Arrival] = []
    stop = time.monotonic() + seconds
    while not any(isinstance(item, Delivered) and item.sequence >= until for item in out):
        assert time.monotonic() < stop, f"waited in vain for {until}: {out[-3:]}"
        out += subscriber.poll(50)
    return out


def numbers(arrivals: list[Arrival]) -> list[object]:
    return [item.sequence if isinstance(item, Delivered) else item for item in arrivals]


def watcher() -> ObservedEngine:
    return ObservedEngine("vllm", TABLE, SystemClock(), tenants_by_salt={SALT: TENANT})


def test_vllms_own_stream_is_read_replayed_and_attributed(addresses: tuple[str, str]) -> None:
    endpoint, replay = addresses
    engine = watcher()
    with vllm_publisher(endpoint, replay) as publisher:
        for number in range(5):
            publisher.publish(batch(number))
        with Subscriber(endpoint, replay, reading=QUICK) as subscriber:
            found = gather(subscriber, 4)
            publisher.publish(batch(5))
            publisher.publish(KVEventBatch(ts=time.time(), events=[theirs.BlockRemoved([bytes(32)], "GPU")]))
            found += gather(subscriber, 6)
    assert numbers(found) == list(range(7))
    for item in found:
        engine.arrive(item)
    (share,) = engine.shares()
    assert (share.tenant, share.residencies, share.blocks) == (TENANT, 5, 5)
    assert not engine.stats().unsure


def test_batches_beyond_vllms_buffer_are_missed_and_said_so(addresses: tuple[str, str]) -> None:
    endpoint, replay = addresses
    with vllm_publisher(endpoint, replay, buffer_steps=3) as publisher:
        for number in range(10):
            publisher.publish(batch(number))
        until = time.monotonic() + 60
        while publisher._event_queue.qsize() and time.monotonic() < until:
            time.sleep(0.05)
        with Subscriber(endpoint, replay, reading=QUICK) as subscriber:
            assert numbers(gather(subscriber, 9)) == [Missed(0, 6, "before observation began"), 7, 8, 9]


def test_a_restarted_vllm_is_recognised(addresses: tuple[str, str]) -> None:
    endpoint, replay = addresses
    engine = watcher()
    with vllm_publisher(endpoint, replay) as publisher:
        subscriber = Subscriber(endpoint, replay, reading=QUICK)
        for number in range(3):
            publisher.publish(batch(number))
        for item in gather(subscriber, 2):
            engine.arrive(item)
    assert engine.stats().blocks == 3
    with subscriber, vllm_publisher(endpoint, replay) as publisher:
        publisher.publish(batch(50))
        found = gather(subscriber, 0)
    assert numbers(found) == [Restarted(3), 0]
    for item in found:
        engine.arrive(item)
    assert engine.stats().blocks == 1 and engine.stats().restarts == 1


def test_observed_blocks_are_those_in_vllms_own_index() -> None:
    """Requests through a real BlockPool: what its events make us believe is what its hash index holds."""
    msgspec = pytest.importorskip("msgspec")
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    size = 16
    pool = BlockPool(12, True, size, enable_kv_cache_events=True)
    hasher = get_request_block_hasher(size, sha256)
    sampling = SamplingParams(max_tokens=1)
    sampling.update_from_generation_config({}, 0)
    engine = watcher()
    for number in range(12):
        prompt = [number] * (size * (1 + number % 3))
        salt = SALT if number % 2 else None
        request = Request(str(number), prompt, sampling, None, cache_salt=salt, block_hasher=hasher)
        blocks = pool.get_new_blocks(len(request.block_hashes))
        pool.cache_full_blocks(request, blocks, 0, len(blocks), size, 0)
        pool.free_blocks(reversed(blocks))
        if number == 8:
            assert pool.reset_prefix_cache()
        payload = msgspec.msgpack.encode(KVEventBatch(ts=time.time(), events=pool.take_events()))
        engine.arrive(Delivered(number, payload, False))
        assert engine.stats().blocks == len(pool.cached_block_hash_to_block), number
    stats = engine.stats()
    assert stats.blocks and not stats.unsure and not stats.malformed and not stats.unmatched_removals
    tenants = {share.tenant for share in engine.shares()}
    assert tenants == {TENANT, None}
