"""Our own Governor, adopted step by step: monitored, a canary, enforced, and back."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from fractions import Fraction

import pytest

from kvcustody.audit.kinds import RequestMonitored, ResidencyOpened
from kvcustody.clock import VirtualClock
from kvcustody.governance.decisions.access_plan import label_of
from kvcustody.governance.decisions.staged_table import Stage, quotas_of
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.governor.forecast_pools import ForecastPools
from kvcustody.governance.monitoring.enforcement import CANARY, ENFORCE, MONITOR, Enforcement
from kvcustody.testkit.conformance.engine_protocol import FINISHED, OVER, REFUSED, RUNNING, RequestSpec, Setup
from kvcustody.testkit.conformance.engines import toy_engine
from kvcustody.testkit.conformance.engines.native_engine import NativeEngine
from standins.governance.monitored_workload import POLICY, agentic, reader, requests, serve

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


ROOMY = pytest.mark.system("a forecast errs in a pool that evicts nothing")
LOADS = {"mixed": requests, "agentic": agentic}


def monitored_and_enforced(
    load: str, count: int, blocks: int, at_once: int
) -> tuple[NativeEngine, NativeEngine, list[int], list[int]]:
    """Two engines on the same requests, and by request: what was foreseen in the first, what the second gave."""
    asks = LOADS[load](count)
    watched, enforced = engine(blocks), engine(blocks)
    order(watched, MONITOR)
    reused = sum(serve(watched, asks, at_once=at_once))
    given = serve(enforced, asks, at_once=at_once)
    events = {event.residency: event for event in monitored(watched)}
    forecast = [events[residency].forecast_tokens for residency in sorted(events)]
    assert len(forecast) == len(asks)
    assert reused == sum(event.reused_tokens for event in events.values()) > sum(given) > 0
    assert watched.check() == watched.scan() == forecast_pools(watched).check() == []
    return watched, enforced, forecast, given


def forecast_pools(one: NativeEngine) -> ForecastPools:
    forecast = one.governor._forecast
    assert forecast.is_open
    return forecast


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(
    "blocks",
    [
        120,
        pytest.param(80, marks=pytest.mark.system("a forecast of a pool that always evicts is not exact")),
        pytest.param(256, marks=pytest.mark.system("a forecast of a pool that seldom evicts is not exact")),
    ],
)
def test_the_forecast_is_exact_where_enforced_requests_take_as_long(
    load: str, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every prompt is prefilled in one step, whatever of it was found."""
    monkeypatch.setattr(toy_engine, "CHUNK_TOKENS", 1_000)
    *both, forecast, given = monitored_and_enforced(load, 120, blocks, 2)
    assert forecast == given
    for one in both:
        one.close()


@pytest.mark.parametrize(
    ("load", "blocks"),
    [
        ("mixed", 120),
        ("mixed", 256),
        ("agentic", 80),
        ("agentic", 120),
        pytest.param("mixed", 400, marks=ROOMY),
        pytest.param("agentic", 256, marks=ROOMY),
    ],
)
def test_the_forecast_is_what_enforcing_then_gives(load: str, blocks: int) -> None:
    """Requests that find less are prefilled in more steps, so they end in another order."""
    watched, enforced, forecast, given = monitored_and_enforced(load, 300 if blocks < 256 else 150, blocks, 4)
    off = abs(sum(forecast) - sum(given)) / sum(given)
    print(f"{load}, {blocks} blocks: foreseen {sum(forecast)}, given {sum(given)}: {off:.2%}")
    assert off <= 0.02
    would, did = Counter[str](), Counter[str]()
    for tally in watched.governor.stats().tenants.values():
        would.update(tally.would_deny)
        assert not tally.denials and not tally.hit_blocks
    waits = 0
    for tally in enforced.governor.stats().tenants.values():
        did.update(tally.denials)
        waits += sum(tally.deferred.values())
    if load == "mixed":
        assert did["no-gamma"] and would["no-gamma"]
    if not waits:  # each attempt of a request that waits for room is decided, and counted
        assert would == did
    watched.close()
    enforced.close()


