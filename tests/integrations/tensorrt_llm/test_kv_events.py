"""The engine's events become governed ones with their scope, or nothing; ours in its form say whose they are."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from kvcustody.allocator.pool.block_state import NEVER_US
from kvcustody.errors import IsolationError
from kvcustody.governance.edge.erase_epochs import EpochTags, EraseEpochs, KnownEpochs
from kvcustody.governance.edge.named_requester import NamedRequester
from kvcustody.integrations.events.block_event import (
    CLEARED,
    REMOVED,
    STORED,
    BlockEvent,
    EventScope,
    cleared,
    removed,
    stored,
)
from kvcustody.integrations.tensorrt_llm.kv_events import EngineEventFeed, TensorRtLlmWire, WrittenStored
from standins.integrations.stand_in_engine import BLOCK_TOKENS
from standins.integrations.trtllm_world import PROMPT, WHOLE, TrtllmWorld

BLOCKS = WHOLE // BLOCK_TOKENS


class Kept:
    def __init__(self) -> None:
        self.events: list[BlockEvent] = []

    def publish(self, events: Sequence[BlockEvent], /) -> int:
        self.events += events
        return len(self.events)


def feed_of(world: TrtllmWorld, kept: Kept) -> EngineEventFeed:
    def may_export(tenant: str, classification: str) -> bool:
        return world.on_thread(lambda chunks: chunks.governor.may_export(tenant, classification))

    return EngineEventFeed(
        kept,
        world.custody.scopes,
        world.engine.take_events,
        may_export,
        epochs=world.custody.thread.known_epochs,
    )


def test_each_block_is_told_with_its_tenant_and_by_our_keys(world: TrtllmWorld) -> None:
    kept = Kept()
    feed = feed_of(world, kept)
    for tenant in ("acme", "beta"):
        world.engine.run(PROMPT, world.salt(tenant))
    feed.publish_pending()
    by_tenant = {
        tenant: [event for event in kept.events if event.scope.tenant == tenant] for tenant in ("acme", "beta")
    }
    assert [len(events) for events in by_tenant.values()] == [BLOCKS, BLOCKS]
    assert {event.kind for event in kept.events} == {STORED}
    keys = {event.keys for event in kept.events}
    assert len(keys) == 2 * BLOCKS and all(len(key) == 32 for key in keys)
    for events in by_tenant.values():
        assert [event.parent for event in events] == [b"", *(event.keys for event in events[:-1])]
        assert len({event.scope.domain for event in events}) == 1
    assert not any(len(event.tokens) or event.salt for event in kept.events), "no prompt and no salt"
    whose = {event.scope.owner for event in kept.events}
    assert {(of.tenant, of.subject) for of in whose if of} == {("acme", "s"), ("beta", "s")}


def test_removals_follow_their_stores(world: TrtllmWorld) -> None:
    kept = Kept()
    feed = feed_of(world, kept)
    world.engine.run(PROMPT, world.salt("acme"))
    feed.publish_pending()
    told = {event.keys for event in kept.events}
    world.engine.forget_device()
    feed.publish_pending()
    gone = [event for event in kept.events if event.kind == REMOVED]
    assert {event.keys for event in gone} == told and {event.scope.tenant for event in gone} == {"acme"}
    assert feed._told_blocks == {}


def test_what_the_connector_was_not_told_of_is_refused(world: TrtllmWorld) -> None:
    """Positional events without a scope; the control is the first test."""
    kept = Kept()
    feed = feed_of(world, kept)
    world.custody.scheduler._learn = None  # as under the engine's second cache manager
    world.engine.run(PROMPT, world.salt("acme"))
    world.engine.forget_device()
    feed.publish_pending()
    assert kept.events == [] and feed.counts["unscoped"] == 1


def test_a_block_under_another_s_parent_is_refused(world: TrtllmWorld) -> None:
    kept = Kept()
    feed = feed_of(world, kept)
    for tenant in ("acme", "beta"):
        world.engine.run(PROMPT, world.salt(tenant))
    first, second = (event["data"] for event in world.engine.take_events())
    mixed = {
        "type": "stored",
        "parent_hash": first["blocks"][0]["block_hash"],
        "blocks": second["blocks"][1:],
    }
    unknown = {"type": "stored", "parent_hash": 12345, "blocks": second["blocks"][1:]}
    world.engine.events = [{"event_id": n, "data": one, "window_size": 1} for n, one in enumerate((mixed, unknown))]
    feed.publish_pending()
    assert kept.events == [] and feed.counts["unscoped"] == 2


def test_moves_parts_and_what_is_malformed_are_counted(world: TrtllmWorld) -> None:
    kept = Kept()
    feed = feed_of(world, kept)
    world.engine.run(PROMPT, world.salt("acme"))
    [event] = world.engine.take_events()
    blocks = event["data"]["blocks"]
    moved = {
        "type": "updated",
        "block_hash": blocks[1]["block_hash"],
        "cache_level": {"type": "event_diff", "new_value": 1, "old_value": 0},
        "priority": None,
    }
    raised = {
        "type": "updated",
        "block_hash": blocks[0]["block_hash"],
        "cache_level": None,
        "priority": {"type": "event_diff", "new_value": 90, "old_value": 35},
    }
    part = {
        "type": "stored",
        "parent_hash": None,
        "blocks": [{**blocks[0], "tokens": blocks[0]["tokens"][:3]}],
    }
    made = {"type": "created", "num_blocks_per_cache_level": [64, 0]}
    said = (made, event["data"], moved, raised, part)
    world.engine.events = [{"event_id": n, "data": one, "window_size": 4096} for n, one in enumerate(said)]
    world.engine.events += [{"event_id": 9, "data": {"type": "stolen"}}, {}]
    feed.publish_pending()
    assert [one.kind for one in kept.events] == [CLEARED, *[STORED] * BLOCKS, REMOVED]
    assert dict(feed.counts) == {"off the device": 1, "partial": 1, "malformed": 2}


SCOPE = EventScope(
    "acme", "tenant", "internal", 3, 7, NamedRequester("api-keys", "acme"), NamedRequester("api-keys", "acme")
)


def test_ours_in_its_form_say_whose_they_are() -> None:
    wire = TensorRtLlmWire(4096)
    keys = bytes(range(32)) + bytes(range(32, 64))
    tokens = list(range(16))
    batch = wire.events_of(
        [
            stored(SCOPE, keys, residency=5, block_tokens=8, tokens=tokens),
            removed(SCOPE, keys[:32], cause="erased"),
            removed(SCOPE, bytes(32), cause="never told"),
            cleared(7, "worker stopped"),
        ],
        "one",
    )
    events = msgspec.to_builtins(batch)
    assert [one["event_id"] for one in events] == [0, 1, 2]
    assert [one["data"]["type"] for one in events] == ["stored", "removed", "removed"]
    first = events[0]["data"]
    assert first["parent_hash"] is None
    assert [one["tokens"] for one in first["blocks"]] == [[], []], "withheld"
    assert events[1]["data"]["block_hashes"] == [first["blocks"][0]["block_hash"]]
    assert events[2]["data"]["block_hashes"] == [first["blocks"][1]["block_hash"]]
    for one in events:
        assert (one["kvcustody"]["tenant"], one["kvcustody"]["revision"]) == ("acme", 7)
    published = TensorRtLlmWire(4096, tokens_published=True).events_of(
        [stored(SCOPE, keys, residency=5, block_tokens=8, tokens=tokens)]
    )
    [event] = msgspec.to_builtins(published)
    assert [one["token_id"] for one in event["data"]["blocks"][1]["tokens"]] == tokens[8:]


def test_an_event_without_a_scope_is_not_written() -> None:
    with pytest.raises(IsolationError):
        TensorRtLlmWire(4096).events_of([BlockEvent(STORED, SCOPE._replace(tenant=""), bytes(32), block_tokens=8)])


def test_what_is_written_is_read_again(world: TrtllmWorld) -> None:
    kept, again = Kept(), Kept()
    feed = feed_of(world, kept)
    world.engine.run(PROMPT, world.salt("acme"))
    feed.publish_pending()
    written = TensorRtLlmWire(4096).events_of(kept.events)
    scopes = world.custody.scopes
    by_key = {block.key: block for block in scopes._blocks.values()}
    for one, event in zip(written, kept.events, strict=True):
        assert isinstance(one.data, WrittenStored)
        [block] = one.data.blocks
        assert scopes.of(block.block_hash) is None, "the engine's hashes are others"
        scopes._blocks[block.block_hash] = by_key[event.keys]
    reader = EngineEventFeed(again, scopes, lambda: [msgspec.to_builtins(one) for one in written], lambda *_: True)
    reader.publish_pending()
    assert [(one.keys, one.parent, one.scope) for one in again.events] == [
        (one.keys, one.parent, one.scope) for one in kept.events
    ]


def test_epochs_that_the_worker_hears_reach_the_publisher(world: TrtllmWorld) -> None:
    """With them it names requesters, and removes what routers know under names that have ended."""

    class Naming(Kept):
        def __init__(self) -> None:
            super().__init__()
            self.known: list[KnownEpochs] = []

        def take_epochs(self, known: KnownEpochs, /) -> None:
            self.known.append(known)

    kept = Naming()
    feed = feed_of(world, kept)
    feed.publish_pending()
    assert kept.known == [], "control: none was heard"
    known = KnownEpochs(EraseEpochs(version=3), EpochTags(bytes(32)))
    world.on_thread(lambda chunks: chunks.governor.take_epochs(known, NEVER_US))
    for _ in range(2):
        feed.publish_pending()
    assert kept.known == [known], "once for each"
