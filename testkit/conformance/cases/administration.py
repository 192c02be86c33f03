"""Erasure, revocation and narrowing take effect at once, on cached and running blocks, and on nobody else's."""

from __future__ import annotations

from kvcustody.governance.erasure.selector import Selector
from kvcustody.testkit.conformance.case import STEPS_MAX, Bench, Case, case, expect, expect_equal, person
from kvcustody.testkit.conformance.engine_protocol import ABORTED, FINISHED, OVER
from kvcustody.testkit.conformance.policy import IDLE_US, SECOND_US, WITHIN_US, policy

ALPHA, BOB, BETA = person("alpha"), person("alpha", "bob"), person("beta")
ANN = Selector(tenant="alpha", subject="ann")


@case("erase/cached")
def erase_cached(bench: Bench) -> None:
    """An erased subject's blocks are gone, at once and in every byte; every other subject's hits stay."""
    rig = bench.open()
    others = [(who, rig.warm(who, 4)) for who in (BOB, BETA)]  # first: what was freed may be handed out at once
    tokens = rig.prompt(4)
    request = rig.submit(ALPHA, tokens, 2)
    blocks = rig.until_running(request).blocks
    rig.finish(request)
    rig.hit(ALPHA, tokens, 4, "own, before (control)")
    rig.engine.erase(ANN)
    rig.same_as_cold(ALPHA, tokens, rig.hit(ALPHA, tokens, 0, "the erased subject's prompt"))
    rig.engine.erase(ANN)
    if rig.has("bytes"):
        rig.idle(WITHIN_US)
        expect_equal(rig.nonzero_bytes(blocks), 0, "bytes left of an erased subject")
    for who, kept in others:
        rig.hit(who, kept, 4, f"{who.tenant}'s {who.subject}, after another's erasure")


@case("erase/running")
def erase_running(bench: Bench) -> None:
    """An erased subject's running and waiting requests are aborted; other subjects' run on."""
    rig = bench.open()
    erased = rig.submit(ALPHA, rig.prompt(6), 30)
    tokens = rig.prompt(4)
    other = rig.submit(BOB, tokens, 30)
    rig.until_running(erased)
    rig.until_running(other)
    rig.steps(2)
    blocks = rig.engine.outcome(erased).blocks
    rig.engine.erase(ANN)
    kept: set[int] = set()  # what was freed may be handed out to the other at once
    for _ in range(STEPS_MAX):
        rig.steps(1)
        kept |= set(rig.engine.outcome(other).blocks)
        if rig.engine.outcome(other).state in OVER:
            break
    rig.finish(erased, other)
    expect_equal(rig.engine.outcome(erased).state, ABORTED, "the erased subject's request")
    expect_equal(rig.engine.outcome(other).state, FINISHED, "the other subject's request")
    rig.same_as_cold(BOB, tokens, rig.engine.outcome(other))
    if rig.has("bytes"):
        rig.idle(WITHIN_US)
        left = [block for block in blocks if block not in kept]
        expect(bool(left), "the other has all blocks of the aborted request (control)")
        expect_equal(rig.nonzero_bytes(left), 0, "bytes left of an aborted request")


@case("erase/tier", "tier")
def erase_tier(bench: Bench) -> None:
    """An erasure reaches the tier: the subject's copies are gone, another's are served."""
    rig = bench.open(policy(tier=True), tier=True)
    mine, other = rig.warm(ALPHA, 4), rig.warm(BETA, 4)
    rig.idle(SECOND_US)
    rig.engine.drop_index()
    copies = len(rig.engine.tier())
    rig.engine.erase(ANN)
    left = len(rig.engine.tier())
    expect(0 < left < copies, f"{left} of {copies} objects are left in the tier")
    rig.hit(ALPHA, mine, 0, "the erased subject, from the tier")
    rig.hit(BETA, other, 4, "another, from the tier (control)")


@case("policy/revocation", "grants")
def revocation(bench: Bench) -> None:
    """A revoked grant opens nothing from the next request on, whatever was decided before."""
    rig = bench.open(policy(scope="tenant", grant=True))
    rig.open_grant(ALPHA, BETA)
    tokens = rig.warm(ALPHA, 4)
    read = rig.submit(BETA, tokens, 6)
    rig.until_running(read)
    queued = rig.submit(BETA, tokens)
    rig.engine.activate(policy(scope="tenant", grant=False))
    rig.finish(queued, read)
    expect_equal(rig.engine.outcome(read).cached_tokens, 4 * rig.block_tokens, "a request before it (control)")
    expect_equal(rig.engine.outcome(queued).cached_tokens, 0, "a request that was queued when it was revoked")
    unread = rig.warm(ALPHA, 4)
    rig.hit(BETA, unread, 0, "reader, after the revocation")
    rig.hit(ALPHA, tokens, 4, "owner, after the revocation (control)")


@case("policy/shorter")
def shorter(bench: Bench) -> None:
    """A revision that shortens a retention binds what is cached already."""
    rig = bench.open()
    tokens = rig.warm(ALPHA, 4)
    rig.engine.activate(policy(idle="5s"))
    rig.idle(4 * SECOND_US)
    rig.hit(ALPHA, tokens, 4, "own, before the shorter deadline (control)")
    rig.idle(6 * SECOND_US)
    rig.hit(ALPHA, tokens, 0, "own, past the shorter deadline")
    rig.idle(IDLE_US)


CASES: tuple[Case, ...] = (erase_cached, erase_running, erase_tier, revocation, shorter)
