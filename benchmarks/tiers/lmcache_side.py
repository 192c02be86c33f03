"""LMCache's local CPU backend, with runs of 1 MiB in clear: run by `against_lmcache.py` in its own environment.

A line on stdin is one round; the answer is GB/s by what was done. `bytes`: memory in one piece into the backend and
back, through `allocate`, `submit_put_task` and `get_blocking`. `engine`: tokens in a paged pool through
`LMCacheEngine`, whose connector gathers and scatters slots.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.cache_engine import LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface
from lmcache.v1.memory_allocators.mixed_memory_allocator import MixedMemoryAllocator
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

RUNS, LAYERS, HIDDEN, CHUNK = 64, 4, 256, 256
SHAPE = torch.Size([2, LAYERS, CHUNK, HIDDEN])  # of 16-bit numbers: 1 MiB
POOL_BYTES = 256 << 20


class Slots(GPUConnectorInterface):
    """Copies slots of a pool: for each layer keys and values, one row a token."""

    def __init__(self, pool: list[torch.Tensor]) -> None:
        self.pool = pool

    def get_shape(self, num_tokens):  # type: ignore[no-untyped-def]
        return torch.Size([2, LAYERS, num_tokens, HIDDEN])

    def from_gpu(self, memory_obj, start, end, **kwargs):  # type: ignore[no-untyped-def]
        slots = kwargs["slot_mapping"][start:end]
        for layer, kept in enumerate(self.pool):
            memory_obj.tensor[:, layer] = kept[:, slots]

    def to_gpu(self, memory_obj, start, end, **kwargs):  # type: ignore[no-untyped-def]
        slots = kwargs["slot_mapping"][start:end]
        for layer, kept in enumerate(self.pool):
            kept[:, slots] = memory_obj.tensor[:, layer]

    def batched_from_gpu(self, memory_objs, starts, ends, **kwargs):  # type: ignore[no-untyped-def]
        for each in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(*each, **kwargs)

    def batched_to_gpu(self, memory_objs, starts, ends, **kwargs):  # type: ignore[no-untyped-def]
        for each in zip(memory_objs, starts, ends, strict=True):
            self.to_gpu(*each, **kwargs)


class Backend:
    """The backend alone."""

    def __init__(self) -> None:
        config = LMCacheEngineConfig.from_defaults(local_cpu=True, chunk_size=CHUNK)
        self.backend = LocalCPUBackend(config, memory_allocator=MixedMemoryAllocator(POOL_BYTES))
        self.content = torch.randint(0, 1 << 15, (RUNS, *SHAPE), dtype=torch.int16).view(torch.float16)
        self.back = torch.empty_like(self.content)

    def key(self, number: int) -> CacheEngineKey:
        return CacheEngineKey("model", 1, 0, number, torch.float16)

    def store(self) -> None:
        for number in range(RUNS):
            kept = self.backend.allocate(SHAPE, torch.float16, MemoryFormat.KV_2LTD)
            kept.tensor.copy_(self.content[number])
            self.backend.submit_put_task(self.key(number), kept)
            kept.ref_count_down()

    def load(self) -> None:
        for number in range(RUNS):
            kept = self.backend.get_blocking(self.key(number))
            self.back[number].copy_(kept.tensor)
            kept.ref_count_down()

    def clear(self) -> None:
        for number in range(RUNS):
            self.backend.remove(self.key(number))

    def check(self) -> None:
        assert torch.equal(self.content.view(torch.int16), self.back.view(torch.int16))


class Engine:
    """The whole engine, over a pool whose slots lie in blocks of 16 in any order."""

    def __init__(self) -> None:
        config = LMCacheEngineConfig.from_defaults(
            local_cpu=True, chunk_size=CHUNK, max_local_cpu_size=POOL_BYTES / (1 << 30)
        )
        metadata = LMCacheMetadata("model", 1, 1, 0, 0, torch.float16, (LAYERS, 2, CHUNK, 8, HIDDEN // 8))
        self.pool = [torch.randn(2, RUNS * CHUNK, HIDDEN).half() for _ in range(LAYERS)]
        self.before = [layer.clone() for layer in self.pool]
        self.engine = LMCacheEngineBuilder.get_or_create(
            "bench", config, metadata, Slots(self.pool), lambda *_: None, lambda value, _: value
        )
        self.engine.post_init()
        blocks = torch.randperm(RUNS * CHUNK // 16)
        slots = (blocks[:, None] * 16 + torch.arange(16)).reshape(RUNS, CHUNK)
        self.slots = list(slots)
        self.tokens = [torch.arange(CHUNK) + CHUNK * number for number in range(RUNS)]

    def store(self) -> None:
        for tokens, slots in zip(self.tokens, self.slots, strict=True):
            self.engine.store(tokens, slot_mapping=slots)

    def load(self) -> None:
        for tokens, slots in zip(self.tokens, self.slots, strict=True):
            assert int(self.engine.retrieve(tokens, slot_mapping=slots).sum()) == CHUNK

    def clear(self) -> None:
        self.engine.clear()

    def check(self) -> None:
        for layer in self.pool:
            layer.zero_()
        self.load()
        assert all(map(torch.equal, self.pool, self.before))


def gbps(run) -> float:  # type: ignore[no-untyped-def]
    begun = time.perf_counter()
    run()
    return RUNS * (1 << 20) / (time.perf_counter() - begun) / 1e9


def main() -> None:
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else it prints
    sides = {"bytes": Backend(), "engine": Engine()}
    for side in sides.values():
        side.store()
        side.load()
        side.check()
        side.clear()
    print("ready", file=out, flush=True)
    for name in map(str.strip, sys.stdin):
        side = sides[name]
        found = {"store": gbps(side.store), "load": gbps(side.load)}
        side.clear()
        print(json.dumps(found), file=out, flush=True)
    os._exit(0)  # its own threads do not end


if __name__ == "__main__":
    main()
