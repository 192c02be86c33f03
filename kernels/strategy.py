"""Launch strategies for a scrub on one device: bytes a program writes at once, number of programs, kind of stores.

The best launch depends on the device and on the cache's geometry, so it is measured. `tune` times each candidate on
scratch memory of the same geometry. It keeps the fastest in a file, by device and versions. What was not tuned uses a
default that needs no measurement.

- A strategy changes speed only: the same bytes are written and counted, whichever it is.
- Blocks are grouped only where each is one whole piece in every segment, next to its neighbour.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import product

import torch

from kvcustody.kernels.segment import SegmentTable, tile_bytes_max

PROGRAMS_PER_SM = 8  # enough 4-warp programs in flight to cover the latency of stores
GROUPS = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to launch. group: adjacent blocks that a program writes at once. programs: 0 means one for each tile."""

    group: int = 1
    warps: int = 4
    programs: int = 0
    streaming: bool = False

    def describe(self) -> dict[str, int | bool]:
        """Describe the strategy for stats and benchmark results."""
        return asdict(self)


def group_max(table: SegmentTable) -> int:
    """Return the maximum number of adjacent blocks one program may write, within the alignment's largest tile."""
    dense = all(one.block_stride_bytes == one.piece_bytes for one in table.segments)
    whole = table.tiles.count == len(table.segments)
    return tile_bytes_max(table.alignment_bytes) // table.tiles.bytes_max if dense and whole else 1


def default_strategy(table: SegmentTable) -> Strategy:
    """Return the strategy without a measurement: the largest group, up to four warps with a 16-byte word a thread, a
    plain grid.
    """
    group = group_max(table)
    span = table.tiles.bytes_max * group
    return Strategy(group, max(1, min(4, span // 512)))


def candidates(table: SegmentTable) -> list[Strategy]:
    """Return the strategies that `tune` compares; the default is the first."""
    first = default_strategy(table)
    strategies = [first]
    multiprocessors = torch.cuda.get_device_properties(table.device).multi_processor_count
    persistent = (0, multiprocessors * PROGRAMS_PER_SM, multiprocessors * 2 * PROGRAMS_PER_SM)
    for group in (one for one in GROUPS if one <= first.group):
        span = table.tiles.bytes_max * group
        for warps in (max(1, min(4, span // 512)), max(1, min(8, span // 512))):
            strategies += [Strategy(group, warps, *rest) for rest in product(persistent, (False, True))]
    return list(dict.fromkeys(strategies))


_CHOSEN: dict[tuple[object, ...], Strategy] = {}


def strategy_of(table: SegmentTable) -> Strategy:
    """Return the tuned strategy for this device and geometry, else the default."""
    return _CHOSEN.get(key_of(table)) or default_strategy(table)


def choose(table: SegmentTable, strategy: Strategy) -> None:
    """Use `strategy` for every table of this device and geometry from now on."""
    _CHOSEN[key_of(table)] = strategy


def key_of(table: SegmentTable) -> tuple[object, ...]:
    """Return what the best launch depends on: device, alignment, segments, piece and tile sizes."""
    pieces = tuple(sorted({one.piece_bytes for one in table.segments}))
    return str(table.device), table.alignment_bytes, len(table.segments), pieces, group_max(table)
