"""One deployment with the connector in a stand-in engine: salts as the door derives them, and its tier."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.governor.governor import Governor
from kvcustody.integrations.lmcache.custody_thread import Chunks
from kvcustody.integrations.tensorrt_llm.open_custody import EngineCustody, close_shared, shared_custody
from standins.engines.vllm.deployment import Deployment, principal
from standins.integrations.stand_in_engine import StandInEngine, llm_args, modules, uninstall

T = TypeVar("T")
POLICY = """\
schema: kvcustody/policy@1
name: tensorrt-llm-tests
profile: shared
scope: subject
classifications: [internal, brief, restricted]
classify:
  - {tenant: "*", as: internal}
  - {tenant: brief, as: brief}
  - {tenant: secret, as: restricted}
tenants:
  acme: {quota: {guaranteed: 0%, cap: 100%, borrow: true}}
  beta: {quota: {guaranteed: 0%, cap: 100%, borrow: true}}
  brief: {quota: {guaranteed: 0%, cap: 100%, borrow: true}}
  secret: {quota: {guaranteed: 0%, cap: 100%, borrow: true}}
  default: {quota: {guaranteed: 0%, cap: 100%, borrow: true}}
rules:
  - {id: own-scope, effect: permit, action: [reuse, export], when: {reader: owner}}
  - {id: own-administration, effect: permit, action: administer, when: {reader: owner}}
retention:
  internal:   {idle: 10m, absolute: 1h, active_max: 1h}
  brief:      {idle: 2s, absolute: 1m, active_max: 1m}
  restricted: {idle: 0s, absolute: 0s, active_max: 1m}
scrub: {default: {within: 1s, verify: all}}
offload:
  internal: {tiers: [host, nvme], encrypt: required}
  brief: {tiers: [nvme], encrypt: required}
  restricted: never
audit: {on_outage: {decisions: deny, lifecycle: spill, own_hits: aggregate}}
"""
PROMPT = [(7 * at + 3) % 997 for at in range(67)]
WHOLE = 64  # tokens of its whole blocks


class TrtllmWorld:
    """Close it. `folder` may be an earlier world's: then it is a restart."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *, host_bytes: int = 0, **engine: Any) -> None:
        self.deployment = Deployment(folder, policy=POLICY)
        self.tier = folder / "tier"
        named = {
            **self.deployment.environment("trtllm-0"),
            "KVCUSTODY_SCOPE_SALTS_PATH": str(folder / "salts"),
            "KVCUSTODY_NVME_TIER_PATH": str(self.tier),
            "KVCUSTODY_NVME_TIER_BYTES": str(64 << 20),
            "KVCUSTODY_TIER_TIMEOUT_MS": "5000",
        }
        if host_bytes:
            named["KVCUSTODY_HOST_TIER_BYTES"] = str(host_bytes)
        for name, value in named.items():
            monkeypatch.setenv(name, value)
        sys.modules.update(modules())
        args = llm_args()
        connector = importlib.import_module("kvcustody.integrations.tensorrt_llm.connector")
        try:
            halves = (connector.CustodyConnectorScheduler(args), connector.CustodyConnectorWorker(args))
            self.custody: EngineCustody = shared_custody()
            self.engine = StandInEngine(halves, **engine)
        except BaseException:
            self.close()
            raise

    def salt(self, tenant: str, subject: str | None = "s") -> str:
        """As the door derives it for a request that comes now."""
        return self.custody.thread.derive(principal(tenant, subject))

    def on_thread(self, call: Callable[[Chunks], T]) -> T:
        """Something of the custody thread."""
        return self.custody.thread.run(call).result(30)

    def order(self, command: Callable[[Governor], T]) -> Any:
        """Have the worker do this with its next step, as an order that came in; its future."""
        return self.on_thread(lambda chunks: chunks.governor.call(command))

    def erase(self, tenant: str, subject: str) -> Any:
        """Order an erasure."""
        return self.order(lambda governor: governor.erase(Selector(tenant, subject)))

    def copies(self) -> int:
        """Copies that can be found."""
        return self.on_thread(lambda chunks: sum(len(tier) for tier in chunks.tiers))

    def files(self) -> list[Path]:
        """Sealed objects on the disk."""
        return [path for path in self.tier.rglob("*") if path.is_file() and len(path.name) == 64]

    def close(self) -> None:
        """Stop in order."""
        close_shared()
        uninstall()
