"""A request id is its request's: another under it is dropped, and nobody is answered for it."""

from __future__ import annotations

from collections.abc import Callable

from standins.engines.vllm.scheduler_rig import Rig, prompt


def test_a_second_request_under_an_id_is_dropped_and_the_first_goes_on(rig: Callable[..., Rig]) -> None:
    engine = rig()
    first = engine.add(prompt(100), "alpha", n=8)
    engine.step()
    second = engine.add(prompt(50, seed=3), "beta", start=False)
    second.request_id = first.request_id
    engine.scheduler.add_request(second)
    assert engine.scheduler.requests[first.request_id] is first
    assert not engine.side.control.has_outputs, "an answer would reach the first one's client"
    assert engine.port.attempts.totals["id-in-use"] == 1
    engine.run()
    assert len(engine.outputs[first.request_id]) == 8
    engine.verify()
