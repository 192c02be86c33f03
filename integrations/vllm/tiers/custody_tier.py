"""A sealed secondary tier for a vLLM that nobody governs: what its own `TieringOffloadingSpec` demotes rests sealed.

    "secondary_tiers": [
      {"type": "CustodyTier", "module_path": "kvcustody.integrations.vllm.tiers.custody_tier",
       "owner": "acme", "seconds": 1800, "path": "/var/lib/kvcustody/tier", "size_bytes": 200000000000}]

1. A chunk is sealed under the owner's epoch secret and the shred key of its time bucket; it is due after `seconds`, and
   then neither it nor its key is left. Destroying the owner's epoch (`kvcustody keys`) ends all of them at once.
2. A chunk that was changed, moved, is older, or another's, does not open: vLLM takes it for a miss and computes.
3. All of an engine's requests are one owner's here: who may reuse what is vLLM's hash and salt alone, and its primary
   tier is in clear. Tenants are kept apart by a governed engine (`KVCustody`), which needs no other connector.
4. Sealing, opening and the store are a thread's; look-ups ask what that thread has told.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from pathlib import Path
from queue import SimpleQueue
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np
import structlog
from vllm.v1.kv_offload.base import LookupResult, Medium, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvcustody.clock import MICROSECONDS, SystemClock
from kvcustody.errors import ConfigError, KeyringError
from kvcustody.governance.decisions.access_plan import DomainLabel
from kvcustody.governance.identity.domain_spec import DomainSpec, ScopeKind, tenant_owner
from kvcustody.governance.keys import core_dumps
from kvcustody.governance.keys.keyring import Keyring
from kvcustody.governance.keys.shred_keys import ShredKeys
from kvcustody.governance.keys.wrapped_key_store import FileKeyStore
from kvcustody.governance.settings import load_settings
from kvcustody.governance.tiers.seal_keys import SealKeys
from kvcustody.governance.tiers.staging import Staging
from kvcustody.governance.tiers.stores.file_store import FileStore
from kvcustody.governance.tiers.stores.guarded_store import GuardedStore
from kvcustody.governance.tiers.stores.node_arenas import open_host_arena
from kvcustody.governance.tiers.stores.store_protocol import TierStore
from kvcustody.governance.tiers.tier import CopyLimit, PublishedRun, SealedTier, TierShare, TierTerms
from kvcustody.governance.worker.plugins import open_root_key

if TYPE_CHECKING:
    from concurrent.futures import Future

_ISSUER, _CLASS = "vllm", "offloaded"
_NO_KEY = bytes(32)
_BUCKETS = 16  # in `seconds`
_log = structlog.get_logger(__name__)


class CustodyTier(SecondaryTierManager):  # type: ignore[misc]
    """Chunks of one engine in host memory, or in files where `path` is given. Called on the scheduler's thread."""

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        *,
        owner: str,
        seconds: float,
        size_bytes: int,
        path: str | None = None,
        backpressure_detector: Any = None,
        locality: str | None = None,
    ) -> None:
        """Raises a `CustodyError` that names what cannot be opened. Keys are those of the environment's settings."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        if seconds <= 0:
            raise ConfigError(f"tier `{tier_type}`: `seconds` is `{seconds}`; copies need a deadline")
        self._slots = np.asarray(primary_kv_view).view(np.uint8)
        self._stack = ExitStack()
        self._clock = clock = SystemClock()
        self._lives_us = int(seconds * MICROSECONDS)
        settings = load_settings()
        core_dumps.disable_core_dumps(strict=settings.strict)
        root = open_root_key(settings)
        keyring = Keyring(FileKeyStore(settings.keyring_path), root, clock)
        self._stack.callback(keyring.close)
        keyring.ensure([tenant_owner(_ISSUER, owner)])
        shred = ShredKeys.open(settings.shred_keys_path, root, clock)
        self._stack.callback(shred.close)
        store: TierStore = open_host_arena(size_bytes)
        if path is not None:
            store = GuardedStore(FileStore(Path(path), size_bytes), seconds=1.0, clock=clock)
        config = offloading_spec.config
        layout = _digest(
            config.model.name, config.model.dtype, str(config.kv_cache_layout), str(self._slots.shape[1:])
        )
        epoch = keyring.current(tenant_owner(_ISSUER, owner))
        assert epoch is not None, "ensured above"
        spec = DomainSpec(
            scope=ScopeKind.TENANT,
            issuer=_ISSUER,
            tenant=owner,
            classification=_CLASS,
            model=_digest(config.model.name),
            key_epoch=epoch,
        )
        self._label = DomainLabel(owner, _CLASS, 0, ScopeKind.TENANT.value, None, None, spec)
        limit = CopyLimit(self._lives_us, max(1, self._lives_us // _BUCKETS))
        terms = TierTerms(
            layout,
            self._slots.shape[1],
            config.cache.tokens_per_hash * config.cache.blocks_per_chunk,
            lambda *_: limit,
            lambda _: TierShare(0.0, 1.0),
            (owner,),
            object_blocks=1,
        )
        self._keyring = keyring
        staging = Staging(1, self._slots.shape[1])
        self._stack.callback(staging.close)
        self._keys, self._names = SealKeys(keyring, shred), SealKeys(keyring, shred)  # one for each thread
        self._tier = SealedTier(store, self._keys, shred, staging, clock, terms)
        self._layout = layout
        self._due_us: dict[bytes, int] = {}  # of what can be found, by name
        self._finished: SimpleQueue[JobResult] = SimpleQueue()
        self._running: set[Future[None]] = set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"kvcustody-{tier_type}")
        self._note()

    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        """Whether the thread has told of this chunk, and it is not due."""
        name = self._name(key)
        due_us = 0 if name is None else self._due_us.get(name, 0)
        is_there = due_us > self._clock.now_us()
        return LookupResult.HIT if is_there else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Seal these slots; vLLM keeps them as they are until the job is over."""
        self._submit(self._store, job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Open chunks into these slots."""
        self._submit(self._load, job_metadata)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Jobs that are over since the last call."""
        found = []
        while not self._finished.empty():
            found.append(self._finished.get())
        return found

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """See the interface."""
        return RequestOffloadingContext()

    def on_schedule_end(self, context: Any) -> None:
        """What is due ends."""
        if self._tier.is_due(self._clock.now_us()) and not self._running:
            self._start(self._expire)

    def has_pending_work(self) -> bool:
        """Jobs are under way."""
        return bool(self._running) or not self._finished.empty()

    def drain_jobs(self) -> None:
        """Wait until no job is under way."""
        wait(self._running.copy())

    def shutdown(self) -> None:
        """End what does not outlive the process, and forget the keys."""
        self._thread.submit(self._tier.close).result()
        self._thread.shutdown()
        self._keys.close()
        self._names.close()
        self._stack.close()

    # -- the thread -----------------------------------------------------------------------------------------------

    def _submit(self, act: Any, job: TransferJob) -> None:
        self._start(self._do, act, job)

    def _start(self, act: Any, *arguments: Any) -> None:
        started = self._thread.submit(act, *arguments)
        self._running.add(started)
        started.add_done_callback(self._running.discard)

    def _do(self, act: Any, job: TransferJob) -> None:
        began, done = monotonic(), []
        try:
            self._keyring.refresh()  # an epoch that was destroyed by another process is refused from now on
            for key, slot in zip(job.keys, job.chunk_ids, strict=True):
                if act(hashlib.blake2b(key, digest_size=32).digest(), self._slots[int(slot)]):
                    done.append(key)
        except Exception as error:  # whatever it was: it is a miss, and the engine goes on
            _log.error("job failed", tier=self.tier_type, error=repr(error))
        self._note()
        size = len(done) * int(self._slots.shape[1])
        is_whole = len(done) == len(job.keys)
        loaded: Collection[Any] | None = done if job.is_promotion else None
        self._finished.put(JobResult(job.job_id, is_whole, loaded, monotonic() - began, size))

    def _store(self, key: bytes, slot: Any) -> bool:
        now_us = self._clock.now_us()
        until_us = now_us + self._lives_us
        run = PublishedRun(self._label, key, _NO_KEY, 0, now_us, until_us, until_us)

        def read(first: int, count: int, into: memoryview) -> None:
            np.frombuffer(into, dtype=np.uint8)[:] = slot

        return self._tier.has(self._label, key) or self._tier.store(run, read) == 1

    def _load(self, key: bytes, slot: Any) -> bool:
        def write(depth: int, count: int, skip: int, data: memoryview) -> None:
            slot[:] = np.frombuffer(data, dtype=np.uint8)

        found = self._tier.lookup(self._label, key, 0)
        return bool(found) and bool(self._tier.load(self._label, key, 0, found, write))

    def _expire(self) -> None:
        self._tier.expire()
        self._note()

    def _note(self) -> None:
        """What the scheduler's thread may find from now on."""
        for event in self._tier.take_events():
            if event.step == "stored":
                self._due_us[event.name] = event.due_us
            elif event.step == "ended":
                self._due_us.pop(event.name, None)

    def _name(self, key: bytes) -> bytes | None:
        """What the chunk is called in the store; None once the owner's epoch is destroyed."""
        assert self._label.spec is not None
        hashed = hashlib.blake2b(key, digest_size=32).digest()
        with suppress(KeyringError):
            return self._names.name(self._label.spec, hashed, shard=0, layout=self._layout)
        return None


def _digest(*texts: str) -> bytes:
    hashed = hashlib.blake2b(digest_size=32)
    for text in texts:
        hashed.update(len(text).to_bytes(4, "little") + text.encode())
    return hashed.digest()
