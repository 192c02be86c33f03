"""Where copies of LMCache's chunks are kept: policy, settings, salts as a governed engine tells them. No LMCache.

`store_and_die` is a worker that is killed: what it leaves is the next start's.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from sqlalchemy import select

from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.schema.ledger import incarnations, workers
from kvcustody.clock import SystemClock
from kvcustody.governance.decisions.access_plan import DomainLabel
from kvcustody.governance.identity.domain_spec import DomainSpec, ScopeKind, tenant_owner
from kvcustody.governance.keys.keyring import Keyring
from kvcustody.governance.keys.shred_keys import ShredKeys
from kvcustody.governance.keys.wrapped_key_store import FileKeyStore
from kvcustody.governance.settings import load_settings
from kvcustody.governance.tiers.scope_salts import ScopeDirectory, ScopeSalts
from kvcustody.governance.tiers.seal_keys import SealKeys
from kvcustody.governance.worker.plugins import open_root_key
from kvcustody.integrations.lmcache.custody_thread import CustodyThread
from standins.engines.vllm.deployment import Deployment

CHUNK_TOKENS, CHUNK_BYTES = 64, 4096
WORKER = "lmcache-0"
POLICY = """\
schema: kvcustody/policy@1
name: lmcache-tests
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


class ChunkSite:
    """Its settings are in the environment. `folder` may be an earlier one's: then it is a restart.

    `url`: copies go to this remote store in place of files. `worker`: one of several on the same keys and salts.
    """

    def __init__(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        *,
        url: str = "",
        worker: str = WORKER,
        **settings: str,
    ) -> None:
        policy = POLICY.replace("tiers: [host, nvme]", "tiers: [remote]") if url else POLICY
        self.deployment = Deployment(folder, policy=policy)
        self.tier = folder / "tier"
        place = {"NVME_TIER_PATH": str(self.tier), "NVME_TIER_BYTES": str(256 << 20)}
        if url:
            place = {"REMOTE_TIER_URL": url, "REMOTE_TIER_BYTES": str(256 << 20)}
            place |= {"REMOTE_TIER_TIMEOUT_MS": "2000", "SPILL_PATH": str(folder / f"{worker}.spill")}
        self.environment = {
            **self.deployment.environment(worker),
            "KVCUSTODY_SCOPE_SALTS_PATH": str(folder / "salts"),
            "KVCUSTODY_TIER_TIMEOUT_MS": "5000",
            **{f"KVCUSTODY_{name}": value for name, value in place.items()},
            **settings,
        }
        for name, value in self.environment.items():
            monkeypatch.setenv(name, value)
        settings_read = load_settings()
        root, clock = open_root_key(settings_read), SystemClock()
        self.keyring = Keyring(FileKeyStore(settings_read.keyring_path), root, clock)
        self.shred = ShredKeys.open(settings_read.shred_keys_path, root, clock)
        keys = SealKeys(self.keyring, self.shred)
        self.directory = ScopeDirectory(folder / "salts", keys)
        self.salts = ScopeSalts(keys, self.directory)

    def salt(
        self,
        tenant: str,
        subject: str = "s",
        classification: str = "internal",
        model: bytes = bytes(32),
    ) -> str:
        """As the governed engine tells it. `model`: the digest of its weights."""
        owner = tenant_owner("api-keys", tenant)
        self.keyring.ensure([owner])
        epoch = self.keyring.current(owner)
        assert epoch is not None
        spec = DomainSpec(
            scope=ScopeKind.SUBJECT, issuer="api-keys", tenant=tenant, subject=subject,
            classification=classification, model=model, key_epoch=epoch,
        )  # fmt: skip
        level = ("internal", "brief", "restricted").index(classification)
        return self.salts.of(DomainLabel(tenant, classification, level, "subject", subject, None, spec))

    def files(self) -> list[Path]:
        """Sealed objects on the disk."""
        return [path for path in self.tier.rglob("*") if path.is_file() and len(path.name) == 64]

    def close(self) -> None:
        """Let the keys go."""
        self.directory.close()
        self.shred.close()
        self.keyring.close()


class Chunk(NamedTuple):
    """A key with the fields of LMCache's own."""

    chunk_hash: bytes
    cache_salt: str
    model_name: str = "tiny"
    kv_rank: int = 0
    object_group_id: int = 0


def lives(ledger_url: str, worker: str = WORKER) -> list[str | None]:
    """How each process of a worker ended, oldest first; None: nobody has closed it."""
    store = open_store(ledger_url)
    query = (
        select(incarnations.c.end)
        .join(workers, workers.c.id == incarnations.c.worker)
        .where(workers.c.name == worker, incarnations.c.device.is_not(None))
        .order_by(incarnations.c.id)
    )
    with store.connect() as connection:
        found = list(connection.scalars(query))
    store.dispose()
    return found


def store_and_die(folder: str) -> None:
    """In a process of its own: keep one copy for two seconds and one for an hour, put that on record, and be killed."""
    with pytest.MonkeyPatch.context() as patch:
        site = ChunkSite(Path(folder), patch)
        thread = CustodyThread(load_settings())
        thread.open(CHUNK_BYTES, CHUNK_TOKENS)
        whose = (("brief", "s", "brief"), ("acme", "s", "internal"))
        for number, (tenant, subject, classification) in enumerate(whose):
            named = Chunk(bytes([number]) * 32, site.salt(tenant, subject, classification))
            kept = thread.run(
                lambda chunks, named=named: chunks.store(named, memoryview(bytes([7]) * CHUNK_BYTES))  # type: ignore[misc]
            )
            assert kept.result(20)
        assert thread.run(lambda chunks: chunks.worker.writer.flush(10)).result(20) is not False
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    store_and_die(sys.argv[1])
