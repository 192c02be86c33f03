"""Messages between the scheduler's side and the workers: one order per step, and receipts.

1. Both ways everything is numbers and names of methods: no tokens, no keys, no identity. Where copies go to tiers, jobs
   about them say whose they are and under which index keys they are found (`tiers.tier_messages`, rule 1).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvcustody.allocator.external.block_sums import SumOrder
from kvcustody.allocator.external.scrub_queue import ScrubOrder
from kvcustody.integrations.vllm.tiers.tier_messages import CopyJob, CopyReply
from kvcustody.integrations.vllm.worker.loaded_adapters import LoadedAdapter

if TYPE_CHECKING:
    from kvcustody.allocator.pool.block_state import Blocks
    from kvcustody.allocator.pool.memory_protocol import ScrubResult


@dataclass(slots=True)
class StepOrder(KVConnectorMetadata):  # type: ignore[misc]
    """What the workers must do before any other write in this step.

    is_idle: no request computes in this step, so a worker may wait for scrubs that are still on the device.
    must_follow: this step hands out a block whose scrub has not been answered, so its writes follow every scrub so far.
    sums: blocks to checksum, and blocks to compare with theirs, where a policy asks for that.
    copies: what to do in tiers; stores among it are made before the scrubs.
    """

    step: int
    order: ScrubOrder | None = None
    is_idle: bool = False
    must_follow: bool = True
    sums: SumOrder | None = None
    copies: tuple[CopyJob, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the pickled form: with numbers and bytes it takes a third of the time of a dataclass with arrays."""
        order, sums = self.order, self.sums
        packed = None if sums is None else (sums.number, sums.record.tobytes(), sums.compare.tobytes())
        if order is None:
            return _without_scrubs, (self.step, self.is_idle, self.must_follow, packed, self.copies)
        batches = [(share, blocks.tobytes()) for share, blocks in order.batches]
        flags = (self.is_idle, self.must_follow)
        return _with_scrubs, (self.step, order.number, batches, *flags, packed, self.copies)


_PackedSums: TypeAlias = tuple[int, bytes, bytes] | None


def _without_scrubs(
    step: int, is_idle: bool, must_follow: bool, sums: _PackedSums, copies: tuple[CopyJob, ...]
) -> StepOrder:
    return StepOrder(step, None, is_idle, must_follow, _unpacked(sums), copies)


def _with_scrubs(
    step: int,
    number: int,
    batches: list[tuple[float, bytes]],
    is_idle: bool,
    must_follow: bool,
    sums: _PackedSums,
    copies: tuple[CopyJob, ...],
) -> StepOrder:
    blocks = tuple((share, _blocks(data)) for share, data in batches)
    return StepOrder(step, ScrubOrder(number, blocks), is_idle, must_follow, _unpacked(sums), copies)


def _unpacked(sums: _PackedSums) -> SumOrder | None:
    return None if sums is None else SumOrder(sums[0], _blocks(sums[1]), _blocks(sums[2]))


def _blocks(data: bytes) -> Blocks:
    return np.frombuffer(data, dtype=np.int64).copy()


@dataclass(slots=True)
class ScrubReply:
    """One shard's answer to one scrub order. `device_blocks`: scrubbed so far, as the device counted them."""

    order: int
    shard: int
    results: tuple[ScrubResult, ...]
    device_blocks: int


@dataclass(slots=True)
class SumReply:
    """One shard's answer to a comparing sum order. `differing`: blocks that are not what was summed."""

    order: int
    shard: int
    differing: list[int]


@dataclass(slots=True)
class StepReceipt(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """A worker's work in one step; all workers' receipts are merged before the scheduler sees them.

    pending_orders: orders that are on a device still; their answers come with a later step's receipt.
    adapters: those whose files were read.
    """

    step: int
    answers: list[ScrubReply] = field(default_factory=list)
    pending_orders: int = 0
    compared: list[SumReply] = field(default_factory=list)
    copies: list[CopyReply] = field(default_factory=list)
    adapters: list[LoadedAdapter] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReceipt:
        """Merge two workers' answers. A step has retired when the slower worker has."""
        assert isinstance(other, StepReceipt)
        return StepReceipt(
            min(self.step, other.step),
            self.answers + other.answers,
            self.pending_orders + other.pending_orders,
            self.compared + other.compared,
            self.copies + other.copies,
            self.adapters + other.adapters,
        )
