"""Eyes inside an engine's processes, for tests only: loaded as a vLLM plugin (engine_site), called by name.

- In the worker: before the model runner (V1 or V2) begins a step, every block that the step was handed is read back.
   What is not zero then was somebody's, and is about to become somebody else's.
- In the EngineCore: vLLM's own pool and queues. Answers are plain numbers and texts.
"""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import torch

SOILED = "ENGINE_PROBE_SOILED"  # in the environment: new caches are not zero
_preempted: list[str] = []
_steps = [0]  # that computed something
_lives: dict[str, list[int]] = {}  # by request: `_steps` when it came, and when it was over


def register() -> None:
    """vLLM's plugin hook: one more utility on EngineCore."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

    from standins.engines.releases.tried_release import widen

    widen("vllm")
    if hasattr(EngineCore, "probe"):
        return
    EngineCore.probe = _probe
    preempts = Scheduler._preempt_request

    def preempt_request(self: Any, request: Any, *arguments: Any, **named: Any) -> Any:
        _preempted.append(request.request_id)
        return preempts(self, request, *arguments, **named)

    Scheduler._preempt_request = preempt_request
    _count_steps(Scheduler)
    if os.environ.get(SOILED):
        _soil_new_caches()


def _count_steps(scheduler: Any) -> None:
    adds, schedules = scheduler.add_request, scheduler.schedule

    def add_request(self: Any, request: Any) -> None:
        _lives[request.request_id] = [_steps[0]]
        adds(self, request)

    def schedule(self: Any, *arguments: Any, **named: Any) -> Any:
        output = schedules(self, *arguments, **named)
        for request_id in output.finished_req_ids:
            _lives[request_id].append(_steps[0])
        _steps[0] += bool(output.total_num_scheduled_tokens)
        return output

    scheduler.add_request, scheduler.schedule = add_request, schedule


def _soil_new_caches() -> None:
    """Let every new cache hold what a dead process might have left there, before anybody is told of it."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    allocates = GPUModelRunner.initialize_kv_cache_tensors

    def initialize_kv_cache_tensors(self: Any, *arguments: Any, **named: Any) -> Any:
        caches = allocates(self, *arguments, **named)
        for cache in self.kv_caches:
            cache.fill_(1)
        self.soiled_bytes = sum(int(_nonzero(cache).sum()) for cache in self.kv_caches)
        return caches

    GPUModelRunner.initialize_kv_cache_tensors = initialize_kv_cache_tensors


def _probe(core: Any, name: str, *arguments: Any) -> Any:
    return _ENGINE[name](core, *arguments)


# What each runner calls first with a step, before it writes anything of its own: V1, V2.
_BEGINNINGS = ("_update_states", "finish_requests")


