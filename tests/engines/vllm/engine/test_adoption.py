"""A live vLLM is adopted without a restart and under load: monitored, a canary, enforced, and backed out of.

- What was foreseen while it was monitored is, within 2 %, what enforcing then gives on the same workload.
- No request fails in any phase, orders arrive while requests run, and an idle engine hears of them too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest

from kvcustody.audit.evidence.processes.enforcement import forecasts
from standins.engines.vllm.deployment import Deployment, Desk
from standins.engines.vllm.local_engine import BLOCK, LocalEngine

TENANTS = ("red", "green", "blue", "secret")  # `secret` is of a class of which nothing is reused
AT_ONCE = 6
REQUESTS = 160


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
    asks = []
    for _ in range(REQUESTS):
        who = random.choice(TENANTS), f"u{random.randrange(3)}"
        history = said.get(who, []) + [random.randrange(20, 500) for _ in range(20)]
        said[who] = history = history if len(history) < 200 else []
        asks.append(Ask(*who, random.choice(systems) + history + [17]))
    return asks


def serve(
    engine: LocalEngine,
    asks: list[Ask],
    halfway: Callable[[], None] = lambda: None,
    *,
    at_once: int = AT_ONCE,
    in_waves: bool = False,
) -> Counter[str]:
    """Serve all of them, six at a time, each to its end; cached tokens by tenant.

    `in_waves`: the next six begin when all six have ended, so that their order does not depend on the moment.
    """
    answers: dict[str, Any] = {}
    tenant_of: dict[str, str] = {}
    for at, ask in enumerate(asks):
        while (running := len(tenant_of) - len(answers)) >= at_once or (in_waves and running and not at % at_once):
            answers |= engine.step()
        if at == len(asks) // 2:
            halfway()
        tenant_of[engine.submit(ask.tokens, tenant=ask.tenant, subject=ask.subject, max_tokens=6)] = ask.tenant
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
    assert {name: one.forecast_tokens for name, one in said.items() if one.forecast_tokens} == dict(+predicted)

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
    print(f"reused {reused.total()}, refused {refused}, foreseen {predicted.total()}, given {given.total()}: {off:.2%}")
    assert off <= 0.02, (predicted, given)
    assert given["secret"] == predicted["secret"] == 0

    serve(engine, workload(6), halfway=lambda: desk.order("monitor"))  # backing out, while requests run
    desk.await_mode("monitor")
    assert serve(engine, asks)["secret"] > 0, "as before"
    assert engine.governance("check") == [] and engine.governance("scan") == []
    assert [one["mode"] for one in desk.bodies("enforcement-changed")] == [
        "monitor", "canary", "canary", "enforce", "monitor",
    ]  # fmt: skip


def agentic(seed: int) -> list[Ask]:
    """Agents that repeat all that was said before each turn, behind their tenant's system prompt; one is `secret`'s."""
    random = Random(seed)
    systems = {tenant: [random.randrange(20, 500) for _ in range(2 * BLOCK)] for tenant in TENANTS}
    conversations: dict[tuple[str, str], list[int]] = {}
    asks: list[Ask] = []
    while len(asks) < REQUESTS:
        who = random.choice(("red", "green", "red", "green", "secret")), f"agent{random.randrange(3)}"
        for _ in range(random.randrange(1, 4)):
            history = conversations.get(who, []) + [random.randrange(20, 500) for _ in range(random.randrange(15, 40))]
            conversations[who] = history = history if len(history) < 250 else []
            asks.append(Ask(*who, systems[who[0]] + history + [17]))
    return asks[:REQUESTS]


LOADS = {"mixed": workload, "agentic": agentic}


def foreseen_and_given(engine: LocalEngine, desk: Desk, asks: list[Ask], **how: Any) -> tuple[int, int, int]:
    """Hits that were foreseen while the requests were monitored, those that enforcing gave, and all prompt tokens."""
    desk.order("monitor")
    desk.await_mode("monitor")
    reused = serve(engine, asks, **how).total()
    foreseen = desk.await_leaves("request-monitored", len(asks))
    predicted = sum(one["forecast_tokens"] for one in foreseen)
    prompts = sum(one["prompt_tokens"] for one in foreseen)
    desk.order("enforce")
    desk.await_mode("enforce")
    given = serve(engine, asks, **how).total()
    print(f"reused {reused}; foreseen {predicted}, given {given} of {prompts}: {abs(predicted - given) / given:.2%}")
    return predicted, given, prompts


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("blocks", [80, 120])
def test_the_forecast_holds_in_a_pool_that_evicts_all_the_time(
    load: str,
    blocks: int,
    start: Callable[..., LocalEngine],
    new_deployment: Callable[..., Deployment],
    tmp_path: Path,
) -> None:
    """A step has room for every prompt, whatever of it was found: enforced requests take as long."""
    deployment = new_deployment(monitoring="allowed")
    engine = start(deployment=deployment, num_gpu_blocks_override=blocks, max_num_batched_tokens=4096)
    desk = Desk(deployment, tmp_path)
    predicted, given, _ = foreseen_and_given(engine, desk, LOADS[load](3), in_waves=True)
    assert abs(predicted - given) <= 0.02 * given


def test_the_forecast_where_requests_that_find_less_take_more_steps(
    start: Callable[..., LocalEngine], new_deployment: Callable[..., Deployment], tmp_path: Path
) -> None:
    """There they end in another order, and one eviction decides the next: it is held to the prompts' tokens."""
    deployment = new_deployment(monitoring="allowed")
    engine = start(deployment=deployment, num_gpu_blocks_override=80)
    predicted, given, prompts = foreseen_and_given(engine, Desk(deployment, tmp_path), workload(3))
    assert abs(predicted - given) <= 0.02 * prompts


def test_an_order_to_monitor_is_not_followed_where_that_is_not_allowed(governed: LocalEngine, tmp_path: Path) -> None:
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
