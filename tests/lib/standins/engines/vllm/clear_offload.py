"""vLLM's own OffloadingConnector on the CPU, with its own manager: what a host tier is without custody.

`CPUOffloadingSpec` moves blocks of CUDA devices. Here the device's tensors are the host's already, so moving is
copying, into an arena in clear. `ClearTieringSpec` does so below vLLM's own tiering, whose secondary tiers read and
write the arena: vLLM's manager, lookups and promotions are its own.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

workers: list[ClearWorker] = []  # of this process, for eyes on it


class ClearWorker(OffloadingWorker):
    """Copies between the cache and an arena of chunks."""

    def __init__(
        self, caches: Any, blocks_per_chunk: int, chunks: int, region: SharedOffloadRegion | None = None
    ) -> None:
        """`region`: the arena's memory, where the scheduler has it too."""
        self.caches = caches
        self.blocks_per_chunk = blocks_per_chunk
        self.region = region
        self.arena = [
            torch.zeros((chunks, blocks_per_chunk, tensor.page_size_bytes), dtype=torch.int8)
            if region is None
            else region.create_next_worker_view(blocks_per_chunk * tensor.page_size_bytes).unflatten(
                1, (blocks_per_chunk, tensor.page_size_bytes)
            )
            for tensor in caches.tensors
        ]
        self.bytes = {"store": 0, "load": 0}
        self._done: list[TransferResult] = []
        workers.append(self)

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """From the cache."""
        return self._move(job_id, src_spec, dst_spec.block_ids, "store")

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, **_: Any) -> bool:
        """Into the cache."""
        return self._move(job_id, dst_spec, src_spec.block_ids, "load")

    def _move(self, job_id: int, device: Any, chunks: Any, way: str) -> bool:
        began, moved, first, chunk = time.perf_counter(), 0, 0, 0
        for group, (count, index) in enumerate(zip(device.group_sizes, device.block_indices, strict=True)):
            if not count:
                continue
            places = np.arange(count) + index % self.blocks_per_chunk
            rows = torch.from_numpy(chunks[chunk + places // self.blocks_per_chunk].astype(np.int64))
            within = torch.from_numpy((places % self.blocks_per_chunk).astype(np.int64))
            chunk += int(places[-1] // self.blocks_per_chunk) + 1
            blocks = torch.from_numpy(device.block_ids[first : first + count].astype(np.int64))
            for reference in self.caches.group_data_refs[group]:
                cache = self.caches.tensors[reference.tensor_idx].tensor
                arena = self.arena[reference.tensor_idx]
                if way == "store":
                    arena[rows, within] = cache[blocks]
                else:
                    cache[blocks] = arena[rows, within]
                moved += count * reference.page_size_bytes
            first += count
        self.bytes[way] += moved
        self._done.append(TransferResult(job_id, True, moved, max(time.perf_counter() - began, 1e-9)))
        return True

    def get_finished(self) -> list[TransferResult]:
        """All of them: nothing is asynchronous here."""
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is under way."""


class ClearOffloadingSpec(CPUOffloadingSpec):
    """vLLM's spec, for the CPU platform."""

    def get_worker(self, kv_caches: Any) -> ClearWorker:
        """Made once."""
        if not self._worker:
            self._worker = ClearWorker(kv_caches, self.blocks_per_chunk, self.num_chunks)
        return self._worker


class ClearTieringSpec(TieringOffloadingSpec):
    """vLLM's spec with secondary tiers, for the CPU platform."""

    def get_worker(self, kv_caches: Any) -> ClearWorker:
        """Made once."""
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = ClearWorker(kv_caches, self.blocks_per_chunk, self.num_chunks, region)
        return self._worker