class WorkerProbe:
    """`--worker-extension-cls`: mixed into vLLM's worker. Layers' tensors have blocks in their first dimension."""

    model_runner: Any
    rank: int

    def watch_writes(self) -> int:
        """Read back every block that a step was handed, before the step writes. Returns this process's id."""
        runner = self.model_runner
        (name,) = (one for one in _BEGINNINGS if hasattr(runner, one))
        begin = getattr(runner, name)
        self._report = {"steps": 0, "blocks": 0, "dirty_blocks": 0, "nonzero_bytes": 0, "drafted": 0}

        def begun(scheduled: Any, *arguments: Any, **named: Any) -> Any:
            self._read_back(scheduled)
            return begin(scheduled, *arguments, **named)

        setattr(runner, name, begun)
        return os.getpid()

    def slow_steps(self, seconds: float) -> None:
        """Every step that computes something takes so much longer from now on."""
        runner = self.model_runner
        computes = runner.execute_model

        def compute(scheduled: Any, *arguments: Any, **named: Any) -> Any:
            if scheduled.total_num_scheduled_tokens:
                time.sleep(seconds)
            return computes(scheduled, *arguments, **named)

        runner.execute_model = compute

    def write_report(self) -> dict[str, int]:
        """Blocks handed out since the last report, and what was in them when the first write was due."""
        report, self._report = self._report, dict.fromkeys(self._report, 0)
        return report

    def block_residue(self) -> list[int]:
        """Bytes that are not zero, block by block."""
        return sum(_nonzero(cache) for cache in self._caches()).tolist()  # type: ignore[union-attr]

    def flip_bits(self, block: int, rank: int, every: bool) -> int:
        """Change a block behind everybody's back: the sign of every value, or one bit of one. How many values."""
        if self.rank != rank:
            return 0
        caches = self._caches()
        before = [cache[block].clone() for cache in caches]
        for cache in caches if every else caches[:1]:
            row = cache[block].view(torch.uint8)
            row[slice(1, None, 2) if every else slice(7, 8)] ^= 0x80 if every else 0x01
        return sum(int((cache[block] != was).sum()) for cache, was in zip(self._caches(), before, strict=True))

    def soiled_bytes(self) -> int:
        """What `SOILED` left in the cache before the engine was told of it."""
        return int(getattr(self.model_runner, "soiled_bytes", 0))

    def _caches(self) -> list[torch.Tensor]:
        """Every layer's views with the manager's blocks first: a kernel may count smaller ones."""
        blocks = self.model_runner.kv_cache_config.num_blocks
        seen: dict[tuple[int, tuple[int, ...]], torch.Tensor] = {}
        for layer in self.model_runner.kv_caches:
            for view in [layer] if isinstance(layer, torch.Tensor) else layer:
                seen.setdefault((view.data_ptr(), tuple(view.shape)), view)
        return [view.reshape(blocks, -1) for view in seen.values()]

    def tier_fault(self, name: str, kind: str, seconds: float = 0.0, rank: int | None = None) -> int:
        """Make a tier's store misbehave from now on, of all workers or of one; `none`: no more.

        How many objects were changed.
        """
        from kvcustody.errors import StoreError

        if rank not in (None, self.rank):
            return 0
        store, changed = _bare(_tiers().threads[name].store), 0
        for method in ("prepare_load", "prepare_store", "complete_store", "delete", "_allocate"):
            store.__dict__.pop(method, None)

        def fails(*_: Any) -> Any:
            raise StoreError("told to fail")

        def has_no_space(*_: Any) -> Any:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def slowly(call: Any) -> Any:
            def late(*arguments: Any) -> Any:
                time.sleep(seconds)
                return call(*arguments)

            return late

        if kind == "loads fail":
            store.prepare_load = fails
        elif kind == "stores fail":
            store.complete_store = fails
        elif kind == "deletes fail":
            store.delete = fails
        elif kind == "full" and name == "nvme":
            store._allocate = has_no_space
        elif kind == "full":
            store.prepare_store = lambda *_: None
        elif kind == "slow":
            store.prepare_load = slowly(store.prepare_load)
        elif kind == "stores slow":
            store.complete_store = slowly(store.complete_store)
        elif kind == "lies" and name == "nvme":
            for file in _objects(store.folder):
                content = bytearray(file.read_bytes())
                content[-40] ^= 1
                file.write_bytes(content)
                changed += 1
        elif kind in ("lies", "newest lies"):
            every = list(store._placed.values())
            for placed in every if kind == "lies" else every[-1:]:
                store._view[placed.start + placed.size - 40] ^= 1
                changed += 1
        return changed

    def plant_orphans(self, name: str, rank: int = 0) -> int:
        """Put an object that no index names into a tier's store, and take one away that the index has; its blocks."""
        if self.rank != rank:
            return 0
        thread = _tiers().threads[name]
        into = thread.store.prepare_store(bytes(32), 100)
        into.release()
        thread.store.complete_store(bytes(32))
        copy = thread.tier.copies()[0]
        assert thread.store.delete([copy.name]).objects == 1
        return int(copy.blocks)

    def store_has(self, name: str, key: bytes = bytes(32)) -> bool:
        """Whether a tier's store of this worker says that it has an object."""
        return any(one.name == key for one in _tiers().threads[name].store.page(b"", 10_000))

    def tier_has(self, name: str, content: bytes) -> dict[str, int]:
        """How often some bytes are in what a tier of this worker keeps, and in its buffers for plaintext."""
        tiers = _tiers()
        thread = tiers.threads[name]
        store = _bare(thread.store)
        kept = [bytes(store._map)] if name == "host" else [file.read_bytes() for file in _objects(store.folder)]
        buffers = [memory for staging in (tiers.staging, thread.staging) for memory, _ in staging._free]
        return {
            "store": sum(one.count(content) for one in kept),
            "staging": sum(bytes(memory[:]).count(content) for memory in buffers),
            "used": thread.store.used_bytes,
        }

    def clear_tier_has(self, content: bytes) -> int:
        """How often some bytes are in the arena of vLLM's own host tier."""
        from standins.engines.vllm import clear_offload

        (worker,) = clear_offload.workers
        return sum(arena.numpy().tobytes().count(content) for arena in worker.arena)

    def block_content(self, block: int, size: int = 64) -> bytes:
        """The beginning of what a block of this worker holds."""
        for cache in self._caches():
            content = bytes(cache[block].contiguous().view(torch.uint8).flatten()[:size].tolist())
            if any(content):
                return content
        return b""

    def _block_tokens(self) -> list[int]:
        return [group.kv_cache_spec.block_size for group in self.model_runner.kv_cache_config.kv_cache_groups]

    def _read_back(self, scheduled: Any) -> None:
        handed = handed_out(scheduled, self._block_tokens())
        self._report["steps"] += 1
        self._report["drafted"] += sum(map(len, scheduled.scheduled_spec_decode_tokens.values()))
        if not handed:
            return
        which = torch.tensor(sorted(set(handed)))
        residue = sum(_nonzero(cache[which]) for cache in self._caches())
        self._report["blocks"] += len(which)
        self._report["dirty_blocks"] += int((residue > 0).sum())  # type: ignore[union-attr]
        self._report["nonzero_bytes"] += int(residue.sum())  # type: ignore[union-attr]


