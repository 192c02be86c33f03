"""Quotas, borrowing, room-making and the clean reserve (Q1–Q3, M1–M3, L9)."""

from __future__ import annotations

import random

import pytest

from kvcustody.allocator.manager.reclaim import OVER_QUOTA, POOL_FULL
from standins.allocator.world import MINUTE, SECOND, World, run


def test_used_never_exceeds_the_cap_and_own_cache_makes_room_first():
    world = World(64, {"a": {"cap": 10}, "b": {}})
    world.cache("b", run(9, 20, 1))
    for at in range(8):
        world.cache("a", run(at, 4, 1))
        assert world.m.accounts["a"].used_blocks <= 10
    assert world.hit("b", run(9, 20, 1)) == 20  # nobody else paid for it
    world.ok()


def test_over_quota_is_refused_alone_and_changes_nothing():
    world = World(64, {"a": {"cap": 10}, "b": {}})
    world.cache("a", run(1, 4, 1))
    running = world.start("a", run(2, 4, 1))
    before = (world.states(), world.hit("a", run(1, 4, 1)), world.m.pool.next_generation)
    assert world.admit("a", run(3, 11)) == OVER_QUOTA
    assert world.admit("a", run(1, 4) + run(3, 7)) == OVER_QUOTA
    assert (world.states(), world.hit("a", run(1, 4, 1)), world.m.pool.next_generation) == before
    assert not isinstance(world.admit("b", run(4, 11)), str)
    world.m.release(running, world.now, "finished")
    assert not isinstance(world.admit("a", run(3, 10)), str)
    world.ok()


def test_decoding_past_the_cap_stalls_that_sequence_alone():
    world = World(64, {"a": {"cap": 4}, "b": {"cap": 8}})
    a, b = world.start("a", run(1, 4)), world.start("b", run(2, 4))
    assert world.extend(a, 1) == [a]
    assert world.extend(b, 1) == []
    assert world.m.decode.length[[a.slot, b.slot]].tolist() == [16, 17]
    world.ok()


@pytest.mark.parametrize("borrow", [True, False])
def test_without_borrowing_others_idle_guarantees_are_not_used(borrow):
    """Of 64 blocks 10 are a's own, 44 b's guarantee, 10 nobody's: a may have 20, more as borrowed cache."""
    world = World(64, {"a": {"guaranteed": 10, "cap": 40, "borrow": borrow}, "b": {"guaranteed": 44}})
    for at in range(4):
        world.cache("a", run(at, 10, 1))
    used = world.m.accounts["a"].used_blocks
    assert used == (40 if borrow else 20)
    assert isinstance(world.admit("a", run(7, 21)), str)
    assert not isinstance(world.admit("a", run(8, 20)), str)
    world.ok()


def test_two_that_do_not_borrow_share_what_no_guarantee_has_claimed():
    world = World(64, {"a": {"borrow": False}, "b": {"borrow": False}, "c": {"guaranteed": 44}})
    for at in range(4):
        world.cache("a", run(at, 5, 1))
        world.cache("b", run(10 + at, 5, 1))
        assert sum(world.m.accounts[name].used_blocks for name in "ab") <= 20
    assert not isinstance(world.admit("b", run(20, 15)), str)  # a's cache beyond its guarantee makes room
    assert not isinstance(world.admit("c", run(21, 44)), str)
    world.ok()


def test_only_cached_blocks_are_lent():
    """What b has ACTIVE beyond its guarantee fits in what no guarantee has claimed, however empty the pool is."""
    world = World(64, {"a": {"guaranteed": 40}, "b": {}})
    assert world.admit("b", run(1, 25)) == POOL_FULL
    for at in range(3):
        world.cache("b", run(at, 20))
    assert world.m.accounts["b"].cached_blocks == 60  # borrowed, as cache
    first = world.start("b", run(7, 24))
    assert world.admit("b", run(8, 1)) == POOL_FULL
    granted = world.start("a", run(9, 40))  # the whole guarantee, by evicting b's cache
    assert granted.block_count == 40
    world.ok()
    assert world.admit("b", run(1, 25), can_preempt=True) == POOL_FULL  # nothing is left to lend
    world.m.release(first, world.now, "preempted")
    world.ok()


def test_lending_active_blocks_needs_an_engine_that_can_preempt():
    world = World(64, {"a": {"guaranteed": 40}, "b": {}})
    assert world.admit("b", run(1, 60)) == POOL_FULL
    assert not isinstance(world.admit("b", run(1, 60), can_preempt=True), str)


def test_attaching_cached_blocks_counts_as_lending_them():
    world = World(64, {"a": {"guaranteed": 40}, "b": {}}, options={"keep_last_token": False})
    world.cache("b", run(1, 20))
    world.cache("b", run(2, 20))
    assert world.admit("b", run(1, 20)).hit_blocks == 20
    assert world.admit("b", run(2, 20)) == POOL_FULL
    partition = world.m.pool.partitions[0]
    assert partition.over_blocks == 20 <= partition.common_blocks == 24
    assert not isinstance(world.admit("a", run(3, 40)), str)
    world.ok()


def test_a_granted_attach_that_would_eat_into_a_guarantee_is_a_miss():
    world = World(64, {"a": {"guaranteed": 10}, "b": {"guaranteed": 20}, "c": {"guaranteed": 30}})
    world.cache("a", run(1, 12, 1))
    world.cache("a", run(2, 12, 1))
    assert world.admit("b", run(1, 12, 1), grants=("a",)).hit_blocks == 12
    assert world.admit("b", run(2, 12, 1), grants=("a",)).hit_blocks == 0
    assert not isinstance(world.admit("c", run(3, 30)), str)
    world.ok()


