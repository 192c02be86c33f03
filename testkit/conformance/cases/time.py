"""Deadlines hold while the engine idles, before every look-up, and whatever happens to a block in between."""

from __future__ import annotations

from kvcustody.audit.kinds import CustodyEnded
from kvcustody.testkit.conformance.case import (
    Bench,
    Case,
    CaseHarness,
    case,
    expect,
    expect_equal,
    person,
)
from kvcustody.testkit.conformance.engine_protocol import FINISHED
from kvcustody.testkit.conformance.policy import ABSOLUTE_US, IDLE_US, ONCE, SECOND_US, WITHIN_US, policy

ALPHA, BETA, BOB = person("alpha"), person("beta"), person("alpha", "bob")


@case("time/idle", "bytes")
def idle(bench: Bench) -> None:
    """Past its idle deadline a block is wiped although no request arrives."""
    rig = bench.open()
    tokens = rig.prompt(4)
    request = rig.submit(ALPHA, tokens, 2)
    blocks = rig.until_running(request).blocks
    rig.finish(request)
    rig.idle(IDLE_US // 2)
    expect(rig.nonzero_bytes(blocks) > 0, "nothing was cached (control)")
    rig.idle(IDLE_US // 2 + WITHIN_US)
    expect_equal(rig.nonzero_bytes(blocks), 0, "bytes left past the idle deadline, with no request arriving")
    if rig.has("events"):
        expect_equal(rig.engine.indexed(), frozenset(), "keys in the index past the idle deadline")
    ended = sum(len(run.blocks) for event in rig.ledger(CustodyEnded) for run in event.runs)
    expect(ended >= len(blocks), f"{ended} custody ends on record for {len(blocks)} blocks")


@case("time/late-sweep")
def late_sweep(bench: Bench) -> None:
    """After a pause in which nothing was swept, an expired block is a miss to the very first request."""
    rig = bench.open()
    tokens = rig.warm(ALPHA, 4)
    rig.late(IDLE_US - SECOND_US)
    rig.hit(ALPHA, tokens, 4, "own, just before the deadline (control)")
    rig.late(IDLE_US + 1)
    rig.same_as_cold(ALPHA, tokens, rig.hit(ALPHA, tokens, 0, "own, after the deadline and before any sweep"))


@case("time/late-sweep-many")
def late_sweep_many(bench: Bench) -> None:
    """The same where more holds are due than one sweep takes."""
    rig = bench.open(blocks=400)
    count = 150
    prompts = [rig.prompt(1) for _ in range(count)]
    for tokens in prompts:
        expect_equal(rig.ask(ALPHA, tokens).state, FINISHED, "a short request")
    rig.hit(ALPHA, prompts[0], 1, "own, at once (control)")
    rig.late(IDLE_US + 1)
    for tokens in reversed(prompts):
        expect_equal(rig.ask(ALPHA, tokens).cached_tokens, 0, "cached tokens past the deadline")


def _age(rig: CaseHarness, tokens: tuple[int, ...]) -> None:
    """Touch a prompt, always before its idle deadline, until just before its ceiling."""
    age_us = 0
    while age_us + IDLE_US - SECOND_US < ABSOLUTE_US:
        rig.idle(IDLE_US - SECOND_US)
        age_us += IDLE_US - SECOND_US
        rig.hit(ALPHA, tokens, 4, "own, touched in time (control)")
    rig.late(ABSOLUTE_US - age_us)


@case("time/ceiling")
def ceiling(bench: Bench) -> None:
    """However often a block is attached, it is a miss at its absolute ceiling."""
    rig = bench.open()
    tokens = rig.warm(ALPHA, 4)
    _age(rig, tokens)
    rig.same_as_cold(ALPHA, tokens, rig.hit(ALPHA, tokens, 0, "own, at the ceiling"))


@case("time/ceiling-running", "bytes")
def ceiling_running(bench: Bench) -> None:
    """A request that runs over the ceiling keeps its blocks to its end, and they are wiped then, for good."""
    rig = bench.open()
    tokens = rig.prompt(4)
    request = rig.submit(ALPHA, tokens, 20)
    rig.until_running(request)
    rig.steps(6)
    blocks = rig.engine.outcome(request).blocks[:4]
    rig.late(ABSOLUTE_US + 1)
    rig.hit(ALPHA, tokens, 0, "own, beside the running request past the ceiling")
    rig.finish(request)
    rig.same_as_cold(ALPHA, tokens, rig.engine.outcome(request))
    rig.late(IDLE_US + 1)
    rig.idle(WITHIN_US)
    expect_equal(rig.nonzero_bytes(blocks), 0, "bytes left of blocks past their ceiling")


@case("time/tier", "tier")
def tier(bench: Bench) -> None:
    """A deadline binds the tier's copy: it is neither served nor kept past it."""
    rig = bench.open(policy(tier=True), tier=True)
    tokens = rig.warm(ALPHA, 4)
    rig.idle(SECOND_US)
    rig.engine.drop_index()
    rig.hit(ALPHA, tokens, 4, "own, from the tier (control)")
    rig.engine.drop_index()
    rig.late(ABSOLUTE_US + 1)
    rig.hit(ALPHA, tokens, 0, "own, from the tier past the deadline")
    rig.idle(IDLE_US + WITHIN_US)
    expect_equal(len(rig.engine.tier()), 0, "objects left in the tier")


@case("time/foreign-renewal", "grants")
def foreign_renewal(bench: Bench) -> None:
    """A reader through a grant renews nothing: the owner's deadline stands."""
    rig = bench.open(policy(scope="tenant", grant=True))
    rig.open_grant(ALPHA, BETA)
    tokens = rig.warm(ALPHA, 4)
    rig.idle(IDLE_US - SECOND_US)
    rig.hit(BETA, tokens, 4, "reader through the grant (control)")
    rig.late(2 * SECOND_US)
    rig.hit(BETA, tokens, 0, "reader, after the owner's deadline")
    rig.hit(ALPHA, tokens, 0, "owner, after the deadline")


@case("time/never-cached")
def never_cached(bench: Bench) -> None:
    """A classification whose idle time is zero is never reused, not even beside its running request."""
    rig = bench.open()
    tokens = rig.prompt(4)
    first = rig.submit(ALPHA, tokens, 12, route=ONCE)
    rig.until_running(first)
    rig.steps(4)
    rig.hit(ALPHA, tokens, 0, "own, beside the running request", route=ONCE)
    rig.finish(first)
    rig.hit(ALPHA, tokens, 0, "own, after it", route=ONCE)
    rig.hit(BOB, tokens, 0, "another's")


CASES: tuple[Case, ...] = (
    idle,
    late_sweep,
    late_sweep_many,
    ceiling,
    ceiling_running,
    tier,
    foreign_renewal,
    never_cached,
)
