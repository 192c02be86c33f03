"""Keys of evicted blocks: one tenant's find nothing of another's, and are bounded and forgotten."""

from __future__ import annotations

from kvcustody.allocator.prefix.evicted_keys import EvictedKeys


def keys(first: int, count: int) -> list[bytes]:
    return [at.to_bytes(32, "big") for at in range(first, first + count)]


def test_a_tenant_finds_its_own_and_once() -> None:
    evicted = EvictedKeys(100)
    evicted.add("alpha", keys(1, 1)[0], 2)
    evicted.add_each("alpha", keys(10, 3), 3)
    prompt = b"".join(keys(1, 2))
    assert evicted.computed_again("beta", prompt) == 0
    assert evicted.computed_again_each("beta", keys(10, 3)) == 0
    assert evicted.computed_again("alpha", prompt) == 2
    assert evicted.computed_again_each("alpha", keys(10, 3)) == 3
    assert not evicted.computed_again("alpha", prompt) and not evicted.computed_again_each("alpha", keys(10, 3))
    assert evicted.evicted == 5 == sum(evicted.distances)


def test_forgetting_is_a_tenants_whole_and_no_others() -> None:
    evicted = EvictedKeys(6)
    for first in (0, 100):  # older and newer half
        evicted.add_each("alpha", keys(first, 2), 2)
        evicted.add_each("beta", keys(first + 50, 2), 2)
    assert len(evicted) == 8
    evicted.forget("alpha")
    assert len(evicted) == 4 and evicted.evicted == 8
    assert evicted.computed_again_each("alpha", keys(0, 2) + keys(100, 2)) == 0
    assert evicted.computed_again_each("beta", keys(50, 2) + keys(150, 2)) == 4
    evicted.add("alpha", keys(0, 1)[0], 1)
    evicted.forget(None)
    assert len(evicted) == 0


def test_what_is_kept_is_at_most_twice_the_pool() -> None:
    evicted = EvictedKeys(16)
    for at in range(1000):
        evicted.add(f"tenant-{at % 7}", keys(at, 1)[0], 1)
        assert len(evicted) <= 32
