"""Orphans between vLLM's books and ours: planted while a request runs, found, repaired between steps; it serves on."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest

from kvcustody.allocator.pool.block_state import ACTIVE, CACHED
from kvcustody.clock import VirtualClock
from kvcustody.testkit.conformance.case import Bench, CaseHarness, person
from kvcustody.testkit.conformance.engine_protocol import FINISHED, Setup
from kvcustody.testkit.conformance.policy import policy
from kvcustody.testkit.vllm.conformance import engine

ANN, BOB = person("alpha"), person("beta", "bob")


class Busy(NamedTuple):
    """An engine with a cached prompt of one tenant and a running request of another."""

    rig: CaseHarness
    prompt: tuple[int, ...]
    running: object

    @property
    def core(self) -> Any:
        return self.rig.engine._core  # type: ignore[attr-defined]

    @property
    def pool(self) -> Any:
        return self.core.kvcustody.side.port.pool

    def scan(self, *, recover: bool) -> list[str]:
        return list(self.core.kvcustody_scan(recover))

    def block(self, state: int) -> int:
        return int(np.flatnonzero(self.pool.state == state)[0])


@pytest.fixture(params=[0, 1], ids=["synchronous", "a step in flight"])
def busy(request: pytest.FixtureRequest) -> Any:
    setup = Setup(policy(), VirtualClock(), steps_in_flight=request.param)
    under_test = engine(setup)
    rig = CaseHarness(under_test, setup, Random(3), Bench(engine, 3))
    prompt = rig.prompt(3)
    assert rig.ask(ANN, prompt).state == FINISHED
    running = rig.submit(BOB, rig.prompt(2), 40)
    rig.until_running(running)
    yield Busy(rig, prompt, running)
    under_test.close()


def leaked_reference(busy: Busy) -> str:
    busy.pool.refs[busy.block(ACTIVE)] += 1
    return "reference without sequence"


def leaked_hold(busy: Busy) -> str:
    busy.pool.holds[busy.block(CACHED)] += 1
    return "hold without residency"


def forgotten_key(busy: Busy) -> str:
    """vLLM's index loses a block behind our back."""
    side = busy.core.kvcustody.side
    block = busy.block(CACHED)
    pool = side.state.pool
    pool.cached_block_hash_to_block.pop(pool.blocks[block].block_hash, block)
    pool.blocks[block].reset_hash()
    return "unreachable chain"


@pytest.mark.parametrize("plant", [leaked_reference, leaked_hold, forgotten_key], ids=lambda plant: plant.__name__)
def test_what_is_planted_is_repaired_between_steps(busy: Busy, plant: Callable[[Busy], str]) -> None:
    assert busy.scan(recover=False) == []
    orphan = plant(busy)
    looked = busy.scan(recover=False)
    assert [line.split(":")[0] for line in looked] == [orphan]
    assert busy.scan(recover=False) == looked, "control: looking repairs nothing"
    repaired = busy.scan(recover=True)
    assert [line.split(":")[0] for line in repaired] == [orphan] and repaired[0].endswith("recovered")
    assert busy.scan(recover=False) == [] and busy.core.kvcustody_check() == []
    busy.rig.finish(busy.running)
    assert busy.rig.engine.outcome(busy.running).state == FINISHED, "whoever ran, runs on"
    assert busy.rig.ask(ANN, busy.prompt).state == FINISHED
    assert busy.scan(recover=True) == []
