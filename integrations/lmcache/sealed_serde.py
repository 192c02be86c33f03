"""A serde for LMCache's own second-tier adapters: content is sealed under the domain's keys, bound to its name.

    python -m kvcustody.integrations.lmcache.server --l2-adapter '{"type": "fs", "base_path": "/cache",
                                                                   "serde": {"type": "kvcustody"}}' …

1. An object is sealed for the domain that its salt stands for. It opens only under the chunk, model, rank and group
   that it was sealed for. An object that was renamed or swapped, belongs to another, or is due does not open.
2. Its facts are enclosed, so that no index is needed. Destroying the key of its tenant's epoch, its subject or its time
   bucket ends it, on whatever medium the adapter writes to. Deleting bytes is the adapter's task.
3. Nothing here counts copies or puts them on record: `CustodyL2Adapter` does.
4. Content is sealed from LMCache's memory into LMCache's memory: nothing is allocated for it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lmcache.v1.distributed.serde.async_processor import AsyncSerdeProcessor
from lmcache.v1.distributed.serde.base import Deserializer, Serializer
from lmcache.v1.distributed.serde.factory import get_registered_serde_types, register_serde_factory

from kvcustody.clock import SystemClock
from kvcustody.errors import ConfigError, CustodyError, SealError
from kvcustody.governance.decisions.access_plan import DomainLabel, is_withheld, owed_by
from kvcustody.governance.identity.domain_spec import DomainSpec
from kvcustody.governance.keys.keyring import Keyring
from kvcustody.governance.keys.keyring_watch import KeyringWatch
from kvcustody.governance.keys.shred_keys import ShredKeys
from kvcustody.governance.keys.wrapped_key_store import FileKeyStore
from kvcustody.governance.restriction.restricted_subjects import RESTRICTED
from kvcustody.governance.settings import Settings, load_settings
from kvcustody.governance.tiers.copies.index import shred_name
from kvcustody.governance.tiers.scope_salts import ScopeDirectory
from kvcustody.governance.tiers.seal.extended_nonce import ExtendedNonceKey
from kvcustody.governance.tiers.seal.object_layout import ObjectFacts, object_bytes
from kvcustody.governance.tiers.seal.sealer import open_enclosed, seal_into
from kvcustody.governance.tiers.seal_keys import SealKeys
from kvcustody.governance.tiers.tier_clock import TierClock
from kvcustody.governance.worker.plugins import open_root_key
from kvcustody.guarding_thread import GuardingThread
from kvcustody.integrations.lmcache.chunk_keys import chunk_key, layout_of
from kvcustody.integrations.lmcache.custody_thread import open_without_blocks
from kvcustody.integrations.lmcache.keys_elsewhere import KeysElsewhere
from kvcustody.policies.document.model import Tier
from kvcustody.policies.table.decision_table import DecisionTable

if TYPE_CHECKING:
    from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
    from lmcache.v1.memory_management import MemoryObj

NAME = "kvcustody"
_NO_KEY = bytes(32)
_CHUNK_BYTES = 4096  # of a worker that hands out nothing
_STEP_SECONDS = 0.05
_END_SECONDS = 15.0
_KNOWN_MAX = 4096  # domains, of each thread
_TIERS = (Tier.NVME.value, Tier.REMOTE.value)


class SerdeCustody:
    """The policy, keys and orders of one server's serde: a worker without blocks, on its own thread."""

    def __init__(self, settings: Settings, tier: str) -> None:
        """Raises a `CustodyError` that names what cannot be opened."""
        if settings.scope_salts_path is None:
            raise ConfigError("setting `scope_salts_path`: name the file to which governed engines write their salts")
        self.tier = tier
        self._settings = settings
        self._path: Path = settings.scope_salts_path
        self._stack = ExitStack()
        self._local = threading.local()
        self._closing = threading.Event()
        with ExitStack() as opening:
            self.worker = open_without_blocks(settings, _CHUNK_BYTES)
            opening.callback(self.worker.close)
            self._shred = self._open_shred(opening)
            erasures = self.worker.governor.erasures
            erasures.tiers += [KeysElsewhere(tier, self._shred)]
            erasures.destroy_returned(self.worker.completed)
            self._stack = opening.pop_all()
        self._thread = GuardingThread(self._step, name="kvcustody-serde")
        self._thread.start()

    def _open_shred(self, stack: ExitStack) -> ShredKeys:
        shred = ShredKeys.open(self._settings.shred_keys_path, open_root_key(self._settings), SystemClock())
        stack.callback(shred.close)
        return shred

    def mine(self) -> SealingThread:
        """Return the calling thread's sealer."""
        found: SealingThread | None = getattr(self._local, "sealing", None)
        if found is None:
            shred = self._open_shred(self._stack)
            found = self._local.sealing = SealingThread(self, self._settings, self._path, shred)
            self._stack.callback(found.close)
        return found

    def _step(self) -> None:
        clock = TierClock(SystemClock())
        while not self._closing.wait(_STEP_SECONDS):
            self.worker.governor.step()
            self._shred.destroy_due(clock.now_us())

    def close(self) -> None:
        """Stop the worker in order and forget the keys; a second call does nothing."""
        self._closing.set()
        self._thread.join(_END_SECONDS)
        self._stack.close()


