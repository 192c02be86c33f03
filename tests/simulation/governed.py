"""A Governor over a virtual clock and an inline policy: tenants, subjects, and a classification never kept."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from kvcustody.allocator.pool.memory_protocol import Memory, UnbackedMemory
from kvcustody.allocator.pool.options import PoolOptions
from kvcustody.clock import VirtualClock
from kvcustody.governance.governor.governor import Governor
from kvcustody.governance.governor.pools import Pools
from kvcustody.governance.identity.principal import Principal, identify
from kvcustody.governance.keys.keyring import Keyring
from kvcustody.governance.keys.root_key_wrapping import open_wrapping
from kvcustody.governance.keys.wrapped_key_store import FileKeyStore
from kvcustody.governance.ledger_protocol import CountingLedger
from kvcustody.policies.reading.load_policy import load_policy
from kvcustody.policies.table.compile import compile_policy
from kvcustody.testkit.tiny_model import tiny_model

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


@cache
def _keys() -> tempfile.TemporaryDirectory[str]:
    """Where this process keeps root keys; gone with it."""
    return tempfile.TemporaryDirectory(prefix="kvcustody-keys-")


def governor(
    blocks: int, clock: VirtualClock, memory: Memory | None = None, policy: str = POLICY, **options: Any
) -> Governor:
    folder = Path(tempfile.mkdtemp(dir=_keys().name))
    ring = Keyring(FileKeyStore(folder / "keys.json"), open_wrapping("generated", folder / "root.key"), clock)
    chosen = PoolOptions(block_tokens=4, **{"evict_ahead": 4, "scrub_batch": 4, **options})
    pools = Pools(lambda n: memory or UnbackedMemory(n, 0, clock=clock), blocks, chosen)
    table = compile_policy(load_policy(policy, name="simulated.yaml"), revision=1)
    return Governor(pools, table, ring, CountingLedger(), clock=clock)


def person(tenant: str, subject: str) -> Principal:
    return identify(issuer="idp", tenant=tenant, verified={"subject": subject})
