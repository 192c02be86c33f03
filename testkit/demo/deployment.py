"""The files of one governed deployment, in a folder that exists as long as the demonstration.

1. They are what an operator writes, and nothing is weakened: two tenants under one policy, keys at a door, a ledger.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from kvcustody.files import write_file
from kvcustody.governance.credentials.api_key_file import add_key
from kvcustody.governance.settings import Settings, load_settings
from kvcustody.integrations.identity.from_settings import open_request_gate
from kvcustody.integrations.identity.request_headers import RequestHeaders
from kvcustody.testkit.demo.engine import ATTACKER, VICTIM

POLICY = """\
schema: kvcustody/policy@1
name: attack-demo
profile: shared
scope: tenant
classifications: [internal]
classify:
  - {tenant: "*", as: internal}
tenants:
  default: {quota: {guaranteed: 0%, cap: 100%, borrow: true}}
rules:
  - {id: own-scope, effect: permit, action: reuse, when: {reader: owner}}
retention:
  internal: {idle: 10m, absolute: 1h, active_max: 1h}
scrub:
  default: {within: 1s, verify: all}
offload: {internal: never}
audit:
  on_outage: {decisions: deny, lifecycle: spill, own_hits: aggregate}
eviction: {policy: lru}
"""
IDENTITY = """\
schema: kvcustody/identity@1
api_keys: {path: keys.yaml}
"""
PATH = "/v1/completions"


class Deployment:
    """A deployment in `folder`, which is created."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        write_file(folder / "policy.yaml", POLICY.encode())
        write_file(folder / "identity.yaml", IDENTITY.encode())
        self._keys = {
            tenant: add_key(folder / "keys.yaml", {"name": tenant, "tenant": tenant}) for tenant in (VICTIM, ATTACKER)
        }

    def values(self) -> dict[str, Any]:
        """Settings by name."""
        folder = self.folder
        return {
            "worker_name": "demo",
            "policy_path": str(folder / "policy.yaml"),
            "database_url": f"sqlite:///{folder / 'ledger.db'}",
            "spill_path": str(folder / "spill"),
            "root_key_path": str(folder / "root.key"),
            "keyring_path": str(folder / "keyring.json"),
            "identity_path": str(folder / "identity.yaml"),
            "scope_token_key_path": str(folder / "scope.key"),
        }

    def settings(self, block_tokens: int) -> Settings:
        """Return the settings of an engine's process."""
        return load_settings(**self.values(), block_tokens=block_tokens)

    def environment(self) -> dict[str, str]:
        """Return the same settings as environment variables."""
        return {f"KVCUSTODY_{name.upper()}": str(value) for name, value in self.values().items()}


class FrontDoor:
    """The door behind the API server's middleware, with the two tenants' keys."""

    def __init__(self, deployment: Deployment) -> None:
        self._gate = open_request_gate(load_settings(**deployment.values()))
        self._keys = deployment._keys

    def pass_on(self, tenant: str, body: dict[str, object]) -> dict[str, object]:
        """Return `body` as it reaches the engine when the tenant sends it with its own API key."""
        headers = RequestHeaders([(b"authorization", b"Bearer " + self._keys[tenant].encode())])
        admitted = self._gate.authenticate("POST", PATH, headers)
        passed: dict[str, object] = orjson.loads(self._gate.scope(admitted, orjson.dumps(body)))
        return passed
