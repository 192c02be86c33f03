"""Block events of a governed vLLM tell the truth: stored minus removed is vLLM's index, after every step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from kvcustody.clock import SystemClock
from kvcustody.errors import IsolationError
from kvcustody.governance.credentials.scope_token_secret import open_scope_key
from kvcustody.governance.edge.current_namespaces import CurrentNamespaces
from kvcustody.governance.edge.named_requester import named_requester
from kvcustody.governance.edge.router_namespace import RouterNamespaces
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.identity.domain_spec import ScopeKind
from kvcustody.governance.identity.principal import Principal
from kvcustody.integrations.events.block_event import (
    CLEARED,
    REMOVED,
    STORED,
    BlockEvent,
    check_event,
    split_keys,
)
from kvcustody.integrations.vllm.scheduler import kv_events as block_events
from standins.engines.vllm import scheduler_rig
from standins.engines.vllm.scheduler_rig import BLOCK_TOKENS, Rig, prompt


class Router:
    """Keeps the index that its events tell of, by tenant."""

    def __init__(self) -> None:
        self.batches: list[Sequence[BlockEvent]] = []
        self.index: dict[tuple[bytes, int], str] = {}

    @property
    def events(self) -> Iterator[BlockEvent]:
        """All of them, in order."""
        return (event for batch in self.batches for event in batch)

    def publish(self, events: Sequence[BlockEvent], /) -> int:
        """As the real publisher, every event is checked; as a strict router, nothing is stored or removed twice."""
        for event in events:
            check_event(event)
            self._take(event)
        self.batches.append(events)
        return len(self.batches)

    def _take(self, event: BlockEvent) -> None:
        if event.kind == CLEARED:
            self.index.clear()
        parent = event.parent
        for key in split_keys(event.keys):
            place = (key, event.group or 0)
            if event.kind == STORED:
                assert place not in self.index
                assert not parent or self._follows(parent, event)
                self.index[place] = event.scope.tenant
            else:
                assert self.index.pop(place) == event.scope.tenant

    def _follows(self, parent: bytes, event: BlockEvent) -> bool:
        """Only blocks of one tenant follow each other; in a window, what they follow may have left."""
        return event.group is not None or self.index.get((parent, 0)) == event.scope.tenant


class TruthRig(Rig):
    """A rig that compares the router with vLLM's own blocks after every step."""

    router: Router | None = None

    def step(self) -> dict[str, int]:
        """See `Rig`."""
        hits = super().step()
        if self.router is not None:
            self.side.state.deferred.flush_unchecked()
            self.side.state.events.publish_pending()
            assert set(self.router.index) == self.index()
        return hits

    def index(self) -> set[tuple[bytes, int]]:
        """Key and group of every block that has one."""
        blocks = self.scheduler.kv_cache_manager.block_pool.blocks
        keys = [block.block_hash for block in blocks if block.block_hash is not None]
        return {(key[:-4], int.from_bytes(key[-4:], "big")) for key in keys}


@pytest.fixture
def rig(model: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., TruthRig]:
    """Makes rigs with a router."""

    def make(**named: object) -> TruthRig:
        one = TruthRig(model, monkeypatch, **named)
        one.router = Router()
        one.side.publish_to(one.router)
        return one

    return make


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("windows", [False, True])
def test_stored_minus_removed_is_the_index(rig: Callable[..., TruthRig], windows: bool, asynchronous: bool) -> None:
    """Chunked prefill, decode, preemption, eviction, twins, in a pool that holds few."""
    engine = rig(blocks=36, windows=windows, asynchronous=asynchronous)
    for turn in range(30):
        ids = prompt(30 + 11 * (turn % 9), seed=turn % 7)
        engine.add(ids, "alpha" if turn % 3 else "beta", n=3 + 5 * (turn % 6))
        if turn % 4 == 3:
            engine.step()
    engine.run()
    engine.verify()
    events = list(engine.router.events)
    assert {event.scope.tenant for event in events if event.kind == STORED} == {"alpha", "beta"}
    assert {event.kind for event in events} == {STORED, REMOVED}
    assert "evicted" in {event.cause for event in events}
    assert all(event.scope.scope and event.scope.domain and event.scope.revision for event in events)
    assert not any(len(event.tokens) or event.salt for event in events)