class _Terms(NamedTuple):
    """A domain's terms: its objects' lifetime, the width of their buckets, and the names in their keys and facts."""

    ceiling_us: int
    lives_us: int
    bucket_us: int
    subject: bytes
    tenant: bytes


class SealingThread:
    """The keys, directory and clock of one thread."""

    def __init__(self, custody: SerdeCustody, settings: Settings, path: Path, shred: ShredKeys) -> None:
        clock = SystemClock()
        self._custody = custody
        with ExitStack() as stack:
            keyring = Keyring(FileKeyStore(settings.keyring_path), open_root_key(settings), clock)
            stack.callback(keyring.close)
            self._watch = KeyringWatch(keyring, settings.keyring_path)
            self._shred = shred
            self._keys = SealKeys(keyring, shred)
            stack.callback(self._keys.close)
            self._directory = ScopeDirectory(path, self._keys, self._watch.look)
            stack.callback(self._directory.close)
            self._stack = stack.pop_all()
        self._clock = TierClock(clock)
        self._known: dict[str, _Terms] = {}
        self._known_of: tuple[DecisionTable, int] | None = None

    def seal(self, key: ObjectKey, content: memoryview, into: memoryview) -> int:
        """Seal a chunk and return its size in bytes.

        Raises:
            CustodyError: it may not be kept.
        """
        label, spec = self._whose(key)
        terms, now_us = self._terms(key.cache_salt, label), self._clock.now_us()
        if not terms.lives_us:
            raise SealError(f"policy keeps `{label.classification}` of `{label.tenant}` out of `{self._custody.tier}`")
        ceiling_us, due_us = now_us + terms.ceiling_us, now_us + terms.lives_us
        bucket = self._shred.of_bucket(label.classification, due_us, terms.bucket_us).id
        last, layout = chunk_key(key), layout_of(key.model_name, len(content))
        name = self._keys.name(spec, last, shard=0, layout=layout)
        facts = ObjectFacts(
            domain=self._keys.domain(spec),
            classification=label.classification,
            model=spec.model,
            layout=layout,
            parent=_NO_KEY,
            first=last,
            last=last,
            shard=0,
            shards=1,
            depth=0,
            blocks=1,
            tokens=0,
            born_us=now_us,
            ceiling_us=ceiling_us,
            epoch=spec.key_epoch,
            subject=terms.subject,
            bucket=bucket,
            due_us=due_us,
            tenant=terms.tenant,
        )
        sealing = self._keys.of(spec, terms.subject, bucket)
        return seal_into(sealing, name, facts, content, into, facts_key=self._keys.catalogue())

    def open(self, key: ObjectKey, sealed: memoryview, into: memoryview) -> None:
        """Open what an adapter returned.

        Raises:
            CustodyError: it is not this chunk; `into` is all zeros then.
        """
        try:
            _, spec = self._whose(key)
            last, layout = chunk_key(key), layout_of(key.model_name, len(into))
            name = self._keys.name(spec, last, shard=0, layout=layout)
        except CustodyError:
            into[:] = bytes(len(into))
            raise
        keys = self._keys

        def key_of(facts: ObjectFacts) -> ExtendedNonceKey:
            if facts.domain != keys.domain(spec) or facts.last != last or facts.layout != layout:
                raise SealError("sealed object: belongs to another owner")
            if facts.due_us <= self._clock.now_us():
                raise SealError("sealed object: has expired")
            return keys.of(spec, facts.subject, facts.bucket)

        open_enclosed(keys.catalogue(), name, sealed, into, key_of)

    def _terms(self, salt: str, label: DomainLabel) -> _Terms:
        """Return the terms of a domain's objects, by the active policy and the available keys."""
        table, changes = self._custody.worker.governor.table, self._shred.changes()
        if self._known_of != (table, changes) or len(self._known) >= _KNOWN_MAX:
            self._known.clear()
            self._known_of = (table, changes)
        known = self._known.get(salt)
        if known is None:
            duty = table.tier_duty(label.tenant, label.level, self._custody.tier)
            owed = owed_by(table, label.tenant, label.level)
            known = self._known[salt] = _Terms(
                owed.absolute_us,
                min(owed.absolute_us, owed.idle_us, duty.absolute_us),
                duty.bucket_us,
                self._shred.of_subject(shred_name(label.tenant, label.subject), label.tenant).id,
                self._shred.pseudonym(label.tenant.encode()),
            )
        return known

    def _whose(self, key: ObjectKey) -> tuple[DomainLabel, DomainSpec]:
        self._watch.look()
        label = self._directory.label_of(key.cache_salt)
        if label is None or label.spec is None:
            raise SealError("no governed engine has written this salt: nothing is stored or found under it")
        if is_withheld(label, self._custody.worker.governor.restricted):
            raise SealError(f"{RESTRICTED}: this subject's data is retained and may not be used")
        return label, label.spec

    def close(self) -> None:
        """Forget the keys."""
        self._stack.close()


