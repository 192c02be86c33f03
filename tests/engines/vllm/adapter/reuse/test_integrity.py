"""What vLLM's scheduler would reuse is compared with its checksum in the worker first, where the policy says so."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pytest

from kvcustody.allocator.pool.block_state import BlockState
from kvcustody.audit.kinds import CustodyEnded, IntegrityMismatch, ReceiptRecorded
from kvcustody.audit.kinds.block_runs import Run
from kvcustody.governance.erasure.selector import Selector
from kvcustody.testkit.conformance.deployment import table
from standins.engines.vllm.scheduler_rig import BLOCK_TOKENS, Rig, prompt

PROMPT = prompt(100)
WHOLE = 96  # of its tokens lie in full blocks
PACES = [
    pytest.param({"asynchronous": asynchronous, "defers": defers}, id=f"{asynchronous=}-{defers=}")
    for asynchronous in (False, True)
    for defers in (False, True)
]


@pytest.fixture
def rig(rig: Callable[..., Rig]) -> Callable[..., Rig]:
    """Makes rigs whose policy compares everything."""
    return lambda **named: rig(**({"verify": "all"} | named))


def block_at(engine: Rig, place: int, ids: Sequence[int] = PROMPT) -> int:
    """The published block that holds the K/V of the prompt's block `place`."""
    first = [ids[place * BLOCK_TOKENS] + 1, place * BLOCK_TOKENS + 1]
    (found,) = [
        block
        for block in np.flatnonzero(engine.port.pool.indexed).tolist()
        if [int(engine.device.layers[0][block, side, 0, 0, 0]) for side in (0, 1)] == first
    ]
    return int(found)


def flip(one: Rig, block: int, bit: int = 3) -> None:
    """One bit of one word of one layer."""
    one.device.layers[0][block, 0, 5, 0, 0] ^= 1 << bit


def blocks(runs: Iterable[Run]) -> list[int]:
    """Block indices of runs."""
    return [int(block) for run in runs for block in run.blocks]


def mismatches(one: Rig) -> list[IntegrityMismatch]:
    """Those on record."""
    one.port.counts()
    return [event for event in one.ledger.events if isinstance(event, IntegrityMismatch)]


def figures(one: Rig) -> tuple[int, int]:
    """Blocks compared, and found changed."""
    pool = one.port.stats().pools[0]
    return pool.checked_blocks, pool.mismatched_blocks


@pytest.mark.parametrize("pace", PACES)
def test_a_changed_block_is_a_miss_with_all_that_continues_it(rig: Callable[..., Rig], pace: dict[str, bool]) -> None:
    engine = rig(**pace)
    assert [engine.ask(PROMPT), engine.ask(PROMPT)] == [0, WHOLE]
    assert figures(engine) == (6, 0)
    bad = block_at(engine, 2)
    flip(engine, bad)
    assert engine.ask(PROMPT) == 2 * BLOCK_TOKENS
    assert figures(engine)[1] == 1
    (leaf,) = mismatches(engine)
    assert blocks(leaf.runs) == [bad]
    assert (leaf.tenant, leaf.requests) == ("alpha", 0)
    ended = [event for event in engine.ledger.events if isinstance(event, CustodyEnded)]
    assert bad in [block for event in ended if event.cause == "integrity" for block in blocks(event.runs)]
    assert engine.ask(PROMPT) == WHOLE, "what was computed anew is reused"
    engine.verify()


@pytest.mark.parametrize("pace", PACES)
def test_control_where_the_policy_compares_nothing_it_is_served(rig: Callable[..., Rig], pace: dict[str, bool]) -> None:
    engine = rig(verify="none", **pace)
    engine.ask(PROMPT)
    flip(engine, block_at(engine, 2))
    assert engine.ask(PROMPT) == WHOLE
    assert len(engine.device.wrong) > 0
    assert figures(engine) == (0, 0)
    assert engine.port.pool.sums is None


def test_a_block_that_changes_twice_is_withheld(rig: Callable[..., Rig]) -> None:
    engine = rig(blocks=14)
    engine.ask(PROMPT)
    bad = block_at(engine, 2)
    pool = engine.port.pool
    for times in (1, 2):
        for _ in range(40):  # until the same block holds a prefix again
            engine.ask(PROMPT)
            if pool.indexed[bad]:
                break
            engine.port.erase(Selector("alpha"))
            engine.ask(prompt(20, 5), "beta")
        flip(engine, bad)
        engine.ask(PROMPT)
        engine.step()
        assert [blocks(leaf.runs) for leaf in mismatches(engine)] == [[bad]] * times
        assert (bad in engine.side.state.withheld) == (times == 2)
    assert BlockState(int(pool.state[bad])) is BlockState.QUARANTINED
    failed = [
        event for event in engine.ledger.events if isinstance(event, ReceiptRecorded) and event.result == "failed"
    ]
    assert [blocks(event.runs) for event in failed] == [[bad]]
    for seed in range(1, 12):
        engine.ask(prompt(90, seed), "beta")
        assert pool.state[bad] == BlockState.QUARANTINED
    assert {str(reason) for reason, _ in engine.reasons.values()} == {"length"}, "whoever came next was not aborted"
    assert (engine.device.wrong, engine.device.residue, engine.port.check()) == ([], [], [])
    assert [(found.orphan, list(found.blocks)) for found in engine.port.scan()] == [("failed verification", [bad])]


