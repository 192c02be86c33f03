"""A worker whose pool is too small, over real tensors: what was evicted comes back from its tier, to its own alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvcustody.errors import DeviceError, LedgerUnavailable
from kvcustody.governance.erasure.selector import Selector
from kvcustody.policies.reading.load_policy import load_policy
from kvcustody.policies.table.compile import compile_policy
from standins.governance.offload_world import MODEL, POLICY, World, prompt, who


@pytest.fixture(params=["host", "nvme", "host nvme"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path, request.param)
    yield made
    made.worker.close()


def test_what_was_evicted_comes_back_to_its_own_and_to_nobody_else(world: World) -> None:
    mine = prompt(1, 10)
    assert world.serve("acme", mine) == 0
    assert world.serve("acme", mine) == 160, "from the device"
    world.crowd()
    assert world.serve("beta", mine) == 0, "another tenant, the same prompt"
    world.crowd(1)
    assert world.serve("acme", mine) == 160, "from a tier"
    assert world.serve("acme", mine + prompt(2, 4)) >= 160
    assert world.worker.governor.offload is not None
    uses = world.worker.governor.offload.transfers.uses()
    assert sum(use.restored_blocks for use in uses) >= 10


def test_what_leaves_bit_by_bit_is_stored_once_and_whole(tmp_path: Path) -> None:
    """Blocks go one by one from a prompt's end, as requests grow: an object of 4 blocks is one copy, not four."""
    world = World(tmp_path, "host")
    (tier,), governor = world.tiers, world.worker.governor
    manager = governor._pools.managers[0]
    assert world.serve("acme", prompt(1, 12)) == 0
    (account,) = [one for one in manager.accounts.values() if one.cached_blocks]
    copies = []
    for _ in range(12):
        assert manager.tree.evict(account, 1, world.clock.now_us(), "pressure") == 1
        copies.append(len(tier))
    assert copies == [1] * 4 + [2] * 4 + [3] * 4
    assert all(copy.blocks == 4 for copy in tier.copies())
    assert world.serve("acme", prompt(1, 12)) == 12 * 16, "and all of it comes back"
    before = tier.counts.stored
    manager.tree.evict(account, 6, world.clock.now_us(), "pressure")
    assert tier.counts.stored == before, "what came from there is there"
    tier.destroy(list(tier.index()))
    manager.tree.evict(account, 6, world.clock.now_us(), "pressure")
    assert tier.counts.stored > before, "control: it is not there any more, so it is stored again"
    world.worker.close()


def test_a_prompt_of_whole_blocks_comes_back_but_for_its_last(world: World) -> None:
    """Its last block is computed always; the object that it is in brings the others."""
    mine = prompt(1, 12, extra=0)
    assert world.serve("acme", mine) == 0
    world.crowd()
    assert world.serve("acme", mine) == 11 * 16


def test_without_a_tier_it_is_computed_again(tmp_path: Path) -> None:
    """The control: the same requests, and no tier is set."""
    world = World(tmp_path, "")
    mine = prompt(1, 10)
    world.serve("acme", mine)
    world.crowd()
    assert world.worker.governor.offload is None and world.serve("acme", mine) == 0
    world.worker.close()


def test_a_round_trip_prolongs_nothing(world: World) -> None:
    """Idle 10 minutes, at most an hour: through the tier and back every nine minutes, and the hour ends it."""
    mine, minute = prompt(1, 10), 60_000_000
    world.serve("acme", mine)
    for trip in range(6):
        world.clock.advance(9 * minute)
        world.worker.governor.step()
        world.crowd(trip)
        assert world.serve("acme", mine) == 160, f"after {9 * (trip + 1)} minutes"
    world.clock.advance(6 * minute)
    world.worker.governor.step()
    assert world.serve("acme", mine) == 0, "an hour after it was written"


def test_a_copy_ends_when_its_hold_would_have(world: World) -> None:
    mine, minute = prompt(1, 10), 60_000_000
    world.serve("acme", mine)
    world.crowd()
    world.clock.advance(10 * minute)
    world.worker.governor.step()
    assert world.serve("acme", mine) == 0
    for tier in world.tiers:
        ends = [event.cause for event in tier.take_events() if event.step == "ended"]
        assert set(ends) <= {"ceiling"}


def test_an_erasure_reaches_the_tiers(world: World) -> None:
    mine = prompt(1, 10)
    world.serve("acme", mine)
    world.crowd()
    world.serve("acme", prompt(3, 10))
    done = world.worker.governor.erase(Selector("acme"))
    assert not done.is_complete
    for _ in range(3):
        world.clock.advance(10_000)
        world.worker.governor.step()
    result = world.worker.governor.erasures.result(done.erasure)
    assert result is not None and result.is_complete
    world.crowd(1)
    assert world.serve("acme", mine) == 0
    assert {entry.tenant for tier in world.tiers for entry in tier.objects().values()} == {"beta"}


def test_policy_decides_and_a_narrower_one_ends_what_is_there(world: World) -> None:
    mine = prompt(1, 10)
    world.serve("acme", mine)
    world.crowd()
    assert sum(map(len, world.tiers)) > 0
    text = POLICY.replace("internal: {tiers: [host, nvme], encrypt: required}", "internal: never")
    table = compile_policy(load_policy(text, name="tiers"), revision=9)
    world.worker.governor.activate(table, actor="test")
    assert sum(map(len, world.tiers)) == 0 == sum(len(tier.objects()) for tier in world.tiers)
    assert world.serve("acme", mine) == 0
    world.crowd(1)
    assert sum(map(len, world.tiers)) == 0


