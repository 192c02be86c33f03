"""Keys and objects for tests of tiers."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from kvcustody.clock import VirtualClock
from kvcustody.governance.identity.domain_spec import DomainSpec, ScopeKind
from kvcustody.governance.keys.keyring import Keyring
from kvcustody.governance.keys.locked_buffer import KeyBuffer
from kvcustody.governance.keys.root_key_wrapping import RootKeyWrapping, WrappingPort
from kvcustody.governance.keys.shred_keys import ShredKeys
from kvcustody.governance.keys.wrapped_key_store import FileKeyStore
from kvcustody.governance.tiers.seal.extended_nonce import ExtendedNonceKey
from kvcustody.governance.tiers.seal.object_layout import ObjectFacts, object_bytes
from kvcustody.governance.tiers.seal.sealer import seal_into
from kvcustody.governance.tiers.seal_keys import SealKeys

MODEL = hashlib.sha256(b"model").digest()


class World:
    """One deployment's keys, in files; `wrapping`: by what its secrets are wrapped, in place of a root key."""

    def __init__(self, folder: Path, wrapping: WrappingPort | None = None) -> None:
        self.clock = VirtualClock()
        self.folder = folder
        if wrapping is None:
            root = KeyBuffer()
            root.take(hashlib.sha256(b"root").digest())
            wrapping = RootKeyWrapping(root)
        self.wrapping = wrapping
        self.open()

    def open(self) -> None:
        """Open everything, as a process does that begins."""
        self.keyring = Keyring(FileKeyStore(self.folder / "keys.json"), self.wrapping, self.clock)
        self.shred = ShredKeys.open(self.folder / "shred.keys", self.wrapping, self.clock)
        self.keys = SealKeys(self.keyring, self.shred)

    def close(self) -> None:
        self.keys.close()
        self.shred.close()
        self.keyring.close()

    def spec(self, tenant: str, subject: str | None = None) -> DomainSpec:
        """A domain of `tenant`, whose owner has an epoch."""
        scope = ScopeKind.SUBJECT if subject else ScopeKind.TENANT
        spec = DomainSpec(
            scope=scope,
            classification="internal",
            model=MODEL,
            key_epoch=1,
            issuer="idp",
            tenant=tenant,
            subject=subject,
        )
        self.keyring.ensure([spec.owner])
        return spec


def facts(**changed: object) -> ObjectFacts:
    """Facts of some object, all digests different."""
    digests = [hashlib.sha256(bytes([at])).digest() for at in range(6)]
    whole = ObjectFacts(
        digests[0],
        "internal",
        *digests[1:],
        shard=0,
        shards=1,
        depth=0,
        blocks=16,
        tokens=256,
        born_us=1_000_000,
        ceiling_us=61_000_000,
        epoch=1,
        subject=os.urandom(16),
        bucket=os.urandom(16),
        due_us=31_000_000,
        tenant=os.urandom(16),
    )
    return whole._replace(**changed)  # type: ignore[arg-type]


def sealed(
    key: ExtendedNonceKey,
    name: bytes,
    what: ObjectFacts,
    content: bytes,
    *,
    facts_key: ExtendedNonceKey | None = None,
    checked: bool = False,
) -> bytearray:
    """One sealed object."""
    into = bytearray(object_bytes(len(content), enclosed=facts_key is not None, checked=checked))
    assert seal_into(key, name, what, content, memoryview(into), facts_key=facts_key, checked=checked) == len(into)
    return into
