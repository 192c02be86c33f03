"""Measure once how a device scrubs best, and keep the answer in a file.

    tune(table, file=path)          # the kept strategy of this device and geometry, or the fastest measured now

`tune` times every candidate on the table's own blocks, in turns, and keeps the fastest median. It takes no further
memory, because an engine has given nearly all of it to the cache by then. So it is for a cache that holds nothing yet:
the blocks it measures on are zero afterwards. Answers are kept by device name, geometry and versions, so another driver
or torch version is measured again.

- If the file cannot be read, or has another version, the device is measured again. The file never changes what is
  written, only how fast.
- Only CUDA and ROCm devices are tuned: on the host there is one way.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvcustody.errors import ConfigError
from kvcustody.files import READABLE, write_file
from kvcustody.kernels.entry import entries_of
from kvcustody.kernels.scrub import launch_scrub
from kvcustody.kernels.segment import SegmentTable
from kvcustody.kernels.strategy import Strategy, candidates, choose, key_of

MEASURED_BYTES = 256 << 20
ROUNDS = 7

Timer = Callable[[Callable[[], None]], float]


@dataclass(frozen=True, slots=True)
class Tuning:
    """A measurement: the winner, and the median round of each candidate in microseconds."""

    chosen: Strategy
    measured: tuple[tuple[Strategy, float], ...]
    from_file: bool


def tune(table: SegmentTable, *, file: Path | None = None) -> Tuning:
    """Choose the strategy for this table's device and geometry, from `file` or by measuring; then use it.

    The table holds nothing yet: measuring zeroes some of it. Raises `ConfigError` for a table on the host.
    """
    if table.device.type != "cuda":
        raise ConfigError(f"there is nothing to tune on `{table.device}`", device=str(table.device))
    name = _name(table)
    kept = load(file).get(name) if file is not None else None
    if kept is not None:
        tuning = Tuning(kept, (), True)
    else:
        tuning = measure(table, candidates(table), _event_timer(table.device))
        if file is not None:
            save(file, name, tuning.chosen)
    choose(table, tuning.chosen)
    return tuning


def measure(table: SegmentTable, strategies: Sequence[Strategy], timer: Timer) -> Tuning:
    """Return the strategy with the best median of `ROUNDS` rounds over at most `MEASURED_BYTES` of scattered and
    adjacent blocks.

    Zeroes those blocks.
    """
    generator = np.random.default_rng(1)
    half = max(1, min(table.blocks // 2, MEASURED_BYTES // table.bytes_per_block))
    listed = np.unique(np.concatenate([generator.integers(0, table.blocks, half // 2), np.arange(max(1, half // 2))]))
    lists = {
        group: torch.from_numpy(entries_of(listed, group)).to(table.device)
        for group in {one.group for one in strategies}
    }
    times: dict[Strategy, list[float]] = {one: [] for one in strategies}
    for turn in range(ROUNDS + 1):
        for one in strategies:
            spent = timer(lambda one=one: launch_scrub(table, lists[one.group], strategy=one))  # type: ignore[misc]
            if turn:  # the first turn compiles
                times[one].append(spent)
    medians = tuple((one, statistics.median(spent)) for one, spent in times.items())
    return Tuning(min(medians, key=lambda pair: pair[1])[0], medians, False)


def load(file: Path) -> dict[str, Strategy]:
    """Return the stored answers; empty if the file is missing or unreadable."""
    try:
        rows = json.loads(file.read_text())
        return {name: Strategy(**row) for name, row in rows.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def save(file: Path, name: str, strategy: Strategy) -> None:
    """Store one answer beside the others; replaces the file in one step."""
    rows = {key: one.describe() for key, one in load(file).items()} | {name: strategy.describe()}
    file.parent.mkdir(parents=True, exist_ok=True)
    write_file(file, (json.dumps(rows, indent=1, sort_keys=True) + "\n").encode(), mode=READABLE)


def _name(table: SegmentTable) -> str:
    """Device, versions and geometry in one line."""
    import triton

    device = torch.cuda.get_device_name(table.device)
    geometry = ",".join(map(str, key_of(table)[1:]))
    return f"{device} | torch {torch.__version__} triton {triton.__version__} | {geometry}"


def _event_timer(device: torch.device) -> Timer:
    def timer(work: Callable[[], None]) -> float:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        with torch.cuda.device(device):
            first.record()
            work()
            last.record()
            last.synchronize()
        spent: Any = first.elapsed_time(last)
        return float(spent) * 1000

    return timer
