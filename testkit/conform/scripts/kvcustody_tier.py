"""The same questions to our own sealed tier over files.

python -m kvcustody.testkit.conform.scripts.kvcustody_tier CASE        # needs: kvcustody
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kvcustody.clock import VirtualClock
from kvcustody.governance.decisions.access_plan import DomainLabel
from kvcustody.governance.identity.domain_spec import DomainSpec, ScopeKind, tenant_owner
from kvcustody.governance.keys.keyring import Keyring
from kvcustody.governance.keys.root_key_wrapping import create_root_key, open_wrapping
from kvcustody.governance.keys.shred_keys import ShredKeys
from kvcustody.governance.keys.wrapped_key_store import FileKeyStore
from kvcustody.governance.tiers.seal_keys import SealKeys
from kvcustody.governance.tiers.staging import Staging
from kvcustody.governance.tiers.stores.file_store import FileStore
from kvcustody.governance.tiers.tier import CopyLimit, PublishedRun, SealedTier, TierTerms

HOUR_US = 3_600_000_000
BLOCK = 4096


class OurTier:
    """A tier of one worker in a folder of its own."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.clock = VirtualClock()
        create_root_key(folder / "root.key")
        root = open_wrapping("file", folder / "root.key", strict=False)
        self.keyring = Keyring(FileKeyStore(folder / "keys.json"), root, self.clock)
        stack.callback(self.keyring.close)
        self.shred = ShredKeys.open(folder / "shred.keys", root, self.clock)
        stack.callback(self.shred.close)
        self.keys = SealKeys(self.keyring, self.shred)
        stack.callback(self.keys.close)
        staging = Staging(2, BLOCK)
        stack.callback(staging.close)
        self.folder = folder / "tier"
        limit = CopyLimit(HOUR_US, HOUR_US // 16)
        terms = TierTerms(bytes(32), BLOCK, 16, lambda *_: limit, tenants=("acme", "beta"), object_blocks=1)
        store = FileStore(self.folder, 1 << 24)
        self.tier = SealedTier(store, self.keys, self.shred, staging, self.clock, terms)
        stack.callback(self.tier.close)

    def label(self, tenant: str, *, model: bytes = b"model-a", salt: str | None = None) -> DomainLabel:
        """A tenant's domain."""
        owner = tenant_owner("idp", tenant)
        self.keyring.ensure([owner])
        epoch = self.keyring.current(owner)
        assert epoch is not None
        digest = hashlib.sha256(model).digest()
        spec = DomainSpec(
            scope=ScopeKind.TENANT, issuer="idp", tenant=tenant, classification="internal",
            model=digest, key_epoch=epoch, salt=salt,
        )  # fmt: skip
        return DomainLabel(tenant, "internal", 0, "tenant", None, None, spec)

    def store(self, label: DomainLabel, key: bytes, content: bytes) -> bool:
        """Whether it is there now."""
        now_us = self.clock.now_us()
        run = PublishedRun(label, key, bytes(32), 0, now_us, now_us + HOUR_US, now_us + HOUR_US)

        def read(first: int, count: int, into: memoryview) -> None:
            into[:] = content

        return self.tier.store(run, read) == 1

    def load(self, label: DomainLabel, key: bytes) -> bytes | None:
        """What comes, if anything does."""
        come: list[bytes] = []

        def write(depth: int, count: int, skip: int, data: memoryview) -> None:
            come.append(bytes(data))

        found = self.tier.lookup(label, key, 0)
        self.tier.load(label, key, 0, found, write)
        return come[0] if come else None

    def files(self) -> list[Path]:
        """Objects on the disk."""
        return sorted(path for path in self.folder.rglob("*") if path.is_file() and len(path.name) == 64)


def main(case: str) -> dict[str, Any]:
    """What was seen."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        found, evidence = _look(OurTier(Path(folder), stack), case)
    return {"found": found, "evidence": evidence}


def _look(our: OurTier, case: str) -> tuple[bool, str]:
    acme, beta = our.label("acme"), our.label("beta")
    first, second = b"\1" * 32, b"\2" * 32
    mine, other = os.urandom(BLOCK), os.urandom(BLOCK)
    assert our.store(acme, first, mine) and our.load(acme, first) == mine, "own copies come back"
    if case in ("salt-dropped", "other-model", "model-revision"):
        asks = (
            [beta, our.label("acme", salt="x")]
            if case == "salt-dropped"
            else [our.label("acme", model=b"model-b")]
        )
        come = [our.load(label, first) for label in asks]
        return any(come), f"{sum(one is not None for one in come)} of {len(come)} foreign look-ups found it"
    if case == "renamed-object":
        assert our.store(acme, second, other)
        one, two = our.files()
        data, more = one.read_bytes(), two.read_bytes()
        one.write_bytes(more)
        two.write_bytes(data)
        come = [our.load(acme, key) for key in (first, second)]
        return any(come), f"{sum(one is not None for one in come)} of 2 files that changed places were served"
    if case == "older-object":
        [place] = our.files()
        old = place.read_bytes()
        our.tier.destroy([bytes.fromhex(place.name)])
        our.clock.advance(1_000_000)
        assert our.store(acme, first, other) and our.load(acme, first) == other
        place.write_bytes(old)
        come_back = our.load(acme, first)
        return (
            come_back is not None,
            "the earlier object was served" if come_back else "a miss, and the copy ended",
        )
    if case == "name-tells-tenant":
        names = " ".join(path.name for path in our.files())
        again = hashlib.sha256(b"acme").hexdigest() in names or "acme" in names
        return again, "64 hexadecimal digits that nobody makes without the tenant's secret"
    if case == "tenant-wipe":
        assert our.store(beta, second, other) and our.load(beta, second) == other
        ended, left = our.tier.end_tenant("beta"), our.load(acme, first)
        assert our.load(beta, second) is None, "its own are gone"
        return left != mine, f"{ended} copy of the tenant ended, {len(our.files())} of another's is there"
    assert case == "namespace-alias"
    pairs = [("a-b", None), ("a", "-b"), ("ab", None), ("a", "b")]
    specs = [our.label(tenant, salt=salt).spec for tenant, salt in pairs]
    namespaces = {our.keys.domain(spec) for spec in specs if spec is not None}
    return len(namespaces) < len(
        pairs
    ), f"{len(namespaces)} namespaces of {len(pairs)} pairs of tenant and salt"


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
