"""What a layer group's copies are named and sealed by, and which blocks of it a hit needs."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from kvcustody.governance.tiers.copies.index import PublishedRun
from kvcustody.integrations.vllm.tiers.copy_plans import PlannedLoad, PlannedPart
from kvcustody.integrations.vllm.tiers.layer_groups import NO_KEY, CopiedGroup
from standins.governance.tier_place import STEP, Place

if TYPE_CHECKING:
    from kvcustody.allocator.pool.accounting import Domain

SECOND = 1_000_000
KEYS = [hashlib.sha256(bytes([number])).digest() for number in range(8)]


def test_each_group_has_keys_of_its_own_and_the_first_those_of_the_chain() -> None:
    groups = [CopiedGroup(number) for number in range(5)]
    assert groups[0].keys(KEYS) == b"".join(KEYS)
    every = {group.key(key) for group in groups for key in KEYS}
    assert len(every) == len(groups) * len(KEYS)
    assert all(group.keys(KEYS) == b"".join(map(group.key, KEYS)) for group in groups)
    assert {group.key(NO_KEY) for group in groups} == {NO_KEY}, "no block comes before the first in any group"


@pytest.mark.parametrize(
    ("window", "depth", "end", "first"),
    [(None, 3, 12, 3), (2, 0, 12, 10), (2, 11, 12, 11), (40, 0, 12, 0), (0, 4, 12, 12)],
)
def test_a_window_needs_its_last_blocks_less_those_that_are_there(
    window: int | None, depth: int, end: int, first: int
) -> None:
    assert CopiedGroup(1, window).first_needed(depth, end) == first


def test_what_did_not_come_is_named_group_by_group() -> None:
    domain = cast("Domain", None)  # whose they are is not asked
    window = PlannedPart(0, domain, (b"w",), (12,), 10, 12)
    whole = PlannedPart(1, domain, (b"a", b"b", b"c"), (4, 8, 14), 2, 12)
    planned = PlannedLoad("host", (window, whole), 2, 12)
    assert planned.blocks == 12
    named = [planned.missing(come) for come in range(12)]
    assert named == [b"w"] * 2 + [b"a"] * 2 + [b"b"] * 4 + [b"c"] * 4


def test_one_group_s_copy_in_the_place_of_another_s_does_not_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, groups = Place(tmp_path, "host"), (CopiedGroup(0), CopiedGroup(1))
    label, chain, now_us = place.label("acme"), KEYS[:STEP], place.world.clock.now_us()
    for group in groups:
        run = PublishedRun(label, group.keys(chain), NO_KEY, 0, now_us, now_us + SECOND, now_us + SECOND)
        assert place.tier.store(run, lambda first, count, into: None) == STEP

    def come(group: CopiedGroup) -> int:
        keys = group.keys(chain)
        found = place.tier.lookup(label, keys, 0)
        return sum(one.blocks for one in place.tier.load(label, keys, 0, found, lambda *_: None))

    assert [come(group) for group in groups] == [STEP, STEP], "control"
    load, names = place.store.prepare_load, [one.name for one in place.store.page(b"", 9)]

    def prepare(name: bytes) -> memoryview:
        other = names[1 - names.index(name)]
        foreign = load(other)
        assert load(name) is not None and foreign is not None
        held = bytes(foreign)
        foreign.release()
        place.store.complete_load(other)
        return memoryview(held)

    monkeypatch.setattr(place.store, "prepare_load", prepare)
    assert come(groups[0]) == 0 and place.ends() == ["broken"]
