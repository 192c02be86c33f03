"""A case of the kit, and the bench on which it runs.

`@case` makes a case of a function: its docstring is what it proves, and it fails through `expect`. The function gets a
`Bench`, which opens engines; each comes as a `CaseHarness`: prompts that nobody else sends, requests driven to their
end, and what is always watched.

1. Every engine that a case opens is closed, and its own checks and scans must be clean before and after.
2. Prompts come from the bench's seed: a failure prints it, and the same seed asks the same things.
3. `cold` is the oracle of outputs: the same prompt, the same principal, in a fresh engine where nothing can be
   reused.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from random import Random
from typing import Any, NamedTuple

from kvcustody.audit.kinds import Event, ResidencyOpened
from kvcustody.clock import VirtualClock
from kvcustody.errors import ConfigError
from kvcustody.governance.identity.principal import Principal, identify
from kvcustody.testkit.conformance.engine_protocol import (
    FEATURES,
    FINISHED,
    OVER,
    RUNNING,
    Capabilities,
    EngineFactory,
    EngineUnderTest,
    FirstWrite,
    RequestOutcome,
    RequestSpec,
    Setup,
)
from kvcustody.testkit.conformance.policy import SECOND_US
from kvcustody.testkit.conformance.policy import policy as standard_policy


class Failed(AssertionError):  # noqa: N818 (the verdict's own word)
    """The engine does not do what the case requires."""


class Case(NamedTuple):
    """`name` is stable across releases; `proves` is one sentence; `needs` are features of `FEATURES`."""

    name: str
    proves: str
    needs: tuple[str, ...]
    run: Callable[[Bench], None]


def case(name: str, *needs: str) -> Callable[[Callable[[Bench], None]], Case]:
    """Make a case of a function, whose docstring states what the case proves."""
    unknown = set(needs) - set(FEATURES)
    if unknown:
        raise ConfigError(f"case `{name}` needs unknown features `{sorted(unknown)}`", case=name)

    def make(function: Callable[[Bench], None]) -> Case:
        return Case(name, " ".join((function.__doc__ or "").split()), needs, function)

    return make


def expect(holds: bool, message: str) -> None:
    """Raise `Failed` with `message` unless the condition holds."""
    if not holds:
        raise Failed(message)


def expect_equal(got: object, wanted: object, what: str) -> None:
    """Raise `Failed` with both values unless they are equal."""
    if got != wanted:
        raise Failed(f"{what}: `{got}`, wanted `{wanted}`")


STEPS_MAX = 400  # more than any case needs; an engine that is not done by then stalls
ISSUER = "idp"


def person(tenant: str, subject: str = "ann") -> Principal:
    """Return an authenticated subject of a tenant."""
    return identify(issuer=ISSUER, tenant=tenant, verified={"subject": subject})


class CaseHarness:
    """One engine under test, its clock and its prompts."""

    def __init__(self, engine: EngineUnderTest, setup: Setup, random: Random, bench: Bench) -> None:
        self.engine = engine
        self.setup = setup
        self.clock = setup.clock
        self.random = random
        self.capabilities: Capabilities = engine.capabilities
        self.block_tokens = self.capabilities.block_tokens
        self.first_writes: list[FirstWrite] = []
        self.lawful_findings: list[str] = []  # that a case has provoked
        self._bench = bench
        if self.has("bytes"):
            engine.watch(self.first_writes.append)

    def has(self, feature: str) -> bool:
        """Return whether the engine has a feature."""
        return feature not in self.capabilities.lacks

    # -- asking --------------------------------------------------------------------------------------------------------

    def prompt(self, blocks: int, tail: int = 1) -> tuple[int, ...]:
        """Return tokens of that many whole blocks and a tail, which no other prompt has."""
        ids = range(3, self.capabilities.vocabulary)
        return tuple(self.random.choices(ids, k=blocks * self.block_tokens + tail))

    def submit(self, who: Principal | str | None, tokens: Sequence[int], max_tokens: int = 1, **more: Any) -> object:
        """Queue a request; `more`: the other fields of `RequestSpec`."""
        return self.engine.submit(RequestSpec(who, tuple(tokens), max_tokens, **more))

    def ask(
        self, who: Principal | str | None, tokens: Sequence[int], max_tokens: int = 1, **more: Any
    ) -> RequestOutcome:
        """Run one request from its arrival to its end."""
        request = self.submit(who, tokens, max_tokens, **more)
        self.finish(request)
        return self.engine.outcome(request)

    def finish(self, *requests: object) -> int:
        """Step until these requests have ended; return the number of steps."""
        steps = 0
        while not all(self.engine.outcome(one).state in OVER for one in requests):
            steps += 1
            expect(steps <= STEPS_MAX, f"a request is not over after {STEPS_MAX} steps: {self.states(requests)}")
            self.engine.step()
        return steps

    def states(self, requests: Iterable[object]) -> list[str]:
        """Return the requests' states for an error message."""
        return [self.engine.outcome(one).state for one in requests]

    def until_running(self, request: object) -> RequestOutcome:
        """Step until the request runs and has blocks."""
        for _ in range(STEPS_MAX):
            outcome = self.engine.outcome(request)
            if outcome.state in OVER:
                raise Failed(f"the request ended as {outcome.state} before it was seen running")
            if outcome.state == RUNNING and outcome.blocks:
                return outcome
            self.engine.step()
        raise Failed(f"the request does not run after {STEPS_MAX} steps")

    def until_output(self, request: object, tokens: int) -> None:
        """Step until the request has that many output tokens and still runs."""
        self.until_running(request)
        for _ in range(STEPS_MAX):
            outcome = self.engine.outcome(request)
            if outcome.state in OVER:
                raise Failed(f"the request ended as {outcome.state} after {len(outcome.output)} tokens")
            if len(outcome.output) >= tokens:
                return
            self.engine.step()
        raise Failed(f"the request has not said {tokens} tokens after {STEPS_MAX} steps")

    def steps(self, count: int) -> None:
        """Take that many engine steps."""
        for _ in range(count):
            self.engine.step()

    def settle(self) -> None:
        """Step until no work is left."""
        for _ in range(STEPS_MAX):
            if not self.engine.step():
                return
        raise Failed(f"the engine is not idle after {STEPS_MAX} steps")

    # -- time ----------------------------------------------------------------------------------------------------------

    def idle(self, microseconds: int) -> None:
        """Let time pass without requests; the engine's own timer may run."""
        self.settle()
        self.engine.idle(microseconds)

    def late(self, microseconds: int) -> None:
        """Move the clock while the engine does not run, as in a long pause of the process."""
        self.clock.advance(microseconds)

    # -- what must hold ------------------------------------------------------------------------------------------------

    def hit(self, who: Principal | None, tokens: Sequence[int], blocks: int, what: str, **more: Any) -> RequestOutcome:
        """Require that a whole request finishes and reuses exactly that many whole blocks."""
        outcome = self.ask(who, tokens, **more)
        expect_equal(outcome.state, FINISHED, f"{what}: state ({outcome.reason})")
        expect_equal(outcome.cached_tokens, blocks * self.block_tokens, f"{what}: cached tokens")
        return outcome

    def warm(self, who: Principal, blocks: int = 4, tail: int = 1, **more: Any) -> tuple[int, ...]:
        """Compute a prompt once and require that its own subject reuses it in full (the positive control)."""
        tokens = self.prompt(blocks, tail)
        first = self.ask(who, tokens, **more)
        expect_equal((first.state, first.cached_tokens), (FINISHED, 0), f"first request ({first.reason})")
        self.hit(who, tokens, blocks, "own second request (control)", **more)
        return tokens

    def open_grant(self, owner: Principal, reader: Principal) -> None:
        """Send requests until the grant is in effect: its first use must be durable before (class A)."""
        for _ in range(100):
            tokens = self.prompt(1)
            self.ask(owner, tokens)
            if self.ask(reader, tokens).cached_tokens:
                return
            time.sleep(0.005)
        raise Failed("the grant never served its reader (control)")

    def same_as_cold(self, who: Principal, tokens: Sequence[int], outcome: RequestOutcome) -> None:
        """Require the output of an engine that has nothing to reuse."""
        if self.has("exact"):
            cold = self._bench.cold(self.setup, who, tuple(tokens), len(outcome.output))
            expect_equal(outcome.output, cold, "output, against an engine without any cache")

    def nonzero_bytes(self, blocks: Iterable[int]) -> int:
        """Return how many bytes of these blocks are not zero now."""
        return sum(len(data) - data.count(0) for data in self.engine.read(tuple(blocks)))

    def expect_clean_first_writes(self, at_least: int = 1) -> None:
        """Require that every allocated block was all zero before its first write, and that there were some."""
        seen = len(self.first_writes)
        expect(seen >= at_least, f"only {seen} first writes were probed, {at_least} wanted")
        dirty = [write for write in self.first_writes if write.nonzero_bytes]
        expect(not dirty, f"{len(dirty)} of {seen} blocks were not zero before their first write: {dirty[:3]}")

    def healthy(self) -> None:
        """Require that the engine's and governance's own checks pass, and the orphan scan finds nothing."""
        problems = self.engine.check()
        expect(not problems, f"check: {problems[:5]}")
        findings = [finding for finding in self.engine.scan() if finding not in self.lawful_findings]
        expect(not findings, f"scan: {findings[:5]}")

    def expect_opened(self, tenant: str, at_least: int) -> None:
        """Require that every residency so far is this tenant's, and that there are at least that many."""
        self.settle()
        self.engine.idle(SECOND_US)
        tenants = [event.tenant for event in self.ledger(ResidencyOpened)]
        expect(set(tenants) == {tenant}, f"residencies of `{sorted(set(tenants))}`, wanted `{tenant}` alone")
        expect(len(tenants) >= at_least, f"{len(tenants)} residencies opened, at least {at_least} wanted")

    def ledger(self, kind: type[Event]) -> list[Any]:
        """Ledger events of one kind."""
        return [event for event in self.engine.ledger() if isinstance(event, kind)]