class SealedSerializer(Serializer):  # type: ignore[misc]
    """Serialises LMCache's memory into an object."""

    def __init__(self, custody: SerdeCustody) -> None:
        self._custody = custody

    def serialize(self, src: MemoryObj, dst: MemoryObj, key: ObjectKey) -> int:
        """Seal a chunk and return the number of written bytes.

        Raises:
            CustodyError: it may not be kept.
        """
        return self._custody.mine().seal(key, _bytes(src), _bytes(dst))

    def estimate_serialized_size(self, layout_desc: MemoryLayoutDesc) -> int:
        """Return the exact size of an object in bytes."""
        sizes = zip(layout_desc.shapes, layout_desc.dtypes, strict=True)
        content = sum(int(shape.numel()) * int(dtype.itemsize) for shape, dtype in sizes)
        return object_bytes(content, enclosed=True, checked=False)


class SealedDeserializer(Deserializer):  # type: ignore[misc]
    """Deserialises an object into LMCache's memory."""

    def __init__(self, custody: SerdeCustody) -> None:
        self._custody = custody

    def deserialize(self, src: MemoryObj, dst: MemoryObj, key: ObjectKey) -> None:
        """Open an object.

        Raises:
            CustodyError: it is not what was sealed; `dst` is all zeros then.
        """
        self._custody.mine().open(key, _bytes(src), _bytes(dst))


class SealedProcessor(AsyncSerdeProcessor):  # type: ignore[misc]
    """LMCache's threads around both; closing it stops the worker."""

    def __init__(self, custody: SerdeCustody, workers: int) -> None:
        super().__init__(SealedSerializer(custody), SealedDeserializer(custody), max_workers=workers)
        self.custody = custody

    def close(self) -> None:
        """Close after the earlier calls."""
        super().close()
        self.custody.close()


def make_serde(options: Mapping[str, Any]) -> SealedProcessor:
    """Return the serde for a `serde` entry: `tier` (nvme by default, or remote: policy's name for the place),
    `max_workers`.

    Raises a `CustodyError` that says what is wrong.
    """
    tier, workers = options.get("tier", Tier.NVME.value), options.get("max_workers", 1)
    unknown = sorted(set(options) - {"tier", "max_workers"})
    if tier not in _TIERS or type(workers) is not int or workers < 1 or unknown:
        raise ConfigError(
            f"serde `{NAME}`: takes `tier` ({' or '.join(_TIERS)}) and `max_workers`; got {dict(options)}"
        )
    return SealedProcessor(SerdeCustody(load_settings(), tier), workers)


def register() -> None:
    """Register the serde for LMCache's configuration; a second call does nothing."""
    if NAME not in get_registered_serde_types():
        register_serde_factory(NAME, make_serde)


def _bytes(one: MemoryObj) -> memoryview:
    return one.byte_array.cast("B")  # type: ignore[no-any-return]
