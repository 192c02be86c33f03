"""What a layer group's copies are named and sealed by, and which blocks of it a hit needs."""

from __future__ import annotations

import hashlib

import pytest

from kvcustody.integrations.vllm.tiers.copy_directory import CopyDirectory
from kvcustody.integrations.vllm.tiers.copy_plans import PlannedLoad, PlannedPart
from kvcustody.integrations.vllm.tiers.layer_groups import NO_KEY, LayerGroup

KEYS = [hashlib.sha256(bytes([number])).digest() for number in range(8)]


def test_each_group_has_keys_of_its_own_and_the_first_those_of_the_chain() -> None:
    groups = [LayerGroup(number) for number in range(5)]
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
    assert LayerGroup(1, window).first_needed(depth, end) == first


def test_what_did_not_come_is_named_group_by_group() -> None:
    window = PlannedPart(0, (b"w",), (12,), 10, 12)
    whole = PlannedPart(1, (b"a", b"b", b"c"), (4, 8, 14), 2, 12)
    planned = PlannedLoad("host", (window, whole), 2, 12)
    assert planned.blocks == 12
    named = [planned.missing(come) for come in range(12)]
    assert named == [b"w"] * 2 + [b"a"] * 2 + [b"b"] * 4 + [b"c"] * 4


def test_copies_are_cut_where_a_hit_ends() -> None:
    directory = CopyDirectory("host", 1, lambda job: 1)
    found = directory.longest(lambda end: KEYS[0], 0, 4, 4, 0)
    assert (found.names, found.ends, found.size) == ((), (), 0) == (*found.until(9)[:2], found.until(9).size)
