"""What the adapter tells the port for its measures: first tokens, keys of what it publishes, tokens of who runs."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from kvcustody.governance.observability.histogram import Histogram
from standins.engines.vllm.eviction_kinds import KINDS
from standins.engines.vllm.scheduler_rig import BLOCK_TOKENS, Rig, prompt

STEP_US = 100_000
NOT_WAITED = 1e12  # an arrival that has yet to come: the wall clock adds nothing to the virtual one


def first_tokens(one: Rig) -> tuple[Histogram, Histogram]:
    """Of requests with a hit, and of those without."""
    one.port.measures.figures()
    return one.port.measures.first_with_hit, one.port.measures.first_without_hit


def run_slowly(one: Rig) -> None:
    """Every step takes `STEP_US`."""
    while one.scheduler.requests:
        one.clock.advance(STEP_US)
        one.step()


def steps(histogram: Histogram) -> float:
    """How many steps its requests waited for their first token, together."""
    return round(histogram.sum * 1e6 / STEP_US, 6)


@pytest.mark.parametrize("defers", [False, True])
def test_a_first_token_is_counted_once_with_a_hit_and_without(rig: Callable[..., Rig], defers: bool) -> None:
    """Two chunks of prefill without a hit, one with; it is seen when the next step is built."""
    engine = rig(defers=defers)
    engine.add(prompt(100), n=4, arrival_time=NOT_WAITED)
    run_slowly(engine)
    hit, miss = first_tokens(engine)
    assert (hit.total, miss.total, steps(miss)) == (0, 1, 3)
    engine.add(prompt(100), n=4, arrival_time=NOT_WAITED)
    run_slowly(engine)
    hit, miss = first_tokens(engine)
    assert (hit.total, miss.total, steps(hit)) == (1, 1, 2)
    engine.verify()


def test_time_counts_from_when_the_request_reached_vllm(rig: Callable[..., Rig]) -> None:
    """It waited 50 s before the scheduler heard of it."""
    one = rig()
    one.ask(prompt(40), arrival_time=time.time() - 50)
    _, miss = first_tokens(one)
    assert miss.total == 1 and 50 <= miss.sum < 3600


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_only_token_is_a_first_one(rig: Callable[..., Rig], asynchronous: bool) -> None:
    one = rig(asynchronous=asynchronous)
    one.add(prompt(40), n=1, arrival_time=NOT_WAITED)
    run_slowly(one)
    one.run()
    _, miss = first_tokens(one)
    assert (miss.total, steps(miss)) == (1, 2 if asynchronous else 1)


def test_who_is_aborted_before_has_none(rig: Callable[..., Rig]) -> None:
    from vllm.v1.request import RequestStatus

    engine = rig()
    request = engine.add(prompt(200), n=4)
    engine.step()
    engine.scheduler.finish_requests([request.request_id], RequestStatus.FINISHED_ABORTED)
    engine.run()
    engine.ask(prompt(20, 1))  # positive control
    assert [each.total for each in first_tokens(engine)] == [0, 1]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_preempted_request_is_counted_once(rig: Callable[..., Rig], asynchronous: bool) -> None:
    one = rig(blocks=12, asynchronous=asynchronous)
    asked = [one.add(prompt(60, seed), n=50) for seed in (1, 2)]
    one.run()
    assert sum(each.num_preemptions for each in asked)
    assert sum(each.total for each in first_tokens(one)) == 2
    one.verify()


def test_a_request_preempted_before_its_first_token_waits_on_for_it(rig: Callable[..., Rig]) -> None:
    """It is the second's: it prefills beside one that decodes, and finds no room for its last chunk."""
    engine = rig(blocks=12, batched_tokens=16)
    first = engine.add(prompt(94, 1), n=60, arrival_time=NOT_WAITED)
    second = engine.add(prompt(90, 2), n=4, arrival_time=NOT_WAITED)
    while not second.num_preemptions:
        engine.clock.advance(STEP_US)
        engine.step()
    assert not second.num_output_tokens and second.request_id in engine.scheduler.requests
    assert sum(each.total for each in first_tokens(engine)) == 1
    while first.request_id in engine.scheduler.requests:
        engine.clock.advance(STEP_US)
        engine.step()
    run_slowly(engine)
    assert sum(each.total for each in first_tokens(engine)) == 2
    assert steps(first_tokens(engine)[0]) + steps(first_tokens(engine)[1]) > 60
    engine.verify()


@pytest.mark.parametrize("defers", [False, True])
@pytest.mark.parametrize("kind", ["lru", "lfu"])
def test_what_is_computed_again_after_an_eviction_is_counted(rig: Callable[..., Rig], kind: str, defers: bool) -> None:
    """Alpha's six whole blocks make room for beta's; the first time, and of beta, there is nothing to count."""
    engine = rig(blocks=20, eviction=KINDS[kind], defers=defers)
    mine = prompt(6 * BLOCK_TOKENS + 4)
    engine.ask(mine, "alpha", n=2)
    for seed in (1, 2):
        engine.ask(prompt(300, seed), "beta", n=2)
    counters = engine.port.stats().tenants
    assert [counters[name].recomputed_blocks for name in ("alpha", "beta")] == [0, 0]
    assert engine.ask(mine, "alpha", n=2) == 0
    counters = engine.port.stats().tenants
    assert [counters[name].recomputed_blocks for name in ("alpha", "beta")] == [6, 0]
    engine.verify()


def test_tokens_of_who_runs_are_told_by_tenant(rig: Callable[..., Rig]) -> None:
    """Those of nobody are in no tenant's row."""
    engine = rig(batched_tokens=200)
    asked = [engine.add(prompt(40, 1), "alpha", n=9), engine.add(prompt(30, 2), "alpha", n=9)]
    other, nobody = engine.add(prompt(50, 3), "beta", n=9), engine.add(prompt(20, 4), None, n=9)
    for _ in range(3):
        engine.step()
    assert all(each.num_output_tokens == 3 for each in (*asked, other, nobody))
    assert engine.port.stats().tenant_tokens == {"alpha": 40 + 30 + 6, "beta": 50 + 3}
    engine.run()
    assert not engine.port.stats().tenant_tokens


def test_requests_that_say_no_kind_are_counted_where_kinds_order(rig: Callable[..., Rig]) -> None:
    """Whoever of caller and door says one is not; without an order by kind there is nothing to say."""
    by_kind = "{policy: priority, priority: 40, kinds: {pasted_log: 0}}"
    span = [[0, 20, "pasted_log"]]
    for eviction, unsaid in ((by_kind, 2), (KINDS["lru"], 0)):
        one = rig(eviction=eviction)
        for at, said in enumerate(({}, {"kinds": span}, {"marks": span}, {})):
            one.ask(prompt(40, at), "alpha", n=2, **said)
        assert one.port.stats().tenants["alpha"].without_kinds == unsaid
        one.verify()
