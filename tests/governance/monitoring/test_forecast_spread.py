"""Where requests come at the same moment and a pool evicts all the time: enforcing differs from itself.

    pytest -s -m system tests/governance/monitoring/test_forecast_spread.py

The same requests are enforced again and again: those that come together in another order, and prompts prefilled nine
or eleven tokens a step in place of ten. Nobody can know while nothing is enforced which of these will come.
"""

from __future__ import annotations

import random
from types import ModuleType

import pytest
from tests.governance.monitoring import test_governor_monitor, test_port_monitor

from kvcustody.testkit.conformance.engine_protocol import RequestSpec
from kvcustody.testkit.conformance.engines import toy_engine
from standins.governance.monitored_workload import serve

pytestmark = pytest.mark.system

ENGINES = {"own": test_governor_monitor, "port": test_port_monitor}
ORDERS = 5
MISSED = {("own", "agentic", 80, 8)}  # docs/how-to/operate/adopt.md says so


def in_another_order(asks: list[RequestSpec], at_once: int, seed: int) -> list[RequestSpec]:
    """Who comes at one moment still does."""
    chance, made = random.Random(seed), list[RequestSpec]()
    for first in range(0, len(asks), at_once):
        together = asks[first : first + at_once]
        chance.shuffle(together)
        made += together
    return made


def enforced(of: ModuleType, asks: list[RequestSpec], blocks: int, at_once: int) -> int:
    one = of.engine(blocks)
    given = sum(serve(one, asks, at_once=at_once))
    one.close()
    return given


def foreseen(of: ModuleType, asks: list[RequestSpec], blocks: int, at_once: int) -> int:
    one = of.engine(blocks)
    of.order(one, test_governor_monitor.MONITOR)
    serve(one, asks, at_once=at_once)
    found = sum(event.forecast_tokens for event in of.monitored(one))
    one.close()
    return found


@pytest.mark.parametrize(
    ("engine", "load", "blocks", "at_once"),
    [
        ("own", "mixed", 80, 4),
        ("own", "mixed", 100, 4),
        ("own", "mixed", 80, 8),
        ("own", "mixed", 100, 8),
        ("own", "mixed", 160, 8),
        ("own", "agentic", 100, 8),
        ("own", "agentic", 80, 8),
        ("port", "mixed", 120, 4),
    ],
)
def test_enforcing_differs_from_itself_by_as_much_as_from_the_forecast(
    engine: str, load: str, blocks: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = ENGINES[engine]
    asks = of.LOADS[load](300)
    given, predicted = enforced(of, asks, blocks, at_once), foreseen(of, asks, blocks, at_once)
    others = [enforced(of, in_another_order(asks, at_once, seed), blocks, at_once) for seed in range(ORDERS)]
    for chunk in (9, 11):
        monkeypatch.setattr(toy_engine, "CHUNK_TOKENS", chunk)
        others.append(enforced(of, asks, blocks, at_once))
    off, apart = abs(predicted - given) / given, max(abs(other - given) for other in others) / given
    print(
        f"\n{engine}, {load}, {blocks} blocks, {at_once} at once: enforced {given}, foreseen {predicted} ({off:.1%});"
        f" enforced again {min(others)} to {max(others)} ({apart:.1%})"
    )
    assert apart > 0.02, "or 2 % would be a goal that can be met here"
    assert off <= apart or (engine, load, blocks, at_once) in MISSED
