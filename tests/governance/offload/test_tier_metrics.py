"""Every metric of a tier against a recount by hand: of the store's own listing, and of what `load` and `store` did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvcustody.errors import StoreError
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.observability.metrics import MEASURES, worker_status
from standins.governance.offload_world import World, prompt

REAL_TIME = {"tier_store_seconds", "tier_restore_seconds", "tier_prediction_error"}


class Recount:
    """Counts at the tier's door what a metric says."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.stored = self.restored = 0
        (tier,) = world.tiers
        self.tier = tier
        store, load = tier.store, tier.load

        def counting_store(*what: Any) -> int:
            blocks = store(*what)
            self.stored += blocks
            return blocks

        def counting_load(*what: Any) -> Any:
            came = load(*what)
            self.restored += sum(one.blocks for one in came)
            return came

        tier.store, tier.load = counting_store, counting_load  # type: ignore[method-assign]

    def by_hand(self) -> dict[str, float]:
        pages = self.tier._index.store.page(b"", 10_000)
        ended = [name for name, one in self.tier._ends.waiting.items() if one is not None]
        return {
            "tier_copies": len(pages) - len(ended),
            "tier_used_bytes": sum(one.size for one in pages if one.name not in ended),
            "tier_capacity_bytes": 1 << 20,
            "tier_waiting": len(ended),
            "tier_stored_blocks": self.stored,
            "tier_restored_blocks": self.restored,
        }

    def said(self) -> dict[str, float]:
        found = worker_status(self.world.worker.governor.stats(), 16)
        name = self.tier.name
        return {key.removesuffix(f".{name}"): value for key, value in found.items() if key.startswith("tier_")}


@pytest.mark.parametrize("kind", ["host", "nvme"])
def test_every_metric_of_a_tier_is_what_a_recount_says(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, kind)
    count = Recount(world)
    keys = {measure.key.partition(".")[0] for measure in MEASURES if "tier" in measure.labels}

    def check() -> dict[str, float]:
        said, hand = count.said(), count.by_hand()
        assert {key: said[key] for key in hand} == hand
        assert set(said) | REAL_TIME == keys == set(hand) | REAL_TIME | {"tier_refused", "tier_left_alone"}
        return said

    check()
    for number in range(4):
        world.serve("acme", prompt(number, 10))
        world.crowd(number)
    world.serve("acme", prompt(0, 10))
    said = check()
    assert said["tier_stored_blocks"] and said["tier_restored_blocks"] and said["tier_copies"]
    assert said["tier_store_seconds"] > 0 < said["tier_restore_seconds"] and said["tier_refused"] == 0

    def away(*_: object) -> None:
        raise StoreError("away")

    monkeypatch.setattr(count.tier._index.store, "delete", away)
    world.clock.advance(601_000_000)
    world.worker.governor.step()
    assert check()["tier_waiting"] > 0, "its holds have lapsed, and the store is away"
    monkeypatch.undo()
    world.worker.governor.erase(Selector("acme"))
    assert check()["tier_waiting"] == 0
    world.clock.advance(1_000_000)
    monkeypatch.setattr(count.tier._index.store, "prepare_store", away)
    for number in range(5):
        world.serve("acme", prompt(50 + number, 10))
    assert check()["tier_refused"] > 0
    world.worker.close()
