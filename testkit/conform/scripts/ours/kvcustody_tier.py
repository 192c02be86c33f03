"""The same questions about our own sealed tier over files.

python -m kvcustody.testkit.conform.scripts.ours.kvcustody_tier CASE        # needs: kvcustody
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kvcustody.clock import VirtualClock
from kvcustody.governance.decisions.access_plan import DomainLabel
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.identity.domain_spec import DomainSpec, ScopeKind, tenant_owner
from kvcustody.governance.identity.model_identity import ModelIdentity
from kvcustody.governance.keys.keyring import Keyring
from kvcustody.governance.keys.root_key_wrapping import create_root_key, open_wrapping
from kvcustody.governance.keys.shred_keys import ShredKeys
from kvcustody.governance.keys.wrapped_key_store import FileKeyStore
from kvcustody.governance.tiers.copies.index import CopyLimit, PublishedRun, TierTerms
from kvcustody.governance.tiers.seal_keys import SealKeys
from kvcustody.governance.tiers.staging import Staging
from kvcustody.governance.tiers.stores.file_store import FileStore
from kvcustody.governance.tiers.stores.host_arena import HostArena
from kvcustody.governance.tiers.tier import SealedTier

HOUR_US = 3_600_000_000
BLOCK = 4096
KEY = b"\1" * 32
LAYOUT = hashlib.sha256(b"a layout").digest()


def model(**more: Any) -> bytes:
    """Return a model's identity, or one that differs in this field."""
    names = ("weights_digest", "tokenizer_digest", "chat_template", "quantization", "kv_dtype", "kv_layout")
    given: dict[str, Any] = dict.fromkeys(names, "one")
    given |= {"weights_epoch": 0, "block_tokens": 16, "rope": {"factor": "1"}, "attention": {}}
    return ModelIdentity(**given | more).digest


class OurTier:
    """A tier of one worker in its own folder; `arena`: in memory instead of files."""

    def __init__(
        self, folder: Path, stack: ExitStack, *, layout: bytes = LAYOUT, arena: HostArena | None = None
    ) -> None:
        self.clock = VirtualClock()
        if not (folder / "root.key").exists():
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
        terms = TierTerms(layout, BLOCK, 16, lambda *_: limit, tenants=("acme", "beta"), object_blocks=1)
        store = arena or FileStore(self.folder, 1 << 24)
        self.tier = SealedTier(store, self.keys, self.shred, staging, self.clock, terms)
        stack.callback(self.tier.close)

    def label(self, tenant: str, *, salt: str | None = None, **of: Any) -> DomainLabel:
        """Return a tenant's domain."""
        owner = tenant_owner("idp", tenant)
        self.keyring.ensure([owner])
        epoch = self.keyring.current(owner)
        assert epoch is not None
        spec = DomainSpec(
            scope=ScopeKind.TENANT, issuer="idp", tenant=tenant, classification="internal",
            model=model(**of), key_epoch=epoch, salt=salt,
        )  # fmt: skip
        return DomainLabel(tenant, "internal", 0, "tenant", None, None, spec)

    def store(self, label: DomainLabel, key: bytes, content: bytes) -> bool:
        """Return whether the copy is now in the tier."""
        now_us = self.clock.now_us()
        run = PublishedRun(label, key, bytes(32), 0, now_us, now_us + HOUR_US, now_us + HOUR_US)

        def read(first: int, count: int, into: memoryview) -> None:
            into[:] = content

        return self.tier.store(run, read) == 1

    def load(self, label: DomainLabel, key: bytes) -> bytes | None:
        """Return the loaded bytes, if there are any."""
        contents: list[bytes] = []

        def write(depth: int, count: int, skip: int, data: memoryview) -> None:
            contents.append(bytes(data))

        found = self.tier.lookup(label, key, 0)
        self.tier.load(label, key, 0, found, write)
        return contents[0] if contents else None

    def files(self) -> list[Path]:
        """Return the objects on the disk."""
        return sorted(path for path in self.folder.rglob("*") if path.is_file() and len(path.name) == 64)


DIFFERENT: dict[str, dict[str, Any]] = {
    "other-model": {"attention": {"layers": 1}},
    "model-revision": {"weights_digest": "two"},
    "rope-scaling": {"rope": {"factor": "4"}},
}


