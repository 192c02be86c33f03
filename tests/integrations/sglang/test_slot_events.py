"""Block events of the tree: what a router rebuilds from them is what the pages of the tree hold, after every move."""

from __future__ import annotations

import random
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest

from kvcustody.clock import VirtualClock
from kvcustody.errors import IsolationError
from kvcustody.governance.edge.named_requester import NamedRequester
from kvcustody.governance.erasure.selector import Selector
from kvcustody.integrations.events.block_event import (
    CLEARED,
    REMOVED,
    STORED,
    BlockEvent,
    check_event,
    split_keys,
)
from kvcustody.integrations.events.publisher import EventPublisher
from kvcustody.integrations.sglang import slot_events
from kvcustody.integrations.sglang.page_tree import PageTree
from kvcustody.integrations.sglang.slot_events import WatchedTree
from kvcustody.testkit.conformance.policy import IDLE_US, policy
from standins.integrations.paged_engine import PagedEngine
from standins.integrations.router_names import lasting_names
from standins.integrations.segmented_engine import COVERED, POLICY, SHARED, SegmentedEngine
from standins.integrations.slot_prompt import PROMPT


class Told(NamedTuple):
    """A page as the events tell it: whose, and every token before its end."""

    tenant: str
    domain: int
    tokens: tuple[int, ...]


class Router:
    """Rebuilds the index from events alone; a strict one, to which nothing is stored or removed twice."""

    def __init__(self) -> None:
        self.events: list[BlockEvent] = []
        self.index: dict[bytes, Told] = {}

    def publish(self, events: Sequence[BlockEvent], /) -> int:
        for event in events:
            check_event(event)
            self._take(event)
        self.events += events
        return len(self.events)

    def _take(self, event: BlockEvent) -> None:
        if event.kind == CLEARED:
            self.index.clear()
        size, scope = event.block_tokens, event.scope
        before = self.index[event.parent].tokens if event.parent else ()
        for at, key in enumerate(split_keys(event.keys)):
            if event.kind == STORED:
                assert key not in self.index, "stored twice"
                before += tuple(event.tokens[at * size : (at + 1) * size])
                self.index[key] = Told(scope.tenant, scope.domain, before)
            else:
                gone = self.index.pop(key)
                assert (gone.tenant, gone.domain) == (scope.tenant, scope.domain)


class ListenedEngine(PagedEngine):
    """With a watched tree and a router that is told tokens too."""

    trees = WatchedTree

    def __init__(self, *given, with_tokens: bool = True, **named) -> None:
        super().__init__(*given, **named)
        self.router = Router()
        self.custody.publish_to(self.router, with_tokens=with_tokens)


class ListenedSegments(ListenedEngine, SegmentedEngine):
    """That, with tiers and a segment."""


def listened(size: int = 1, pages: int = 64, **named) -> ListenedEngine:
    return ListenedEngine(policy(**named), VirtualClock(), pages, size)


def compare(engine: PagedEngine) -> None:
    """The router's index is what the tree's pages were computed from, whosever they are."""
    engine.custody.events.publish_pending()
    pool = engine.port.pool
    truth = Counter(
        Told(pool.domains[int(pool.tag[page])].owner.name, int(pool.tag[page]), engine.content[page][1])
        for page in np.flatnonzero(engine.tree.indexed()).tolist()
    )
    assert Counter(engine.router.index.values()) == truth, "the router's index is the tree"


def drawn_work(seed: int, acts: int = 160) -> PagedEngine:
    """Chunks, splits, twins, preemption, evictions, deadlines, erasures and resets; compared after each act."""
    draw = random.Random(seed)
    own = listened(draw.choice((1, 1, 4)), pages=draw.choice((40, 90)))
    texts = [[draw.randrange(1, 5) for _ in range(draw.randrange(3, 13))] for _ in range(5)]
    for _ in range(acts):
        act = draw.random()
        own.clock.advance(1000)
        if act < 0.3:
            tokens = draw.choice(texts) + [draw.randrange(1, 5) for _ in range(draw.randrange(1, 6))]
            narrowed = draw.choice(("", "", "mine"))
            own.ask(draw.choice(("alpha", "beta", None)), draw.choice(("x", "y")), tokens, narrowed)
        elif act < 0.55 and own.waiting:
            own.start(draw.choice(list(own.waiting)))
        elif act < 0.8 and own.running:
            own.compute(draw.choice(list(own.running)), draw.randrange(1, 9))
        elif act < 0.9 and own.running:
            own.finish(draw.choice(list(own.running)), draw.choice(("finished", "aborted", "preempted")))
        elif act < 0.93:
            own.custody.make_room(draw.randrange(1, 9))
        elif act < 0.96:
            own.clock.advance(draw.randrange(IDLE_US))
            own.custody.step()
        elif act < 0.98:
            own.port.erase(Selector(tenant="alpha", subject=draw.choice(("x", "y"))))
        elif act < 0.985:
            own.custody.clear()
        compare(own)
    return own


