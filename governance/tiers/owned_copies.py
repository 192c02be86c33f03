"""Sealed copies of one owner's engine that nobody governs: an object a copy.

    copies = OwnedCopies(OwnedTerms("vllm", "acme", 1800.0, 1 << 30, Path("/var/lib/tier")), layout, model, 8192, 128)
    copies.store(key, memory)      # `key`: whatever the engine calls it by
    copies.finds(key)
    copies.load(key, memory)

1. A copy is sealed under the owner's epoch secret and the shred key of its time bucket; it is due after `seconds`, and
   then neither it nor its key is left. Destroying the owner's epoch (`kvcustody keys`) ends all of them at once.
2. In a remote store (`url`) engines of one owner share copies: `seek` asks the store for what another stored.
3. A copy that was changed, moved, is older, of another layout or another's does not open: it is not there.
4. Keys are those of the environment's settings, and so is how a remote store is reached. All copies are one owner's:
   who may have which is the engine's alone.

One thread at a time stores, loads, seeks and expires. `finds` is for any thread: it says what that one has told.
"""

from __future__ import annotations

import hashlib
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvcustody.clock import MICROSECONDS, SystemClock
from kvcustody.errors import ConfigError, NoKeyError
from kvcustody.governance.decisions.access_plan import DomainLabel
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.identity.domain_spec import DomainSpec, ScopeKind, tenant_owner
from kvcustody.governance.keys import core_dumps
from kvcustody.governance.keys.keyring import Keyring
from kvcustody.governance.keys.shred_keys import ShredKeys
from kvcustody.governance.keys.wrapped_key_store import FileKeyStore
from kvcustody.governance.settings import Settings, load_settings
from kvcustody.governance.tiers.copies.index import CopyLimit, PublishedRun, TierShare, TierTerms
from kvcustody.governance.tiers.open_tiers import remote_plan
from kvcustody.governance.tiers.seal.object_layout import object_bytes
from kvcustody.governance.tiers.seal_keys import SealKeys
from kvcustody.governance.tiers.staging import Staging
from kvcustody.governance.tiers.stores.file_store import FileStore
from kvcustody.governance.tiers.stores.guarded_store import GuardedStore
from kvcustody.governance.tiers.stores.node_arenas import open_host_arena
from kvcustody.governance.tiers.stores.open_remote import open_remote
from kvcustody.governance.tiers.stores.store_protocol import TierStore
from kvcustody.governance.tiers.tier import SealedTier
from kvcustody.governance.worker.plugins import open_root_key

_CLASS = "offloaded"
_NO_KEY = bytes(32)
_BUCKETS = 16  # in `seconds`

Memory = npt.NDArray[np.uint8]


class OwnedTerms(NamedTuple):
    """The owner by the engine's kind and name, and the limits of its copies in time, bytes and place."""

    issuer: str
    owner: str
    seconds: float
    size_bytes: int
    path: Path | None = None
    url: str | None = None  # neither: in this process's memory


