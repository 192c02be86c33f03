"""What the port hears late, and what a step still waits for: a block that is not zero, a deadline that is near."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from scheduler_rig import Rig, prompt

from kvcustody.allocator.foreign_pool import ForeignPool


@pytest.fixture
def rig(model: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Rig]:
    """Makes rigs of an engine that attends to governance while its workers compute."""
    return lambda **named: Rig(model, monkeypatch, attends=True, **named)


def churn(one: Rig) -> None:
    """Requests that end, so that others are handed their blocks at once."""
    for turn in range(24):
        one.add(prompt(30 + 11 * (turn % 5), seed=turn), "alpha" if turn % 2 else "beta", n=2 + turn % 7)
        one.step()
    one.run()


def test_a_step_of_zeroed_blocks_leaves_before_the_port_hears_of_it(rig: Callable[..., Rig]) -> None:
    one = rig(blocks=200)
    one.ask(prompt(20), "beta")
    one.side.attend()
    request = one.add(prompt(40), "alpha", n=4)
    output = one.scheduler.schedule()
    assert output.num_scheduled_tokens[request.request_id]
    assert one.side.books.journal.placed and not one.port.pool.refs.any()
    one.side.attend()
    assert one.side.books.journal.is_empty and one.port.pool.refs.sum() == 3


def test_no_step_writes_over_what_was_not_scrubbed(rig: Callable[..., Rig]) -> None:
    one = rig(blocks=12)
    churn(one)
    one.verify()


def test_and_would_if_it_did_not_look(rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    """Positive control: steps that take every block for CLEAN."""
    one = rig(blocks=12)
    monkeypatch.setattr(ForeignPool, "are_clean", lambda self, blocks: True)
    churn(one)
    assert one.device.residue


@pytest.mark.parametrize(("step_us", "leaves_now"), [(1_000, False), (400_000, True)])
def test_a_near_deadline_does_not_wait_for_the_next_step(
    rig: Callable[..., Rig], step_us: int, leaves_now: bool
) -> None:
    """The policy scrubs within a second: an engine whose steps take 0.4 s orders what ended with the very next one."""
    one = rig(blocks=200)
    short, long = one.add(prompt(40), "alpha", n=3), one.add(prompt(40, 1), "beta", n=12)
    while short.request_id in one.scheduler.requests:
        one.clock.advance(step_us)
        one.step()
    assert one.side.books.journal.has_ends
    one.clock.advance(step_us)
    order = one.scheduler.schedule().kv_connector_metadata.order
    assert (order is not None) == leaves_now
    assert long.request_id in one.scheduler.requests


def test_what_was_not_told_is_told_before_an_erasure(rig: Callable[..., Rig]) -> None:
    from kvcustody.governance.erasure import Selector

    one = rig()
    request = one.add(prompt(40), "alpha", n=2)
    while request.request_id in one.scheduler.requests:
        one.step()
    assert one.side.books.journal.has_ends
    assert one.port.erase(Selector("alpha")).ended_blocks > 0
    assert one.ask(prompt(40), "alpha") == 0
    one.verify()
