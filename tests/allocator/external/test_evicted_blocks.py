"""How many blocks of an engine are recomputed after eviction: counted in a small pool, else estimated."""

from __future__ import annotations

import numpy as np
import pytest

from kvcustody.allocator.external.evicted_blocks import EXACT_BLOCKS, EvictedBlocks
from kvcustody.allocator.external.pool import ExternalPool


def keys(count: int, seed: int) -> list[bytes]:
    """As a keyed hash makes them."""
    data = np.random.default_rng(seed).bytes(32 * count)
    return [data[at : at + 32] for at in range(0, len(data), 32)]


def pool_of(size: int) -> ExternalPool:
    """Return a pool of two tenants with half of the blocks each."""
    pool = ExternalPool(size)
    pool.generation[:] = np.arange(size)
    for tenant, part in (("alpha", slice(0, size // 2)), ("beta", slice(size // 2, size))):
        domain = pool.domain(pool.account(tenant))
        pool.domains[domain.tag] = domain
        pool.tag[part] = domain.tag
    return pool


def published(made: EvictedBlocks, told: list[bytes]) -> int:
    """Return how many blocks of both tenants under these keys had been evicted."""
    half = len(told) // 2
    return made.published(np.arange(half), told[:half]) + made.published(np.arange(half, len(told)), told[half:])


def evicted(size: int, block_keys: list[bytes], *, changed: bool = False) -> EvictedBlocks:
    """Return a pool whose blocks were published under these keys and evicted; `changed`: handed out in between."""
    pool = pool_of(size)
    made = EvictedBlocks(pool)
    assert published(made, block_keys) == 0
    pool.generation += changed
    made.made_room(np.arange(len(block_keys)))
    return made


@pytest.mark.parametrize(("size", "error"), [(64, 0), (EXACT_BLOCKS, 0), (4 * EXACT_BLOCKS, 0.12)])
def test_what_is_computed_again_is_counted_once(size: int, error: float) -> None:
    """Of 16,384 keys 2,048 are kept, give or take 42: 12 % is five times what chance makes of it. The seed is fixed."""
    block_keys = keys(size, 1)
    ghosts = evicted(size, block_keys)
    assert ghosts.keys.evicted == size
    again = published(ghosts, block_keys)
    assert abs(again - size) <= error * size
    assert sum(ghosts.keys.distances) == again
    assert published(ghosts, block_keys) == 0
    assert published(ghosts, keys(size, 2)) == 0


def test_a_block_that_was_handed_out_since_is_not_known_by_its_old_key() -> None:
    told = keys(64, 3)
    assert published(evicted(64, told, changed=True), told) == 0
    assert published(evicted(64, told), told) == 64, "positive control"


def test_what_a_decode_step_fills_is_known_when_it_is_evicted() -> None:
    told = keys(8, 4)
    made = EvictedBlocks(pool_of(64))
    made.note([5, 6], told[:2])
    made.made_room(np.array([5, 6, 7]))
    assert made.keys.evicted == 3
    assert made.published(np.array([1, 2, 3]), told[:3]) == 2


def test_what_is_forgotten_or_ended_otherwise_is_not_known() -> None:
    block_keys = keys(64, 5)
    ghosts = evicted(64, block_keys)
    ghosts.forget("alpha")
    assert ghosts.published(np.arange(32), block_keys[:32]) == 0
    assert ghosts.published(np.arange(32, 64), block_keys[32:]) == 32, "another tenant's are"
    ghosts = EvictedBlocks(pool_of(64))
    ghosts.note([1, 2], block_keys[:2])
    ghosts.drop([1])
    ghosts.made_room(np.array([1, 2]))
    assert ghosts.published(np.array([1, 2]), block_keys[:2]) == 1
