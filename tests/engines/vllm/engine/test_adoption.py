"""A live vLLM is adopted without a restart and under load: monitored, a canary, enforced, and backed out of.

- What was foreseen while it was monitored is, within 2 %, what enforcing then gives on the same workload.
- No request fails in any phase, orders arrive while requests run, and an idle engine hears of them too.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import builders
import orjson
import pytest
from deployment import Deployment
from local_engine import BLOCK, LocalEngine
from sqlalchemy import select

from kvcustody.audit.database.engine import open_store
from kvcustody.audit.events import Event
from kvcustody.audit.processes.enforcement import forecasts, newest_order, worker_enforcement
from kvcustody.audit.schema.ledger import events
from kvcustody.clock import SystemClock
from kvcustody.governance.monitoring.ordering import enforcement_order

CLOCK = SystemClock()
TENANTS = ("red", "green", "blue", "secret")  # `secret` is of a class of which nothing is reused
AT_ONCE = 6
REQUESTS = 160


class Desk:
    """Whoever gives orders, in the same ledger."""

    def __init__(self, deployment: Deployment, folder: Path) -> None:
        self._deployment = deployment
        self._spill = folder / "desk"

    def read(self, ask: Callable[[Any], Any]) -> Any:
        """An answer of the ledger as it is now."""
        store = open_store(self._deployment.ledger_url, read_only=True)
        try:
            with store.connect() as connection:
                return ask(connection)
        finally:
            store.dispose()

    def order(self, mode: str, tenants: tuple[str, ...] = (), share: str = "") -> None:
        """Put an order on record, and wait for nothing."""
        until_us = None if mode == "enforce" else CLOCK.utc_us() + 3_600_000_000
        made: Event = enforcement_order(
            self.read(newest_order),
            mode,
            at_us=CLOCK.now_us(),
            now_utc_us=CLOCK.utc_us(),
            tenants=tenants,
            share=share,
            until_us=until_us,
            actor="olga",
            reason="adoption",
        )
        store = open_store(self._deployment.ledger_url)
        writer = builders.writer(store, self._spill, worker="desk", clock=CLOCK)
        writer.submit_durable(made)
        writer.close()
        store.dispose()

    def await_mode(self, mode: str) -> None:
        """Until the engine says that it does so; nobody sends it a request."""
        deadline = time.monotonic() + 60
        while [one.mode for one in self.read(worker_enforcement)] != [mode]:
            assert time.monotonic() < deadline, f"the engine did not hear of `{mode}`"
            time.sleep(0.05)

    def bodies(self, kind: str) -> list[dict[str, Any]]:
        """Every leaf of a kind."""
        query = select(events.c.leaf).where(events.c.kind == kind).order_by(events.c.at_us, events.c.idx)
        return [orjson.loads(bytes(leaf)) for leaf in self.read(lambda c: list(c.scalars(query)))]

    def await_leaves(self, kind: str, count: int) -> list[dict[str, Any]]:
        """Until the ledger has so many."""
        deadline = time.monotonic() + 60
        while len(found := self.bodies(kind)) < count:
            assert time.monotonic() < deadline, f"{len(found)} of {count} `{kind}`"
            time.sleep(0.05)
        return found


class Ask(NamedTuple):
    """One request of the workload."""

    tenant: str
    subject: str
    tokens: list[int]


def workload(seed: int) -> list[Ask]:
    """Shared system prompts, conversations that grow, four tenants of three users each."""
    random = Random(seed)
    systems = [[random.randrange(20, 500) for _ in range(3 * BLOCK)] for _ in range(2)]
    said: dict[tuple[str, str], list[int]] = {}
    made = []
    for _ in range(REQUESTS):
        who = random.choice(TENANTS), f"u{random.randrange(3)}"
        history = said.get(who, []) + [random.randrange(20, 500) for _ in range(20)]
        said[who] = history = history if len(history) < 200 else []
        made.append(Ask(*who, random.choice(systems) + history + [17]))
    return made


def serve(engine: LocalEngine, asks: list[Ask], halfway: Callable[[], None] = lambda: None) -> Counter[str]:
    """Serve all of them, six at a time, each to its end; cached tokens by tenant."""
    answers: dict[str, Any] = {}
    tenant_of: dict[str, str] = {}
    for at, ask in enumerate(asks):
        while len(tenant_of) - len(answers) >= AT_ONCE:
            answers |= engine.step()
        if at == len(asks) // 2:
            halfway()
        tenant_of[engine.submit(ask.tokens, tenant=ask.tenant, subject=ask.subject, max_tokens=6)] = (
            ask.tenant
        )
    answers |= engine.finish()
    assert len(answers) == len(asks) and {one.reason for one in answers.values()} == {"length"}, "0 failed"
    found: Counter[str] = Counter()
    for request_id, answer in answers.items():
        found[tenant_of[request_id]] += answer.cached_tokens
    return found


def test_monitor_canary_enforce_and_back(
    start: Callable[..., LocalEngine], new_deployment: Callable[..., Deployment], tmp_path: Path
) -> None:
    deployment = new_deployment(
        monitoring="allowed",
    )
    engine, desk, asks = (
        start(deployment=deployment, num_gpu_blocks_override=256),
        Desk(deployment, tmp_path),
        workload(3),
    )
    desk.await_mode("enforce")  # from its start on, whatever else is allowed
    desk.order("monitor")
    desk.await_mode("monitor")

    reused = serve(engine, asks)
    foreseen = desk.await_leaves("request-monitored", len(asks))
    assert reused.total() == sum(one["reused_tokens"] for one in foreseen)
    assert reused["secret"] > 0, "nothing is enforced"
    refused = sum(one["refused_tokens"] for one in foreseen)
    assert refused > 0
    predicted: Counter[str] = Counter()
    for one in foreseen:
        predicted[one["tenant"]] += one["forecast_tokens"]
    said = {one.tenant: one for one in desk.read(forecasts)}
    assert {name: one.forecast_tokens for name, one in said.items() if one.forecast_tokens} == dict(
        +predicted
    )

    desk.order("canary", ("green",), "30%")
    desk.await_mode("canary")
    before = len(foreseen)
    canary = serve(engine, workload(4), halfway=lambda: desk.order("canary", ("green", "red"), "50%"))
    during = desk.await_leaves("request-monitored", before + 20)[before:]
    assert canary.total() and not [one for one in during if one["tenant"] == "green"]

    serve(engine, workload(5), halfway=lambda: desk.order("enforce"))
    desk.await_mode("enforce")
    count = len(desk.bodies("request-monitored"))
    given = serve(engine, asks)
    assert len(desk.bodies("request-monitored")) == count
    off = abs(predicted.total() - given.total()) / given.total()
    print(
        f"reused {reused.total()}, refused {refused}, foreseen {predicted.total()}, given {given.total()}: {off:.2%}"
    )
    assert off <= 0.02, (predicted, given)
    assert given["secret"] == predicted["secret"] == 0

    serve(engine, workload(6), halfway=lambda: desk.order("monitor"))  # backing out, while requests run
    desk.await_mode("monitor")
    assert serve(engine, asks)["secret"] > 0, "as before"
    assert engine.governance("check") == [] and engine.governance("scan") == []
    assert [one["mode"] for one in desk.bodies("enforcement-changed")] == [
        "monitor", "canary", "canary", "enforce", "monitor",
    ]  # fmt: skip


def test_the_forecast_in_a_pool_that_evicts_all_the_time(
    start: Callable[..., LocalEngine], new_deployment: Callable[..., Deployment], tmp_path: Path
) -> None:
    """There one eviction decides the next: the forecast is held to the prompts' tokens, not to the hits."""
    deployment = new_deployment(monitoring="allowed")
    engine, desk, asks = (
        start(deployment=deployment, num_gpu_blocks_override=80),
        Desk(deployment, tmp_path),
        workload(3),
    )
    desk.order("monitor")
    desk.await_mode("monitor")
    reused = serve(engine, asks).total()
    foreseen = desk.await_leaves("request-monitored", len(asks))
    predicted = sum(one["forecast_tokens"] for one in foreseen)
    prompts = sum(one["prompt_tokens"] for one in foreseen)
    desk.order("enforce")
    desk.await_mode("enforce")
    given = serve(engine, asks).total()
    off = abs(predicted - given) / given
    print(f"reused {reused}; foreseen {predicted}, given {given} of {prompts}: {off:.2%} of hits")
    assert abs(predicted - given) <= 0.02 * prompts


