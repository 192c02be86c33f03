"""Block events of a real engine over ZeroMQ, read with SGLang's own structs: the index, each tenant's part its own."""

from __future__ import annotations

import random
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from sglang.srt.disaggregation import kv_events as theirs

from kvcustody.clock import SystemClock
from kvcustody.governance.credentials.scope_token_secret import open_scope_key
from kvcustody.governance.edge.current_namespaces import CurrentNamespaces
from kvcustody.governance.edge.router_namespace import RouterNamespaces
from kvcustody.integrations.events import sglang_wire
from kvcustody.integrations.events.block_event import EventScope, cleared, removed, stored
from kvcustody.integrations.events.sequence_gaps import Delivered
from kvcustody.integrations.events.subscriber import Subscriber
from standins.engines.sglang.sglang_tiers import SMALL, clean, prompt
from standins.engines.sglang.sglang_workload import requests, run
from standins.engines.vllm.deployment import BRIEF_IDLE_SECONDS, POLICY

KINDS = ("BlockStored", "BlockRemoved", "AllBlocksCleared")
_theirs = msgspec.msgpack.Decoder(theirs.KVEventBatch)


class Router:
    """A subscriber that keeps what SGLang's own structs say, by the tenant that our field names."""

    def __init__(self, endpoint: str, replay: str) -> None:
        self.reader = Subscriber(endpoint, replay)
        self.index: dict[int, tuple[str, int, tuple[int, ...]]] = {}
        self.stored: dict[str, set[int]] = {}
        self.payloads: list[bytes] = []
        self.causes: set[str] = set()

    def read(self) -> None:
        for arrival in self.reader.poll(50):
            assert isinstance(arrival, Delivered), "a batch is missing"
            self.payloads.append(arrival.payload)
            plain, ours = _theirs.decode(arrival.payload).events, sglang_wire.decode(arrival.payload).events
            for event, scoped in zip(plain, ours, strict=True):
                self._take(event, scoped.kvcustody)

    def _take(self, event: Any, scope: Any) -> None:
        self.causes.add(scope.cause)
        if isinstance(event, theirs.AllBlocksCleared):
            assert scope.tenant == "*"
            self.index.clear()
        elif isinstance(event, theirs.BlockRemoved):
            for key in event.block_hashes:
                tenant, domain, _ = self.index.pop(key)
                assert (scope.tenant, scope.domain) == (tenant, domain), "a removal says whose it was"
        else:
            before = self.index[event.parent_block_hash][2] if event.parent_block_hash is not None else ()
            for at, key in enumerate(event.block_hashes):
                assert key not in self.index, "stored twice"
                before += tuple(event.token_ids[at * event.block_size : (at + 1) * event.block_size])
                self.index[key] = (scope.tenant, scope.domain, before)
            self.stored.setdefault(scope.tenant, set()).update(event.block_hashes)

    def agrees(self, engine: Any) -> None:
        """Its index becomes the engine's tree, page by page."""
        until = time.monotonic() + 20
        while True:
            self.read()
            truth = Counter((tenant, domain, tuple(tokens)) for tenant, domain, tokens in engine.probe("indexed"))
            told = Counter(self.index.values())
            if told == truth:
                return
            assert time.monotonic() < until, (len(told - truth), "too many,", len(truth - told), "too few")


