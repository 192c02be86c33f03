"""One LMCache adapter of ours, a directory of salts as a governed engine writes it, and LMCache's own objects."""

from __future__ import annotations

import select
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

from kvcustody.integrations.lmcache.l2_adapter import CustodyL2Adapter
from standins.integrations.chunk_site import CHUNK_TOKENS, WORKER, ChunkSite

SHAPE = (2, 4, 64, 32)


class ChunkWorld(ChunkSite):
    """Close it. `folder`, `url`, `worker` as of `ChunkSite`."""

    def __init__(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        *,
        url: str = "",
        worker: str = WORKER,
        **settings: str,
    ) -> None:
        super().__init__(folder, monkeypatch, url=url, worker=worker, **settings)
        try:
            self.adapter = CustodyL2Adapter({"chunk_tokens": CHUNK_TOKENS}, l1_memory_desc=None)
        except BaseException:
            super().close()
            raise
        self.adapter.set_backend_identity("plugin")

    def done(self, task_kind: int, task: int, seconds: float = 20.0) -> Any:
        """The result of a task, when its event has come."""
        adapter = self.adapter
        fd = (adapter.get_store_event_fd, adapter.get_lookup_and_lock_event_fd, adapter.get_load_event_fd)[task_kind]()
        take = (
            lambda number: adapter.pop_completed_store_tasks().get(number),
            adapter.query_lookup_and_lock_result,
            adapter.query_load_result,
        )[task_kind]
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            select.select([fd], [], [], 0.05)
            result = take(task)
            if result is not None:
                return result
        raise AssertionError("no answer")

    def store(self, keys: list[ObjectKey], objects: list[TensorMemoryObj]) -> int:
        """How many bytes were kept."""
        return int(self.done(0, self.adapter.submit_store_task(keys, objects)).bytes_transferred())

    def found(self, keys: list[ObjectKey]) -> list[bool]:
        """Which of them a look-up finds."""
        shape, dtype = torch.Size(SHAPE), torch.float16
        layout = MemoryLayoutDesc(shapes=[shape], dtypes=[dtype])
        bitmap = self.done(1, self.adapter.submit_lookup_and_lock_task(keys, {0: layout}))
        return [bool(bitmap.test(at)) for at in range(len(keys))]

    def load(self, keys: list[ObjectKey]) -> list[TensorMemoryObj | None]:
        """What comes of them, found or not."""
        objects = [chunk(0) for _ in keys]
        bitmap = self.done(2, self.adapter.submit_load_task(keys, objects))
        return [one if bitmap.test(at) else None for at, one in enumerate(objects)]

    def close(self) -> None:
        """Stop in order."""
        self.adapter.close()
        super().close()


def key(number: int, salt: str, *, model: str = "tiny", rank: int = 0, group: int = 0) -> ObjectKey:
    """A key as LMCache makes it."""
    return ObjectKey(number.to_bytes(32, "big"), model, rank, group, salt)


def chunk(seed: int) -> TensorMemoryObj:
    """An object of one chunk's size with content that no other seed has."""
    torch.manual_seed(seed)
    shape, dtype = torch.Size(SHAPE), torch.float16
    data = torch.randn(shape).to(dtype) if seed else torch.zeros(shape, dtype=dtype)
    raw = data.contiguous().view(torch.uint8).flatten()
    metadata = MemoryObjMetadata(shape, dtype, 0, raw.numel(), 1, fmt=MemoryFormat.KV_2LTD)
    return TensorMemoryObj(raw, metadata, parent_allocator=None)


def content(one: TensorMemoryObj) -> bytes:
    """Its bytes."""
    return bytes(one.byte_array)
