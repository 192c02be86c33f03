"""How many leading blocks of an external pool may be attached, compared with a block-by-block reading of the rules."""

from __future__ import annotations

import numpy as np
import pytest

from kvcustody.allocator.external.pool import ExternalPool
from kvcustody.allocator.pool.block_state import ACTIVE, CACHED, DIRTY, FENCED

BLOCKS, NOW_US, MINE = 32, 1_000, 3


def may_attach(pool: ExternalPool, block: int, domain: int) -> bool:
    """Return whether the rules allow a block: its domain, indexed, before its ceiling, and in use or held."""
    held = pool.state[block] == CACHED and pool.hold_until_us[block] > NOW_US
    return bool(
        pool.tag[block] == domain
        and pool.indexed[block]
        and pool.ceiling_us[block] > NOW_US
        and (held or pool.refs[block] > 0)
    )


def held_pool() -> ExternalPool:
    """Return a pool with every block CACHED, indexed, held and in one domain."""
    pool = ExternalPool(BLOCKS)
    pool.state[:], pool.indexed[:], pool.tag[:] = CACHED, True, MINE
    pool.ceiling_us[:] = pool.hold_until_us[:] = NOW_US + 1
    return pool


SPOILS = {
    "ceiling": lambda pool, block: pool.ceiling_us.__setitem__(block, NOW_US),
    "deadline": lambda pool, block: pool.hold_until_us.__setitem__(block, NOW_US),
    "dirty": lambda pool, block: pool.state.__setitem__(block, DIRTY),
    "domain": lambda pool, block: pool.tag.__setitem__(block, MINE + 1),
    "fenced": lambda pool, block: pool.state.__setitem__(block, FENCED),
    "index": lambda pool, block: pool.indexed.__setitem__(block, False),
}


@pytest.mark.parametrize("spoil", sorted(SPOILS))
def test_the_first_block_that_may_not_ends_the_run(spoil: str) -> None:
    blocks = np.arange(BLOCKS - 1, -1, -1)
    for place in (0, 7, BLOCKS - 1):
        pool = held_pool()
        assert pool.attachable(blocks, MINE, NOW_US) == BLOCKS
        SPOILS[spoil](pool, blocks[place])
        assert pool.attachable(blocks, MINE, NOW_US) == place


def test_it_is_what_the_rules_say_block_by_block() -> None:
    random = np.random.default_rng(0)
    whole = 0
    for _ in range(200):
        pool = held_pool()
        expected = random.choice([MINE, MINE + 1], BLOCKS, p=[0.9, 0.1]).astype(np.int32)
        pool.tag[:] = expected
        for name in sorted(SPOILS):
            if random.random() < 0.2:
                SPOILS[name](pool, int(random.integers(BLOCKS)))
        pool.refs[:] = random.random(BLOCKS) < 0.5
        pool.state[(pool.refs > 0) & (pool.state == CACHED)] = ACTIVE
        fine = [may_attach(pool, block, int(expected[block])) for block in range(BLOCKS)]
        count = fine.index(False) if False in fine else BLOCKS
        whole += count == BLOCKS
        assert pool.attachable(np.arange(BLOCKS), expected, NOW_US) == count
    assert 20 < whole < 180
