"""What vLLM's scheduler would reuse is compared with its checksum in the worker first, where the policy says so."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

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
def rig(model: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Rig]:
    """Makes rigs whose policy compares everything."""
    return lambda **named: Rig(model, monkeypatch, **({"verify": "all"} | named))


def block_at(one: Rig, place: int, ids: Sequence[int] = PROMPT) -> int:
    """The published block that holds the K/V of the prompt's block `place`."""
    first = [ids[place * BLOCK_TOKENS] + 1, place * BLOCK_TOKENS + 1]
    (found,) = [
        block
        for block in np.flatnonzero(one.port.pool.indexed).tolist()
        if [int(one.device.layers[0][block, side, 0, 0, 0]) for side in (0, 1)] == first
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
    one = rig(**pace)
    assert [one.ask(PROMPT), one.ask(PROMPT)] == [0, WHOLE]
    assert figures(one) == (6, 0)
    bad = block_at(one, 2)
    flip(one, bad)
    assert one.ask(PROMPT) == 2 * BLOCK_TOKENS
    assert figures(one)[1] == 1
    (leaf,) = mismatches(one)
    assert blocks(leaf.runs) == [bad]
    assert (leaf.tenant, leaf.requests) == ("alpha", 0)
    ended = [event for event in one.ledger.events if isinstance(event, CustodyEnded)]
    assert bad in [block for event in ended if event.cause == "integrity" for block in blocks(event.runs)]
    assert one.ask(PROMPT) == WHOLE, "what was computed anew is reused"
    one.verify()


@pytest.mark.parametrize("pace", PACES)
def test_control_where_the_policy_compares_nothing_it_is_served(rig: Callable[..., Rig], pace: dict[str, bool]) -> None:
    one = rig(verify="none", **pace)
    one.ask(PROMPT)
    flip(one, block_at(one, 2))
    assert one.ask(PROMPT) == WHOLE
    assert len(one.device.wrong) > 0
    assert figures(one) == (0, 0)
    assert one.port.pool.sums is None


def test_a_block_that_changes_twice_is_withheld(rig: Callable[..., Rig]) -> None:
    one = rig(blocks=14)
    one.ask(PROMPT)
    bad = block_at(one, 2)
    pool = one.port.pool
    for times in (1, 2):
        for _ in range(40):  # until the same block holds a prefix again
            one.ask(PROMPT)
            if pool.indexed[bad]:
                break
            one.port.erase(Selector("alpha"))
            one.ask(prompt(20, 5), "beta")
        flip(one, bad)
        one.ask(PROMPT)
        one.step()
        assert [blocks(leaf.runs) for leaf in mismatches(one)] == [[bad]] * times
        assert (bad in one.side.state.withheld) == (times == 2)
    assert BlockState(int(pool.state[bad])) is BlockState.QUARANTINED
    failed = [event for event in one.ledger.events if isinstance(event, ReceiptRecorded) and event.result == "failed"]
    assert [blocks(event.runs) for event in failed] == [[bad]]
    for seed in range(1, 12):
        one.ask(prompt(90, seed), "beta")
        assert pool.state[bad] == BlockState.QUARANTINED
    assert {str(reason) for reason, _ in one.reasons.values()} == {"length"}, "whoever came next was not aborted"
    assert (one.device.wrong, one.device.residue, one.port.check()) == ([], [], [])
    assert [(found.orphan, list(found.blocks)) for found in one.port.scan()] == [("failed verification", [bad])]


def test_whoever_runs_on_it_goes_on_and_leaves_nothing_behind(rig: Callable[..., Rig]) -> None:
    one = rig()
    one.ask(PROMPT)
    running = one.add([*PROMPT[:WHOLE], *prompt(20, 9)], n=60)
    for _ in range(6):
        one.step()
    table = [block.block_id for block in one.side.state.groups[0].blocks(running.request_id)]
    bad = block_at(one, 4)
    assert table[4] == bad and one.port.pool.refs[bad] == 1
    before = int(one.port.pool.indexed[table].sum())
    assert before > 6, "positive control: it published blocks of its own"
    flip(one, bad)
    assert one.ask(PROMPT) == 4 * BLOCK_TOKENS
    (leaf,) = mismatches(one)
    assert leaf.requests == 1
    assert one.port.pool.indexed[table].tolist()[:7] == [True] * 4 + [False] * 3
    one.run()
    assert len(one.outputs[running.request_id]) == 60
    one.device.wrong = [name for name in one.device.wrong if name != running.request_id]  # it had read it
    assert one.port.pool.indexed[table].sum() == 4, "nothing that it computed from it can be found"
    assert one.ask([*PROMPT[:WHOLE], *prompt(20, 9)]) == WHOLE, "what the other request computed anew"
    one.verify()


def test_others_do_not_wait_while_one_is_compared(rig: Callable[..., Rig]) -> None:
    one = rig()
    one.ask(PROMPT)
    first, other = one.add(PROMPT), one.add(prompt(40, 3), "beta")
    assert set(one.step()) == {other.request_id}
    assert one.step() == {first.request_id: WHOLE}
    one.run()
    one.verify()


@pytest.mark.parametrize("pace", PACES)
def test_in_a_crowded_pool_nothing_that_was_not_changed_raises_an_alarm(
    rig: Callable[..., Rig], pace: dict[str, bool]
) -> None:
    """Chunked prefill, preemption, eviction, blocks that are hit in the step that fills them."""
    one = rig(blocks=34, alpha=30, **pace)
    for round_ in range(4):
        for seed in range(6):
            one.add(prompt(60 + 17 * seed, seed % 4), "alpha" if seed % 2 else "beta", n=9 + round_)
        one.run()
    checked, mismatched = figures(one)
    assert checked > 20 and mismatched == 0
    one.verify()


def test_with_layers_of_two_kinds_everything_that_may_come_from_it_is_computed_anew(
    rig: Callable[..., Rig],
) -> None:
    """Behind a window it is not known which blocks were computed from which."""
    one = rig(blocks=80, windows=True)
    one.ask(PROMPT)
    assert one.ask(PROMPT) > 0
    pool, before = one.port.pool, one.port.pool.generation.copy()
    held = np.flatnonzero(pool.indexed)
    windowed = [block for block in held.tolist() if pool.parent[block] < 0 and not pool.children[block]]
    flip(one, windowed[-1])
    assert one.ask(PROMPT) == 0
    assert figures(one)[1] == 1
    assert not any(pool.indexed[held] & (pool.generation[held] == before[held]))
    assert one.ask(PROMPT) > 0
    one.verify()


def test_a_policy_that_begins_to_ask_has_what_is_cached_summed_as_it_is(rig: Callable[..., Rig]) -> None:
    one = rig(verify="none")
    one.ask(PROMPT)
    asks = one.policy.replace("verify: none", "verify: all")
    one.port.activate(table(asks, revision=2), actor="t")
    assert one.port.has_work(), "an idle engine sums at once"
    while one.port.has_work():
        one.step()
    assert one.ask(PROMPT) == WHOLE
    assert figures(one) == (6, 0)
    flip(one, block_at(one, 0))
    assert one.ask(PROMPT) == 0
    one.verify()


def test_a_share_of_reuses_is_compared(rig: Callable[..., Rig]) -> None:
    """6 blocks a hit, each with a chance of 1/4: fewer than 40 or more than 200 of 480 come once in 10^12 runs."""
    one = rig(verify="1/4")
    one.ask(PROMPT)
    for _ in range(80):
        assert one.ask(PROMPT, n=1) == WHOLE
    assert 40 < figures(one)[0] < 200
    assert figures(one)[1] == 0
    counted = one.port.stats().tenants["alpha"]
    assert counted.verified_blocks == figures(one)[0] < counted.hit_blocks