def main(case: str) -> dict[str, Any]:
    """Return what was seen."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        found, evidence = _look(case, Path(folder), stack)
    return {"found": found, "evidence": evidence}


def _look(case: str, folder: Path, stack: ExitStack) -> tuple[bool, str]:
    if case in APART:
        return APART[case](folder, stack)
    our = OurTier(folder, stack)
    acme, beta = our.label("acme"), our.label("beta")
    first, second = KEY, b"\2" * 32
    mine, other = os.urandom(BLOCK), os.urandom(BLOCK)
    assert our.store(acme, first, mine) and our.load(acme, first) == mine, "own copies come back"
    if case == "salt-dropped" or case in DIFFERENT:
        asks = [our.label("acme", **DIFFERENT[case])] if case in DIFFERENT else [beta, our.label("acme", salt="x")]
        foreign_loads = [our.load(label, first) for label in asks]
        return any(
            foreign_loads
        ), f"{sum(one is not None for one in foreign_loads)} of {len(foreign_loads)} foreign look-ups found it"
    if case == "renamed-object":
        assert our.store(acme, second, other)
        first_file, second_file = our.files()
        data, more = first_file.read_bytes(), second_file.read_bytes()
        first_file.write_bytes(more)
        second_file.write_bytes(data)
        foreign_loads = [our.load(acme, key) for key in (first, second)]
        return any(
            foreign_loads
        ), f"{sum(one is not None for one in foreign_loads)} of 2 files that changed places were served"
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
    if case == "never-deleted":
        our.clock.advance(HOUR_US + 1)
        served, ended = our.load(acme, first), our.tier.expire()
        kept = len(our.files())
        return served is not None or kept > 0, f"{ended} copy ended with its time, {kept} files are left"
    if case == "clear-at-rest":
        [place] = our.files()
        sealed, mode = place.read_bytes(), place.stat().st_mode & 0o777
        clear = sum(mine[at : at + 16] in sealed for at in range(0, BLOCK, 16))
        return (
            clear > 0 or mode & 0o077 > 0,
            f"{clear} of {BLOCK // 16} pieces are in the file; mode {mode:04o}",
        )
    assert case == "guessable-name"
    [place] = our.files()
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    theirs = OurTier(elsewhere, stack)  # the same code and the same prompt, without this place's keys
    assert theirs.store(theirs.label("acme"), first, mine)
    right = place.name in {path.name for path in theirs.files()} or place.name == first.hex()
    return right, "whoever has the prompt and the code makes another name than the file's"


def _erase_tenant(folder: Path, stack: ExitStack) -> tuple[bool, str]:
    our, acme, beta, content = _two_tenants(folder, stack)
    our.clock.advance(1)
    our.tier.erase("erasure-1", Selector("beta", None, None), our.clock.now_us())
    left, gone = our.load(acme, KEY) == content, our.load(beta, KEY) is None
    return not (left and gone), f"{int(gone)} of 1 of the tenant's are ended, {int(left)} of 1 of another's are there"


def _tenant_wipe(folder: Path, stack: ExitStack) -> tuple[bool, str]:
    our, acme, beta, content = _two_tenants(folder, stack)
    ended, left = our.tier.end_tenant("beta"), our.load(acme, KEY)
    assert our.load(beta, KEY) is None, "its own are gone"
    return left != content, f"{ended} copy of the tenant ended, {len(our.files())} of another's is there"


def _two_tenants(folder: Path, stack: ExitStack) -> tuple[OurTier, DomainLabel, DomainLabel, bytes]:
    our, content = OurTier(folder, stack), os.urandom(BLOCK)
    labels = [our.label("acme"), our.label("beta")]
    for label in labels:
        assert our.store(label, KEY, content) and our.load(label, KEY) == content, "own copies come back"
    return our, labels[0], labels[1], content


def _namespaces(folder: Path, stack: ExitStack) -> tuple[bool, str]:
    our = OurTier(folder, stack)
    pairs = list(itertools.product(("a-b", "a", "ab"), (None, "-b", "b")))
    specs = [our.label(tenant, salt=salt).spec for tenant, salt in pairs]
    namespaces = {our.keys.domain(spec) for spec in specs if spec is not None}
    fewer = len(namespaces) < len(pairs)
    return fewer, f"{len(namespaces)} namespaces of {len(pairs)} pairs of tenant and salt"


def _other_layout(folder: Path, stack: ExitStack) -> tuple[bool, str]:
    key, content = KEY, os.urandom(BLOCK)
    with ExitStack() as before:
        our = OurTier(folder, before)
        assert our.store(our.label("acme"), key, content)
    with ExitStack() as again:
        our = OurTier(folder, again)
        assert our.load(our.label("acme"), key) == content, "own copies outlive a restart"
        by_model = our.load(our.label("acme", kv_layout="two"), key)
    our = OurTier(folder, stack, layout=hashlib.sha256(b"another").digest())
    come = [by_model, our.load(our.label("acme"), key)]
    return any(come), f"{sum(one is not None for one in come)} of {len(come)} look-ups in another layout found it"


def _residue(folder: Path, stack: ExitStack) -> tuple[bool, str]:
    arena = HostArena(1 << 20)
    our = OurTier(folder, stack, arena=arena)
    acme, key = our.label("acme"), KEY
    assert our.store(acme, key, os.urandom(BLOCK)) and our.load(acme, key), "own copies come back"
    held = arena.capacity_bytes - bytes(arena._view).count(0)
    assert held >= BLOCK // 2, "the memory holds it"
    our.tier.destroy(list(our.tier.objects()))
    left = arena.capacity_bytes - bytes(arena._view).count(0)
    return left > 0, f"{left} bytes are left in the memory after the copy has ended"


APART: dict[str, Callable[[Path, ExitStack], tuple[bool, str]]] = {
    "erase-tenant": _erase_tenant,
    "tenant-wipe": _tenant_wipe,
    "namespace-alias": _namespaces,
    "other-layout": _other_layout,
    "residue": _residue,
}

if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