class OwnedCopies:
    """Copies in host memory, in files (with a path), or in a remote store (with an address)."""

    def __init__(self, terms: OwnedTerms, layout: bytes, model: bytes, copy_bytes: int, copy_tokens: int) -> None:
        """`layout`, `model`: digests of what conditions the bytes.

        Raises a `CustodyError` that says what cannot be opened.
        """
        if terms.seconds <= 0:
            raise ConfigError(f"`seconds` is `{terms.seconds}`; copies need a deadline")
        self.clock = clock = SystemClock()
        self._lives_us = int(terms.seconds * MICROSECONDS)
        with ExitStack() as stack:  # what is open where the rest cannot be is closed again
            settings = load_settings()
            core_dumps.disable_core_dumps(strict=settings.strict)
            root = open_root_key(settings)
            self._keyring = Keyring(FileKeyStore(settings.keyring_path), root, clock)
            stack.callback(self._keyring.close)
            owner = tenant_owner(terms.issuer, terms.owner)
            self._keyring.ensure([owner])
            shred = ShredKeys.open(settings.shred_keys_path, root, clock)
            stack.callback(shred.close)
            store = _open_store(terms, settings, copy_bytes, clock)
            opening = stack.enter_context(ExitStack())
            opening.callback(store.close)
            epoch = self._keyring.current(owner)
            assert epoch is not None, "ensured above"
            spec = DomainSpec(
                scope=ScopeKind.TENANT,
                issuer=terms.issuer,
                tenant=terms.owner,
                classification=_CLASS,
                model=model,
                key_epoch=epoch,
            )
            self._spec = spec
            self._label = DomainLabel(terms.owner, _CLASS, 0, ScopeKind.TENANT.value, None, None, spec)
            limit = CopyLimit(self._lives_us, max(1, self._lives_us // _BUCKETS))
            tier_terms = TierTerms(
                layout,
                copy_bytes,
                copy_tokens,
                lambda *_: limit,
                lambda _: TierShare(0.0, 1.0),
                (terms.owner,),
                object_blocks=1,
            )
            staging = Staging(1, copy_bytes)
            stack.callback(staging.close)
            self._keys, self._names = SealKeys(self._keyring, shred), SealKeys(self._keyring, shred)
            for keys in (self._keys, self._names):
                stack.callback(keys.close)
            self.tier = SealedTier(store, self._keys, shred, staging, clock, tier_terms)
            opening.pop_all()  # from now on the tier closes it
            stack.callback(self.tier.close)
            self._stack = stack.pop_all()
        self._layout = layout
        self.is_shared = store.is_shared
        self._due_us: dict[bytes, int] = {}  # of what can be found, by name
        self._cleared = 0
        self.note()

    def finds(self, key: bytes) -> bool:
        """Whether the storing thread has reported this copy, and it is not due."""
        name = self._name(key)
        return name is not None and self._due_us.get(name, 0) > self.clock.now_us()

    def seek(self, key: bytes) -> bool:
        """Whether such a copy exists, in a shared store of any worker; `finds` then knows it."""
        found = self.tier.lookup(self._label, _hashed(key), 0)
        copy = self.tier.copy(found[0].name) if found else None
        if copy is not None:
            self._due_us[copy.name] = copy.due_us
        return copy is not None

    def refresh(self) -> None:
        """Refuse epochs that another process destroyed."""
        self._keyring.refresh()

    def store(self, key: bytes, memory: Memory) -> bool:
        """Seal a copy; returns whether it is stored."""
        hashed, now_us = _hashed(key), self.clock.now_us()
        until_us = now_us + self._lives_us
        run = PublishedRun(self._label, hashed, _NO_KEY, 0, now_us, until_us, until_us)

        def read(first: int, count: int, into: memoryview) -> None:
            np.frombuffer(into, dtype=np.uint8)[:] = memory

        return self.tier.has(self._label, hashed) or self.tier.store(run, read) == 1

    def load(self, key: bytes, memory: Memory) -> bool:
        """Open the copy into `memory`; False: it is absent, and nothing was written."""

        def write(depth: int, count: int, skip: int, data: memoryview) -> None:
            memory[:] = np.frombuffer(data, dtype=np.uint8)

        hashed = _hashed(key)
        found = self.tier.lookup(self._label, hashed, 0)
        came = bool(found) and bool(self.tier.load(self._label, hashed, 0, found, write))
        name = None if came else self._name(key)
        if name is not None and self.tier.copy(name) is None:  # another engine ended it, or it did not open
            self._due_us.pop(name, None)
        return came

    def is_due(self) -> bool:
        """Whether `expire` may have work; for any thread."""
        return self.tier.is_due(self.clock.now_us())

    def expire(self) -> None:
        """End what is due."""
        self.tier.expire()
        self.note()

    def end_all(self) -> int:
        """End every copy of the owner, its key first, then the bytes; returns the number."""
        self._cleared += 1
        erased = self.tier.erase(f"clear {self._cleared}", Selector(self._label.tenant), self.clock.now_us() + 1)
        self.note()
        return erased.objects

    def note(self) -> None:
        """Make a copy findable."""
        for event in self.tier.take_events():
            if event.step == "stored":
                self._due_us[event.name] = event.due_us
            elif event.step == "ended":
                self._due_us.pop(event.name, None)

    def close(self) -> None:
        """End copies that must not outlive the process, and forget the keys."""
        self._stack.close()

    def _name(self, key: bytes) -> bytes | None:
        """What the copy is called in the store; None where the owner's key cannot be had."""
        with suppress(NoKeyError):
            return self._names.name(self._spec, _hashed(key), shard=0, layout=self._layout)
        return None


def _open_store(terms: OwnedTerms, settings: Settings, copy_bytes: int, clock: SystemClock) -> TierStore:
    if terms.url is not None:
        if terms.path is not None:
            raise ConfigError("copies are in a folder or in a remote store; name one of both")
        said = {"remote_tier_url": terms.url, "remote_tier_bytes": terms.size_bytes}
        plan = remote_plan(settings.model_copy(update=said))
        largest = object_bytes(copy_bytes, enclosed=True, checked=False)
        return open_remote(plan, worker=settings.worker_name, object_bytes_max=largest, clock=clock)
    if terms.path is None:
        return open_host_arena(terms.size_bytes)
    return GuardedStore(FileStore(terms.path, terms.size_bytes), seconds=1.0, clock=clock)


def digest_of(*texts: str) -> bytes:
    """Return 32 bytes for these texts in this order, unambiguous whatever they contain."""
    hashed = hashlib.blake2b(digest_size=32)
    for text in texts:
        hashed.update(len(text).to_bytes(4, "little") + text.encode())
    return hashed.digest()


def _hashed(key: bytes) -> bytes:
    return hashlib.blake2b(key, digest_size=32).digest()