@pytest.mark.parametrize("seed", range(12))
def test_stored_minus_removed_is_the_tree(seed):
    own = drawn_work(seed)
    told = own.router.events
    assert {event.scope.tenant for event in told if event.kind == STORED} == {"alpha", "beta"}
    assert {event.kind for event in told} >= {STORED, REMOVED}
    assert {event.cause for event in told if event.kind == REMOVED} <= {"evicted", "ended"}
    assert all(event.scope.scope and event.scope.revision for event in told)
    assert not any(event.salt for event in told)


@pytest.mark.parametrize("missed", ["removal", "split"])
def test_a_removal_that_is_not_told_is_noticed(monkeypatch, missed):
    """The control of every comparison above."""
    if missed == "removal":
        monkeypatch.setattr(WatchedTree, "_cut_off", PageTree._cut_off)
    else:
        monkeypatch.setattr(WatchedTree, "_split", PageTree._split)
    with pytest.raises((AssertionError, KeyError)):
        for seed in range(12):
            drawn_work(seed)


@pytest.mark.parametrize("how", ["expiry", "erasure", "reset", "room"])
def test_every_way_out_of_the_tree_is_told(how):
    engine = listened()
    for tenant in ("alpha", "beta"):
        engine.run(tenant, "x", PROMPT)
    compare(engine)
    assert len(engine.router.index) == 2 * len(PROMPT)
    if how == "expiry":
        engine.clock.advance(IDLE_US + 10_000)
    elif how == "erasure":
        engine.port.erase(Selector("alpha"))
    elif how == "reset":
        engine.custody.clear()
    else:
        engine.custody.make_room(63)
    before = len(engine.router.events)
    engine.custody.step()
    compare(engine)
    assert {told.tenant for told in engine.router.index.values()} == ({"beta"} if how == "erasure" else set())
    last = engine.router.events[before:]
    assert {event.cause for event in last} == {{"reset": "reset", "room": "evicted"}.get(how, "ended")}
    assert {event.kind for event in last} == {CLEARED if how == "reset" else REMOVED}


def test_keys_do_not_depend_on_how_the_chain_came():
    """The same prompt at once, in chunks, behind a split and after an eviction: the same keys, other tenants' none."""
    keys = []
    for chunks in ((13,), (2, 5, 6)):
        engine = listened()
        rid = engine.ask("alpha", "ann", PROMPT)
        engine.start(rid)
        for count in chunks:
            engine.chunk(rid, count)
        engine.finish(rid)
        engine.run("alpha", "ann", [*PROMPT[:6], 40, 41])  # splits
        compare(engine)
        first = {told.tokens: key for key, told in engine.router.index.items()}
        engine.custody.make_room(63)
        engine.run("alpha", "ann", PROMPT)
        engine.run("beta", "ann", PROMPT)
        compare(engine)
        again = {told.tokens: key for key, told in engine.router.index.items() if told.tenant == "alpha"}
        others = {told.tokens: key for key, told in engine.router.index.items() if told.tenant == "beta"}
        assert again.keys() == others.keys() and not set(again.values()) & set(others.values())
        assert all(first[tokens] == key for tokens, key in again.items())
        keys.append(len(again))
    assert keys == [len(PROMPT)] * 2


def test_what_is_narrowed_or_shared_is_no_tenants_whole(tmp_path):
    """A router that indexes by tenant is told only what every request of it may use."""
    one = listened(scope="tenant")
    one.run("alpha", "ann", PROMPT)
    one.run("alpha", "ann", PROMPT, "mine")
    compare(one)
    assert [event.scope.owner for event in one.router.events] == [NamedRequester("idp", "alpha"), None]
    assert one.router.events[0].keys != one.router.events[1].keys


