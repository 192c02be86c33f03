"""Ends are idempotent in any order, a finished request's handle reaches nothing, and no block is anybody's twice."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

from kvcustody.testkit.conformance.case import (
    Bench,
    Case,
    CaseHarness,
    case,
    expect,
    expect_equal,
    person,
)
from kvcustody.testkit.conformance.engine_protocol import ABORTED, FINISHED
from kvcustody.testkit.conformance.policy import SECOND_US

ALPHA, BETA = person("alpha"), person("beta")


def _free_list_is_sound(rig: CaseHarness, running: list[object]) -> None:
    free = rig.engine.free_blocks()
    twice = [block for block, count in Counter(free).items() if count > 1]
    expect(not twice, f"blocks {twice} are in the free list twice")
    for request in running:
        both = set(rig.engine.outcome(request).blocks) & set(free)
        expect(not both, f"blocks {sorted(both)} are in the free list and in a running request's table")


@case("lifecycle/any-order")
def any_order(bench: Bench) -> None:
    """Abort, disconnect and preempt, in any order and any number of times, at any age, leave the books in order."""
    rig = bench.open()
    acts = {"abort": rig.engine.abort, "disconnect": rig.engine.disconnect}
    if rig.has("preemption"):
        acts["preempt"] = rig.engine.preempt
    for order in permutations(acts):
        for age in (0, 1, 4):
            tokens = rig.prompt(3, 2)
            request, other = rig.submit(ALPHA, rig.prompt(3, 2), 20), rig.submit(BETA, tokens, 8)
            rig.steps(age)
            for name in (*order, *order):
                acts[name](request)
                _free_list_is_sound(rig, [other])
            rig.finish(other)
            expect_equal(rig.engine.outcome(request).state, ABORTED, f"after {order}")
            rig.same_as_cold(BETA, tokens, rig.engine.outcome(other))
            rig.settle()
            rig.healthy()


@case("lifecycle/stale-handle")
def stale_handle(bench: Bench) -> None:
    """The handle of a request that is over reaches neither its old blocks nor their new holder."""
    rig = bench.open(blocks=16)
    old = rig.submit(ALPHA, rig.prompt(6, 2), 4)
    rig.until_running(old)
    rig.steps(1)
    rig.engine.abort(old)
    rig.idle(SECOND_US)
    tokens = rig.prompt(6, 2)
    new = rig.submit(BETA, tokens, 8)
    rig.until_running(new)
    for act in (rig.engine.abort, rig.engine.disconnect, rig.engine.preempt):
        if act is not rig.engine.preempt or rig.has("preemption"):
            act(old)
        rig.steps(1)
        _free_list_is_sound(rig, [new])
    rig.finish(new)
    expect_equal(rig.engine.outcome(old).blocks, (), "the old request's table")
    expect_equal(rig.engine.outcome(old).state, ABORTED, "the old request")
    expect_equal(rig.engine.outcome(new).state, FINISHED, "the new holder")
    rig.same_as_cold(BETA, tokens, rig.engine.outcome(new))


@case("lifecycle/stale-preemption", "preemption")
def stale_preemption(bench: Bench) -> None:
    """What a preempted request left behind is not given up a second time when the resumed one ends."""
    rig = bench.open(blocks=20)
    for _ in range(4):
        tokens = rig.prompt(3, 2)
        request = rig.submit(ALPHA, tokens, 6)
        rig.until_running(request)
        for _ in range(2):
            rig.steps(2)
            rig.engine.preempt(request)
            rig.engine.preempt(request)
        other = rig.submit(BETA, rig.prompt(3, 2), 6)
        rig.finish(request, other)
        rig.engine.abort(request)
        rig.same_as_cold(ALPHA, tokens, rig.engine.outcome(request))
        _free_list_is_sound(rig, [])
    rig.settle()


@case("lifecycle/one-holder")
def one_holder(bench: Bench) -> None:
    """No block that somebody may still write is in two running tables, and none is in the free list twice."""
    rig = bench.open()
    for _ in range(4):
        requests = [rig.submit(who, rig.prompt(2, 2), 8) for who in (ALPHA, BETA, ALPHA, BETA)]
        rig.steps(3)
        rig.engine.abort(requests[0])
        for _ in range(4):
            holders = Counter(block for one in requests for block in rig.engine.outcome(one).blocks)
            twice = [block for block, count in holders.items() if count > 1]
            expect(not twice, f"blocks {twice} of unlike prompts are in two running tables")
            _free_list_is_sound(rig, requests)
            rig.steps(1)
        rig.finish(*requests)
        _free_list_is_sound(rig, [])


@case("lifecycle/computed-only")
def computed_only(bench: Bench) -> None:
    """A block is reusable only once its K/V is in memory: whoever asks during a prefill gets it right."""
    rig = bench.open()
    for gap in (1, 2, 3):
        tokens = rig.prompt(6, 2)
        requests = []
        for _ in range(4):
            requests.append(rig.submit(ALPHA, tokens, 2))
            rig.steps(gap)
        rig.finish(*requests)
        for request in requests:
            rig.same_as_cold(ALPHA, tokens, rig.engine.outcome(request))
    rig.hit(ALPHA, tokens, 6, "own, afterwards (control)")


@case("lifecycle/aborted-prefill")
def aborted_prefill(bench: Bench) -> None:
    """What an aborted prefill leaves behind is what it had computed, and no more."""
    rig = bench.open(steps_in_flight=0)
    for steps in (1, 2):
        tokens = rig.prompt(7, 2)
        request = rig.submit(ALPHA, tokens, 2)
        rig.until_running(request)
        rig.steps(steps - 1)
        rig.engine.abort(request)
        rig.same_as_cold(ALPHA, tokens, rig.ask(ALPHA, tokens, 2))


CASES: tuple[Case, ...] = (
    any_order,
    stale_handle,
    stale_preemption,
    one_holder,
    computed_only,
    aborted_prefill,
)
