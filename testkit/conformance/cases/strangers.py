"""An unauthenticated request reuses nothing and leaves nothing; an authenticated one learns nothing about others."""

from __future__ import annotations

from random import Random

from kvcustody.testkit.conformance.case import (
    Bench,
    Case,
    CaseHarness,
    case,
    expect,
    expect_equal,
    person,
)
from kvcustody.testkit.conformance.engine_protocol import FINISHED, REFUSED, WAITING
from kvcustody.testkit.conformance.policy import SECOND_US

ALPHA, BETA, GAMMA = person("alpha"), person("beta"), person("gamma")


def _reuses_nothing(rig: CaseHarness, identity: str | None, tokens: tuple[int, ...], what: str) -> None:
    """Require that the request is refused, or computed in full and leaves nothing to reuse."""
    fresh = rig.prompt(3)
    for asked in (tokens, fresh):
        outcome = rig.ask(identity, asked, 2)
        expect(outcome.state in (FINISHED, REFUSED), f"{what}: {outcome.state} ({outcome.reason})")
        expect_equal(outcome.cached_tokens, 0, f"{what}: cached tokens")
    expect_equal(rig.ask(None, fresh, 2).cached_tokens, 0, f"{what}: cached tokens of the next without identity")
    rig.hit(ALPHA, fresh, 0, f"{what}: what it computed, asked by a tenant")


@case("identity/missing")
def missing(bench: Bench) -> None:
    """A request without an identity reuses nothing and leaves nothing to reuse."""
    rig = bench.open()
    tokens = rig.warm(ALPHA, 4)
    _reuses_nothing(rig, None, tokens, "no identity")
    rig.hit(ALPHA, tokens, 4, "own, afterwards (control)")


@case("identity/forged", "tokens")
def forged(bench: Bench) -> None:
    """A token changed in any one place, cut, extended or made up is no identity."""
    rig = bench.open(blocks=200)
    tokens = rig.warm(ALPHA, 4)
    token = rig.engine.mint(ALPHA, 60 * SECOND_US)
    places = rig.random.sample(range(len(token)), 6)
    other = "A" if token[-1] != "A" else "B"
    near = len(token) - 6  # of the signature
    fakes = [token[:near] + ("A" if token[near] != "A" else "B") + token[near + 1 :]]
    fakes += [token[:at] + ("A" if token[at] != "A" else "B") + token[at + 1 :] for at in places]
    fakes += ["", "alpha", token[:-1], token[:-1] + other, token + "A", token[::-1], "x" * 500]
    for fake in fakes:
        _reuses_nothing(rig, fake, tokens, f"forged token `{fake[:12]}…`")
    expect_equal(rig.ask(token, tokens).cached_tokens, 4 * rig.block_tokens, "the real token (control)")


@case("identity/expired", "tokens")
def expired(bench: Bench) -> None:
    """A token past its life is no identity."""
    rig = bench.open()
    token = rig.engine.mint(ALPHA, 5 * SECOND_US)
    rig.late(6 * SECOND_US)
    tokens = rig.warm(ALPHA, 4)
    _reuses_nothing(rig, token, tokens, "expired token")
    fresh = rig.engine.mint(ALPHA, 5 * SECOND_US)
    expect_equal(rig.ask(fresh, tokens).cached_tokens, 4 * rig.block_tokens, "a live token (control)")


@case("identity/replayed", "tokens")
def replayed(bench: Bench) -> None:
    """A token of one use is an identity once."""
    rig = bench.open()
    tokens = rig.warm(ALPHA, 4)
    token = rig.engine.mint(ALPHA, 60 * SECOND_US)
    expect_equal(rig.ask(token, tokens).cached_tokens, 4 * rig.block_tokens, "the first use (control)")
    _reuses_nothing(rig, token, tokens, "replayed token")


@case("quota/waits-alone")
def waits_alone(bench: Bench) -> None:
    """A tenant over its quota waits by itself: another's requests run as if it were not there."""
    transcripts, waiting = [], 0
    for flooded in (False, True):
        rig = bench.open()
        random = Random(rig.setup.seed)  # noqa: S311 (prompts of tests)
        flood = []
        if flooded:
            # Each fits the cap of 25 % by itself; two do not.
            size = rig.capabilities.blocks // 4 // rig.capabilities.groups - 3
            flood = [rig.submit(GAMMA, rig.prompt(size), rig.block_tokens) for _ in range(6)]
            rig.steps(2)
        seen = []
        for _ in range(4):
            tokens = tuple(random.choices(range(3, rig.capabilities.vocabulary), k=3 * rig.block_tokens + 1))
            request = rig.submit(ALPHA, tokens, 3)
            steps = rig.finish(request)
            seen.append((steps, rig.engine.outcome(request).seen))
            expect_equal(rig.engine.outcome(request).state, FINISHED, "the other tenant's request")
        transcripts.append(seen)
        if flooded:
            expect_equal(seen, transcripts[0], "another tenant's transcript beside a flood")
            waiting = sum(rig.engine.outcome(one).state == WAITING for one in flood)
            rig.finish(*flood)
            expect_equal(set(rig.states(flood)), {FINISHED}, "the flood, in the end")
    expect(waiting > 0, "the flood never waited (control)")


@case("worlds/foreign-tenant")
def worlds(bench: Bench) -> None:
    """Two worlds that differ only in what another tenant did look the same, to the byte."""
    secret = [bench.random.choices(range(3, 200), k=40) for _ in range(4)]
    transcripts = []
    for acts in (False, True):
        rig = bench.open(blocks=96)
        random = Random(rig.setup.seed)  # noqa: S311 (prompts of tests)
        seen: list[object] = []
        for turn in range(8):
            if acts:
                rig.ask(ALPHA, tuple(secret[turn % 4]), 1 + turn % 3)
                rig.settle()
            guess = list(secret[random.randrange(4)][: random.randrange(8, 41)])
            for tokens in (guess, random.choices(range(3, 200), k=random.randrange(5, 30))):
                request = rig.submit(BETA, tokens, 2)
                seen.append((rig.finish(request), rig.engine.outcome(request).seen))
            rig.idle(SECOND_US * random.randrange(1, 4))
            seen.append(rig.clock.now_us())
        transcripts.append(repr(seen).encode())
    expect(b"finished" in transcripts[0], "the observer saw nothing (control)")
    expect_equal(transcripts[1], transcripts[0], "what another tenant sees")


CASES: tuple[Case, ...] = (missing, forged, expired, replayed, waits_alone, worlds)
