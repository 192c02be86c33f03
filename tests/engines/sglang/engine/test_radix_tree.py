"""Drawn work on SGLang's own radix cache and on ours, side by side: the same hits and sizes, but for what is declared.

SGLang's own tests of its cache are in its repository, in no wheel and in no source distribution of this release; they
are about its nodes. What is compared here is what its scheduler is answered.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
from sglang.srt.mem_cache.radix_cache import RadixCache

from kvcustody.integrations.sglang import slot_custody
from kvcustody.integrations.sglang.page_tree import PageTree
from kvcustody.integrations.sglang.radix_cache import GovernedRadixCache
from standins.engines.sglang.both_caches import CacheSizes, GovernedBench, OwnBench, configure

ACTS, SEEDS = 250, 6
LARGE = {1: 6000, 16: 6000}  # nothing is evicted
SMALL = {1: 400, 16: 800}


def _cut_no_prompt(patch: pytest.MonkeyPatch) -> None:
    inserts = RadixCache._insert_cache
    patch.setattr(
        RadixCache,
        "_insert_cache",
        lambda self, req, tokens, *, key_limit=None, split_prompt=False: inserts(
            self, req, tokens, key_limit=key_limit
        ),
    )


def _use_what_is_behind(patch: pytest.MonkeyPatch) -> None:
    splits = PageTree._split

    def split(self, node, at):
        upper = splits(self, node, at)
        node.used = self._uses
        return upper

    patch.setattr(PageTree, "_split", split)


def _use_at_checkpoints(patch: pytest.MonkeyPatch) -> None:
    checkpoints = GovernedRadixCache.checkpoint

    def checkpoint(self, req, *, up_to, **named):
        checkpoints(self, req, up_to=up_to, **named)
        self.tree.use(req.last_node)

    patch.setattr(GovernedRadixCache, "checkpoint", checkpoint)


def _end_what_is_asked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(slot_custody, "ROOM_SHARE", 1 << 40)
    patch.setattr(slot_custody, "SMALL_ROOM_SHARE", 1 << 40)


# Where the two choose differently what leaves first, each with what makes one side do as the other.
DIFFERENT: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "SGLang cuts a chain where the prompt ends, so that the answer behind it can leave alone": _cut_no_prompt,
    "to SGLang, what lies behind the place where a look-up ends is used by it": _use_what_is_behind,
    "to SGLang, a request that has nothing new to keep uses what it has again": _use_at_checkpoints,
    "ours ends a share of the pool at once": _end_what_is_asked,
}


class Seen(NamedTuple):
    """What both said after one act."""

    act: str
    own: tuple[int, CacheSizes]
    ours: tuple[int, CacheSizes]


@pytest.fixture(scope="module", autouse=True)
def configured(model) -> Iterator[None]:
    from standins.engines.sglang.sglang_engine import CPU_SETTINGS, environment

    with environment(CPU_SETTINGS):
        configure(model)
        yield


def side_by_side(seed: int, page_size: int, slots: int, *, evicts: bool) -> Iterator[Seen]:
    """Requests with shared beginnings, chunks, decodes, ends, preemption and evictions, on both alike."""
    draw = random.Random(seed)
    own, ours = OwnBench(slots, page_size), GovernedBench(slots, page_size)
    texts = [[draw.randrange(1, 300) for _ in range(draw.randrange(10, 90))] for _ in range(5)]
    asked = 0
    for _ in range(ACTS):
        drawn = draw.random()
        ours.clock.advance(100)
        waiting, running = list(own.waiting), list(own.running)
        given: tuple[object, ...]
        if drawn < 0.3 and len(waiting) < 6 and len(running) < 20:
            asked += 1
            text = draw.choice(texts)
            tokens = text[: draw.randrange(1, len(text) + 1)]
            given = str(asked), tokens + [draw.randrange(1, 300) for _ in range(draw.randrange(1, 40))]
            act = "ask"
        elif drawn < 0.5 and waiting:
            act, given = "start", (draw.choice(waiting), draw.choice((7, 16, 40, 200)))
        elif drawn < 0.75 and running:
            act, given = "go_on", (draw.choice(running), draw.choice((7, 16, 40)))
        elif drawn < 0.87 and running:
            act, given = "finish", (draw.choice(running),)
        elif drawn < 0.92 and running:
            act, given = "preempt", (draw.choice(running),)
        elif drawn < 0.95 and evicts:
            act, given = "evict", (draw.randrange(1, slots // 4),)
        else:
            continue
        said = [(int(getattr(bench, act)(*given) or 0), bench.sizes()) for bench in (own, ours)]
        assert ours.problems() == []
        yield Seen(act, *said)
        if own.waiting.keys() != ours.waiting.keys() or own.running.keys() != ours.running.keys():
            return  # one had room where the other had none: they go different ways from here
    for bench in (own, ours):
        for rid in list(bench.running):
            bench.finish(rid)
        bench.evict(slots)
        assert bench.sizes() == (slots, 0, 0, 0), "everything comes back"


def differences(page_size: int, slots: dict[int, int], *, evicts: bool) -> tuple[list[Seen], int, set[str]]:
    """Where they said different things; how many tokens were found, and what was done."""
    every = [one for seed in range(SEEDS) for one in side_by_side(seed, page_size, slots[page_size], evicts=evicts)]
    hits = sum(max(0, one.own[0]) for one in every if one.act == "start")
    return [one for one in every if one.own != one.ours], hits, {one.act for one in every}


@pytest.mark.parametrize("page_size", [1, 16])
def test_without_eviction_every_answer_is_sglangs(page_size):
    different, hits, acts = differences(page_size, LARGE, evicts=False)
    assert different == [] and hits > 4000
    assert acts == {"ask", "start", "go_on", "finish", "preempt"}


@pytest.mark.parametrize("page_size", [1, 16])
def test_with_eviction_nothing_differs_but_what_is_declared(page_size, monkeypatch):
    for alike in DIFFERENT.values():
        alike(monkeypatch)
    different, hits, acts = differences(page_size, SMALL, evicts=True)
    assert different == [] and hits > 4000
    assert acts == {"ask", "start", "go_on", "finish", "preempt", "evict"}


@pytest.mark.parametrize("left", DIFFERENT)
def test_each_declared_difference_is_one(left, monkeypatch):
    """The control: with it left as it is, and the others alike, the comparison tells."""
    for name, alike in DIFFERENT.items():
        if name != left:
            alike(monkeypatch)
    assert any(differences(page_size, SMALL, evicts=True)[0] for page_size in (1, 16)), left


@pytest.mark.parametrize("page_size", [1, 16])
def test_with_all_differences_as_many_tokens_are_found(page_size):
    """In a pool that is too small, within a tenth of what SGLang finds."""
    counts = [[0, 0] for _ in range(SEEDS)]
    for seed in range(SEEDS):
        for one in side_by_side(seed, page_size, SMALL[page_size], evicts=True):
            if one.act == "start":
                counts[seed][0] += max(0, one.own[0])
                counts[seed][1] += max(0, one.ours[0])
    own, ours = map(sum, zip(*counts, strict=True))
    print("tokens found: SGLang's own", own, "ours", ours)
    assert 0.9 * own <= ours <= 1.1 * own
