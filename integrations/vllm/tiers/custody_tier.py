"""A sealed secondary tier for an ungoverned vLLM: what its own `TieringOffloadingSpec` demotes is stored sealed.

    "secondary_tiers": [
      {"type": "CustodyTier", "module_path": "kvcustody.integrations.vllm.tiers.custody_tier",
       "owner": "acme", "seconds": 1800, "path": "/var/lib/kvcustody/tier", "size_bytes": 200000000000}]

Instead of `path`, `"url": "s3://kv-objects/fleet-1"` names a store that engines share; the environment's settings
`remote_tier_…` configure the connection. `root_dir` is another name of `path`, as vLLM's tier of files has it.

1. A chunk is sealed under the owner's epoch secret and the shred key of its time bucket; it is due after `seconds`, and
   then neither it nor its key is left. Destroying the owner's epoch (`kvcustody keys`) ends all of them at once.
2. A chunk that was changed, moved, is older, or another's, does not open: vLLM takes it for a miss and computes.
3. All of an engine's requests belong to one owner here. Only vLLM's hash and salt decide who may reuse what, and its
   primary tier is unencrypted. To isolate tenants, use a governed engine (`KVCustody`), which needs no other connector.
4. One thread seals, opens and uses the store, and look-ups use what that thread has reported. If it has not reported an
   object of a shared store, it is asked once for each request. vLLM asks again until the answer comes; after
   `remote_tier_timeout_ms` it is a miss.
5. Chunks are found only under the same weights: `revision`, or else the files' names, sizes and times. Layout, groups
   of layers and parallelism must be the same too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from queue import SimpleQueue
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, Medium, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvcustody.errors import ConfigError
from kvcustody.governance.identity.content_digest import weights_fingerprint
from kvcustody.governance.settings import load_settings
from kvcustody.governance.tiers.owned_copies import Memory, OwnedCopies, OwnedTerms, digest_of
from kvcustody.logger import get_logger

if TYPE_CHECKING:
    from concurrent.futures import Future

_log = get_logger(__name__)


_AGAIN_SECONDS = 1.0  # before what was not there is asked for again
_KNOWN_MAX = 65_536


class CustodyTier(SecondaryTierManager):  # type: ignore[misc]
    """One owner's chunks, sealed. Called on the scheduler's thread."""

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
        root_dir: str | None = None,
        url: str | None = None,
        revision: str = "",
        backpressure_detector: Any = None,
        locality: str | None = None,
    ) -> None:
        """Open the tier with the keys of the environment's settings.

        Raises:
            CustodyError: names what cannot be opened.
        """
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        if seconds <= 0:
            raise ConfigError(f"tier `{tier_type}`: `seconds` is `{seconds}`; copies need a deadline")
        self._slots = np.asarray(primary_kv_view).view(np.uint8)
        config = offloading_spec.config
        folder = path if path is not None else root_dir
        terms = OwnedTerms("vllm", owner, seconds, size_bytes, Path(folder) if folder is not None else None, url)
        model, parallel = config.model, config.parallel
        ranks = (
            parallel.world_size,
            parallel.tp_size,
            parallel.pp_size,
            parallel.pcp_size,
            parallel.dcp_size,
        )
        shape = (self._slots.shape[1:], ranks, config.groups)
        self._wait_seconds = load_settings().remote_tier_timeout_ms / 1000
        self._copies = OwnedCopies(
            terms,
            digest_of(model.dtype, str(config.kv_cache_layout), str(shape)),
            digest_of(model.name, revision or weights_fingerprint(model.name, "")),
            int(self._slots.shape[1]),
            config.cache.tokens_per_hash * config.cache.blocks_per_chunk,
        )
        self._asked: dict[Any, float] = {}  # since when the store is asked for a chunk
        self._asked_for: dict[str, set[Any]] = {}  # by request
        self._to_ask: list[Any] = []
        self._absent: dict[Any, float] = {}  # until when it is not asked again
        self._finished: SimpleQueue[JobResult] = SimpleQueue()
        self._running: set[Future[None]] = set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"kvcustody-{tier_type}")

    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        """Return whether this chunk is known and not due; a shared store may have to be searched first."""
        if self._copies.finds(key):
            return LookupResult.HIT
        now, asked_for = monotonic(), self._asked_for.setdefault(req_context.req_id, set())
        since = self._asked.get(key)
        if since is None:
            if not self._copies.is_shared or key in asked_for or self._absent.get(key, 0.0) > now:
                return LookupResult.MISS
            since = self._asked[key] = now
            self._to_ask.append(key)
        asked_for.add(key)
        return LookupResult.RETRY if now < since + self._wait_seconds else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Seal these slots; vLLM keeps them unchanged until the job ends."""
        self._submit(self._copies.store, job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Open chunks into these slots."""
        self._submit(self._copies.load, job_metadata)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return the jobs that ended since the last call."""
        found = []
        while not self._finished.empty():
            found.append(self._finished.get())
        return found

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """See the interface."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        """Take note that a request ended: another one searches the store again."""
        self._asked_for.pop(req_context.req_id, None)

    def on_schedule_end(self, context: Any) -> None:
        """Search for what this step looked up, and end what is due."""
        if self._to_ask:
            asked, self._to_ask = self._to_ask, []
            self._start(self._seek, asked)
        if self._copies.is_due() and not self._running:
            self._start(self._copies.expire)

    def has_pending_work(self) -> bool:
        """Return whether jobs are running."""
        return bool(self._running or self._to_ask) or not self._finished.empty()

    def drain_jobs(self) -> None:
        """Wait until no job is running."""
        wait(self._running.copy())

    def shutdown(self) -> None:
        """End what does not outlive the process, and forget the keys."""
        self._thread.submit(self._copies.close).result()
        self._thread.shutdown()

    # -- the thread -----------------------------------------------------------------------------------------------

    def _submit(self, act: Callable[[bytes, Memory], bool], job: TransferJob) -> None:
        self._start(self._do, act, job)

    def _start(self, act: Callable[..., None], *arguments: Any) -> None:
        started = self._thread.submit(act, *arguments)
        self._running.add(started)
        started.add_done_callback(self._running.discard)

    def _seek(self, keys: list[Any]) -> None:
        until = monotonic() + _AGAIN_SECONDS
        for key in keys:
            try:
                is_there = self._copies.seek(key)
            except Exception as error:  # whatever it was: it is a miss, and the engine goes on
                _log.error("look-up failed", tier=self.tier_type, error=repr(error))
                is_there = False
            if not is_there:
                if len(self._absent) >= _KNOWN_MAX:
                    self._absent.clear()
                self._absent[key] = until
            del self._asked[key]

    def _do(self, act: Callable[[bytes, Memory], bool], job: TransferJob) -> None:
        began, done = monotonic(), []
        try:
            self._copies.refresh()
            for key, slot in zip(job.keys, job.chunk_ids, strict=True):
                if act(key, self._slots[int(slot)]):
                    done.append(key)
        except Exception as error:  # whatever it was: it is a miss, and the engine goes on
            _log.error("job failed", tier=self.tier_type, error=repr(error))
        self._copies.note()
        size = len(done) * int(self._slots.shape[1])
        is_whole = len(done) == len(job.keys)
        loaded: Collection[Any] | None = done if job.is_promotion else None
        self._finished.put(JobResult(job.job_id, is_whole, loaded, monotonic() - began, size))
