"""What a real engine tells routers: the truth after every step, with a scope on each event; nothing unless asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import zmq

from kvcustody.allocator.prefix.tree import PrefixTree
from kvcustody.governance.erasure.selector import Selector
from kvcustody.integrations.events.block_event import CLEARED, STORED, BlockEvent, check_event, split_keys
from kvcustody.integrations.transformers.batching.governed_batching import GovernedBatching
from standins.engines.transformers.continuous_world import (
    ANYBODY,
    IDENTITY,
    IDLE_US,
    TENANTS,
    Governed,
    batching,
    generation,
    governed,
    model,
    person,
    policy,
    prompt,
    settings,
)


class Router:
    """A publisher that keeps what a router would: whose blocks are where."""

    def __init__(self) -> None:
        self.owner_of: dict[bytes, str] = {}
        self.seen: Counter[tuple[str, str]] = Counter()
        self.batches = 0

    def publish(self, events: Sequence[BlockEvent], /) -> int:
        self.batches += 1
        for event in events:
            check_event(event)
            keys = split_keys(event.keys)
            self.seen[event.kind, event.cause] += len(keys)
            if event.kind == CLEARED:
                self.owner_of.clear()
            elif event.kind == STORED:
                assert event.residency and not set(keys) & set(self.owner_of)
                assert not event.parent or self.owner_of[event.parent] == event.scope.tenant
                self.owner_of |= dict.fromkeys(keys, event.scope.tenant)
            else:
                assert {self.owner_of.pop(key, "nobody") for key in keys} == {event.scope.tenant}
        return self.batches


def reusable(engine: Governed) -> set[bytes]:
    """The keys of every block that a request of its domain could attach now."""
    now_us = engine.clock.now_us()
    found: set[bytes] = set()
    for manager in engine.governor.managers:
        for node in manager.tree.nodes():
            if manager.tree.attachable(node, node.domain, now_us):
                found.update(split_keys(node.keys))
    return found


def drive(engine: Governed, router: Router) -> None:
    """Step until idle; after every step the router knows exactly what can be reused."""
    while engine.step() or engine.processor.has_pending_requests():
        engine.custody.publish_events()
        assert set(router.owner_of) == reusable(engine)


def churn(engine: Governed, router: Router) -> None:
    """Hits, decoded blocks, forks, nobody's requests, pressure, cancellation, erasure, expiry."""
    for turn in range(5):
        for name in "ab":
            engine.submit(person(name), prompt(40) + prompt(20 + turn, turn))
        engine.add(prompt(30))
        gone = engine.submit(person("a"), prompt(33, turn))
        engine.step()
        engine.batching.cancel(gone)
        drive(engine, router)
    engine.governor.call(lambda governor: governor.erase(Selector(tenant="b")))
    engine.batching.tick()
    assert set(router.owner_of) == reusable(engine) and set(router.owner_of.values()) == {"a"}
    engine.clock.advance(IDLE_US + 100_000)
    engine.batching.tick()
    assert not router.owner_of


PRESSED = {"config": batching(num_blocks=48), "text": policy(TENANTS + ANYBODY)}
FORKED = generation(num_return_sequences=2, do_sample=True, max_new_tokens=12)


def test_stored_less_removed_is_what_can_be_reused_after_every_step() -> None:
    router = Router()
    with governed(**PRESSED, generate=FORKED, publisher=router, tick_seconds=None) as engine:
        churn(engine, router)
        causes = {cause for kind, cause in router.seen if kind != STORED}
        assert {"pressure", "expired", "erased"} <= causes, causes
        engine.submit(person(), prompt(40))
        engine.run()
    assert router.seen[CLEARED, "shutdown"] == 0 and (CLEARED, "shutdown") in router.seen
    assert not router.owner_of


def test_positive_control_ends_that_are_not_told_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(self: PrefixTree, *args: object) -> None:
        kept, self.changes = self.changes, None
        collect(self, *args)
        self.changes = kept

    collect = PrefixTree._gather_end
    monkeypatch.setattr(PrefixTree, "_gather_end", silent)
    router = Router()
    with (
        governed(**PRESSED, generate=FORKED, publisher=router, tick_seconds=None) as engine,
        pytest.raises(AssertionError),
    ):
        churn(engine, router)


def test_a_step_that_stores_and_removes_nothing_tells_nothing() -> None:
    router = Router()
    with governed(generate=generation(max_new_tokens=30), publisher=router, tick_seconds=None) as engine:
        engine.submit(person(), prompt(17))
        engine.step()
        engine.step()
        before = router.batches
        for _ in range(20):
            engine.step()
        assert router.batches == before == 1  # the prompt's blocks; decoded ones may be found when it has ended


def test_nothing_is_recorded_where_nobody_listens() -> None:
    with governed() as engine:
        engine.submit(person(), prompt(40))
        engine.run()
        assert engine.custody.events is None
        assert [manager.tree.changes for manager in engine.governor.managers] == [None]


@pytest.mark.system("settings open another stream of events")
def test_settings_open_a_stream_with_scopes_and_without_tokens(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path / 'events'}"
    chosen = settings(tmp_path).model_copy(update={"kv_events_endpoint": endpoint})
    context = zmq.Context()
    subscriber = context.socket(zmq.SUB)
    subscriber.setsockopt(zmq.SUBSCRIBE, b"")
    subscriber.connect(endpoint)
    try:
        events: list[dict[str, object]] = []
        with GovernedBatching(
            model(), chosen, IDENTITY, generation_config=generation(), batching_config=batching()
        ) as engine:
            for turn in range(20):  # until the subscription has reached the publisher
                engine.generate_batch(person(), [prompt(40, turn)])
                if subscriber.poll(100):
                    break
        while subscriber.poll(1000):
            events += msgspec.msgpack.decode(subscriber.recv_multipart()[2])[1]
    finally:
        context.destroy(linger=0)
    kinds = [event["type"] for event in events]
    assert "BlockStored" in kinds and kinds[-1] == "AllBlocksCleared"
    for event in events:
        if event["type"] == "BlockStored":
            scope = event["kvcustody"]
            assert isinstance(scope, dict) and (scope["tenant"], scope["scope"]) == ("a", "subject")
            assert scope["residency"] and scope["incarnation"] and event["token_ids"] == []
