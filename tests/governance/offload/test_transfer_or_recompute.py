"""Whether bytes move is decided by what moving and computing take: measured, on record with both, and right."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from kvcustody.audit.kinds import TransferDecided
from kvcustody.governance.governor.offloading import Offloading
from kvcustody.governance.observability.prefill_cost import DeclaredRate
from kvcustody.governance.tiers.run_transfers import TierWay
from kvcustody.governance.tiers.tier_link import TRIED
from kvcustody.governance.tiers.transfer_rates import TransferRates
from standins.governance.offload_world import World, prompt


def offloading(world: World) -> Offloading:
    assert world.worker.governor.offload is not None
    return world.worker.governor.offload


def watched(offload: Offloading) -> list[TransferDecided]:
    """What is decided from now on, as the ledger gets it."""
    decided: list[TransferDecided] = []
    take = offload.transfers.take_decisions

    def taking() -> list[TransferDecided]:
        taken = take()
        decided.extend(taken)
        return taken

    offload.transfers.take_decisions = taking  # type: ignore[method-assign]
    return decided


def restores(decided: list[TransferDecided]) -> list[TransferDecided]:
    return [one for one in decided if one.action == "restore"]


def test_a_tier_that_is_faster_is_used_and_both_numbers_are_on_record(tmp_path: Path) -> None:
    world = World(tmp_path, "host")
    offloading(world)._cost = DeclaredRate(1.0)  # a second a token
    decided = watched(offloading(world))
    for number in range(6):
        world.serve("acme", prompt(1, 10))
        world.crowd(number)
    found = restores(decided)
    assert len(found) >= 4 and {one.choice for one in found} == {"transfer"}
    first, *others = found
    assert first.reason == "not measured yet" and {one.reason for one in others} == {"faster"}
    for one in others:
        assert 0 < one.transfer_us < one.recompute_us == one.blocks * 16 * 1_000_000
        assert one.outcome == "done" and one.actual_us > 0 and one.tenant == "acme" and one.residency > 0
    assert [one.choice for one in decided if one.action == "store"].count("transfer") >= 10
    world.worker.close()


def test_a_tier_that_is_always_slower_is_not_used_after_its_first_samples(tmp_path: Path) -> None:
    world = World(tmp_path, "host")
    offload = offloading(world)
    offload.transfers.cost = DeclaredRate(1e12)
    decided = watched(offload)
    for number in range(12):
        world.serve("acme", prompt(1, 10))
        world.crowd(number)
    found = restores(decided)
    assert found[0].choice == "transfer", "the first sample"
    assert {one.choice for one in found[1:]} <= {"recompute"}
    for one in found[1:]:
        assert one.transfer_us > one.recompute_us and one.reason == "slower" and not one.actual_us
    stores = [one for one in decided if one.action == "store"]
    later = stores[len(stores) // 2 :]
    assert sum(one.choice == "transfer" for one in later) <= len(later) // 8 + 1, "nor is much kept for nothing"
    world.worker.close()


def test_a_tier_that_was_left_alone_is_looked_at_between_steps_and_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, "host")
    offload = offloading(world)
    offload.transfers.cost = DeclaredRate(1.0)
    for number in range(2):
        world.serve("acme", prompt(1, 10))
        world.crowd(number)
    (way,) = offload.transfers.ways
    for size in (1_000, 10_000, 100_000):
        for _ in range(20):
            way.link.restores.learn(size, 10**12)  # the link has become hopeless
    assert world.serve("acme", prompt(1, 10)) < 160
    assert way.link.against > 0
    before = way.link.restores.samples
    for _ in range(40):
        world.clock.advance(60_000_000 // 8)
        world.worker.governor.step()
    assert way.link.restores.samples > before, "and nobody asked"
    world.crowd(5)
    assert world.serve("acme", prompt(1, 10)) == 160
    world.worker.close()


def test_one_step_moves_no_more_than_its_share(tmp_path: Path) -> None:
    world = World(tmp_path, "host")
    offload = offloading(world)
    offload.transfers.step_bytes = offload.transfers.left_bytes = 4 * world.size
    world.serve("acme", prompt(1, 10))
    found = watched(offload)
    world.serve("beta", prompt(2, 22))
    decided = [one for one in found if one.action == "store"]
    moved = sum(one.blocks for one in decided if one.choice == "transfer")
    assert moved <= 4 and "busy" in {one.reason for one in decided}
    world.worker.close()


def test_rates_follow_a_link_and_know_how_wrong_they_were() -> None:
    rates = TransferRates()
    assert rates.predict(1 << 20) is None and rates.error is None
    rates.learn(1 << 20, 1_000)
    assert rates.predict(1 << 20) == pytest.approx(1_000)
    assert rates.predict(1 << 10) == pytest.approx(1_000 / 1024), "from the nearest size"
    for _ in range(6):
        rates.learn(1 << 10, 50)
        rates.learn(1 << 20, 1_000)
    assert rates.predict(1 << 10) == pytest.approx(50, rel=0.3), "a byte of small ones costs more"
    assert rates.predict(1 << 20) == pytest.approx(1_000, rel=0.3)
    for _ in range(6):
        rates.learn(1 << 20, 100_000)
    slower = rates.predict(1 << 20)
    assert slower is not None and 90_000 < slower < 200_000, "nearer to too much than to too little"
    for _ in range(60):
        rates.learn(1 << 20, 100_000)
    assert rates.predict(1 << 20) == pytest.approx(100_000, rel=0.1)
    small = rates.predict(1 << 10)
    assert small is not None and small > 500, "the link is slower for every size"
    assert rates.error is not None and 0 < rates.error < 1


@pytest.mark.parametrize("spread", [0.3, 1.0, 1.5])
def test_predictions_are_right_in_sum_where_times_have_a_heavy_tail(spread: float) -> None:
    """Control: what is typical, without rule 3, is too low by the tail: exp(spread^2 / 2) in the limit."""
    draw, rates = random.Random(7), TransferRates()
    took = predicted = typical = 0.0
    for _ in range(4_000):
        size = draw.choice((1 << 16, 1 << 18, 1 << 20))
        took_us = int(size / 100 * math.exp(draw.gauss(0, spread)))
        expected = rates.predict(size)
        if expected is not None:
            took, predicted = took + took_us, predicted + expected
            typical += expected * rates._typical / rates._took
        rates.learn(size, took_us)
    assert predicted == pytest.approx(took, rel=0.15)
    assert took / typical > (1.0, 1.2)[spread >= 1]


@pytest.mark.parametrize("follows", [True, False])
def test_a_trial_takes_a_chain_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, follows: bool) -> None:
    """Nothing comes back behind a hole. Control: each run tried by itself leaves a hole."""
    if not follows:
        monkeypatch.setattr(TierWay, "is_awaited", lambda way, run: False)
    world = World(tmp_path, "host")
    offload = offloading(world)
    offload.transfers.cost = DeclaredRate(1e12)  # nothing seems to pay
    (way,) = offload.transfers.ways
    for size in (1_000, 10_000, 100_000):
        way.link.stores.learn(size, 100)
        way.link.restores.learn(size, 100)
    decided = watched(offload)
    world.serve("acme", prompt(1, 10))
    way.link.skipped = TRIED - 1  # the next run is the one in `TRIED`
    world.crowd()
    runs = [one for one in decided if one.action == "store" and one.tenant == "acme"]
    assert [one.blocks for one in runs] == [6, 4], "from the end, cut where objects end"
    assert [one.reason for one in runs] == ["tried", "tried" if follows else "does not pay"]
    offload.transfers.cost = DeclaredRate(1)
    assert world.serve("acme", prompt(1, 10)) == (160 if follows else 0)
    world.worker.close()
