"""An engine whose index is a tree of token ids, monitored and enforced: the same orders, and nothing crosses."""

from __future__ import annotations

import pytest

from kvcustody.audit.kinds import RequestMonitored
from kvcustody.clock import VirtualClock
from kvcustody.governance.monitoring.enforcement import Enforcement
from kvcustody.testkit.conformance.policy import policy
from standins.integrations.paged_engine import PagedEngine

PROMPT = list(range(1, 14))
ANYBODY = ("anybody", "", "")


def order(engine: PagedEngine, mode: str) -> None:
    until_us = engine.clock.utc_us() + 3_600_000_000
    engine.port.order_enforcement(Enforcement(mode, seed="5eed" * 8, until_utc_us=until_us, actor="olga", order=3))


def monitored(engine: PagedEngine, tenant: str | None, narrowed_by: str = "") -> int:
    """One request, whose pages are compared with what anybody computed of its prompt."""
    rid = engine.ask(tenant, "s", PROMPT, narrowed_by)
    engine.waiting[rid].who = (*ANYBODY[:2], narrowed_by)
    before = engine.hits
    assert engine.start(rid)
    engine.chunk(rid, 99)
    engine.finish(rid)
    return engine.hits - before


@pytest.mark.parametrize("size", [1, 4])
def test_a_tree_is_monitored_and_enforced(size: int) -> None:
    engine = PagedEngine(policy(), VirtualClock(), 128, size)
    engine.port.may_monitor = True
    whole = (len(PROMPT) - 1) // size
    order(engine, "monitor")
    assert [monitored(engine, tenant) for tenant in ("alpha", "beta", None)] == [0, whole, whole]
    assert monitored(engine, "alpha", "mine") == 0, "what its client says narrows as ever"
    order(engine, "enforce")
    assert engine.run("alpha", "s", PROMPT) == 0, "nothing of what was monitored"
    assert [engine.run("alpha", "s", PROMPT), engine.run("beta", "s", PROMPT)] == [whole, 0]
    order(engine, "monitor")
    assert monitored(engine, "alpha") == 0, "nothing of what was enforced"
    engine.port.counts()
    leaves = [event for event in engine.ledger.events if isinstance(event, RequestMonitored)]
    assert [(one.tenant, one.effect) for one in leaves[:3]] == [
        ("alpha", "would-permit"),
        ("beta", "would-deny"),
        ("(anonymous)", "would-deny"),
    ]
    assert leaves[1].refused_tokens == leaves[1].reused_tokens == whole * size
    assert leaves[1].forecast_tokens == 0
    assert engine.problems() == []
