"""Whoever cuts or fills the file of shred keys destroys copies, and ends no engine that has it open."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvcustody.errors import ConfigError, KeyringError
from kvcustody.governance.keys.shred_keys import ShredKeys
from kvcustody.times import DAY_US
from standins.governance.offload_world import World, prompt


@pytest.mark.parametrize("size", [0, 1, 70, 256, 300])
def test_a_cut_file_is_a_miss_and_serving_goes_on(tmp_path: Path, size: int) -> None:
    world = World(tmp_path, "nvme")
    world.serve("acme", prompt(1, 10))
    world.crowd()
    (tier,) = world.tiers
    assert tier.counts.living > 0
    os.truncate(tmp_path / "shred.keys", size)
    if size >= 256:  # its header still says that no record was written: it is looked at when something is due
        world.clock.advance(DAY_US)
        world.worker.governor.step()
    assert world.serve("acme", prompt(1, 10)) == 0
    assert tier.counts.living == 0
    for seed in (5, 7, 9):
        world.serve("acme", prompt(seed, 10))
    world.worker.close()
    if 0 < size < 256:  # a part of a header is nobody's file
        with pytest.raises(ConfigError, match="shred_keys_path"):
            world.open()
        return
    world.open()
    world.serve("acme", prompt(1, 10))
    world.crowd(1)
    assert world.serve("acme", prompt(1, 10)) == 160, "the next start makes the file whole"
    world.worker.close()


def test_a_file_that_somebody_fills_is_a_miss_too(tmp_path: Path) -> None:
    """Its count of changes is the largest then."""
    world = World(tmp_path, "nvme")
    world.serve("acme", prompt(1, 10))
    world.crowd()
    path = tmp_path / "shred.keys"
    path.write_bytes(b"\xff" * path.stat().st_size)
    assert world.serve("acme", prompt(1, 10)) == 0
    world.crowd(1)
    world.worker.close()


def test_without_it_the_engine_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: where a missing header is an error of whoever looks, each step raises it."""
    world = World(tmp_path, "nvme")
    world.serve("acme", prompt(1, 10))
    world.crowd()
    monkeypatch.setattr(ShredKeys, "changes", lambda keys: int.from_bytes(keys._bytes(64, 8), "little"))
    os.truncate(tmp_path / "shred.keys", 0)
    with pytest.raises(KeyringError, match="shorter than before"):
        world.worker.governor.step()
    world.worker.close()
