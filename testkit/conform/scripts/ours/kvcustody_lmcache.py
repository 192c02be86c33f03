"""The questions about LMCache's serde and files, put to our serde and our adapter with LMCache's own objects.

python -m kvcustody.testkit.conform.scripts.ours.kvcustody_lmcache CASE        # needs: lmcache, kvcustody
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kvcustody.clock import SystemClock
from kvcustody.errors import CustodyError
from kvcustody.files import write_file
from kvcustody.governance.credentials.scope_token_secret import open_scope_key
from kvcustody.governance.decisions.access_plan import DomainLabel
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.identity.domain_spec import DomainSpec, ScopeKind, tenant_owner
from kvcustody.governance.keys.keyring import Keyring
from kvcustody.governance.keys.shred_keys import ShredKeys
from kvcustody.governance.keys.wrapped_key_store import FileKeyStore
from kvcustody.governance.settings import load_settings
from kvcustody.governance.tiers.scope_salts import ScopeDirectory, ScopeSalts
from kvcustody.governance.tiers.seal_keys import SealKeys
from kvcustody.governance.worker.plugins import open_root_key
from kvcustody.integrations.lmcache.l2_adapter import CustodyL2Adapter
from kvcustody.integrations.lmcache.sealed_serde import SealedDeserializer, SealedSerializer, make_serde

SIZE = 4096
POLICY = b"""\
schema: kvcustody/policy@1
name: conform
profile: shared
scope: tenant
classifications: [internal]
classify: [{tenant: "*", as: internal}]
tenants: {default: {quota: {guaranteed: 0%, cap: 100%, borrow: true}}}
rules:
  - {id: own-scope, effect: permit, action: [reuse, export], when: {reader: owner}}
  - {id: own-administration, effect: permit, action: administer, when: {reader: owner}}
retention: {internal: {idle: 10m, absolute: 1h, active_max: 1h}}
scrub: {default: {within: 1s, verify: all}}
offload: {internal: {tiers: [nvme], encrypt: required}}
audit: {on_outage: {decisions: deny, lifecycle: spill, own_hits: aggregate}}
"""


def memory(content: bytes) -> Any:
    """Return LMCache's own object with this content."""
    import torch
    from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

    raw = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    about = MemoryObjMetadata(raw.shape, torch.uint8, 0, raw.numel(), 1, fmt=MemoryFormat.BINARY)
    return TensorMemoryObj(raw, about, parent_allocator=None)


def name(number: int, salt: str, model: str = "model-a", rank: int = 0) -> Any:
    """Return LMCache's own key."""
    from lmcache.v1.distributed.api import ObjectKey

    return ObjectKey(number.to_bytes(32, "big"), model, rank, 0, salt)


class Site:
    """A deployment of one LMCache server, with salts as a governed engine makes them."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        write_file(folder / "policy.yaml", POLICY)
        with open_scope_key(folder / "scope.key"):
            pass  # made
        places = {
            **{"POLICY_PATH": "policy.yaml", "SPILL_PATH": "spill", "ROOT_KEY_PATH": "root.key"},
            **{"KEYRING_PATH": "keys.json", "SHRED_KEYS_PATH": "shred.keys", "SCOPE_SALTS_PATH": "salts"},
            **{"SCOPE_TOKEN_KEY_PATH": "scope.key", "NVME_TIER_PATH": "tier"},
        }
        os.environ |= {f"KVCUSTODY_{setting}": str(folder / file) for setting, file in places.items()}
        os.environ |= {
            "KVCUSTODY_WORKER_NAME": "lmcache-0",
            "KVCUSTODY_DATABASE_URL": f"sqlite:///{folder / 'ledger.db'}",
            "KVCUSTODY_NVME_TIER_BYTES": str(1 << 24),
            "KVCUSTODY_MONITORING": "refused",
        }
        self.folder, settings, clock = folder / "tier", load_settings(), SystemClock()
        root = open_root_key(settings)
        self._keyring = Keyring(FileKeyStore(settings.keyring_path), root, clock)
        shred = ShredKeys.open(settings.shred_keys_path, root, clock)
        keys = SealKeys(self._keyring, shred)
        directory = ScopeDirectory(folder / "salts", keys)
        self._salts = ScopeSalts(keys, directory)
        for one in (self._keyring, shred, keys, directory):
            stack.callback(one.close)

    def salt(self, tenant: str) -> str:
        """Return a tenant's salt."""
        owner = tenant_owner("api-keys", tenant)
        self._keyring.ensure([owner])
        epoch = self._keyring.current(owner)
        assert epoch is not None
        spec = DomainSpec(
            scope=ScopeKind.TENANT, issuer="api-keys", tenant=tenant, classification="internal",
            model=bytes(32), key_epoch=epoch,
        )  # fmt: skip
        return self._salts.of(DomainLabel(tenant, "internal", 0, "tenant", None, None, spec))

    def files(self) -> list[Path]:
        """Return the sealed objects on the disk."""
        return sorted(path for path in self.folder.rglob("*") if path.is_file() and len(path.name) == 64)