def test_a_segment_is_told_in_its_own_domain_and_what_follows_in_its_readers(tmp_path):
    engine = ListenedSegments(tmp_path, "host", text=POLICY, pages=300)
    engine.run("alpha", "ann", [9, 9, 9])
    engine.share("alpha", "beta")
    for tenant in ("alpha", "beta", "alpha", "beta"):
        engine.run(tenant, "s", [*SHARED[:COVERED], 7, 8, 7])
    compare(engine)
    whole = (*SHARED[:COVERED], 7, 8, 7)
    shared = [told for told in engine.router.index.values() if told.domain in _domains(engine, "segment")]
    assert sorted(len(told.tokens) for told in shared) == list(range(1, COVERED + 1)), "once, whoever computed it"
    behind = {event.scope.tenant for event in engine.router.events if engine.router.index.get(event.parent) in shared}
    assert behind == {"alpha", "beta"}
    assert {told.tenant for told in engine.router.index.values() if told.tokens == whole} == {"alpha", "beta"}


def _domains(engine: ListenedEngine, scope: str) -> set[int]:
    return {event.scope.domain for event in engine.router.events if event.scope.scope == scope}


def test_tokens_and_denied_tenants_stay_here():
    for text, told in ((policy(), True), (policy().replace(", export", ""), False)):
        one = ListenedEngine(text, VirtualClock(), with_tokens=False)
        one.run("alpha", "ann", PROMPT)
        one.custody.step()
        assert bool(one.router.events) is told, "a policy without a permit of `export` tells nothing"
        assert not any(len(event.tokens) for event in one.router.events)


@pytest.mark.parametrize("form", ["vllm", "sglang", "dynamo", "mooncake"])
def test_each_form_takes_every_event(form, tmp_path):
    """Through the publisher that the settings open; what cannot be encoded would be lost there, and counted."""
    names = lasting_names(bytes(32))
    with EventPublisher(f"ipc://{tmp_path}/events", form=form, namespaces=names, tokens_published=True) as publisher:
        engine = listened(4, scope="tenant")
        engine.custody.events._publisher = publisher
        for number in range(12):
            engine.run("alpha" if number % 3 else "beta", "x", [*PROMPT[: number + 1], *range(20, 30)])
            engine.custody.make_room(number)
            engine.custody.step()
        engine.custody.clear()
        engine.custody.step()
        until = time.monotonic() + 20
        while publisher.stats().waiting and time.monotonic() < until:
            time.sleep(0.01)
        stats = publisher.stats()
    assert stats.events > 20 and stats.lost_batches == stats.waiting == 0


def test_the_last_event_says_that_everything_is_gone():
    one = listened()
    one.run("alpha", "ann", PROMPT)
    ended: list[str] = []
    one.custody.events._close = lambda: ended.append("closed")
    one.custody.events.close()
    assert not one.router.index and one.router.events[-1].cause == "shutdown" and ended == ["closed"]


def test_nobody_listens_nothing_is_collected():
    one = PagedEngine(policy(), VirtualClock())
    one.run("alpha", "ann", PROMPT)
    assert one.custody.events is None and type(one.tree) is PageTree
    with pytest.raises(IsolationError, match="watched"):
        PagedEngine(policy(), VirtualClock()).custody.publish_to(Router())
    late = listened()
    late.run("alpha", "ann", PROMPT)
    with pytest.raises(IsolationError, match="empty"):
        late.custody.publish_to(Router())


def test_a_node_of_nobody_and_an_event_without_scope_are_refused(monkeypatch):
    one = listened()
    one.tree.insert(None, "nobody", array("q", PROMPT), np.arange(1, 14), 0, 3)
    with pytest.raises(IsolationError, match="without a known owner"):
        one.custody.step()
    original = slot_events.removed
    monkeypatch.setattr(slot_events, "removed", lambda scope, keys, **named: original(None, keys, **named))
    two = listened()
    two.run("alpha", "ann", PROMPT)
    two.clock.advance(IDLE_US + 10_000)
    with pytest.raises(IsolationError, match="without a scope"):
        two.custody.step()
