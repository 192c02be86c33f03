"""What a worker says of requests that it monitors, against a recount from its leaves and from what it answered."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from kvcustody.audit.kinds import HitCounted, RequestMonitored
from kvcustody.clock import VirtualClock
from kvcustody.governance.decisions.staged_table import Stage
from kvcustody.governance.monitoring.enforcement import CANARY, ENFORCE, Enforcement
from kvcustody.governance.observability.metrics import worker_status
from kvcustody.testkit.conformance.engine_protocol import Setup
from kvcustody.testkit.conformance.engines.native_engine import NativeEngine
from kvcustody.testkit.conformance.engines.reference_engine import ReferenceEngine
from kvcustody.testkit.conformance.engines.toy_engine import BLOCK_TOKENS
from standins.governance.monitored_workload import POLICY, requests, serve


@pytest.mark.parametrize("kind", [NativeEngine, ReferenceEngine])
def test_every_figure_of_monitored_requests_is_what_a_recount_says(kind: type[Any]) -> None:
    engine = kind(Setup(POLICY, VirtualClock(), blocks=400))
    facade = engine.governor if kind is NativeEngine else engine.port

    def said() -> dict[str, float]:
        return worker_status(facade.stats(), BLOCK_TOKENS)

    assert said()["monitors"] == 0
    facade.may_monitor = True
    until_us = engine.clock.utc_us() + 3_600_000_000
    facade.order_enforcement(
        Enforcement(CANARY, Stage(frozenset({"alpha"}), Fraction(0)), "5eed" * 8, until_us, "olga")
    )
    asks = requests(120)
    cached = serve(engine, asks)
    facade.counts()
    own = sum(got for ask, got in zip(asks, cached, strict=True) if ask.identity.tenant == "alpha")
    leaves = [event for event in engine.ledger() if isinstance(event, RequestMonitored)]
    status = said()
    assert status["monitors"] == 1
    assert status["monitored_requests"] == len(leaves) == sum(ask.identity.tenant != "alpha" for ask in asks)
    assert status["monitored_tokens"] == sum(event.reused_tokens for event in leaves) == sum(cached) - own > 0
    assert status["would_refuse_tokens"] == sum(event.refused_tokens for event in leaves) > 0
    assert status["forecast_tokens"] == sum(event.forecast_tokens for event in leaves) > 0
    assert status["hit_tokens"] == own > 0, "what is monitored is in no other figure of hits"
    denied = sum(
        event.requests
        for event in engine.ledger()
        if isinstance(event, HitCounted) and event.effect == "would-deny" and event.rule == "no-gamma"
    )
    assert status["would_deny.no-gamma"] == denied > 0 and "denials" not in status
    facade.order_enforcement(Enforcement(ENFORCE))
    assert said()["monitors"] == 0
    engine.close()
