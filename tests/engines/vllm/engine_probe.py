"""Eyes inside an engine's processes, for tests only: loaded as a vLLM plugin (engine_site), called by name.

P1 In the worker: before each forward pass, every block that the step was handed is read back. What is not zero then was
   somebody's, and is about to become somebody else's.
P2 In the EngineCore: vLLM's own pool and queues. Answers are plain numbers and texts.
"""

from __future__ import annotations

import os
from typing import Any

import torch


def register() -> None:
    """vLLM's plugin hook: one more utility on EngineCore."""
    from vllm.v1.engine.core import EngineCore

    EngineCore.probe = _probe  # type: ignore[attr-defined]


def _probe(core: Any, name: str, *arguments: Any) -> Any:
    return _ENGINE[name](core, *arguments)


class WorkerProbe:
    """`--worker-extension-cls`: mixed into vLLM's worker. Layers' tensors have blocks in their first dimension."""

    model_runner: Any

    def watch_writes(self) -> int:
        """Read back every block that a step was handed, before the step writes (P1). Returns this process's id."""
        runner = self.model_runner
        execute, forward = runner.execute_model, runner._model_forward
        self._handed: list[int] = []
        self._report = {"steps": 0, "blocks": 0, "dirty_blocks": 0, "nonzero_bytes": 0}

        def execute_model(scheduled: Any, *arguments: Any, **named: Any) -> Any:
            self._handed = handed_out(scheduled, self._block_tokens())
            return execute(scheduled, *arguments, **named)

        def model_forward(*arguments: Any, **named: Any) -> Any:
            self._read_back()
            return forward(*arguments, **named)

        runner.execute_model, runner._model_forward = execute_model, model_forward
        return os.getpid()

    def write_report(self) -> dict[str, int]:
        """Blocks handed out since the last report, and what was in them when the first write was due."""
        report, self._report = self._report, dict.fromkeys(self._report, 0)
        return report

    def block_residue(self) -> list[int]:
        """Bytes that are not zero, block by block."""
        return sum(_nonzero(cache) for cache in self._caches()).tolist()  # type: ignore[union-attr]

    def find_bytes(self, needle: list[int], layer: int = 0) -> list[int]:
        """Blocks in which these bytes of one layer's tensor lie, at any place."""
        cache = self._caches()[layer]
        flat = [
            bytes(cache[block].contiguous().view(torch.uint8).flatten().tolist())
            for block in range(len(cache))
        ]
        return [block for block, content in enumerate(flat) if bytes(needle) in content]

    def block_bytes(self, block: int) -> list[int]:
        """Everything that one block holds, layer after layer."""
        parts = [cache[block].contiguous().view(torch.uint8).flatten() for cache in self._caches()]
        return torch.cat(parts).tolist()

    def soil(self, blocks: list[int]) -> None:
        """Write ones into blocks: what a crash of the scrub would leave."""
        for cache in self._caches():
            cache[torch.tensor(blocks)] = 1

    def _caches(self) -> list[torch.Tensor]:
        seen: dict[tuple[int, tuple[int, ...]], torch.Tensor] = {}
        for cache in self.model_runner.kv_caches:
            seen.setdefault((cache.data_ptr(), tuple(cache.shape)), cache)
        return list(seen.values())

    def _block_tokens(self) -> list[int]:
        return [group.kv_cache_spec.block_size for group in self.model_runner.kv_cache_config.kv_cache_groups]

    def _read_back(self) -> None:
        handed, self._handed = self._handed, []
        self._report["steps"] += 1
        if not handed:
            return
        which = torch.tensor(sorted(set(handed)))
        residue = sum(_nonzero(cache[which]) for cache in self._caches())
        self._report["blocks"] += len(which)
        self._report["dirty_blocks"] += int((residue > 0).sum())  # type: ignore[union-attr]
        self._report["nonzero_bytes"] += int(residue.sum())  # type: ignore[union-attr]


def handed_out(scheduled: Any, block_tokens: list[int]) -> list[int]:
    """The blocks that a step may write for the first time: new ones, not those of a cached prefix; never the null block."""
    blocks: list[int] = []
    for request in scheduled.scheduled_new_reqs:
        blocks += _beyond(request.block_ids, request.num_computed_tokens, block_tokens)
    cached = scheduled.scheduled_cached_reqs
    for request_id, new, computed in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    ):
        if new is None:
            continue
        resumed = request_id in cached.resumed_req_ids
        blocks += _beyond(new, computed if resumed else 0, block_tokens)
    return [block for block in blocks if block]


def _beyond(groups: Any, computed_tokens: int, block_tokens: list[int]) -> list[int]:
    return [
        block
        for ids, size in zip(groups, block_tokens, strict=True)
        for block in ids[computed_tokens // size :]
    ]


def _nonzero(cache: torch.Tensor) -> torch.Tensor:
    return (cache.contiguous().view(torch.uint8).flatten(1) != 0).sum(1)


# -- EngineCore -----------------------------------------------------------------------------------------------------------


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
        "skipped": [request.request_id for request in scheduler.skipped_waiting],
    }


_ENGINE = {"pool": _pool, "requests": _requests}