def _bare(store: Any) -> Any:
    """A tier's store without its guard."""
    return getattr(store, "_store", store)


def _objects(folder: Path) -> list[Path]:
    """The objects of a tier of files."""
    return [file for file in folder.glob("??/*") if len(file.name) == 64]


def _tiers() -> Any:
    """The governed connector's tiers of this worker."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group().worker_side.tiers


def handed_out(scheduled: Any, block_tokens: list[int]) -> list[int]:
    """The blocks that a step may write for the first time: not those of a cached prefix, never the null block."""
    blocks: list[int] = []
    for request in scheduled.scheduled_new_reqs:
        blocks += _beyond(request.block_ids, request.num_computed_tokens, block_tokens)
    cached = scheduled.scheduled_cached_reqs
    for request_id, new, computed in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
        if new is None:
            continue
        resumed = request_id in cached.resumed_req_ids
        blocks += _beyond(new, computed if resumed else 0, block_tokens)
    return [block for block in blocks if block]


def _beyond(groups: Any, computed_tokens: int, block_tokens: list[int]) -> list[int]:
    return [block for ids, size in zip(groups, block_tokens, strict=True) for block in ids[computed_tokens // size :]]


def _nonzero(cache: torch.Tensor) -> torch.Tensor:
    return (cache.contiguous().view(torch.uint8).flatten(1) != 0).sum(1)


# -- EngineCore -----------------------------------------------------------------------------------------------


def _pool(core: Any) -> dict[str, Any]:
    """vLLM's own books: references, index and free queue of every block."""
    pool = core.scheduler.kv_cache_manager.block_pool
    return {
        "pid": os.getpid(),
        "class": type(pool).__name__,
        "refs": [block.ref_cnt for block in pool.blocks],
        "indexed": [block.block_hash is not None for block in pool.blocks],
        "free": pool.get_num_free_blocks(),
        "entries": len(pool.cached_block_hash_to_block),
        "null": pool.null_block.block_id,
    }


def _requests(core: Any) -> dict[str, list[str]]:
    """Ids of the requests that run and that wait."""
    scheduler = core.scheduler
    return {
        "running": [request.request_id for request in scheduler.running],
        "waiting": [request.request_id for request in scheduler.waiting],
        "skipped": [request.request_id for request in getattr(scheduler, "skipped_waiting", ())],
    }


def _preemptions(core: Any) -> list[str]:
    """Requests that vLLM's scheduler preempted since the last question."""
    found = list(map(_as_submitted, _preempted))
    _preempted.clear()
    return found


def _steps_lived(core: Any, request_id: str) -> int:
    """In how many steps that computed something a request that is over was there."""
    (first, last) = next(steps for one, steps in _lives.items() if _as_submitted(one) == request_id)
    return last - first


def _declare(core: Any, what: tuple[str, str, list[int]]) -> dict[str, Any]:
    """What a policy says of a segment of the engine's own model, made with the secret of its owner (issuer, tenant)."""
    from kvcustody.governance.decisions.segment_matcher import declare
    from kvcustody.governance.identity.domain_spec import tenant_owner

    side = core.scheduler.connector.scheduler_side
    model, block_tokens = side._models.of(None).digest, side.state.block_tokens
    issuer, owner, tokens = what
    who = tenant_owner(issuer, owner)
    made = declare(side.port.keyring, who, tokens, model=model, block_tokens=block_tokens)
    return {"digest": made.digest, "tokens": made.tokens, "blocks": made.blocks}


def _tier_copies(core: Any, name: str) -> dict[str, int]:
    """Blocks in copies of one tier by tenant, as the scheduler's half knows them."""
    found: dict[str, int] = {}
    for copy in core.scheduler.connector.scheduler_side.tiers.directories[name].copies():
        found[copy.tenant] = found.get(copy.tenant, 0) + copy.blocks
    return found


def _tier_cost(core: Any, what: tuple[str, int, int]) -> None:
    """From now on computing takes this (µs), a transfer 100 µs, and the tier's link has passed over so many stores."""
    name, recompute_us, skipped = what
    tiers = core.scheduler.connector.scheduler_side.tiers
    tiers._recompute_us = lambda blocks, depth: recompute_us
    link = tiers._links[name]
    for size in (1_000, 10_000, 100_000, 1_000_000):
        link.stores.learn(size, 100)
        link.restores.learn(size, 100)
    link.skipped = skipped


def _forget_refused_runs(core: Any) -> None:
    """Each run is tried by itself, whatever goes before it in its chain."""
    core.scheduler.connector.scheduler_side.tiers._refuse = lambda tier, run: None


def _as_submitted(request_id: str) -> str:
    """vLLM appends a random part to the id that a request came with."""
    return request_id.rpartition("-")[0] or request_id


_ENGINE = {
    "preemptions": _preemptions,
    "pool": _pool,
    "requests": _requests,
    "steps_lived": _steps_lived,
    "declare": _declare,
    "tier_copies": _tier_copies,
    "tier_cost": _tier_cost,
    "forget_refused_runs": _forget_refused_runs,
}
