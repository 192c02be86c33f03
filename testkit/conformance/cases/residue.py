"""No byte of one request reaches another: every block is zero before its first write, and soon after its end."""

from __future__ import annotations

from kvcustody.testkit.conformance.case import (
    STEPS_MAX,
    Bench,
    Case,
    CaseHarness,
    case,
    expect,
    expect_equal,
    person,
)
from kvcustody.testkit.conformance.engine_protocol import ABORTED, FINISHED, OVER, REFUSED
from kvcustody.testkit.conformance.policy import ONCE, WITHIN_US, policy

ALPHA, BETA, GAMMA = person("alpha"), person("beta"), person("gamma")


def _churn(rig: CaseHarness, rounds: int) -> None:
    """Run tenants in turns in a pool that is too small for all of them."""
    for _ in range(rounds):
        for who in (ALPHA, BETA, GAMMA):
            rig.ask(who, rig.prompt(3, 1), 2)  # two positions of a partial tail are written


@case("residue/first-write", "bytes")
def first_write(bench: Bench) -> None:
    """Every block that is handed out, the partial tail's included, is zero in every byte before its first write."""
    rig = bench.open(blocks=24)
    _churn(rig, 6)
    rig.expect_clean_first_writes(24)
    blocks = [write.block for write in rig.first_writes]
    expect(len(set(blocks)) < len(blocks), "no block was ever handed out twice (control)")


@case("residue/shards", "bytes", "shards")
def shards(bench: Bench) -> None:
    """With memory in several shards, every shard's part of a block is zero before its first write."""
    rig = bench.open(blocks=24, shards=2)
    _churn(rig, 6)
    rig.expect_clean_first_writes(24)


