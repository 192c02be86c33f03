"""How many blocks of an engine are computed again after their eviction: counted in a small pool, else estimated."""

from __future__ import annotations

import numpy as np
import pytest

from kvcustody.allocator.external.evicted_blocks import EXACT_BLOCKS, EvictedBlocks


def keys(count: int, seed: int) -> list[bytes]:
    """As a keyed hash makes them."""
    data = np.random.default_rng(seed).bytes(32 * count)
    return [data[at : at + 32] for at in range(0, len(data), 32)]


def evicted(size: int, told: list[bytes], *, changed: bool = False) -> EvictedBlocks:
    """A pool whose every block was published under one of these and evicted; `changed`: and handed out in between."""
    generation = np.arange(size)
    made = EvictedBlocks(size, generation)
    blocks = list(range(len(told)))
    assert made.published(blocks, told) == 0
    generation += changed
    made.made_room(blocks)
    return made


@pytest.mark.parametrize(("size", "error"), [(64, 0), (EXACT_BLOCKS, 0), (4 * EXACT_BLOCKS, 0.12)])
def test_what_is_computed_again_is_counted_once(size: int, error: float) -> None:
    """Of 16,384 keys 2,048 are kept, give or take 42: 12 % is five times what chance makes of it. The seed is fixed."""
    told, blocks = keys(size, 1), list(range(size))
    made = evicted(size, told)
    assert made.keys.evicted == size
    again = made.published(blocks, told)
    assert abs(again - size) <= error * size
    assert sum(made.keys.distances) == again
    assert made.published(blocks, told) == 0
    assert made.published(blocks, keys(size, 2)) == 0


def test_a_block_that_was_handed_out_since_is_not_known_by_its_old_key() -> None:
    told = keys(64, 3)
    assert evicted(64, told, changed=True).published(list(range(64)), told) == 0
    assert evicted(64, told).published(list(range(64)), told) == 64, "positive control"


def test_what_a_decode_step_fills_is_known_when_it_is_evicted() -> None:
    told = keys(8, 4)
    made = EvictedBlocks(64, np.arange(64))
    made.note([5, 6], told[:2])
    made.made_room([5, 6, 7])
    assert made.keys.evicted == 3
    assert made.published([1, 2, 3], told[:3]) == 2