@pytest.fixture
def listened(start: Callable[..., Any], new_deployment: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Starts an engine whose events are published, and a router that hears them."""
    routers: list[Router] = []
    with tempfile.TemporaryDirectory(prefix="kv") as folder:  # short: a socket's path has 107 bytes

        def one(form: str, tokens: str, policy: str = POLICY, **options: Any) -> tuple[Any, Router]:
            addresses = [f"ipc://{folder}/events", f"ipc://{folder}/replay"]
            settings = {
                "KVCUSTODY_KV_EVENTS_ENDPOINT": addresses[0],
                "KVCUSTODY_KV_EVENTS_REPLAY_ENDPOINT": addresses[1],
                "KVCUSTODY_KV_EVENTS_FORMAT": form,
                "KVCUSTODY_KV_EVENTS_TOKENS": tokens,
            }
            engine = start(deployment=new_deployment(policy=policy), settings=settings, **SMALL, **options)
            routers.append(Router(*addresses))
            return engine, routers[-1]

        yield one
        for router in routers:
            router.reader.close()


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_router_rebuilds_the_index_and_no_tenants_blocks_are_anothers(listened, page_size):
    engine, router = listened("sglang", "published", page_size=page_size)
    site, work = engine.deployment, requests(36)
    for first in range(0, len(work), 12):
        run(engine, work[first : first + 12], site.token)
        router.agrees(engine)
    shared = prompt(40, 120)
    for tenant in ("acme", "beta"):
        engine.run(shared, site.token(tenant))
    engine.run(shared, site.token("brief"))
    router.agrees(engine)
    mine, other = (
        {key for key, told in router.index.items() if told[0] == tenant and told[2] == tuple(shared)[: len(told[2])]}
        for tenant in ("acme", "beta")
    )
    assert len(mine) == len(other) >= len(shared) // page_size and not mine & other, "one prompt, two tenants' keys"
    every = list(router.stored.values())
    assert sum(map(len, every)) == len(set[int]().union(*every)), "no key is two tenants'"
    assert router.stored.keys() >= {"acme", "beta", "gamma", "brief"}
    # What ends is told: a deadline in an idle engine, an erasure, a flush.
    time.sleep(BRIEF_IDLE_SECONDS + 0.5)
    router.agrees(engine)
    assert "brief" not in {told[0] for told in router.index.values()}
    engine.probe("erase", tenant="acme")
    router.agrees(engine)
    assert "acme" not in {told[0] for told in router.index.values()} and router.index
    clean(engine)
    engine.engine.flush_cache()
    router.agrees(engine)
    assert not router.index and router.causes >= {"start", "evicted", "ended", "reset"}
    spoken = b"".join(router.payloads)
    events = [event for payload in router.payloads for event in msgspec.msgpack.decode(payload)[1]]
    salts = {event["cache_salt"] for event in events if "cache_salt" in event}
    assert salts and all(re.fullmatch("[0-9a-f]{32}", salt) for salt in salts), "names of doors alone"
    assert b"session_id" not in spoken


def test_tokens_stay_here_unless_they_are_published(listened):
    """The default: keys and scopes leave, and nothing of a prompt."""
    engine, router = listened("sglang", "withheld")
    engine.run(prompt(41, 120), engine.deployment.token("acme"))
    until = time.monotonic() + 20
    while not router.stored:
        assert time.monotonic() < until
        router.read()
    events = [event for payload in router.payloads for event in _theirs.decode(payload).events]
    assert sum(len(event.block_hashes) for event in events if isinstance(event, theirs.BlockStored)) >= 120
    assert not any(event.token_ids for event in events if isinstance(event, theirs.BlockStored))


def some(kind: Any, draw: random.Random) -> Any:
    """A random event of one of SGLang's classes; about every other optional field is at its default."""
    signed = [draw.getrandbits(63), -draw.getrandbits(63)]
    values = {
        "block_hashes": signed[: draw.randint(0, 2)],
        "parent_block_hash": draw.choice([None, signed[1]]),
        "token_ids": [draw.getrandbits(draw.randint(1, 31)) for _ in range(draw.randint(0, 20))],
        "block_size": draw.choice([1, 16]),
        "lora_id": draw.choice([None, 3]),
        "medium": draw.choice([None, "GPU", "CPU_PINNED", "DISK"]),
        "cache_salt": draw.choice([None, "salt"]),
        "session_id": draw.choice([None, "chat"]),
        "lora_name": draw.choice([None, "adapter-ä"]),
    }
    return kind(**{name: values[name] for name in kind.__struct_fields__})


def test_bytes_are_sglangs_for_two_thousand_random_batches():
    draw, encoder = random.Random(1), msgspec.msgpack.Encoder()
    for _ in range(2000):
        events = [some(getattr(theirs, draw.choice(KINDS)), draw) for _ in range(draw.randint(0, 3))]
        ts, rank = draw.random() * 1e9, draw.choice([None, 0, 3])
        payload = encoder.encode(theirs.KVEventBatch(ts=ts, events=events, attn_dp_rank=rank))
        ours = [
            getattr(sglang_wire, f"Sglang{type(event).__name__}")(
                **{name: getattr(event, name) for name in event.__struct_fields__}
            )
            for event in events
        ]
        read = sglang_wire.decode(payload)
        assert [msgspec.to_builtins(one) for one in read.events] == [msgspec.to_builtins(one) for one in ours]
        again = sglang_wire.encode(sglang_wire.SglangEventBatch(ts, ours, rank))
        assert _theirs.decode(again) == _theirs.decode(payload)
        if rank is not None:  # which we always write, and SGLang too; an absent one it writes as nil
            assert again == payload


def test_sglang_reads_what_we_publish_and_skips_our_field():
    scope = EventScope("acme", "tenant", "internal", 3, 5)
    keys = bytes(range(64))
    events = [
        cleared(5, "start"),
        stored(scope, keys, residency=7, block_tokens=2, tokens=[1, 2, 3, 4]),
        removed(scope, keys[:32], cause="ended"),
    ]
    read = _theirs.decode(sglang_wire.payload_of(events, 1.0, 0, "inc", tokens_published=True))
    short = [sglang_wire.short_hash(keys[:32]), sglang_wire.short_hash(keys[32:])]
    assert [type(event).__name__ for event in read.events] == [
        "AllBlocksCleared",
        "BlockStored",
        "BlockRemoved",
    ]
    assert read.events[1] == theirs.BlockStored(short, None, [1, 2, 3, 4], 2, None, "GPU")
    assert read.events[2].block_hashes == short[:1] and read.attn_dp_rank == 0


def test_dynamos_form_names_each_requester_as_doors_do(listened):
    """A tenant's blocks under its name and its subject's; what a client narrowed is an answer to no other request."""
    engine, router = listened("dynamo", "published", policy=POLICY.replace("scope: subject", "scope: tenant"))
    site, tokens = engine.deployment, prompt(42, 120)
    engine.run(prompt(43, 120), site.token("acme"), extra_key="mine")
    for tenant in ("acme", "beta"):
        engine.run(tokens, site.token(tenant))
    with open_scope_key(site.folder / "scope.key") as secret:
        names = CurrentNamespaces(RouterNamespaces(secret), SystemClock())
    spaces = {names.of("api-keys", tenant, *who) for tenant in ("acme", "beta") for who in ((), ("s",))}
    tokens_by_name: dict[str, list[int]] = {}
    until = time.monotonic() + 20
    while sum(map(len, tokens_by_name.values())) < 4 * len(tokens):
        assert time.monotonic() < until, {name: len(found) for name, found in tokens_by_name.items()}
        for arrival in router.reader.poll(50):
            for event in msgspec.msgpack.decode(arrival.payload)[1]:
                if event["type"] == "BlockStored":
                    tokens_by_name.setdefault(event["cache_salt"], []).extend(event["token_ids"])
    assert tokens_by_name.keys() == spaces
    assert all(found[: len(tokens)] == tokens for found in tokens_by_name.values())
