"""Our own Governor, adopted step by step: monitored, a canary, enforced, and back."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from tests.governance.monitoring.workload import POLICY, reader, requests, serve

from kvcustody.audit.events import RequestMonitored, ResidencyOpened
from kvcustody.clock import VirtualClock
from kvcustody.governance.decisions.access_plan import label_of
from kvcustody.governance.decisions.staged_table import Stage
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.monitoring.enforcement import CANARY, ENFORCE, MONITOR, Enforcement
from kvcustody.testkit.conformance.engine_protocol import FINISHED, REFUSED, RequestSpec, Setup
from kvcustody.testkit.conformance.engines.native_engine import NativeEngine

SEED = "5eed" * 8
WORDS = tuple(range(10, 42))


def engine(blocks: int = 400) -> NativeEngine:
    made = NativeEngine(Setup(POLICY, VirtualClock(), blocks=blocks))
    made.governor.may_monitor = True
    return made


def order(one: NativeEngine, mode: str, *, tenants: frozenset[str] = frozenset(), share: str = "0") -> None:
    until_us = one.clock.utc_us() + 3_600_000_000
    stage = Stage(tenants, Fraction(share))
    one.governor.order_enforcement(Enforcement(mode, stage, SEED, until_us, "olga", 5, "adoption"))


def monitored(one: NativeEngine) -> list[RequestMonitored]:
    one.governor.counts()
    return [event for event in one.ledger() if isinstance(event, RequestMonitored)]


def ask(one: NativeEngine, tenant: str, subject: str, session: str = "s") -> int:
    return serve(one, [RequestSpec(reader(tenant, subject, session), WORDS)])[0]


def sides(one: NativeEngine) -> set[bool]:
    return {
        label_of(node.domain).is_monitored
        for manager in one.governor.managers
        for node in manager.tree.nodes()
        if node.length
    }


@pytest.mark.parametrize("blocks", [400, 120])
def test_the_forecast_is_what_enforcing_then_gives(blocks: int) -> None:
    asks = requests(300)
    watched, enforced = engine(blocks), engine(blocks)
    order(watched, MONITOR)
    reused = sum(serve(watched, asks))
    forecast = monitored(watched)
    given = sum(serve(enforced, asks))
    predicted = sum(event.forecast_tokens for event in forecast)
    assert len(forecast) == len(asks)
    assert reused == sum(event.reused_tokens for event in forecast) > given
    prompts = sum(event.prompt_tokens for event in forecast)
    within = (
        given if blocks == 400 else prompts
    )  # a pool that thrashes: what is evicted next decides everything
    assert abs(predicted - given) <= 0.02 * within, (predicted, given, reused)
    would, did = Counter[str](), Counter[str]()
    for tally in watched.governor.stats().tenants.values():
        would.update(tally.would_deny)
        assert not tally.denials and not tally.hit_blocks
    for tally in enforced.governor.stats().tenants.values():
        did.update(tally.denials)
    assert did["no-gamma"] and would["no-gamma"]
    if (
        blocks == 400
    ):  # where nobody is put off: each attempt of a request that waits for room is decided, and counted
        assert would == did
    assert watched.check() == watched.scan() == []
    watched.close()
    enforced.close()


def test_blocks_of_the_two_sides_never_meet() -> None:
    one = engine()
    order(one, MONITOR)
    assert ask(one, "alpha", "ann") == 0
    assert ask(one, "gamma", "eve") > 0, "the engine's own keys know no tenant"
    assert monitored(one)[1].effect == "would-deny" and monitored(one)[1].refused_tokens > 0
    opened = [event for event in one.ledger() if isinstance(event, ResidencyOpened)]
    assert len(opened[1].domains) == 2 and opened[1].reasons[0] == "(monitored)"
    order(one, CANARY, tenants=frozenset({"alpha"}))
    assert ask(one, "alpha", "ann") == 0, "what it left while it was monitored is out of its reach"
    assert ask(one, "alpha", "ann") > 0, "its own"
    assert sides(one) == {False}
    assert ask(one, "gamma", "eve") == 0, "an enforced tenant's blocks are out of a monitored one's reach"
    assert ask(one, "gamma", "eva") > 0
    order(one, ENFORCE)
    assert ask(one, "gamma", "eve") == 0 and ask(one, "alpha", "ann") > 0
    order(one, MONITOR)
    assert ask(one, "gamma", "eve") == 0
    assert one.check() == one.scan() == []
    one.close()


def test_a_share_of_sessions_and_an_erasure() -> None:
    one = engine()
    order(one, CANARY, share="1/2")
    for number in range(40):
        ask(one, "alpha", "ann", session=f"s{number}")
    assert 8 < len(monitored(one)) < 32 and sides(one) == {True, False}
    one.erase(Selector(tenant="alpha"))
    assert sides(one) == set()
    assert one.check() == one.scan() == []
    one.close()


def test_a_tenant_that_the_policy_does_not_know_is_served_and_recorded() -> None:
    one = engine()
    refused = one.submit(RequestSpec(reader("nobody-knows", "x"), WORDS))
    one.step()
    assert one.outcome(refused).state == REFUSED, "control"
    order(one, MONITOR)
    assert ask(one, "nobody-knows", "x") == 0 < ask(one, "alpha", "ann")
    assert ask(one, "strangest", "y") > 0
    first, _, last = monitored(one)
    assert (first.tenant, first.effect, first.reasons) == ("(anonymous)", "would-deny", ("unknown-tenant",))
    assert last.refused_tokens == last.reused_tokens > 0
    order(one, ENFORCE)
    assert sides(one) == set()
    assert one.check() == one.scan() == []
    one.close()


def test_an_order_ends_by_itself_and_what_runs_leaves_nothing() -> None:
    one = engine()
    one.governor.call(lambda governor: order(one, MONITOR))
    one.idle(1_000_000)
    running = one.submit(RequestSpec(reader("alpha", "ann"), WORDS, max_tokens=8))
    one.step()
    one.idle(3_600_000_000)
    assert one.governor.enforcement.mode == ENFORCE
    while one.step():
        one.clock.advance(1_000)
    assert one.outcome(running).state == FINISHED, "no deadline of the policy's ended it"
    assert sides(one) == set()
    assert one.check() == one.scan() == []
    one.close()
