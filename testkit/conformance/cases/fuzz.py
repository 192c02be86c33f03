"""Random traces of all operations at once: the seed is the case's, the oracles are the kit's."""

from __future__ import annotations

from typing import Any

from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.identity.principal import Principal
from kvcustody.testkit.conformance.case import Bench, Case, CaseHarness, case, expect, person
from kvcustody.testkit.conformance.engine_protocol import FINISHED, OVER
from kvcustody.testkit.conformance.policy import IDLE_US, SECOND_US, WITHIN_US, policy

PEOPLE = (person("alpha"), person("alpha", "bob"), person("beta"), person("gamma"))
ROUNDS = 90


class FuzzTrace:
    """One random trace: requests with shared prefixes, and everything that can happen to them."""

    def __init__(self, rig: CaseHarness) -> None:
        self.rig = rig
        self.bases = [rig.prompt(5, 0) for _ in range(2)]
        self.live: list[tuple[object, Principal, tuple[int, ...]]] = []
        self.finished = 0
        self.hits = 0

    def act(self) -> None:
        """Perform one random operation and an engine step."""
        rig, random = self.rig, self.rig.random
        chance = random.random()
        if chance < 0.4 and len(self.live) < 6:
            base = random.choice(self.bases)[: random.randrange(5 * rig.block_tokens)]
            who = random.choice(PEOPLE)
            tokens = (*base, *rig.prompt(0, random.randrange(1, 2 * rig.block_tokens)))
            self.live.append((rig.submit(who, tokens, random.randrange(1, 6)), who, tokens))
        elif chance < 0.5 and self.live:
            self._interrupt(random.choice(self.live)[0])
        elif chance < 0.56:
            rig.late(random.choice((SECOND_US, IDLE_US // 2, IDLE_US + 1)))
        elif chance < 0.58:
            rig.engine.erase(Selector(tenant="alpha", subject=random.choice(("ann", "bob"))))
        rig.engine.step()
        self._harvest()

    def _interrupt(self, request: object) -> None:
        engine = self.rig.engine
        acts = [engine.abort, engine.disconnect]
        acts += [engine.preempt, engine.preempt] if self.rig.has("preemption") else []
        self.rig.random.choice(acts)(request)

    def _harvest(self) -> None:
        for entry in list(self.live):
            request, who, tokens = entry
            outcome = self.rig.engine.outcome(request)
            if outcome.state not in OVER:
                continue
            self.live.remove(entry)
            if outcome.state == FINISHED:
                self.finished += 1
                self.hits += outcome.cached_tokens > 0
                self.rig.same_as_cold(who, tokens, outcome)


def _fuzz(bench: Bench, text: str, **setup: Any) -> None:
    rig = bench.open(text, blocks=36, **setup)
    trace = FuzzTrace(rig)
    for _ in range(ROUNDS):
        trace.act()
    rig.finish(*(request for request, _, _ in trace.live))
    trace._harvest()
    rig.idle(IDLE_US + WITHIN_US)
    rig.expect_clean_first_writes(30)
    expect(trace.finished >= 10, f"only {trace.finished} requests finished (control)")
    expect(trace.hits >= 1, "nothing was ever reused (control)")


@case("fuzz/trace", "bytes")
def trace(bench: Bench) -> None:
    """Random submit, abort, disconnect, preempt, erase and pauses: clean first writes, outputs of an empty cache."""
    _fuzz(bench, policy())


@case("fuzz/in-flight", "bytes", "async")
def in_flight(bench: Bench) -> None:
    """The same with device steps in flight: what is late lands where it should, or nowhere."""
    _fuzz(bench, policy(), steps_in_flight=2)


@case("fuzz/tier", "bytes", "tier")
def tier(bench: Bench) -> None:
    """The same with an external tier."""
    _fuzz(bench, policy(tier=True), tier=True)


CASES: tuple[Case, ...] = (trace, in_flight, tier)