def test_after_a_restart_the_nvme_tier_has_it_still(tmp_path: Path) -> None:
    world = World(tmp_path, "nvme")
    mine = prompt(1, 10)
    world.serve("acme", mine)
    world.crowd()
    world.worker.close()
    world.clock.advance(60_000_000)
    world.open()
    assert world.serve("beta", mine) == 0 and world.serve("acme", mine) == 160
    world.worker.close()


def test_a_device_that_fails_in_a_restore_leaves_no_request(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = prompt(1, 10)
    world.serve("acme", mine)
    world.crowd()

    def fails(*_: object) -> None:
        raise DeviceError("the device is gone")

    monkeypatch.setattr(world.memory, "write", fails)
    governor = world.worker.governor
    with pytest.raises(DeviceError, match="gone"):
        governor.admit(who("acme"), MODEL, mine)
    monkeypatch.undo()
    assert not governor.running and governor.check() == []
    assert world.serve("acme", mine) == 160


@pytest.mark.parametrize("lie", [b"", b"short", None])
def test_a_tier_that_lies_costs_a_computation(world: World, lie: bytes | None, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = prompt(1, 10)
    world.serve("acme", mine)
    world.crowd()
    kept: list[object] = []
    for tier in world.tiers:
        real: Callable[[bytes], memoryview | None] = tier._index.store.prepare_load

        def wrong(name: bytes, real: Callable[[bytes], memoryview | None] = real) -> memoryview | None:
            data = real(name)
            assert data is not None
            kept.append(lie if lie is not None else bytes(data[:-1]) + bytes([data[-1] ^ 1]))
            data.release()
            return memoryview(kept[-1])  # type: ignore[arg-type]

        monkeypatch.setattr(tier._index.store, "prepare_load", wrong)
    assert world.serve("acme", mine) == 0 and kept, "and its blocks are right"


@pytest.mark.system
def test_random_requests_are_answered_as_by_a_cache_that_lasts(world: World) -> None:
    """500 requests of two tenants over shared beginnings: `serve` compares every block under a hit, byte for byte."""
    drawn, hits = np.random.default_rng(5), 0
    for _ in range(500 // (3 if "nvme" in world.set else 1)):
        tenant = ("acme", "beta")[int(drawn.integers(2))]
        shared = prompt(int(drawn.integers(6)), 6, 0)
        hits += world.serve(tenant, shared + prompt(int(drawn.integers(40)), int(drawn.integers(1, 6))))
        world.clock.advance(int(drawn.integers(2_000_000)))
    assert world.worker.governor.offload is not None
    restored = sum(use.restored_blocks for use in world.worker.governor.offload.transfers.uses())
    assert hits and restored > 100, "void: nothing came from a tier"


def test_what_the_host_has_no_room_for_goes_to_the_disk_as_it_is_sealed(tmp_path: Path) -> None:
    """A host tier of a few objects over a large folder: hits come from both, and never live longer."""
    world = World(tmp_path, "host nvme", host_bytes=8 * 8192)
    prompts = [prompt(number, 10) for number in range(8)]
    for number, tokens in enumerate(prompts):
        world.serve("acme", tokens)
        world.crowd(number)
    host, nvme = world.tiers
    assert len(host) and len(nvme) and host.counts.ended > 0
    assert world.serve("beta", prompts[0]) == 0
    world.crowd(9)
    hits = sum(world.serve("acme", tokens) for tokens in prompts)
    assert world.worker.governor.offload is not None
    uses = {use.tier: use.restored_blocks for use in world.worker.governor.offload.transfers.uses()}
    assert hits > 500 and uses["host"] + uses["nvme"] > 30 and uses["nvme"] > 0, (hits, uses)
    world.clock.advance(600_000_000)
    world.worker.governor.step()
    assert world.serve("acme", prompts[0]) == 0
    world.worker.close()


def test_what_a_policy_narrows_ends_even_where_it_cannot_be_recorded(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.serve("acme", prompt(1, 10))
    world.crowd()
    assert sum(map(len, world.tiers)) > 0
    text = POLICY.replace("internal: {tiers: [host, nvme], encrypt: required}", "internal: never")
    table = compile_policy(load_policy(text, name="tiers"), revision=9)
    governor = world.worker.governor

    def down(*_: object) -> int:
        raise LedgerUnavailable("the ledger is away")

    monkeypatch.setattr(governor._ledger, "submit_durable", down)
    with pytest.raises(LedgerUnavailable):
        governor.activate(table, actor="test")
    assert sum(map(len, world.tiers)) == 0
    monkeypatch.undo()


def test_a_tenant_that_nobody_listed_takes_its_copies_along(tmp_path: Path) -> None:
    world = World(tmp_path, "host")
    world.worker.close()
    world.policy = POLICY.replace("  beta:", "  default: {quota: {guaranteed: 0%, cap: 100%}, tenants_max: 1}\n  beta:")
    world.open()
    (tier,) = world.tiers
    world.serve("stranger", prompt(1, 10))
    for number in range(3):
        world.serve("acme", prompt(20 + number, 16))
    assert {"stranger"} <= {entry.tenant for entry in tier.index().values()}
    world.serve("another", prompt(2, 4))
    assert "stranger" not in {entry.tenant for entry in tier.index().values()}
    world.worker.close()
