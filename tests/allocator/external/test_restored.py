"""Blocks that a tier restored into an external pool keep their copies' age; what follows from them ends with them."""

from __future__ import annotations

import numpy as np

from kvcustody.allocator.external.pool import ExternalPool
from kvcustody.allocator.external.residency import ExternalResidency

LONG_US, IDLE_US = 1_000_000, 500_000
BORN_US, CEILING_US, NOW_US = 2_000, 400_000, 100_000


def begun(restored: int) -> tuple[ExternalPool, ExternalResidency]:
    """A request with four blocks, of which a tier filled the first; then it grew by one."""
    pool = ExternalPool(8)
    account = pool.account("alpha")
    domain = pool.domain(account, idle_us=IDLE_US, absolute_us=LONG_US)
    residency = pool.residency(account, domain, "someone", None, "r", NOW_US)
    pool.hand_out(residency, np.arange(4), domain, NOW_US)
    if restored:
        pool.restored(residency, np.arange(restored), BORN_US, CEILING_US)
    pool.hand_out(residency, np.array([4]), domain, NOW_US + 1)
    pool.publish(np.arange(5))
    return pool, residency


def test_what_a_tier_filled_is_as_old_as_its_copy() -> None:
    pool, _ = begun(2)
    assert pool.born_us[:5].tolist() == [BORN_US, BORN_US, NOW_US, NOW_US, NOW_US + 1]


def test_what_is_computed_from_it_ends_with_it() -> None:
    for restored, ceiling_us in ((0, NOW_US + LONG_US), (2, CEILING_US)):
        pool, residency = begun(restored)
        assert pool.ceiling_us[:4].tolist() == [ceiling_us] * 4
        assert pool.ceiling_us[4] == ceiling_us
        pool.release(residency, "finished", NOW_US + 2)
        for block in range(5):
            assert pool.hold_until_us[block] == min(NOW_US + 2 + IDLE_US, ceiling_us)


def test_a_copy_that_lives_longer_than_its_new_domain_prolongs_nothing() -> None:
    pool, residency = begun(0)
    pool.restored(residency, np.arange(2), NOW_US + 50, NOW_US + 10 * LONG_US)
    assert pool.born_us[:2].tolist() == [NOW_US] * 2
    assert pool.ceiling_us[:5].tolist() == [NOW_US + LONG_US] * 5