@case("residue/in-time", "bytes")
def in_time(bench: Bench) -> None:
    """What a finished request does not leave in the cache is zero within the policy's time, while nothing arrives."""
    rig = bench.open()
    tokens = rig.prompt(2, rig.block_tokens // 2)
    request = rig.submit(ALPHA, tokens, 8)
    blocks = set(rig.until_running(request).blocks)
    for _ in range(STEPS_MAX):
        blocks |= set(rig.engine.outcome(request).blocks)
        rig.steps(1)
        if rig.engine.outcome(request).state in OVER:
            break
    expect_equal(rig.engine.outcome(request).state, FINISHED, "the request")
    rig.idle(WITHIN_US)
    left = [block for block in blocks if rig.nonzero_bytes([block])]
    whole = (len(tokens) + 8 - 1) // rig.block_tokens * rig.capabilities.groups
    expect(bool(left), "nothing is cached (control)")
    expect(len(left) <= whole, f"{len(left)} blocks have bytes, at most {whole} are whole and published")
    once = rig.submit(BETA, rig.prompt(3), 3, route=ONCE)
    blocks = set(rig.until_running(once).blocks)
    rig.finish(once)
    rig.idle(WITHIN_US)
    expect_equal(rig.nonzero_bytes(blocks), 0, "bytes left of a request whose classification is never cached")


@case("residue/interrupted", "bytes")
def interrupted(bench: Bench) -> None:
    """A request aborted, disconnected or preempted in the middle of its prefill or decode leaves no byte behind."""
    rig = bench.open(blocks=24)
    acts = [rig.engine.abort, rig.engine.disconnect]
    acts += [rig.engine.preempt] if rig.has("preemption") else []
    for act in acts:
        for steps in (1, 2, 5):
            request = rig.submit(ALPHA, rig.prompt(6, 2), 6)
            rig.until_running(request)
            rig.steps(steps)
            act(request)
            rig.finish(request)
            expect(rig.engine.outcome(request).state in (ABORTED, FINISHED), "it is over")
            rig.ask(BETA, rig.prompt(5, 2), 4)
    rig.expect_clean_first_writes(24)


@case("residue/in-flight", "bytes", "async")
def in_flight(bench: Bench) -> None:
    """A step that is still in flight when its request is aborted writes into nobody else's block."""
    rig = bench.open(blocks=24, steps_in_flight=2)
    asked = []
    for _ in range(8):
        victim = rig.submit(ALPHA, rig.prompt(8, 2), 4)
        rig.until_running(victim)
        rig.steps(1)
        rig.engine.abort(victim)
        tokens = rig.prompt(5, 2)
        asked.append((tokens, rig.submit(BETA, tokens, 3)))
        rig.steps(4)
    rig.finish(*(request for _, request in asked))
    rig.settle()
    for tokens, request in asked:
        outcome = rig.engine.outcome(request)
        expect_equal(outcome.state, FINISHED, "the other's request")
        rig.same_as_cold(BETA, tokens, outcome)
    rig.expect_clean_first_writes(24)


@case("residue/transfers", "bytes", "tier")
def transfers(bench: Bench) -> None:
    """A transfer under way keeps its blocks: no load lands in another's block, no store reads another's bytes."""
    rig = bench.open(policy(tier=True), blocks=16, tier=True)
    rig.engine.hold_transfers(True)
    stored = rig.prompt(5)
    expect_equal(rig.ask(ALPHA, stored).state, FINISHED, "a request whose blocks are being stored")
    rig.engine.drop_index()
    _press(rig, 2)
    rig.engine.hold_transfers(False)
    rig.settle()
    rig.engine.idle(1)
    again = rig.ask(ALPHA, stored, 2)
    expect_equal(again.cached_tokens, 5 * rig.block_tokens, "own, from the tier (control)")
    rig.same_as_cold(ALPHA, stored, again)
    rig.engine.drop_index()
    rig.engine.hold_transfers(True)
    loading = rig.submit(ALPHA, stored, 2)
    rig.until_running(loading)
    rig.steps(2)
    rig.engine.abort(loading)
    others = [(tokens, rig.submit(BETA, tokens, 2)) for tokens in (rig.prompt(5), rig.prompt(4))]
    rig.steps(6)
    rig.engine.hold_transfers(False)
    rig.finish(*(request for _, request in others))
    for tokens, request in others:
        rig.same_as_cold(BETA, tokens, rig.engine.outcome(request))
    _press(rig, 3)
    rig.expect_clean_first_writes(20)


def _press(rig: CaseHarness, rounds: int) -> None:
    """Submit requests that together need more than the pool has."""
    for _ in range(rounds):
        for who in (BETA, ALPHA):
            tokens = rig.prompt(5)
            request = rig.submit(who, tokens, 2)
            rig.steps(12)
            rig.engine.abort(request)


@case("residue/stuck", "bytes", "stuck")
def stuck(bench: Bench) -> None:
    """A block that does not become zero is found by the read-back and never handed out again."""
    rig = bench.open(blocks=24)
    request = rig.submit(ALPHA, rig.prompt(3, 1), 2)
    rig.until_output(request, 1)  # by then all of it is in blocks
    bad = rig.engine.outcome(request).blocks[-1]  # the partial tail: never cached
    rig.engine.stick(bad)
    rig.finish(request)
    rig.idle(WITHIN_US)
    before = len(rig.first_writes)
    for _ in range(8):
        for who in (BETA, GAMMA):
            outcome = rig.ask(who, rig.prompt(3, 2), 3)
            expect(outcome.state in (FINISHED, ABORTED, REFUSED), "a request of another tenant is over")
    since = rig.first_writes[before:]
    expect(len(since) >= 24, "the pool was not used up (control)")
    given = [write for write in since if write.block == bad]
    expect(not given, f"block {bad}, which does not become zero, was handed out {len(given)} times")
    dirty = [write for write in since if write.nonzero_bytes]
    expect(not dirty, f"{len(dirty)} blocks were not zero before their first write")
    found = [finding for finding in rig.engine.scan() if "verif" in finding or "quarantine" in finding]
    expect(bool(found), "the scan has no finding about a block that did not verify")
    rig.lawful_findings = found


CASES: tuple[Case, ...] = (first_write, shards, in_time, interrupted, in_flight, transfers, stuck)
