"""Dynamo's `SelectionService` over workers that publish their blocks on loopback in vLLM's format.

It runs in Dynamo's own environment, and needs ai-dynamo-runtime, pyzmq and msgspec, nothing of this package: scripts
that anybody runs read it as a file.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any

BLOCK_TOKENS = 16
MODEL = "toy"


def worker_record(number: int, url: str, events: str, **more: Any) -> dict[str, Any]:
    """Return a worker's registration. `events`: the address of its block events; without one the service never chooses
    it.
    """
    record: dict[str, Any] = {
        "worker_id": number,
        "model_name": MODEL,
        "block_size": BLOCK_TOKENS,
        "endpoint": url,
        "kv_events_endpoint": events,
        "data_parallel_start_rank": 0,
        "data_parallel_size": 1,
        "total_kv_blocks": 100_000,
        "max_num_batched_tokens": 8192,
    }
    return record | more


def overlap(answer: Mapping[str, Any]) -> int:
    """Return the largest number of blocks that the answer attributes to any worker."""
    scored = answer.get("scores") or answer.get("workers") or []
    found = [each.get("overlap_blocks", each.get("device_blocks", 0)) for each in scored if isinstance(each, dict)]
    return max([0, *(value or 0 for value in found)])


class EventSource:
    """One worker's block events; `number` is the worker's. `context`: a `zmq.Context`."""

    def __init__(self, context: Any, number: int) -> None:
        import zmq

        self._number, self._sequence = number, 0
        self._socket = context.socket(zmq.PUB)
        self._socket.set_hwm(0)
        self.endpoint = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"

    @property
    def record(self) -> dict[str, Any]:
        """The worker's registration, with an address where nothing listens."""
        return worker_record(self._number, f"http://127.0.0.1:{20_000 + self._number}", self.endpoint)

    def store(self, hashes: Sequence[int], tokens: Sequence[int], salt: str, parent: int | None = None) -> None:
        """Publish that the worker has the blocks of a prompt; `parent` is the last block published before them."""
        event = {
            "type": "BlockStored",
            "block_hashes": [*hashes],
            "parent_block_hash": parent,
            "token_ids": [*tokens],
            "block_size": BLOCK_TOKENS,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "cache_salt": salt,
        }
        self._tell(event)

    def remove(self, hashes: Sequence[int]) -> None:
        """Publish that the worker no longer has these blocks."""
        self._tell({"type": "BlockRemoved", "block_hashes": [*hashes], "medium": "GPU"})

    def _tell(self, event: dict[str, Any]) -> None:
        import msgspec

        batch = msgspec.msgpack.encode([time.time(), [event], 0])
        self._socket.send_multipart([b"", struct.pack(">Q", self._sequence), batch])
        self._sequence += 1
