"""An engine on the port, adopted step by step: monitored, a canary, enforced, and back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvcustody.allocator.external.residency import ExternalResidency
from kvcustody.allocator.prefix.key_chain import HashState
from kvcustody.allocator.prefix.longest_prefix import Chain
from kvcustody.audit.kinds import EnforcementChanged, HitCounted, RequestMonitored, ResidencyOpened
from kvcustody.clock import VirtualClock
from kvcustody.governance.decisions.access_plan import label_of
from kvcustody.governance.decisions.staged_table import Stage
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.monitoring.enforcement import CANARY, ENFORCE, MONITOR, Enforcement, Requester
from kvcustody.governance.monitoring.port_forecast import PortForecast
from kvcustody.governance.request import NO_HINTS
from kvcustody.testkit.conformance.engine_protocol import FINISHED, RUNNING, RequestSpec, Setup
from kvcustody.testkit.conformance.engines import toy_engine
from kvcustody.testkit.conformance.engines.reference_engine import _MODEL, ReferenceEngine
from kvcustody.testkit.conformance.engines.toy_engine import BLOCK_TOKENS
from standins.governance.monitored_workload import POLICY, agentic, reader, requests, serve

SEED = "5eed" * 8
WORDS = tuple(range(10, 42))


def engine(blocks: int = 400, policy: str = POLICY) -> ReferenceEngine:
    made = ReferenceEngine(Setup(policy, VirtualClock(), blocks=blocks))
    made.port.may_monitor = True
    return made


def order(one: ReferenceEngine, mode: str, *, tenants: frozenset[str] = frozenset(), share: str = "0") -> None:
    until_us = one.clock.utc_us() + 3_600_000_000
    stage = Stage(tenants, Fraction(share))
    one.port.order_enforcement(Enforcement(mode, stage, SEED, until_us, "olga", 5, "adoption"))


def monitored(one: ReferenceEngine) -> list[RequestMonitored]:
    one.port.stats()
    one.port.counts()
    return [event for event in one.ledger() if isinstance(event, RequestMonitored)]


def ask(one: ReferenceEngine, tenant: str, subject: str, tokens: tuple[int, ...] = WORDS, session: str = "s") -> int:
    return serve(one, [RequestSpec(reader(tenant, subject, session), tokens)])[0]


ROOMY = pytest.mark.system("a forecast of an engine errs in a pool that evicts nothing")
LOADS = {"mixed": requests, "agentic": agentic}


def off_by(load: str, blocks: int, at_once: int) -> tuple[float, ReferenceEngine, ReferenceEngine]:
    """How far the forecast of a monitored engine is from what the same requests find in one that enforces."""
    asks = LOADS[load](300 if blocks < 256 else 150)
    watched, enforced = engine(blocks), engine(blocks)
    order(watched, MONITOR)
    reused = sum(serve(watched, asks, at_once=at_once))
    forecast = monitored(watched)
    given = sum(serve(enforced, asks, at_once=at_once))
    predicted = sum(event.forecast_tokens for event in forecast)
    assert len(forecast) == len(asks)
    assert reused == sum(event.reused_tokens for event in forecast) > given > 0
    assert watched.check() == watched.scan() == []
    off = abs(predicted - given) / given
    print(f"{load}, {blocks} blocks: foreseen {predicted}, given {given}: {off:.2%}")
    return off, watched, enforced


@pytest.mark.system("a forecast drifts in a pool of an engine that always evicts")
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(("blocks", "at_once"), [(80, 2), (120, 4), (256, 4)])
def test_the_forecast_holds_in_a_pool_that_evicts_all_the_time(
    load: str, blocks: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every prompt is prefilled in one step, whatever of it was found: enforced requests take as long."""
    monkeypatch.setattr(toy_engine, "CHUNK_TOKENS", 1_000)
    off, *both = off_by(load, blocks, at_once)
    assert off <= 0.02
    for one in both:
        one.close()