def serve_with_forks(native_engine: NativeEngine, asks: list[RequestSpec]) -> list[int]:
    """One after another, and of each a second request once it runs; the cached tokens of the first ones."""
    cached = []
    for ask in asks:
        first = native_engine.submit(ask)
        native_engine.step()
        assert native_engine.outcome(first).state == RUNNING
        second = native_engine.fork(first)
        while native_engine.step():
            native_engine.clock.advance(1_000)
        assert native_engine.outcome(first).state == native_engine.outcome(second).state == FINISHED
        cached.append(native_engine.outcome(first).cached_tokens)
    return cached


def test_forks_are_in_the_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a control: a forecast that hears of no fork has room for what they would have evicted."""
    monkeypatch.setattr(toy_engine, "CHUNK_TOKENS", 1_000)
    asks = [ask._replace(max_tokens=18) for ask in requests(50)]
    enforced = engine(100)
    given = serve_with_forks(enforced, asks)
    enforced.close()
    forecasts = []
    for hears in (True, False):
        if not hears:
            monkeypatch.setattr(ForecastPools, "fork", lambda *_: None)
        watched = engine(100)
        order(watched, MONITOR)
        serve_with_forks(watched, asks)
        events = sorted(monitored(watched), key=lambda event: event.residency)
        forecasts.append([event.forecast_tokens for event in events])
        assert watched.check() == watched.scan() == forecast_pools(watched).check() == []
        watched.close()
    heard, unheard = forecasts
    assert sum(given) > 0 and heard == given != unheard


def test_what_is_forked_from_a_request_that_would_wait_waits_with_it() -> None:
    native_engine = engine(400)
    order(native_engine, MONITOR)
    waits = [RequestSpec(reader("gamma", f"u{number}"), tuple(range(10, 210)), max_tokens=12) for number in range(4)]
    handles = [native_engine.submit(ask) for ask in waits]
    for _ in range(25):
        native_engine.step()
    forecast = forecast_pools(native_engine)
    assert len(forecast._waiting) == 1
    child = native_engine.fork(handles[3])
    assert native_engine.outcome(child).state == RUNNING and len(forecast._waiting[0].forks) == 1
    forked = forecast._waiting[0].forks[0][1]
    while native_engine.step():
        native_engine.clock.advance(1_000)
    assert len(monitored(native_engine)) == 4 and not forecast._waiting
    assert forked.is_over and forked.sequence is None and forecast.check() == []
    native_engine.close()


def test_requests_that_would_be_put_off_are_recorded_once_it_is_known_what_they_would_find() -> None:
    native_engine = engine(400)
    order(native_engine, MONITOR)
    waits = [RequestSpec(reader("gamma", f"u{number}"), tuple(range(10, 210)), max_tokens=4) for number in range(4)]
    handles = [native_engine.submit(ask) for ask in waits]
    native_engine.step()
    assert {native_engine.outcome(handle).state for handle in handles} == {RUNNING}, "nothing is enforced"
    forecast = forecast_pools(native_engine)
    assert len(forecast._waiting) == 1, "three fit under its cap"
    native_engine.governor.step()
    recorded = [event for event in native_engine.ledger() if isinstance(event, RequestMonitored)]
    assert len(recorded) == 3
    while native_engine.step():
        native_engine.clock.advance(1_000)
    assert len(monitored(native_engine)) == 4 and not forecast._waiting
    assert forecast.check() == []
    native_engine.close()


def test_a_forecast_costs_little_memory() -> None:
    native_engine = engine(20_000)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    order(native_engine, MONITOR)
    native_engine.governor._forecast.open(quotas_of(native_engine.governor.table))
    spent = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert spent <= 32 * 20_000
    native_engine.close()


def test_blocks_of_the_two_sides_never_meet() -> None:
    native_engine = engine()
    order(native_engine, MONITOR)
    assert ask(native_engine, "alpha", "ann") == 0
    assert ask(native_engine, "gamma", "eve") > 0, "the engine's own keys know no tenant"
    assert monitored(native_engine)[1].effect == "would-deny" and monitored(native_engine)[1].refused_tokens > 0
    opened = [event for event in native_engine.ledger() if isinstance(event, ResidencyOpened)]
    assert len(opened[1].domains) == 2 and opened[1].reasons[0] == "(monitored)"
    order(native_engine, CANARY, tenants=frozenset({"alpha"}))
    assert ask(native_engine, "alpha", "ann") == 0, "what it left while it was monitored is out of its reach"
    assert ask(native_engine, "alpha", "ann") > 0, "its own"
    assert sides(native_engine) == {False}
    assert ask(native_engine, "gamma", "eve") == 0, "an enforced tenant's blocks are out of a monitored one's reach"
    assert ask(native_engine, "gamma", "eva") > 0
    order(native_engine, ENFORCE)
    assert ask(native_engine, "gamma", "eve") == 0 and ask(native_engine, "alpha", "ann") > 0
    order(native_engine, MONITOR)
    assert ask(native_engine, "gamma", "eve") == 0
    assert native_engine.check() == native_engine.scan() == []
    native_engine.close()


def test_a_share_of_sessions_and_an_erasure() -> None:
    native_engine = engine()
    order(native_engine, CANARY, share="1/2")
    for number in range(40):
        ask(native_engine, "alpha", "ann", session=f"s{number}")
    assert 8 < len(monitored(native_engine)) < 32 and sides(native_engine) == {True, False}
    native_engine.erase(Selector(tenant="alpha"))
    assert sides(native_engine) == set()
    assert native_engine.check() == native_engine.scan() == []
    native_engine.close()


def test_a_tenant_that_the_policy_does_not_know_is_served_and_recorded() -> None:
    native_engine = engine()
    refused = native_engine.submit(RequestSpec(reader("nobody-knows", "x"), WORDS))
    native_engine.step()
    assert native_engine.outcome(refused).state == REFUSED, "control"
    order(native_engine, MONITOR)
    assert ask(native_engine, "nobody-knows", "x") == 0 < ask(native_engine, "alpha", "ann")
    assert ask(native_engine, "strangest", "y") > 0
    first, _, last = monitored(native_engine)
    assert (first.tenant, first.effect, first.reasons) == ("(anonymous)", "would-deny", ("unknown-tenant",))
    assert last.refused_tokens == last.reused_tokens > 0
    order(native_engine, ENFORCE)
    assert sides(native_engine) == set()
    assert native_engine.check() == native_engine.scan() == []
    native_engine.close()


def test_a_misplaced_request_is_served_and_counted_while_its_tenant_is_monitored() -> None:
    rules = "placement: [{id: alpha-own, groups: [east-1], tenants: [alpha], dedicated: true}]\n"
    native_engine = NativeEngine(Setup(POLICY + rules, VirtualClock(), blocks=400))
    native_engine.governor.may_monitor, native_engine.governor.placement_group = True, "west-1"

    def refused(tenant: str) -> bool:
        request = native_engine.submit(RequestSpec(reader(tenant, "ann"), WORDS))
        while native_engine.outcome(request).state not in OVER:
            native_engine.step()
        return native_engine.outcome(request).state == REFUSED

    def would_deny(tenant: str) -> int:
        return native_engine.governor.stats().tenants[tenant].would_deny.get("misplaced", 0)

    assert refused("alpha") and not refused("beta"), "control: enforced"
    order(native_engine, CANARY, tenants=frozenset(("beta",)))
    assert not refused("alpha") and not refused("alpha") and not refused("beta")
    assert (would_deny("alpha"), would_deny("beta")) == (2, 0)
    order(native_engine, ENFORCE)
    assert refused("alpha")
    assert native_engine.check() == native_engine.scan() == []
    native_engine.close()


def test_an_order_ends_by_itself_and_what_runs_leaves_nothing() -> None:
    native_engine = engine()
    native_engine.governor.call(lambda governor: order(native_engine, MONITOR))
    native_engine.idle(1_000_000)
    running = native_engine.submit(RequestSpec(reader("alpha", "ann"), WORDS, max_tokens=8))
    native_engine.step()
    native_engine.idle(3_600_000_000)
    assert native_engine.governor.enforcement.mode == ENFORCE
    while native_engine.step():
        native_engine.clock.advance(1_000)
    assert native_engine.outcome(running).state == FINISHED, "no deadline of the policy's ended it"
    assert sides(native_engine) == set()
    assert native_engine.check() == native_engine.scan() == []
    native_engine.close()
