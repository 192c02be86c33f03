"""One LMCache adapter of ours, a directory of salts as a governed engine writes it, and LMCache's own objects."""

from __future__ import annotations

import select
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from deployment import Deployment
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

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
from kvcustody.integrations.lmcache.l2_adapter import CustodyL2Adapter

CHUNK_TOKENS, SHAPE = 64, (2, 4, 64, 32)
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


class ChunkWorld:
    """Close it. `folder` may be an earlier world's: then it is a restart."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: str) -> None:
        self.deployment = Deployment(folder, policy=POLICY)
        self.tier = folder / "tier"
        named = {
            **self.deployment.environment("lmcache-0"),
            "KVCUSTODY_SCOPE_SALTS_PATH": str(folder / "salts"),
            "KVCUSTODY_NVME_TIER_PATH": str(self.tier),
            "KVCUSTODY_NVME_TIER_BYTES": str(256 << 20),
            "KVCUSTODY_TIER_TIMEOUT_MS": "5000",
            **settings,
        }
        for name, value in named.items():
            monkeypatch.setenv(name, value)
        self.adapter = CustodyL2Adapter({"chunk_tokens": CHUNK_TOKENS}, l1_memory_desc=None)
        self.adapter.set_backend_identity("plugin")
        settings_read = load_settings()
        root, clock = open_root_key(settings_read), SystemClock()
        self.keyring = Keyring(FileKeyStore(settings_read.keyring_path), root, clock)
        self.shred = ShredKeys.open(settings_read.shred_keys_path, root, clock)
        keys = SealKeys(self.keyring, self.shred)
        self.directory = ScopeDirectory(folder / "salts", keys)
        self.salts = ScopeSalts(keys, self.directory)

    def salt(self, tenant: str, subject: str = "s", classification: str = "internal") -> str:
        """As the governed engine tells it."""
        owner = tenant_owner("api-keys", tenant)
        self.keyring.ensure([owner])
        epoch = self.keyring.current(owner)
        assert epoch is not None
        spec = DomainSpec(
            scope=ScopeKind.SUBJECT, issuer="api-keys", tenant=tenant, subject=subject,
            classification=classification, model=bytes(32), key_epoch=epoch,
        )  # fmt: skip
        level = ("internal", "brief", "restricted").index(classification)
        return self.salts.of(DomainLabel(tenant, classification, level, "subject", subject, None, spec))

    def done(self, which: int, task: int, seconds: float = 20.0) -> Any:
        """The result of a task, when its event has come."""
        adapter = self.adapter
        fd = (adapter.get_store_event_fd, adapter.get_lookup_and_lock_event_fd, adapter.get_load_event_fd)[
            which
        ]()
        take = (
            lambda number: adapter.pop_completed_store_tasks().get(number),
            adapter.query_lookup_and_lock_result,
            adapter.query_load_result,
        )[which]
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            select.select([fd], [], [], 0.05)
            result = take(task)
            if result is not None:
                return result
        raise AssertionError("no answer")

    def store(self, keys: list[ObjectKey], objects: list[TensorMemoryObj]) -> int:
        """How many bytes were kept."""
        return int(self.done(0, self.adapter.submit_store_task(keys, objects)).bytes_transferred())

    def found(self, keys: list[ObjectKey]) -> list[bool]:
        """Which of them a look-up finds."""
        shape, dtype = torch.Size(SHAPE), torch.float16
        layout = MemoryLayoutDesc(shapes=[shape], dtypes=[dtype])
        bitmap = self.done(1, self.adapter.submit_lookup_and_lock_task(keys, {0: layout}))
        return [bool(bitmap.test(at)) for at in range(len(keys))]

    def load(self, keys: list[ObjectKey]) -> list[TensorMemoryObj | None]:
        """What comes of them, found or not."""
        objects = [chunk(0) for _ in keys]
        bitmap = self.done(2, self.adapter.submit_load_task(keys, objects))
        return [one if bitmap.test(at) else None for at, one in enumerate(objects)]

    def files(self) -> list[Path]:
        """Sealed objects on the disk."""
        return [path for path in self.tier.rglob("*") if path.is_file() and len(path.name) == 64]

    def close(self) -> None:
        """Stop in order."""
        self.adapter.close()
        self.directory.close()
        self.shred.close()
        self.keyring.close()


def key(number: int, salt: str, *, model: str = "tiny", rank: int = 0) -> ObjectKey:
    """A key as LMCache makes it."""
    return ObjectKey(number.to_bytes(32, "big"), model, rank, 0, salt)


def chunk(seed: int) -> TensorMemoryObj:
    """An object of one chunk's size with content that no other seed has."""
    torch.manual_seed(seed)
    shape, dtype = torch.Size(SHAPE), torch.float16
    data = torch.randn(shape).to(dtype) if seed else torch.zeros(shape, dtype=dtype)
    raw = data.contiguous().view(torch.uint8).flatten()
    metadata = MemoryObjMetadata(shape, dtype, 0, raw.numel(), 1, fmt=MemoryFormat.KV_2LTD)
    return TensorMemoryObj(raw, metadata, parent_allocator=None)


def content(one: TensorMemoryObj) -> bytes:
    """Its bytes."""
    return bytes(one.byte_array)