@pytest.mark.system("a forecast of an engine forgets who waits for a quota")
@pytest.mark.parametrize("blocks", [120, 256])
def test_requests_that_would_wait_for_their_tenants_quota_wait_in_the_forecast(
    blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a control: where whoever comes begins at once, the forecast is off by five times as much as it may be."""
    policy = POLICY.replace("cap: 60%", "cap: 22%").replace("cap: 40%", "cap: 22%")
    asks = agentic(300)
    enforced = engine(blocks, policy)
    given = sum(serve(enforced, asks))
    assert sum(tally.deferred["over-quota"] for tally in enforced.port.stats().tenants.values()) > 10
    off = []
    for waits in (True, False):
        if not waits:
            monkeypatch.setattr(PortForecast, "_fits", lambda *_: True)
        watched = engine(blocks, policy)
        order(watched, MONITOR)
        serve(watched, asks)
        events = monitored(watched)
        assert len(events) == len(asks), "each is on record once, also those that waited"
        off.append(abs(sum(event.forecast_tokens for event in events) - given) / given)
        assert watched.check() == watched.scan() == []
        watched.close()
    print(f"{blocks} blocks: {off[0]:.2%}, control {off[1]:.2%}")
    assert off[0] <= 0.02 and off[1] > 0.05
    enforced.close()


def test_who_would_wait_is_recorded_once_it_is_known_what_it_would_find() -> None:
    reference_engine = engine(400)
    order(reference_engine, MONITOR)
    tokens = tuple(range(10, 210))
    handles = [
        reference_engine.submit(RequestSpec(reader("gamma", f"u{number}"), tokens, max_tokens=4)) for number in range(4)
    ]
    reference_engine.step()
    assert {reference_engine.outcome(handle).state for handle in handles} == {RUNNING}, "nothing is enforced"
    reference_engine.port.stats()
    assert reference_engine.port._forecast.waiting == 1, "three fit under its cap"
    reference_engine.step()
    assert len([event for event in reference_engine.ledger() if isinstance(event, RequestMonitored)]) == 3
    reference_engine.abort(handles[3])
    assert reference_engine.port._forecast.waiting == 0, "whoever leaves while it would wait is given up"
    while reference_engine.step():
        reference_engine.clock.advance(1_000)
    assert len(monitored(reference_engine)) == 4
    reference_engine.close()


@pytest.mark.parametrize(
    ("load", "blocks"),
    [
        ("mixed", 256),
        ("agentic", 120),
        pytest.param("mixed", 400, marks=ROOMY),
        pytest.param("agentic", 256, marks=ROOMY),
    ],
)
def test_the_forecast_is_what_enforcing_then_gives(load: str, blocks: int) -> None:
    off, watched, enforced = off_by(load, blocks, 4)
    assert off <= 0.02
    would = Counter[str]()
    did = Counter[str]()
    for tally in watched.port.stats().tenants.values():
        would.update(tally.would_deny)
        assert not tally.denials and not tally.hit_blocks
    for tally in enforced.port.stats().tenants.values():
        did.update(tally.denials)
    assert would == did and (load == "agentic" or did["no-gamma"])
    watched.close()
    enforced.close()


def test_a_hit_that_the_policy_refuses_is_recorded_as_one_and_as_no_reuse() -> None:
    reference_engine = engine()
    order(reference_engine, MONITOR)
    assert ask(reference_engine, "alpha", "ann") == 0
    assert ask(reference_engine, "gamma", "eve") > 0, "the engine's own keys know no tenant"
    first, second = monitored(reference_engine)
    assert (first.effect, first.refused_tokens) == ("would-permit", 0)
    assert second.effect == "would-deny" and second.reasons == ("no-gamma",)
    assert second.refused_tokens == second.reused_tokens > 0 == second.forecast_tokens
    opened = [event for event in reference_engine.ledger() if isinstance(event, ResidencyOpened)]
    assert all(event.reasons[0] == "(monitored)" for event in opened)
    attached = opened[1].attached
    assert attached and len(opened[1].domains) == 2, "whose they are stands in the leaf"
    counted = [event for event in reference_engine.ledger() if isinstance(event, HitCounted)]
    assert {event.effect for event in counted} == {"would-deny"}
    reference_engine.close()


def test_a_request_whom_the_policy_does_not_admit_is_served_and_recorded() -> None:
    reference_engine = engine()
    order(reference_engine, MONITOR)
    ask(reference_engine, "nobody-knows", "x")
    serve(reference_engine, [RequestSpec(None, WORDS)])
    found = monitored(reference_engine)
    assert [(event.tenant, event.effect) for event in found] == [("(anonymous)", "would-deny")] * 2
    assert [event.reasons for event in found] == [("unknown-tenant",), ("no-identity",)]
    reference_engine.close()


def test_blocks_of_the_two_sides_never_meet() -> None:
    reference_engine = engine()
    order(reference_engine, MONITOR)
    ask(reference_engine, "alpha", "ann")
    ask(reference_engine, "beta", "bob")
    order(reference_engine, CANARY, tenants=frozenset({"alpha"}))
    assert ask(reference_engine, "alpha", "ann") == 0, "what it left while it was monitored is out of its reach"
    assert ask(reference_engine, "alpha", "ann") > 0, "its own"
    indexed = np.flatnonzero(reference_engine.pool.indexed)
    sides = {
        label_of(reference_engine.pool.domains[tag]).is_monitored for tag in reference_engine.pool.tag[indexed].tolist()
    }
    assert sides == {False}, "alpha's monitored blocks, and what stood behind them, have ended"
    assert ask(reference_engine, "gamma", "eve") == 0, "an enforced tenant's blocks are out of a monitored one's reach"
    assert ask(reference_engine, "gamma", "eva") > 0
    order(reference_engine, ENFORCE)
    assert ask(reference_engine, "gamma", "eve") == 0
    assert ask(reference_engine, "alpha", "ann") > 0, "whoever was enforced before keeps what it had"
    order(reference_engine, MONITOR)
    assert ask(reference_engine, "gamma", "eve") == 0, "nothing of alpha's is reached under the engine's own keys"
    assert reference_engine.check() == reference_engine.scan() == []
    reference_engine.close()


def _keyed_by(state: HashState, chain: Callable[..., Chain], *which: Any) -> Chain:
    return chain(*which)._replace(state=state)


def test_a_monitored_key_is_none_that_an_enforced_request_can_ask_for() -> None:
    """With a control: were the keys the policy's own, the very same look-up would find the block."""
    for keyed_alike in (False, True):
        reference_engine = engine()
        order(reference_engine, MONITOR)
        plan = reference_engine.port.plan_of(reader("alpha", "ann"), _MODEL, None, NO_HINTS)
        assert plan is not None and plan.own.state is not None
        if keyed_alike:
            keyed = partial(_keyed_by, plan.own.state, reference_engine.port._monitor.chain)
            reference_engine.port._monitor.chain = keyed  # type: ignore[method-assign]
        reference_engine.port._end_monitored = lambda before: None  # type: ignore[method-assign]
        ask(reference_engine, "alpha", "ann")
        order(reference_engine, ENFORCE)
        residency = reference_engine.port.admit(reader("alpha", "ann"), _MODEL, list(WORDS), request_id="probe")
        assert isinstance(residency, ExternalResidency)
        found = [
            reference_engine.blocks.find(key)
            for key in reference_engine.port.look_up(residency, reference_engine.blocks.find).keys
        ]
        assert any(block >= 0 for block in found) is keyed_alike
        there = [block for block in found if block >= 0]
        assert reference_engine.port.attachable(residency, there) == 0, (
            "and its domain is another one, whatever its key is"
        )
        reference_engine.close()


def test_what_was_monitored_ends_with_the_order_that_enforces() -> None:
    """With a control: where nothing ends it, it stays."""
    for is_ended in (True, False):
        reference_engine = engine()
        if not is_ended:
            reference_engine.port._end_monitored = lambda before: None  # type: ignore[method-assign]
        order(reference_engine, MONITOR)
        ask(reference_engine, "alpha", "ann")
        order(reference_engine, ENFORCE)
        assert bool(reference_engine.pool.indexed.any()) is not is_ended
        reference_engine.close()


def test_a_canary_of_sessions_is_steady_and_only_grows() -> None:
    small = Enforcement(CANARY, Stage(frozenset(), Fraction(1, 10)), SEED, 1, "olga")
    large = replace(small, stage=Stage(frozenset(), Fraction(3, 10)))
    who = [Requester("alpha", "ann", f"s{number}") for number in range(4_000)]
    first = {one for one in who if small.enforces(one, object())}
    assert first == {one for one in who if small.enforces(one, object())}, "whatever the request is called"
    assert first <= {one for one in who if large.enforces(one, 1)}
    assert 300 < len(first) < 500
    other = replace(small, seed="0123" * 8)
    assert first != {one for one in who if other.enforces(one, 1)}


def test_a_share_of_sessions_is_enforced_and_the_others_are_not() -> None:
    reference_engine = engine()
    order(reference_engine, CANARY, share="1/2")
    for number in range(40):
        ask(reference_engine, "alpha", "ann", session=f"s{number}")
    assert 8 < len(monitored(reference_engine)) < 32
    assert reference_engine.check() == reference_engine.scan() == []
    reference_engine.close()


def test_an_order_ends_by_itself_and_reaches_an_engine_that_sleeps() -> None:
    reference_engine = engine()
    reference_engine.port.call(lambda port: order(reference_engine, MONITOR))
    reference_engine.idle(1_000_000)
    assert reference_engine.port.enforcement.mode == MONITOR
    ask(reference_engine, "alpha", "ann")
    reference_engine.idle(3_600_000_000)
    assert (
        reference_engine.port.enforcement.mode == ENFORCE
        and reference_engine.port.enforcement_refused == "its time is over"
    )
    assert not reference_engine.pool.indexed.any()
    assert ask(reference_engine, "gamma", "eve") == 0
    changes = [event for event in reference_engine.ledger() if isinstance(event, EnforcementChanged)]
    assert [(event.mode, event.actor, event.refused) for event in changes] == [
        ("monitor", "olga", ""),
        ("enforce", "olga", "its time is over"),
    ]
    reference_engine.close()


def test_nothing_is_monitored_by_accident() -> None:
    reference_engine = engine()
    reference_engine.port.may_monitor = False
    order(reference_engine, MONITOR)
    assert (
        reference_engine.port.enforcement.mode == ENFORCE
        and reference_engine.port.enforcement_refused == "not allowed here"
    )
    ask(reference_engine, "alpha", "ann")
    assert ask(reference_engine, "gamma", "eve") == 0 and not monitored(reference_engine)
    reference_engine.close()
    dedicated = engine(
        policy=POLICY.replace("profile: shared", "profile: strict")
        .replace(POLICY[POLICY.index("grants:") : POLICY.index("rules:")], "")
        .replace("guaranteed: 0%, cap: 40%", "guaranteed: 20%, cap: 20%")
        .replace("guaranteed: 10%, cap: 60%", "guaranteed: 30%, cap: 30%")
    )
    order(dedicated, MONITOR)
    assert dedicated.port.enforcement_refused == "profile strict"
    dedicated.close()


def test_a_monitored_tenants_blocks_end_with_its_erasure() -> None:
    reference_engine = engine()
    order(reference_engine, MONITOR)
    ask(reference_engine, "alpha", "ann")
    reference_engine.erase(Selector(tenant="alpha"))
    assert not reference_engine.pool.indexed.any()
    assert ask(reference_engine, "gamma", "eve") == 0
    reference_engine.close()


def test_what_runs_when_its_tenant_is_enforced_leaves_nothing() -> None:
    reference_engine = engine()
    order(reference_engine, MONITOR)
    running = reference_engine.submit(RequestSpec(reader("alpha", "ann"), WORDS, max_tokens=8))
    waiting = reference_engine.submit(RequestSpec(reader("alpha", "ann"), WORDS, max_tokens=8))
    reference_engine.step()
    order(reference_engine, ENFORCE)
    late = reference_engine.submit(RequestSpec(reader("alpha", "ann"), WORDS))
    while reference_engine.step():
        reference_engine.clock.advance(1_000)
    assert {reference_engine.outcome(each).state for each in (running, waiting, late)} == {FINISHED}
    sides = [
        label_of(reference_engine.pool.domains[tag]).is_monitored
        for tag in reference_engine.pool.tag[reference_engine.pool.indexed].tolist()
    ]
    assert sides and not any(sides)
    assert BLOCK_TOKENS and reference_engine.check() == reference_engine.scan() == []
    reference_engine.close()