class Adapter:
    """Our adapter, called as LMCache's controllers call it."""

    def __init__(self, stack: ExitStack) -> None:
        self.ours = CustodyL2Adapter({"chunk_tokens": 16}, l1_memory_desc=None)
        self.ours.set_backend_identity("plugin")
        stack.callback(self.ours.close)

    def _answer(self, ask: Any) -> Any:
        until = time.monotonic() + 20
        while (answer := ask()) is None:
            assert time.monotonic() < until, "no answer"
            time.sleep(0.01)
        return answer

    def store(self, key: Any, content: bytes) -> bool:
        """Return whether the object was kept."""
        task = self.ours.submit_store_task([key], [memory(content)])
        return bool(self._answer(lambda: self.ours.pop_completed_store_tasks().get(task)).bytes_transferred())

    def load(self, key: Any) -> bytes | None:
        """Return the loaded object, if there is one."""
        into = memory(bytes(SIZE))
        task = self.ours.submit_load_task([key], [into])
        come = self._answer(lambda: self.ours.query_load_result(task)).test(0)
        return bytes(into.byte_array) if come else None

    def erase(self, tenant: str) -> None:
        """Erase a tenant as an operator's order does."""
        self.ours.custody.run(lambda chunks: chunks.governor.erase(Selector(tenant, None, None))).result(20)


def _adapter(case: str, site: Site, stack: ExitStack) -> tuple[bool, str]:
    adapter, acme, beta = Adapter(stack), site.salt("acme"), site.salt("beta")
    first_key, two, mine, other = name(1, acme), name(2, acme), os.urandom(SIZE), os.urandom(SIZE)
    assert adapter.store(first_key, mine) and adapter.load(first_key) == mine, "own objects come back"
    foreign = {
        "salt-dropped": [name(1, salt) for salt in (beta, "acme", "")],
        "other-model": [name(1, acme, "model-b"), name(1, acme, rank=1)],
    }.get(case)
    if foreign is not None:
        foreign_hits = sum(adapter.load(key) is not None for key in foreign)
        return foreign_hits > 0, f"{foreign_hits} of {len(foreign)} foreign look-ups found it"
    if case == "erase-tenant":
        theirs = name(1, beta)
        assert adapter.store(theirs, other)
        adapter.erase("acme")
        left, gone = adapter.load(theirs) == other, adapter.load(first_key) is None
        return not (
            left and gone
        ), f"{int(gone)} of 1 of the tenant's are ended, {int(left)} of 1 of another's are there"
    [place] = site.files()
    if case == "name-tells-tenant":
        told = any(text in place.name for text in ("acme", acme, first_key.chunk_hash.hex()))
        return told, "64 hexadecimal digits that nobody makes without the tenant's secret"
    if case == "clear-at-rest":
        kept, mode = place.read_bytes(), place.stat().st_mode & 0o777
        clear = sum(mine[at : at + 16] in kept for at in range(0, SIZE, 16))
        return (
            clear > 0 or mode & 0o077 > 0,
            f"{clear} of {SIZE // 16} pieces are in the file; mode {mode:04o}",
        )
    before = place.read_bytes()
    if case == "renamed-object":
        assert adapter.store(two, other)
        [second] = set(site.files()) - {place}
        place.write_bytes(second.read_bytes())
        second.write_bytes(before)
        foreign_hits = sum(adapter.load(key) is not None for key in (first_key, two))
        return foreign_hits > 0, f"{foreign_hits} of 2 files that changed places were served"
    assert case == "older-object"
    adapter.ours.delete([first_key])
    assert adapter.load(first_key) is None and adapter.store(first_key, other) and adapter.load(first_key) == other
    place.write_bytes(before)
    served = adapter.load(first_key) is not None
    return served, "the earlier object was served" if served else "a miss, and the copy ended"


def _serde(case: str, site: Site, stack: ExitStack) -> tuple[bool, str]:
    for setting in ("NVME_TIER_PATH", "NVME_TIER_BYTES"):
        del os.environ[f"KVCUSTODY_{setting}"]
    serde = make_serde({})
    stack.callback(serde.close)
    acme, beta = site.salt("acme"), site.salt("beta")
    content, mine = os.urandom(SIZE), name(1, acme)
    frame = memory(bytes(2 * SIZE))
    written = SealedSerializer(serde.custody).serialize(memory(content), frame, mine)
    assert bytes(frame.byte_array)[:written] != content
    names = {
        "renamed-object": [name(2, acme)],
        "other-model": [name(1, acme, "model-b"), name(1, acme, rank=1)],
        "salt-dropped": [name(1, beta), name(1, "acme"), name(1, "")],
        "older-object": [mine],
        "": [mine],
    }
    sealed = memory(bytes(frame.byte_array)[:written])
    if case == "older-object":  # what stands there now; the first is put back in its place
        SealedSerializer(serde.custody).serialize(memory(os.urandom(SIZE)), memory(bytes(2 * SIZE)), mine)
    opened = {}
    for kind in ("", case):
        opened[kind] = 0
        for each in names[kind]:
            into = memory(bytes(SIZE))
            try:
                SealedDeserializer(serde.custody).deserialize(sealed, into, each)
            except CustodyError:
                continue
            opened[kind] += bytes(into.byte_array) == content
    assert opened[""] == 1, "it opens under its own name"
    return opened[case] > 0, f"{opened[case]} of {len(names[case])} opened with the first object's content"


def main(case: str, part: str = "adapter") -> dict[str, Any]:
    """Return what was seen; `part`: adapter, or serde."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        look = _serde if part == "serde" else _adapter
        found, evidence = look(case, Site(Path(folder), stack), stack)
    return {"found": found, "evidence": evidence}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])), flush=True)
