"""Prefixes that the policy shares, and tiers: a segment's blocks come back to whom it is for, a grant opens no tier."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from kvcustody.governance.erasure.selector import Selector
from standins.governance.offload_world import PREFIX, SHARED, TOKENS, SharedWorld, prompt


@pytest.fixture(params=["host", "nvme"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> SharedWorld:
    made = SharedWorld(tmp_path, request.param)
    assert made.serve("acme", prompt(99, 2)) == 0, "its keys are made"
    return made


def test_a_segment_comes_back_to_whom_it_is_for_and_to_nobody_else(world: SharedWorld) -> None:
    world.share()
    covered = (PREFIX - 1) * TOKENS  # the last block may be tokenized otherwise
    world.serve("acme", SHARED + prompt(5, 4))
    world.serve("beta", SHARED + prompt(6, 4))  # a first use is put on record, and computed
    world.worker.governor.settle()
    assert world.serve("beta", SHARED + prompt(7, 4)) == covered, "from the device"
    world.crowd()
    assert world.restored() == 0 and world.serve("gamma", SHARED + prompt(8, 4)) == 0, "no rule is for it"
    world.crowd(1)
    assert world.restored() == 0, "void: somebody has brought it back already"
    assert world.serve("beta", SHARED + prompt(9, 4)) == covered, "from a tier"
    assert world.restored() == PREFIX - 1
    world.crowd(2)
    assert world.serve("acme", SHARED + prompt(5, 4)) >= covered + TOKENS, "and what is its owner's own follows"
    assert world.serve("gamma", SHARED + prompt(8, 4)) >= covered, "its own copy, that it computed itself"
    world.worker.close()


def test_where_its_classification_may_not_go_a_segment_does_not(world: SharedWorld) -> None:
    """The control is the test before: the same requests, and `internal` may go there."""
    world.share(classified="public")
    world.serve("acme", SHARED + prompt(5, 4))
    world.serve("beta", SHARED + prompt(6, 4))
    world.worker.governor.settle()
    assert world.serve("beta", SHARED + prompt(7, 4)) == (PREFIX - 1) * TOKENS, "void: it is not shared at all"
    world.crowd()
    assert world.serve("beta", SHARED + prompt(9, 4)) == 0 == world.restored()
    world.worker.close()


def test_a_grant_s_reader_is_brought_nothing_of_its_owner_s(world: SharedWorld) -> None:
    """It reads the owner's blocks in the pool; what has left is the owner's alone to bring back."""
    granted = "grants: [{id: g, owner: acme, reader: beta, at_most: internal, until: 2027-01-01, reason: t}]"
    world.share(granted)
    mine = prompt(11, 8)

    assert world.is_granted("beta", range(30, 50, 2)), "void: nothing is granted"
    assert world.serve("acme", mine) == 0
    assert world.serve("beta", mine + prompt(12, 2)) == 8 * TOKENS, "void: it reads no more"
    world.crowd()
    left = world.serve("beta", mine + prompt(13, 2))
    assert left < 8 * TOKENS and world.restored() == 0, "what the pool has still, and no more"
    assert world.serve("acme", mine) == 8 * TOKENS and world.restored() == 8 - left // TOKENS
    world.worker.close()


def test_what_a_grant_s_reader_computed_behind_it_comes_back_to_it_alone(world: SharedWorld) -> None:
    """Behind the owner's blocks, which are in the pool. Controls: another reader, and its owner's data when erased."""
    until = "at_most: internal, until: 2027-01-01, reason: t"
    grants = [f"{{id: {one}, owner: acme, reader: {one}, {until}}}" for one in ("beta", "gamma")]
    world.share(f"grants: [{', '.join(grants)}]")
    mine, tail = prompt(11, 8), prompt(12, 4)
    assert world.is_granted("gamma", range(30, 50, 2)) and world.is_granted("beta", range(50, 70, 2)), "void"
    world.serve("acme", mine)
    assert world.serve("beta", mine + tail) == 8 * TOKENS
    before = Counter(copy.tenant for tier in world.tiers for copy in tier.copies())
    (manager,) = world.worker.governor._pools.managers
    (account,) = [one for one in manager.accounts.values() if one.name == "beta"]
    manager.tree.evict(account, account.cached_blocks, world.clock.now_us(), "quota")
    after = Counter(copy.tenant for tier in world.tiers for copy in tier.copies())
    assert (after - before).keys() == {"beta"}, "and none of its owner's"
    assert world.serve("gamma", mine + tail) == 8 * TOKENS and world.restored() == 0, "its keys are its own"
    assert world.serve("beta", mine + tail) == 12 * TOKENS and world.restored() == 4
    manager.tree.evict(account, account.cached_blocks, world.clock.now_us(), "quota")
    world.worker.governor.erase(Selector("acme"))
    world.worker.governor.step()
    assert world.serve("beta", mine + tail) == 0 and world.restored() == 4, "its owner's blocks are gone"
    world.worker.close()