class Bench:
    """Opens engines for one case."""

    def __init__(self, factory: EngineFactory, seed: int) -> None:
        self.factory = factory
        self.seed = seed
        self.random = Random(seed)  # noqa: S311 (prompts of tests)
        self._open: list[CaseHarness] = []
        self._cold: dict[tuple[object, ...], tuple[int, ...]] = {}

    def open(self, policy: str | None = None, **setup: Any) -> CaseHarness:
        """Return a fresh engine; `setup`: fields of `Setup`."""
        made = Setup(policy or standard_policy(), VirtualClock(), seed=self.seed, **setup)
        rig = CaseHarness(self.factory(made), made, self.random, self)
        unknown = set(rig.capabilities.lacks) - set(FEATURES)
        if unknown:
            raise ConfigError(f"`{rig.capabilities.engine}` lacks unknown features `{sorted(unknown)}`")
        self._open.append(rig)
        return rig

    def cold(self, setup: Setup, who: Principal, tokens: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
        """Return the output of a fresh engine for one request (rule 3)."""
        key = (who, tokens, max_tokens)
        known = self._cold.get(key)
        if known is None:
            fresh = setup._replace(clock=VirtualClock(), steps_in_flight=0, tier=False)
            rig = CaseHarness(self.factory(fresh), fresh, self.random, self)
            outcome = rig.ask(who, tokens, max_tokens)
            expect_equal(outcome.state, FINISHED, f"cold run ({outcome.reason})")
            known = self._cold[key] = outcome.output
            rig.engine.close()
        return known

    def close(self) -> None:
        """Check and close every open engine (rule 1)."""
        while self._open:
            self._open[-1].healthy()  # where it is not, `abandon` closes it
            self._open.pop().engine.close()

    def abandon(self) -> None:
        """Close, after a failure, whatever can be closed, without checks."""
        while self._open:
            _quietly(self._open.pop().engine.close)


def _quietly(close: Callable[[], None]) -> None:
    with suppress(Exception):  # the case has failed already, with its own reason
        close()
