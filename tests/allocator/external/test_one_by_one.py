"""One block each, as a decode step hands out and fills: few or many, it is what single calls would record."""

from __future__ import annotations

import numpy as np
import pytest

from kvcustody.allocator.external.pool import ExternalPool
from kvcustody.allocator.external.residency import ExternalResidency
from kvcustody.allocator.pool.accounting import Domain

BLOCKS, NOW_US = 64, 1_000
COLUMNS = ("state", "generation", "refs", "tag", "ceiling_us", "born_us", "indexed", "parent", "children")


def world(count: int) -> tuple[ExternalPool, list[ExternalResidency], list[int]]:
    """Return a pool, `count` residencies of two domains with different ceilings, and a block for each."""
    pool = ExternalPool(BLOCKS)
    domains: list[Domain] = []
    for name, absolute_us in (("a", 500), ("b", 900)):
        owner = pool.account(name)
        domains.append(pool.domain(owner, label=name, idle_us=100, absolute_us=absolute_us))
    residencies = [pool.residency(domains[at % 2].owner, domains[at % 2], None, None, at, 0) for at in range(count)]
    blocks = np.random.default_rng(count).permutation(BLOCKS)[:count].tolist()
    return pool, residencies, blocks


def columns(pool: ExternalPool) -> dict[str, list[int]]:
    return {name: getattr(pool, name).tolist() for name in COLUMNS}


@pytest.mark.parametrize("count", [1, 8, 9, 40])
def test_hand_outs_of_one_block_each_are_single_hand_outs(count: int) -> None:
    together, whose, blocks = world(count)
    single, others, _ = world(count)
    together.hand_out_each(whose, np.array(blocks), NOW_US)
    for residency, block in zip(others, blocks, strict=True):
        single.hand_out(residency, np.array([block]), residency.domain, NOW_US)
    assert columns(together) == columns(single)
    assert together.next_generation == single.next_generation == count + 1
    assert [one.generations().tolist() for one in whose] == [one.generations().tolist() for one in others]
    assert [one.ceiling_us for one in whose] == [one.ceiling_us for one in others]
    assert {name: one.used_blocks for name, one in together.accounts.items()} == {
        name: one.used_blocks for name, one in single.accounts.items()
    }


@pytest.mark.parametrize("count", [2, 8, 9, 40])
def test_publications_of_one_block_each_are_single_publications(count: int) -> None:
    """Several may continue one block, or none."""
    together, whose, blocks = world(count)
    single, others, _ = world(count)
    before = [-1 if at % 3 == 0 else blocks[0] for at in range(count)]
    for pool, residencies in ((together, whose), (single, others)):
        pool.hand_out_each(residencies, np.array(blocks), NOW_US)
    together.publish_each(blocks, before)
    for block, parent in zip(blocks, before, strict=True):
        single.publish(np.array([block]), parent)
    assert columns(together) == columns(single)
    assert together.children[blocks[0]] == sum(parent >= 0 for parent in before)
