"""The worker half of the connector: loads claimed content onto the device, and stores computed blocks sealed.

1. A block is one row of the engine's pool, with all its layers: loads are complete before the step's first layer, and
   blocks are read after its last.
2. A load that cannot be done whole stops the engine (`transfer_thread`, rule 2); a block that cannot be kept is a miss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvcustody.errors import ConfigError, IsolationError
from kvcustody.integrations.tensorrt_llm.engine_protocol import StepOrders
from kvcustody.integrations.tensorrt_llm.transfer_thread import ComputedRun, TransferThread

_NO_ORDERS = StepOrders()


class WorkerHalf:
    """The worker half. Called on the engine's thread."""

    def __init__(self, thread: TransferThread, block_tokens: int, take_run: Callable[[int], ComputedRun]) -> None:
        self._thread = thread
        self._block_tokens = block_tokens
        self._take_run = take_run
        self._rows: torch.Tensor | None = None
        self.counts: Counter[str] = Counter()

    def register(self, pool: torch.Tensor) -> int:
        """Take the engine's pool, one block per first index; return the bytes of a block.

        Raises:
            CustodyError: the pool cannot be used.
        """
        if self._rows is not None:
            raise ConfigError("TensorRT-LLM registered a second pool; only one can be governed")
        if pool.dim() < 2 or not pool.is_contiguous():
            raise ConfigError(
                f"TensorRT-LLM's pool of shape `{tuple(pool.shape)}` does not have its blocks one after the other: "
                "models with several pools or layer groups are not governed"
            )
        self._rows = pool.view(pool.shape[0], -1).view(torch.uint8)
        size = int(self._rows.shape[1])
        self._thread.open(size, self._block_tokens)
        self._thread.run(lambda chunks: None).result()  # what cannot be opened is said now
        return size

    def load(self, orders: StepOrders | None) -> None:
        """Load claims before the step's first layer.

        Raises:
            IsolationError: a claim is gone.
        """
        for order in (orders or _NO_ORDERS).loads:
            rows, places = self._places(order.blocks)
            with self._thread.hold(order.claim) as content:
                at = 0
                self._wait(rows)
                for part in content:
                    blocks = len(part) // int(rows.shape[1])
                    source = torch.frombuffer(part, dtype=torch.uint8).view(-1, rows.shape[1])
                    take = min(blocks, len(order.blocks) - at)
                    rows[places[at : at + take]] = source[:take].to(rows.device)
                    at += take
                self._wait(rows)
            if at != len(order.blocks):
                raise IsolationError(f"claim `{order.claim}` has fewer blocks than were promised")
            self.counts["loaded blocks"] += at

    def save(self, orders: StepOrders | None, stream: Any) -> None:
        """Save blocks after the step's last layer."""
        saves = (orders or _NO_ORDERS).saves
        if saves and stream is not None:
            stream.synchronize()
        for order in saves:
            rows, places = self._places(order.blocks)
            content = bytearray(rows[places].cpu().numpy().tobytes())
            self.counts["kept blocks"] += self._thread.keep(self._take_run(order.number), content)

    def _places(self, blocks: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self._rows
        if rows is None:
            raise IsolationError("TensorRT-LLM scheduled transfers before it registered its pool")
        if any(not 0 <= one < len(rows) for one in blocks) or len(set(blocks)) != len(blocks):
            raise IsolationError(f"blocks `{list(blocks)[:8]}` are not places of this pool, each once")
        return rows, torch.tensor(list(blocks), dtype=torch.int64, device=rows.device)

    @staticmethod
    def _wait(rows: torch.Tensor) -> None:
        if rows.device.type == "cuda":
            torch.cuda.synchronize(rows.device)
