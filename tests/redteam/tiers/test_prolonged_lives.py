"""E1: no way through a tier, no step of a clock and no restart makes a block live longer than its ceiling.

Time is what has passed, whatever the wall clock says. Of 10^6 operations without a hit that is too late, the rate is
below 3 x 10^-6 with 95 % confidence.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from kvcustody.clock import VirtualClock
from kvcustody.governance.tiers.tier import Restored, SealedTier
from standins.governance.offload_world import TOKENS, World, prompt

SECOND_US = 1_000_000
ABSOLUTE_US = 3_600 * SECOND_US
DAY_US = 24 * ABSOLUTE_US
TENANTS = ("acme", "beta")


class LastingWorld(World):
    """A worker with both tiers, small, that knows since when the content of every block has existed."""

    def __init__(self, folder: Path) -> None:
        self.passed_us = self.hits = self.restored = self.boots = 0
        self.since_us: dict[tuple[str, tuple[int, ...]], int] = {}
        super().__init__(folder, "host nvme", host_bytes=1 << 15)

    def ask(self, tenant: str, tokens: list[int]) -> None:
        """One request: what it is given is younger than its ceiling; what it computes is new."""
        hit = self.serve(tenant, tokens) // TOKENS
        self.hits += hit > 0
        for block in range(len(tokens) // TOKENS):
            name = (tenant, tuple(tokens[: TOKENS * (block + 1)]))
            if block >= hit:
                self.since_us[name] = self.passed_us
            age_us = self.passed_us - self.since_us[name]
            assert age_us < ABSOLUTE_US, f"a block of {tenant} lives on after {age_us / SECOND_US} s"

    def wait(self, microseconds: int) -> None:
        """Time passes."""
        self.passed_us += microseconds
        self.clock.advance(microseconds)
        self.worker.governor.step()

    def restart(self) -> None:
        """Another process, of the same boot."""
        self._count()
        self.worker.close()
        self.open()

    def reboot(self, wall_us: int) -> None:
        """Another process after another boot, whose wall clock says that it is later, or earlier, than it is."""
        self._count()
        self.worker.close()
        self.boots += 1
        self.clock = VirtualClock(SECOND_US, self.clock.utc_us() + wall_us, f"boot-{self.boots}")
        self.open()

    def _count(self) -> None:
        assert self.worker.governor.offload is not None
        self.restored += sum(use.restored_blocks for use in self.worker.governor.offload.transfers.uses())


def operate(world: LastingWorld, operations: int, seed: int) -> None:
    """Requests, waits, steps of the wall clock either way, restarts and reboots, at random."""
    drawn = Random(seed)
    for _ in range(operations):
        what = drawn.random()
        if what < 0.85:
            begun = prompt(drawn.randrange(5), 6, 0)
            world.ask(drawn.choice(TENANTS), begun + prompt(drawn.randrange(4), drawn.randrange(5)))
        elif what < 0.97:
            world.wait(drawn.choice((SECOND_US, 60 * SECOND_US, 500 * SECOND_US)))
        elif what < 0.995:
            world.clock.step_utc(drawn.choice((-DAY_US, -1_800 * SECOND_US, 1_800 * SECOND_US, DAY_US)))
            world.worker.governor.step()
        elif what < 0.998:
            world.restart()
        else:
            world.reboot(drawn.choice((-DAY_US, -600 * SECOND_US, 0, 600 * SECOND_US)))
    world.restart()


@pytest.mark.parametrize("operations", [200, pytest.param(1_000_000, marks=pytest.mark.soak)])
def test_nothing_is_found_after_its_ceiling(tmp_path: Path, operations: int) -> None:
    world = LastingWorld(tmp_path)
    operate(world, operations, seed=11)
    assert world.hits > operations // 10 and world.restored > operations // 10, "void: almost nothing came back"
    world.worker.close()


def test_a_round_trip_that_began_a_new_life_would_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: what comes from a tier is as young as if it had been computed."""
    real = SealedTier.load

    def load(self: SealedTier, *arguments: object) -> list[Restored]:
        now_us = self._index.clock.boot_us()
        return [
            one._replace(born_us=now_us, ceiling_us=now_us + ABSOLUTE_US)
            for one in real(self, *arguments)  # type: ignore[arg-type]
        ]

    monkeypatch.setattr(SealedTier, "load", load)
    world, mine = LastingWorld(tmp_path), prompt(1, 10)
    with pytest.raises(AssertionError, match="lives on"):
        for trip in range(9):
            world.ask("acme", mine)
            if not trip:
                world.crowd()
            world.wait(500 * SECOND_US)
    world.worker.close()
