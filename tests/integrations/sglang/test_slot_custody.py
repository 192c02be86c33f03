"""Custody of pages over a real port: scopes, grants, deadlines, erasure, repeats; drawn work, and what was computed."""

from __future__ import annotations

import random
import time

import pytest

from kvcustody.clock import VirtualClock
from kvcustody.governance.erasure.selector import Selector
from kvcustody.integrations.sglang.slot_request import SlotRequest
from kvcustody.testkit.conformance.policy import IDLE_US, policy
from standins.integrations.paged_engine import PagedEngine
from standins.integrations.slot_prompt import PROMPT


def engine(size: int = 1, pages: int = 64, **named) -> PagedEngine:
    return PagedEngine(policy(**named), VirtualClock(), pages, size)


@pytest.mark.parametrize("size", [1, 4])
def test_own_prefixes_are_found_and_no_others(size):
    own = engine(size)
    whole = (len(PROMPT) - 1) // size
    assert own.run("alpha", "ann", PROMPT) == 0
    assert own.run("alpha", "ann", PROMPT) == whole
    assert own.run("beta", "eve", PROMPT) == 0
    assert own.run("alpha", "bob", PROMPT) == 0, "another subject"
    assert own.run(None, "", PROMPT) == 0
    assert own.run(None, "", PROMPT) == 0
    assert own.run("alpha", "ann", PROMPT, "mine") == 0, "narrowed by its client"
    assert own.run("alpha", "ann", PROMPT, "mine") == whole
    assert own.problems() == []


def test_a_grant_opens_the_owners_chain_and_what_is_added_is_the_readers():
    shared = engine(scope="tenant", grant=True)
    shared.run("alpha", "ann", PROMPT)
    longer = [*PROMPT, 90, 91]
    for _ in range(100):  # until its first use is durable
        rid = shared.ask("beta", "eve", longer)
        waiting = shared.waiting[rid]
        waiting.who = ("alpha", "ann", "")  # what it may read there is the owner's
        assert shared.start(rid)
        if shared.hits:
            break
        shared.finish(rid, "aborted")
        time.sleep(0.005)
    assert shared.hits == len(PROMPT)
    waiting.who = ("beta", "eve", "")
    shared.chunk(rid, 99)
    shared.finish(rid)
    owners = {shared.port.pool.domains[tag].owner.name for tag in shared.port.pool.tag[waiting.request.found]}
    assert owners == {"alpha"}
    assert shared.run("alpha", "ann", longer) == len(PROMPT), "what the reader added is not in the owner's chain"
    assert shared.problems() == []


def test_nothing_is_found_past_its_deadline_and_an_idle_engine_ends_it():
    late = engine()
    late.run("alpha", "ann", PROMPT)
    late.clock.advance(IDLE_US + 10_000)
    late.custody.step()
    assert not late.tree.indexed().any() and not late.content
    assert late.run("alpha", "ann", PROMPT) == 0
    assert late.problems() == []


def test_an_erasure_reaches_what_is_cached_and_what_runs():
    erased = engine()
    erased.run("alpha", "ann", PROMPT)
    erased.run("beta", "eve", PROMPT)
    rid = erased.ask("alpha", "ann", [*PROMPT, 50])
    assert erased.start(rid)
    erased.chunk(rid, 99)
    erased.port.erase(Selector(tenant="alpha", subject="ann"))
    erased.custody.step()
    assert rid in erased.ended
    assert all(who[0] == "beta" for who, _ in erased.content.values())
    assert erased.run("alpha", "ann", PROMPT) == 0
    assert erased.run("beta", "eve", PROMPT) == len(PROMPT) - 1
    assert erased.problems() == []


def test_the_same_computed_twice_is_kept_once():
    both = engine()
    rids = [both.ask("alpha", "ann", PROMPT) for _ in range(2)]
    assert all(both.start(rid) for rid in rids)
    for rid in rids:
        both.chunk(rid, 5)
    for rid in rids:
        both.chunk(rid, 99)
    assert int(both.tree.indexed().sum()) == len(PROMPT)
    for rid in rids:
        both.finish(rid)
    assert both.problems() == []


def test_a_preempted_request_goes_on_with_what_is_its_own():
    again = engine()
    rid = again.ask("alpha", "ann", PROMPT)
    assert again.start(rid)
    again.chunk(rid, 6)
    again.finish(rid, "preempted")
    assert again.problems() == []
    assert again.start(rid) and again.hits == 6
    again.chunk(rid, 99)
    again.finish(rid)
    assert again.problems() == []


@pytest.mark.parametrize("seed", range(12))
def test_drawn_work_attaches_only_its_own_and_keeps_every_book(seed):
    draw = random.Random(seed)
    own = engine(draw.choice((1, 1, 4)), pages=draw.choice((40, 90)))
    texts = [[draw.randrange(1, 5) for _ in range(draw.randrange(3, 13))] for _ in range(5)]
    for _ in range(160):
        act = draw.random()
        own.clock.advance(1000)
        if act < 0.3:
            tokens = draw.choice(texts) + [draw.randrange(1, 5) for _ in range(draw.randrange(1, 6))]
            own.ask(draw.choice(("alpha", "beta", None)), draw.choice(("x", "y")), tokens)
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
        elif act < 0.97:
            own.port.erase(Selector(tenant="alpha", subject=draw.choice(("x", "y"))))
        assert own.problems() == []
    assert own.hits > 0


def test_a_tree_without_namespaces_is_noticed(monkeypatch):
    """The positive control of every comparison above."""
    monkeypatch.setattr(SlotRequest, "name", lambda self, namespace: "everybody")
    open_to_all = engine()
    open_to_all.run("alpha", "ann", PROMPT)
    monkeypatch.setattr("kvcustody.allocator.external.pool.ExternalPool.attachable", lambda self, b, e, n: len(b))
    with pytest.raises(AssertionError, match="what it attaches"):
        open_to_all.run("beta", "eve", PROMPT)


def test_the_ports_own_comparison_holds_without_namespaces(monkeypatch):
    """Two defences: what the tree finds is compared with the domain of each page again."""
    monkeypatch.setattr(SlotRequest, "name", lambda self, namespace: "everybody")
    open_to_all = engine()
    open_to_all.run("alpha", "ann", PROMPT)
    assert open_to_all.run("beta", "eve", PROMPT) == 0


def test_an_id_that_a_request_has_is_no_other_requests():
    shared = engine()
    rid = shared.ask("alpha", "ann", PROMPT)
    assert shared.start(rid)
    assert not shared.custody.is_used("another")
    assert shared.custody.is_used(rid), "dropped, without an answer under the id"
    assert shared.port.attempts.totals["id-in-use"] == 1
    shared.finish(rid)
    assert not shared.custody.is_used(rid)
    assert shared.problems() == []