def test_an_order_to_monitor_is_not_followed_where_that_is_not_allowed(
    governed: LocalEngine, tmp_path: Path
) -> None:
    assert governed.deployment is not None
    desk = Desk(governed.deployment, tmp_path)
    desk.order("monitor")
    changed = desk.await_leaves("enforcement-changed", 1)[0]
    assert (changed["mode"], changed["refused"]) == ("enforce", "not allowed here")
    prompt = [*range(20, 20 + 3 * BLOCK), 17]
    governed.ask(prompt, tenant="adopt-1")
    assert governed.ask(prompt, tenant="adopt-2").cached_tokens == 0
    assert not desk.bodies("request-monitored")
    desk.order("enforce")


@pytest.mark.parametrize("salt", [None, "mine"])
def test_nobody_known_is_served_and_recorded(salt: str | None, adopted: tuple[LocalEngine, Desk]) -> None:
    engine, desk = adopted
    prompt = [*range(30, 30 + 3 * BLOCK), 19]
    before = len(desk.bodies("request-monitored"))
    engine.ask(prompt, salt=salt)
    assert engine.ask(prompt, salt=salt).cached_tokens == 3 * BLOCK
    found = desk.await_leaves("request-monitored", before + 2)[before:]
    assert {one["effect"] for one in found} == {"would-deny"}


@pytest.fixture(scope="module")
def adopted(
    engines: Callable[..., LocalEngine],
    new_deployment: Callable[..., Deployment],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[LocalEngine, Desk]:
    """An engine that is monitored."""
    deployment = new_deployment(monitoring="allowed")
    engine, desk = engines(deployment=deployment), Desk(deployment, tmp_path_factory.mktemp("desk"))
    desk.order("monitor")
    desk.await_mode("monitor")
    return engine, desk
