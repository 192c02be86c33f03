"""A workload whose hits depend on the policy: shared system prompts, users with histories, a tenant without reuse."""

from __future__ import annotations

import random
from collections.abc import Callable

from kvcustody.governance.identity.principal import Principal, identify
from kvcustody.testkit.conformance.engine_protocol import FINISHED, OVER, RequestSpec
from kvcustody.testkit.conformance.engines.toy_engine import ToyEngine

POLICY = """\
schema: kvcustody/policy@1
name: adoption
profile: shared
scope: subject
classifications: [low, once]
classify:
  - {tenant: "*", as: low}
tenants:
  alpha: {quota: {guaranteed: 10%, cap: 60%}}
  beta: {quota: {guaranteed: 10%, cap: 60%}}
  gamma: {quota: {guaranteed: 0%, cap: 40%}}
grants:
  - {id: beta-reads-alpha, owner: alpha, reader: beta, at_most: low, until: 2099-01-01, reason: "joint"}
rules:
  - {id: own, effect: permit, action: [reuse, export], when: {reader: owner}}
  - {id: no-gamma, effect: forbid, action: reuse, when: {reader: gamma}}
retention:
  low: {idle: 10m, absolute: 60m, active_max: 10m}
  once: {idle: 0s, absolute: 0s, active_max: 10m}
scrub:
  default: {within: 1s, verify: all}
offload: {low: never, once: never}
audit:
  on_outage: {decisions: deny, lifecycle: spill, own_hits: aggregate}
eviction: {policy: lru}
"""


def reader(tenant: str, subject: str, session: str = "s") -> Principal:
    """Somebody whom an identity provider has named."""
    return identify(issuer="idp", tenant=tenant, verified={"subject": subject, "session": session})


def requests(count: int, seed: int = 7) -> list[RequestSpec]:
    """One of three system prompts, one of four users of a tenant, and how far their conversation has come."""
    chance = random.Random(seed)
    systems = [tuple(chance.randrange(3, 200) for _ in range(32)) for _ in range(3)]
    histories: dict[tuple[str, str], tuple[int, ...]] = {}
    specs = []
    for _ in range(count):
        tenant, user = chance.choice(["alpha", "beta", "gamma"]), f"u{chance.randrange(4)}"
        said = histories.get((tenant, user), ()) + tuple(chance.randrange(3, 200) for _ in range(8))
        histories[tenant, user] = said = said[-64:] if len(said) <= 64 else ()
        specs.append(RequestSpec(reader(tenant, user), chance.choice(systems) + said, max_tokens=4))
    return specs


def agentic(count: int, seed: int = 11) -> list[RequestSpec]:
    """Agents of two tenants: a shared system prompt, turns that repeat all before them, several agents in turn."""
    chance = random.Random(seed)
    systems = {tenant: tuple(chance.randrange(3, 200) for _ in range(24)) for tenant in ("alpha", "beta")}
    agents = [(tenant, f"agent{number}") for tenant in systems for number in range(3)]
    conversations: dict[tuple[str, str], tuple[int, ...]] = {}
    specs: list[RequestSpec] = []
    while len(specs) < count:
        tenant, agent = chance.choice(agents)
        for _ in range(chance.randrange(1, 4)):
            turn = tuple(chance.randrange(3, 200) for _ in range(chance.randrange(6, 15)))
            history = conversations.get((tenant, agent), ()) + turn
            conversations[tenant, agent] = history = history if len(history) <= 64 else ()
            specs.append(RequestSpec(reader(tenant, agent), systems[tenant] + history, max_tokens=4))
    return specs[:count]


def serve(
    engine: ToyEngine,
    asks: list[RequestSpec],
    *,
    at_once: int = 4,
    between: Callable[[int], None] = lambda _: None,
) -> list[int]:
    """Serve all of them, some at a time; the cached tokens of each. Fails where one does not finish."""
    handles: list[object] = []
    for first in range(0, len(asks), at_once):
        between(first)
        batch = [engine.submit(ask) for ask in asks[first : first + at_once]]
        for _ in range(2_000):
            engine.step()
            engine.clock.advance(1_000)
            if all(engine.outcome(handle).state in OVER for handle in batch):
                break
        handles += batch
    assert {engine.outcome(handle).state for handle in handles} == {FINISHED}, "a request failed"
    return [engine.outcome(handle).cached_tokens for handle in handles]
