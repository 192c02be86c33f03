"""One deployment in a folder of its own: policy, identity, API keys, ledger, and tokens as the door issues them.

- Every tenant of the policy is there for one question; tests share an engine by using tenants of their own.
- Nothing is a stand-in: the files are those that an operator writes, and tokens are issued under the deployment's key.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from sqlalchemy import select

from kvcustody.audit.evidence.processes.enforcement import newest_order, worker_enforcement
from kvcustody.audit.kinds import Event
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.schema.ledger import events
from kvcustody.clock import SystemClock
from kvcustody.governance.credentials.api_key_file import add_key
from kvcustody.governance.credentials.scope_token import ScopeTokens
from kvcustody.governance.credentials.scope_token_secret import open_scope_key
from kvcustody.governance.identity.principal import Principal, identify
from kvcustody.governance.monitoring.ordering import enforcement_order
from standins import builders

CLOCK = SystemClock()
CONNECTOR = {"kv_connector": "KVCustody", "kv_role": "kv_both"}
MIDDLEWARE = "kvcustody.integrations.vllm.middleware.ScopeMiddleware"
BRIEF_IDLE_SECONDS = 3
SMALL_CAP = 0.15

POLICY = """\
schema: kvcustody/policy@1
name: engine-tests
profile: shared
scope: subject
classifications: [internal, brief, restricted]
classify:
  - {tenant: "*", as: internal}
  - {tenant: brief, as: brief}
  - {tenant: secret, as: restricted}
tenants:
  # Others differ by name only; `small` may hold few blocks, `brief` for seconds, `secret` none after its request.
  small: {quota: {guaranteed: 0%, cap: 15%}}
  brief: {quota: {guaranteed: 0%, cap: 100%, borrow: true}}
  secret: {quota: {guaranteed: 0%, cap: 100%, borrow: true}}
  default: {quota: {guaranteed: 0%, cap: 100%, borrow: true}}
rules:
  - {id: own-scope, effect: permit, action: [reuse, export], when: {reader: owner}}
  - {id: own-administration, effect: permit, action: administer, when: {reader: owner}}
  - {id: no-restricted, effect: forbid, action: reuse, when: {classification: restricted}}
retention:
  internal:   {idle: 10m, absolute: 1h, active_max: 1h}
  brief:      {idle: 3s, absolute: 1m, active_max: 1m}
  restricted: {idle: 0s, absolute: 0s, active_max: 1m}
scrub:
  default: {within: 1s, verify: all}
offload: {internal: never, brief: never, restricted: never}
audit:
  on_outage: {decisions: deny, lifecycle: spill, own_hits: aggregate}
eviction: {policy: lru}
"""
IDENTITY = """\
schema: kvcustody/identity@1
api_keys:
  path: keys.yaml
  asserted: {subject: X-KVCustody-Subject, session: X-KVCustody-Session}
"""


@dataclass
class Deployment:
    """The files of one deployment, and what a client or an operator holds of it."""

    folder: Path
    policy: str = POLICY
    identity: str = IDENTITY
    monitoring: str = "refused"

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "policy.yaml").write_text(self.policy)
        (self.folder / "identity.yaml").write_text(self.identity)
        self.keys: dict[str, str] = {}
        with open_scope_key(self.folder / "scope.key") as secret:
            self._door = ScopeTokens(secret, SystemClock())  # the engine finds the same key

    @property
    def ledger_url(self) -> str:
        """The ledger's database."""
        return f"sqlite:///{self.folder / 'ledger.db'}"

    def environment(self, worker: str = "engine-0") -> dict[str, str]:
        """The settings of every process of the deployment."""
        folder = self.folder
        return {
            "KVCUSTODY_WORKER_NAME": worker,
            "KVCUSTODY_POLICY_PATH": str(folder / "policy.yaml"),
            "KVCUSTODY_DATABASE_URL": self.ledger_url,
            "KVCUSTODY_SPILL_PATH": str(folder / "spill"),
            "KVCUSTODY_ROOT_KEY_PATH": str(folder / "root.key"),
            "KVCUSTODY_KEYRING_PATH": str(folder / "keyring.json"),
            "KVCUSTODY_SHRED_KEYS_PATH": str(folder / "shred.keys"),
            "KVCUSTODY_IDENTITY_PATH": str(folder / "identity.yaml"),
            "KVCUSTODY_SCOPE_TOKEN_KEY_PATH": str(folder / "scope.key"),
            "KVCUSTODY_MONITORING": self.monitoring,
            "KVCUSTODY_LOG_FORMAT": "json",
            "KVCUSTODY_LOG_LEVEL": "debug",
        }

    def api_key(self, tenant: str) -> str:
        """The API key of a tenant, made at first asking."""
        if tenant not in self.keys:
            self.keys[tenant] = add_key(self.folder / "keys.yaml", {"name": tenant, "tenant": tenant})
        return self.keys[tenant]

    def operator_key(self) -> str:
        """The API key of who may see what counts everybody's work, made at first asking."""
        if "ops" not in self.keys:
            named = {"name": "ops", "tenant": "platform", "operator": True}
            self.keys["ops"] = add_key(self.folder / "keys.yaml", named)
        return self.keys["ops"]

    def token(self, tenant: str, subject: str | None = "s", *, uses: int = 1, seconds: int = 60, **hints: Any) -> str:
        """A scope token as the door issues it."""
        return self._door.issue(principal(tenant, subject), uses=uses, ttl_seconds=seconds, **hints)

    def carried(self, tenant: str, subject: str | None = "s", **named: Any) -> dict[str, Any]:
        """What a request carries: `cache_salt`, and `transfer` for a long token."""
        return self._door.carry(self.token(tenant, subject, **named))._asdict()


def principal(tenant: str, subject: str | None = "s") -> Principal:
    """A tenant's user."""
    verified = {} if subject is None else {"subject": subject}
    return identify(issuer="api-keys", tenant=tenant, verified=verified)


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
        event: Event = enforcement_order(
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
        writer.submit_durable(event)
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
