"""A Governor over a virtual clock and an inline policy: tenants, subjects, and a classification never kept."""

from __future__ import annotations

from typing import Any

from kvcustody.allocator.pool.memory_protocol import Memory, UnbackedMemory
from kvcustody.allocator.pool.options import PoolOptions
from kvcustody.clock import VirtualClock
from kvcustody.governance.governor.governor import Governor
from kvcustody.governance.identity.principal import Principal, identify
from kvcustody.testkit.tiny_model import tiny_model
from standins import builders

MODEL = tiny_model(kv_dtype="bf16", block_tokens=4, attention={"heads": 8})
POLICY = """
schema: kvcustody/policy@1
name: simulated
profile: shared
scope: subject
classifications: [low, high]
classify:
  - {tenant: "*", as: low}
  - {tenant: "*", route: /v1/high, as: high}
tenants:
  a: {quota: {guaranteed: 25%, cap: 60%, borrow: true}}
  b: {quota: {guaranteed: 25%, cap: 60%, borrow: true}}
rules:
  - {id: own, effect: permit, action: reuse, when: {reader: owner}}
retention:
  low:  {idle: 20s, absolute: 90s, active_max: 5m}
  high: {idle: 0s, absolute: 0s, active_max: 5m}
scrub:
  default: {within: 1s, verify: 1/64}
offload: {low: never, high: never}
audit: {on_outage: {decisions: deny, lifecycle: spill, own_hits: aggregate}}
eviction: {policy: lru}
"""
LOW_IDLE_US, LOW_ABSOLUTE_US = 20_000_000, 90_000_000


def governor(
    blocks: int, clock: VirtualClock, memory: Memory | None = None, policy: str = POLICY, **options: Any
) -> Governor:
    chosen = PoolOptions(block_tokens=4, **{"evict_ahead": 4, "scrub_batch": 4, **options})
    return builders.governor(
        builders.table(policy),
        clock,
        blocks=blocks,
        memory=lambda count: memory or UnbackedMemory(count, 0, clock=clock),
        options=chosen,
    )


def person(tenant: str, subject: str) -> Principal:
    return identify(issuer="idp", tenant=tenant, verified={"subject": subject})