def test_a_granted_attach_misses_when_the_owner_is_at_its_cap():
    world = World(64, {"a": {"cap": 9}, "b": {}})
    world.cache("a", run(1, 8, 1))
    world.scrub()
    assert world.hit("b", run(1, 8, 1), grants=("a",)) == 8
    busy = world.start("a", run(2, 1))
    assert world.m.accounts["a"].used_blocks == 9
    assert world.hit("b", run(1, 8, 1), grants=("a",)) == 0
    world.m.release(busy, world.now, "finished")


def test_two_spans_of_one_owner_are_admitted_together():
    world = World(64, {"a": {"cap": 10}})
    world.domain("seg", "a", is_segment=True)
    assert world.admit("a", run(1, 12), segment="seg", segment_blocks=6) == OVER_QUOTA
    assert not isinstance(world.admit("a", run(1, 10), segment="seg", segment_blocks=6), str)
    assert world.m.accounts["a"].used_blocks == 10
    world.ok()


def test_two_spans_in_one_partition_never_promise_the_same_block_twice():
    world = World(16, {"o": {}, "b": {}})
    world.domain("seg", "o", is_segment=True)
    world.cache("b", run(1, 16))
    sequence = world.start("b", run(2, 16), segment="seg", segment_blocks=8)
    assert (world.m.accounts["o"].used_blocks, world.m.accounts["b"].used_blocks) == (8, 8)
    world.m.release(sequence, world.now, "finished")
    world.ok()


def test_eviction_under_pressure_stops_at_a_guarantee():
    """Making room ahead never digs into what a tenant has within its guarantee."""
    world = World(64, {"a": {"guaranteed": 48}, "b": {}}, options={"evict_ahead": 64})
    world.cache("a", run(1, 50))
    world.start("b", run(2, 15))
    assert world.m.accounts["a"].cached_blocks == 48
    world.ok()


def test_the_victim_is_whoever_is_furthest_over_its_guarantee():
    world = World(64, {"a": {"guaranteed": 20}, "b": {"guaranteed": 4}, "c": {}})
    world.cache("a", run(1, 30))  # 10 over
    world.cache("b", run(2, 20))  # 16 over
    world.cache("c", run(3, 14))  # 14 over
    world.cache("c", run(4, 1))
    cached = {name: account.cached_blocks for name, account in world.m.accounts.items()}
    assert cached == {"a": 30, "b": 19, "c": 15}


@pytest.mark.parametrize("seed", range(3))
def test_a_tenant_within_its_guarantee_is_always_served(seed):
    """Whatever the others do; positive control below."""
    assert refused_within_guarantee(seed, lend=False) == 0


def test_positive_control_lending_active_blocks_breaks_the_guarantee():
    assert refused_within_guarantee(0, lend=True) > 10


def refused_within_guarantee(seed: int, *, lend: bool) -> int:
    rng = random.Random(seed)
    world = World(60, {"a": {"guaranteed": 30}, "b": {"guaranteed": 10}, "c": {}}, options={"evict_ahead": 8})
    live: list = []
    refused = 0
    for _ in range(400):
        world.now += SECOND
        if live and rng.random() < 0.45:
            world.m.release(live.pop(rng.randrange(len(live))), world.now, "finished")
        name, blocks = rng.choice("abc"), rng.randrange(1, 16)
        account = world.m.accounts[name]
        within = account.active_blocks + blocks <= account.guaranteed_blocks
        got = world.admit(name, run(rng.randrange(6), blocks), can_preempt=lend and name != "a")
        if isinstance(got, str):
            refused += within
        else:
            world.m.commit(got, blocks * 4, world.now)
            live.append(got)
        world.ok()
        partition = world.m.pool.partitions[0]
        assert lend or partition.over_blocks <= partition.common_blocks
        for each in world.m.accounts.values():
            assert each.used_blocks <= each.limit_blocks
    return refused


def test_the_clean_reserve_is_refilled_in_the_background():
    """L9: after a step, an allocation as large as the reserve waits for no scrub."""
    world = World(64, options={"reserve_low": 8, "reserve_high": 16})
    for at in range(6):
        world.cache("a", run(at, 10, 1))
        world.wait(SECOND)
        world.ok()
        assert world.m.pool.partitions[0].clean_count >= 8
    launches = len(world.m.pool.receipts)
    world.start("b", run(9, 8))
    assert len(world.m.pool.receipts) == launches


def test_dirty_blocks_wait_for_a_full_launch_or_their_deadline():
    world = World(64, options={"scrub_batch": 32}, domain={"scrub_within_us": 4 * SECOND})
    world.m.release(world.admit("a", run(1, 5)), world.now, "aborted")
    world.wait(SECOND // 2)
    assert world.states() == {"clean": 59, "dirty": 5}
    world.wait(SECOND // 2)  # a quarter of what the policy allows has passed
    assert world.states() == {"clean": 64}


def test_limits_may_change_under_way():
    world = World(64, {"a": {"guaranteed": 20}, "b": {}})
    running = world.start("a", run(1, 15))
    world.m.account("a", guaranteed=4, cap=10)
    world.ok()
    assert world.admit("a", run(2, 1)) == OVER_QUOTA
    world.m.release(running, world.now, "finished")
    assert not isinstance(world.admit("a", run(2, 10)), str)
    world.ok()
    world.wait(MINUTE)