@pytest.mark.parametrize("how", ["expiry", "erasure", "reset", "vllm"])
def test_every_way_out_of_the_index_is_told(rig: Callable[..., TruthRig], how: str) -> None:
    engine = rig()
    for tenant in ("alpha", "beta"):
        engine.ask(prompt(100), tenant)
    assert len(engine.router.index) == 12
    pool = engine.scheduler.kv_cache_manager.block_pool
    if how == "expiry":
        engine.clock.advance(61_000_000)
    elif how == "erasure":
        engine.port.erase(Selector("alpha"))
    elif how == "reset":
        assert engine.scheduler.kv_cache_manager.reset_prefix_cache()
    else:
        pool.evict_blocks({block.block_id for block in pool.blocks if block.block_hash is not None})
    engine.step()
    left = {"beta"} if how == "erasure" else set()
    assert set(engine.router.index.values()) == left
    last = engine.router.batches[-1]
    causes = {"reset": "reset", "vllm": "evicted by the engine"}
    assert {event.cause for event in last} == {causes.get(how, "ended")}
    assert {event.kind for event in last} == {CLEARED if how == "reset" else REMOVED}


def test_a_twin_is_told_once_and_leaves_with_the_last(rig: Callable[..., TruthRig]) -> None:
    """Two requests compute the same blocks at once: one key, two blocks."""
    engine = rig(batched_tokens=256)
    twins = [engine.add(prompt(100), "alpha", n=n) for n in (2, 30)]
    engine.run({twins[0].request_id})
    assert sum(len(event.keys) // 32 for event in engine.router.events if event.kind == STORED) == 6
    engine.clock.advance(61_000_000)
    engine.step()
    assert len(engine.router.index) >= 6  # the second still runs on its own blocks
    engine.run()
    engine.clock.advance(61_000_000)
    engine.step()
    assert not engine.router.index


def test_tokens_leave_only_where_the_setting_says_so(
    rig: Callable[..., TruthRig], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ids = prompt(100)
    whole = ids[: len(ids) // BLOCK_TOKENS * BLOCK_TOKENS]
    for setting, expected in (("withheld", []), ("published", whole)):
        monkeypatch.setenv("KVCUSTODY_KV_EVENTS_TOKENS", setting)
        monkeypatch.setenv("KVCUSTODY_SCOPE_TOKEN_KEY_PATH", str(tmp_path / "scope.key"))
        one = rig()
        one.ask(ids, "alpha")
        assert [token for event in one.router.events for token in event.tokens] == expected


def test_the_setting_opens_a_publisher(model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On the wire, as a router asks for what it missed: every event with its scope."""
    monkeypatch.setenv("KVCUSTODY_KV_EVENTS_ENDPOINT", f"ipc://{tmp_path}/live")
    monkeypatch.setenv("KVCUSTODY_KV_EVENTS_REPLAY_ENDPOINT", f"ipc://{tmp_path}/replay")
    engine = TruthRig(model, monkeypatch)
    engine.ask(prompt(100), "alpha")
    engine.clock.advance(61_000_000)
    engine.step()
    told = _replay(f"ipc://{tmp_path}/replay")
    assert [event["type"] for event in told[:2]] == ["AllBlocksCleared", "BlockStored"]
    assert told[-1]["type"] == "BlockRemoved"
    assert all(event["kvcustody"]["tenant"] == "alpha" for event in told[1:])
    assert not any(event.get("token_ids") for event in told)
    engine.side.close()


@pytest.mark.parametrize("scope", ["tenant", "subject"])
def test_a_router_is_told_in_the_doors_namespaces(
    scope: str, model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Dynamo's form: one prompt of two tenants under the names that the door makes of their requests."""
    policy = scheduler_rig.POLICY.replace("profile: shared", f"profile: shared\nscope: {scope}")
    assert policy != scheduler_rig.POLICY
    monkeypatch.setattr(scheduler_rig, "POLICY", policy)
    key, live, replayed = (tmp_path / name for name in ("scope.key", "live", "replay"))
    monkeypatch.setenv("KVCUSTODY_SCOPE_TOKEN_KEY_PATH", str(key))
    monkeypatch.setenv("KVCUSTODY_KV_EVENTS_ENDPOINT", f"ipc://{live}")
    monkeypatch.setenv("KVCUSTODY_KV_EVENTS_REPLAY_ENDPOINT", f"ipc://{replayed}")
    monkeypatch.setenv("KVCUSTODY_KV_EVENTS_FORMAT", "dynamo")
    monkeypatch.setenv("KVCUSTODY_KV_EVENTS_TOKENS", "published")
    engine = TruthRig(model, monkeypatch)
    ids = prompt(100)
    for tenant in ("alpha", "beta"):
        engine.ask(ids, tenant)
    engine.clock.advance(61_000_000)
    engine.step()
    events = _replay(f"ipc://{replayed}")
    engine.side.close()
    stores = [event for event in events if event["type"] == "BlockStored"]
    with open_scope_key(key) as secret:
        names = CurrentNamespaces(RouterNamespaces(secret), SystemClock())
    places = [named_requester(Principal("idp", tenant, "u"), ScopeKind(scope)) for tenant in ("alpha", "beta")]
    expected = {names.of(*place) for place in places if place is not None}
    assert len(expected) == 2
    assert {event["cache_salt"] for event in stores} == expected
    whole = ids[: len(ids) // BLOCK_TOKENS * BLOCK_TOKENS]
    for namespace in expected:
        mine = [event["token_ids"] for event in stores if event["cache_salt"] == namespace]
        assert [token for each in mine for token in each] == whole
    assert events[-1]["type"] == "BlockRemoved"


def _replay(endpoint: str) -> list[dict[str, Any]]:
    """All that was published, once the removal is among it."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as asks:
        asks.setsockopt(zmq.RCVTIMEO, 10_000)
        asks.setsockopt(zmq.LINGER, 0)
        asks.connect(endpoint)
        for _ in range(100):
            events: list[dict[str, Any]] = []
            asks.send_multipart([b"", (0).to_bytes(8, "big")])
            while True:
                *_, payload = asks.recv_multipart()
                if not payload:
                    break
                events += msgspec.msgpack.decode(payload)[1]
            if events and events[-1]["type"] == "BlockRemoved":
                return events
    raise AssertionError("the removal was never published")


def test_nobody_listens_nothing_is_collected(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TruthRig(model, monkeypatch)
    engine.ask(prompt(100), "alpha")
    assert engine.side.state.events is None
    index = engine.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block
    assert not isinstance(index, block_events.WatchedIndex)
    with pytest.raises(IsolationError, match="empty index"):
        engine.side.publish_to(Router())


def test_an_event_without_scope_is_not_published(rig: Callable[..., TruthRig], monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: with its scope dropped, the event is refused."""
    original = block_events.removed
    monkeypatch.setattr(block_events, "removed", lambda scope, keys, **named: original(None, keys, **named))
    one = rig()
    one.ask(prompt(100), "alpha")
    one.clock.advance(61_000_000)
    with pytest.raises(IsolationError, match="without a scope"):
        one.step()


@pytest.mark.parametrize("drop", ["stored", "removed"])
def test_a_dropped_event_is_seen(rig: Callable[..., TruthRig], monkeypatch: pytest.MonkeyPatch, drop: str) -> None:
    """The control of the comparison itself."""
    engine = rig()
    engine.ask(prompt(40), "alpha")
    publish = engine.router.publish
    monkeypatch.setattr(engine.router, "publish", lambda events: publish([e for e in events if e.kind != drop]))
    with pytest.raises((AssertionError, KeyError)):
        engine.ask(prompt(100, 1), "beta")
        engine.clock.advance(61_000_000)
        engine.step()
