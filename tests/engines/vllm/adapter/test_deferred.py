"""What the port hears late, and what a step still waits for: a block that is not zero, a deadline that is near."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from vllm.v1.request import RequestStatus

from kvcustody.allocator.external.pool import ExternalPool
from kvcustody.governance.erasure.selector import Selector
from kvcustody.integrations.vllm.scheduler.scheduler_state import SchedulerState
from standins.engines.vllm.scheduler_rig import Rig, prompt


@pytest.fixture
def rig(rig: Callable[..., Rig]) -> Callable[..., Rig]:
    """Makes rigs of an engine that attends to governance while its workers compute."""
    return lambda **named: rig(defers=True, **named)


def churn(one: Rig) -> None:
    """Requests that end, so that others are handed their blocks at once."""
    for turn in range(24):
        one.add(prompt(30 + 11 * (turn % 5), seed=turn), "alpha" if turn % 2 else "beta", n=2 + turn % 7)
        one.step()
    one.run()


def test_a_step_of_zeroed_blocks_leaves_before_the_port_hears_of_it(rig: Callable[..., Rig]) -> None:
    engine = rig(blocks=200)
    engine.ask(prompt(20), "beta")
    engine.side.run_deferred_work()
    request = engine.add(prompt(40), "alpha", n=4)
    output = engine.scheduler.schedule()
    assert output.num_scheduled_tokens[request.request_id]
    assert engine.side.state.deferred.allocations and not engine.port.pool.refs.any()
    engine.side.run_deferred_work()
    assert engine.side.state.deferred.is_empty and engine.port.pool.refs.sum() == 3


def test_no_step_writes_over_what_was_not_scrubbed(rig: Callable[..., Rig]) -> None:
    one = rig(blocks=12)
    churn(one)
    one.verify()


def test_and_would_if_it_did_not_look(rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    """Positive control: steps that take every block for CLEAN."""
    one = rig(blocks=12)
    monkeypatch.setattr(ExternalPool, "are_clean", lambda self, blocks: True)
    churn(one)
    assert one.device.residue


@pytest.mark.parametrize(("step_us", "leaves_now"), [(1_000, False), (400_000, True)])
def test_a_near_deadline_does_not_wait_for_the_next_step(
    rig: Callable[..., Rig], step_us: int, leaves_now: bool
) -> None:
    """The policy scrubs within a second: an engine whose steps take 0.4 s orders what ended with the very next one."""
    engine = rig(blocks=200)
    short, long = engine.add(prompt(40), "alpha", n=3), engine.add(prompt(40, 1), "beta", n=12)
    while short.request_id in engine.scheduler.requests:
        engine.clock.advance(step_us)
        engine.step()
    assert engine.side.state.deferred.has_unreported_ends
    engine.clock.advance(step_us)
    order = engine.scheduler.schedule().kv_connector_metadata.order
    assert (order is not None) == leaves_now
    assert long.request_id in engine.scheduler.requests


def test_what_was_not_told_is_told_before_an_erasure(rig: Callable[..., Rig]) -> None:
    engine = rig()
    request = engine.add(prompt(40), "alpha", n=2)
    while request.request_id in engine.scheduler.requests:
        engine.step()
    assert engine.side.state.deferred.has_unreported_ends
    assert engine.port.erase(Selector("alpha")).ended_blocks > 0
    assert engine.ask(prompt(40), "alpha") == 0
    engine.verify()


def indexed(one: Rig) -> int:
    """Keys in vLLM's index."""
    return len(one.side.state.pool.cached_block_hash_to_block)


def test_blocks_enter_the_index_when_the_step_has_left(rig: Callable[..., Rig]) -> None:
    engine = rig()
    engine.ask(prompt(10, seed=1), "beta")  # every block is zero then
    engine.side.run_deferred_work()
    engine.add(prompt(40), "alpha")
    engine.scheduler.schedule()
    assert indexed(engine) == 0
    engine.side.run_deferred_work()
    assert indexed(engine) == int(engine.port.pool.indexed.sum()) == 2


@pytest.mark.parametrize(("tenant", "cached_tokens"), [("alpha", 32), ("beta", 0)])
def test_two_that_start_in_one_step_compute_a_prompt_once(
    rig: Callable[..., Rig], tenant: str, cached_tokens: int
) -> None:
    one = rig()
    one.add(prompt(40), "alpha")
    second = one.add(prompt(40), tenant)
    assert one.step()[second.request_id] == cached_tokens
    one.run()
    one.verify()


def test_and_would_compute_it_twice_if_nothing_entered_before_the_look_up(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positive control."""
    one = rig()
    monkeypatch.setattr(SchedulerState, "_insert_before_look_up", lambda self, residency: None)
    one.add(prompt(40), "alpha")
    second = one.add(prompt(40), "alpha")
    assert one.step()[second.request_id] == 0


@pytest.mark.parametrize(("ends", "kept_blocks"), [("aborted", 2), ("erased", 0)])
def test_what_has_not_entered_the_index_ends_with_its_request(
    rig: Callable[..., Rig], ends: str, kept_blocks: int
) -> None:
    """The full blocks of an aborted request stay its tenant's, as if they had entered at once."""
    engine = rig()
    engine.ask(prompt(10, seed=1), "beta")
    engine.side.run_deferred_work()
    request = engine.add(prompt(40), "alpha", n=12)
    output = engine.scheduler.schedule()
    assert engine.side.state.deferred.pending_inserts
    if ends == "aborted":
        engine.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
    else:
        engine.port.erase(Selector("alpha"))
    engine.carry_out(output)
    assert request.is_finished() and not engine.side.state.deferred.pending_inserts
    assert indexed(engine) == int(engine.port.pool.indexed.sum()) == kept_blocks
    assert engine.ask(prompt(40), "alpha") == 16 * kept_blocks
    engine.verify()
