"""Records of a pool about its blocks, for governance to write: attached, released, scrubbed.

The caller takes them from `Pool.attached`, `Pool.released`, `Pool.receipts` and `Pool.ended` after each operation."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcustody.allocator.pool.accounting import Domain, EndedRun
from kvcustody.allocator.pool.block_state import NEVER_US, Blocks
from kvcustody.allocator.pool.memory_protocol import ScrubResult
from kvcustody.allocator.pool.residency import Residency


class EndingRun(NamedTuple):
    """Blocks whose custody ends with the next `Pool.end`, and the cause. `fence` 0: no device work may touch them."""

    blocks: Blocks
    domain: Domain
    cause: str
    due_us: int
    fence: int
    ceiling_us: int = NEVER_US


class ReleasedBlocks(NamedTuple):
    """Blocks that a running sequence no longer uses although others may: evidence for governance to write."""

    residency: Residency
    blocks: Blocks
    generations: NDArray[np.int64]
    recorded_until: int  # as the sequence's: later generations are on no record yet
    at_us: int


class AttachedBlocks(NamedTuple):
    """Another domain's blocks that a running sequence now refers to: evidence for governance to write."""

    residency: Residency
    blocks: Blocks
    generations: NDArray[np.int64]
    at_us: int


class Scrubbed(NamedTuple):
    """Evidence of one scrub launch on one shard: the receipt, before governance writes it down."""

    shard: int
    result: ScrubResult
    share: float
    custodies: tuple[EndedRun, ...]