def test_whoever_runs_on_it_goes_on_and_leaves_nothing_behind(rig: Callable[..., Rig]) -> None:
    engine = rig()
    engine.ask(PROMPT)
    running = engine.add([*PROMPT[:WHOLE], *prompt(20, 9)], n=60)
    for _ in range(6):
        engine.step()
    table = [block.block_id for block in engine.side.state.groups[0].blocks(running.request_id)]
    bad = block_at(engine, 4)
    assert table[4] == bad and engine.port.pool.refs[bad] == 1
    before = int(engine.port.pool.indexed[table].sum())
    assert before > 6, "positive control: it published blocks of its own"
    flip(engine, bad)
    assert engine.ask(PROMPT) == 4 * BLOCK_TOKENS
    (leaf,) = mismatches(engine)
    assert leaf.requests == 1
    assert engine.port.pool.indexed[table].tolist()[:7] == [True] * 4 + [False] * 3
    engine.run()
    assert len(engine.outputs[running.request_id]) == 60
    engine.device.wrong = [name for name in engine.device.wrong if name != running.request_id]  # it had read it
    assert engine.port.pool.indexed[table].sum() == 4, "nothing that it computed from it can be found"
    assert engine.ask([*PROMPT[:WHOLE], *prompt(20, 9)]) == WHOLE, "what the other request computed anew"
    engine.verify()


def test_others_do_not_wait_while_one_is_compared(rig: Callable[..., Rig]) -> None:
    engine = rig()
    engine.ask(PROMPT)
    first, other = engine.add(PROMPT), engine.add(prompt(40, 3), "beta")
    assert set(engine.step()) == {other.request_id}
    assert engine.step() == {first.request_id: WHOLE}
    engine.run()
    engine.verify()


@pytest.mark.parametrize("pace", PACES)
def test_in_a_crowded_pool_nothing_that_was_not_changed_raises_an_alarm(
    rig: Callable[..., Rig], pace: dict[str, bool]
) -> None:
    """Chunked prefill, preemption, eviction, blocks that are hit in the step that fills them."""
    engine = rig(blocks=34, alpha=30, **pace)
    for round_ in range(4):
        for seed in range(6):
            engine.add(prompt(60 + 17 * seed, seed % 4), "alpha" if seed % 2 else "beta", n=9 + round_)
        engine.run()
    checked, mismatched = figures(engine)
    assert checked > 20 and mismatched == 0
    engine.verify()


def test_with_layers_of_two_kinds_everything_that_may_come_from_it_is_computed_anew(
    rig: Callable[..., Rig],
) -> None:
    """Behind a window it is not known which blocks were computed from which."""
    engine = rig(blocks=80, windows=True)
    engine.ask(PROMPT)
    assert engine.ask(PROMPT) > 0
    pool, before = engine.port.pool, engine.port.pool.generation.copy()
    held = np.flatnonzero(pool.indexed)
    windowed = [block for block in held.tolist() if pool.parent[block] < 0 and not pool.children[block]]
    flip(engine, windowed[-1])
    assert engine.ask(PROMPT) == 0
    assert figures(engine)[1] == 1
    assert not any(pool.indexed[held] & (pool.generation[held] == before[held]))
    assert engine.ask(PROMPT) > 0
    engine.verify()


def test_a_policy_that_begins_to_ask_has_what_is_cached_summed_as_it_is(rig: Callable[..., Rig]) -> None:
    engine = rig(verify="none")
    engine.ask(PROMPT)
    asks = engine.policy.replace("verify: none", "verify: all")
    engine.port.activate(table(asks, revision=2), actor="t")
    assert engine.port.has_work(), "an idle engine sums at once"
    while engine.port.has_work():
        engine.step()
    assert engine.ask(PROMPT) == WHOLE
    assert figures(engine) == (6, 0)
    flip(engine, block_at(engine, 0))
    assert engine.ask(PROMPT) == 0
    engine.verify()


def test_a_share_of_reuses_is_compared(rig: Callable[..., Rig]) -> None:
    """6 blocks a hit, each with a chance of 1/4: fewer than 40 or more than 200 of 480 come once in 10^12 runs."""
    engine = rig(verify="1/4")
    engine.ask(PROMPT)
    for _ in range(80):
        assert engine.ask(PROMPT, n=1) == WHOLE
    assert 40 < figures(engine)[0] < 200
    assert figures(engine)[1] == 0
    counted = engine.port.stats().tenants["alpha"]
    assert counted.verified_blocks == figures(engine)[0] < counted.hit_blocks
