"""Scrub, verify and copy bandwidth, as a ratio of `torch.Tensor.zero_()` over the same bytes in the same run.

    python benchmarks/device/scrub.py [--device cuda] [--mib 1024] [--layers 4] [--repeats 15] [--full] [--json FILE]

Each point scrubs `--mib` of a pool twice that size: the listed blocks adjacent, or drawn at random. The
measures take turns, and the best of `--repeats` counts, since anything else on the machine only adds time;
`paired` is the median ratio of a scrub to the `zero_()` of the same round, for a machine that others use too.
`scrub` reads nothing back; `read back` is a scrub that reads every block again, on CUDA in the same launch.
On CUDA, times are of events on the stream; the list's copy to the device is included, and the launch is the one
that tuning chose for this device. `peer` is an engine's own way of zeroing (peer_zero.py), `memset` the driver's
over as many adjacent bytes. `--full` goes on to 4 MiB pieces, 1 to 100,000 blocks and 1 to 128 layers.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from kvcustody.kernels.copy import copy
from kvcustody.kernels.launch import uses_triton
from kvcustody.kernels.scrub import scrub
from kvcustody.kernels.segment import SegmentTable
from kvcustody.kernels.strategy import strategy_of
from kvcustody.kernels.verify import verify

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "harness"))

from bench import Bench, alternate

PIECES = (8 << 10, 32 << 10, 128 << 10, 1 << 20)
FULL_PIECES = (8 << 10, 16 << 10, 32 << 10, 128 << 10, 1 << 20, 4 << 20)
FULL_LAYERS = (1, 8, 32, 128)
ORDERS = ("adjacent", "scattered")
COUNTS = (1, 10, 100, 1_000, 10_000, 100_000)


class Point(NamedTuple):
    """One line of the table; rates in GB/s."""

    piece_bytes: int
    layers: int
    blocks: int
    order: str
    zero_gbps: float
    scrub_gbps: float
    naive_gbps: float
    verify_gbps: float
    copy_gbps: float
    peer_gbps: float  # nan without a device
    read_back_gbps: float  # scrub and verify together
    memset_gbps: float  # the driver's own, over the same bytes in one piece; nan off CUDA
    paired_ratio: float  # median over rounds: scrub to `zero_()`
    strategy: dict[str, int | bool] | None  # the launch that tuning chose; none without Triton

    @property
    def ratio(self) -> float:
        return self.scrub_gbps / self.zero_gbps


def seconds(work: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    work()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1000


def naive(table: SegmentTable, blocks: np.ndarray) -> None:
    """What a first attempt does: one indexed assignment a layer, in the cache's own dtype."""
    index = torch.from_numpy(blocks).to(table.device)
    for tensor in table.tensors:
        tensor[:, index] = 0


def measure(
    piece: int,
    order: str,
    options: argparse.Namespace,
    *,
    layers: int | None = None,
    count: int | None = None,
) -> Point:
    device = torch.device(options.device)
    layers = layers or options.layers
    segments = 2 * layers
    listed = count or max(8, (options.mib << 20) // (piece * segments))
    tensors = [torch.zeros((2, 2 * listed, piece // 2), dtype=torch.bfloat16, device=device) for _ in range(layers)]
    table = SegmentTable.from_tensors(tensors, layout="kv_blocks")
    flat = torch.zeros(listed * table.bytes_per_block, dtype=torch.uint8, device=device)
    generator = np.random.default_rng(1)
    blocks = np.arange(listed) if order == "adjacent" else generator.permutation(2 * listed)[:listed]
    rest = np.setdiff1d(np.arange(2 * listed), blocks)
    work: dict[str, Callable[[], object]] = {
        "zero": flat.zero_,
        "scrub": lambda: scrub(table, blocks),
        "naive": lambda: naive(table, blocks),
        "verify": lambda: verify(table, blocks),
        "copy": lambda: copy(table, blocks, rest),
        "read_back": lambda: (scrub(table, blocks), verify(table, blocks)),
    }
    if device.type == "cuda":
        work |= on_device(table, blocks, flat)
    sides = {name: partial(seconds, one, device) for name, one in work.items()}
    taken = alternate(sides, options.repeats, warm=1)  # the first compiles, and touches pages
    assert not len(verify(table, blocks).dirty)
    rates = {name: len(flat) / min(times) / 1e9 for name, times in taken.items()}
    columns = ("zero", "scrub", "naive", "verify", "copy", "peer", "read_back", "memset")
    paired = float(np.median(np.divide(taken["zero"], taken["scrub"])))
    in_order = (rates.get(name, float("nan")) for name in columns)
    strategy = strategy_of(table).describe() if uses_triton(table) else None
    return Point(piece, layers, listed, order, *in_order, paired_ratio=paired, strategy=strategy)


def on_device(table: SegmentTable, blocks: np.ndarray, flat: torch.Tensor) -> dict[str, Callable[[], object]]:
    """What only a device has: the tuned strategy, an engine's own kernel, and a read-back in the same launch."""
    from peer_zero import PeerZero

    from kvcustody.kernels.entry import entries_of
    from kvcustody.kernels.scrub import launch_scrub
    from kvcustody.kernels.tuning import tune

    chosen = tune(table).chosen
    peer, ordered = PeerZero(table), np.sort(blocks)

    def engine_own() -> None:
        peer.zero(torch.from_numpy(blocks).to(table.device))

    def read_back() -> None:
        entries = torch.from_numpy(entries_of(ordered, chosen.group, read_back=True)).to(table.device)
        flags = torch.zeros(len(ordered), dtype=torch.int32, device=table.device)
        launch_scrub(table, entries, strategy=chosen, flags=flags)

    work: dict[str, Callable[[], object]] = {"peer": engine_own, "read_back": read_back}
    return work | ({} if torch.version.hip else {"memset": lambda: memset(flat)})


def memset(flat: torch.Tensor) -> None:
    """`cuMemsetD8Async` on the current stream. Raises `RuntimeError` where the driver refuses it."""
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    address, size = ctypes.c_uint64(flat.data_ptr()), ctypes.c_size_t(flat.numel())
    if status := ctypes.CDLL("libcuda.so.1").cuMemsetD8Async(address, ctypes.c_ubyte(0), size, stream):
        raise RuntimeError(f"the driver refused a memset with {status}")


def full(options: argparse.Namespace) -> list[Point]:
    """The whole grid of a device: pieces by order, then counts of blocks, then layers."""
    points = [measure(piece, order, options) for piece in FULL_PIECES for order in ORDERS]
    points += [measure(32 << 10, "scattered", options, layers=1, count=count) for count in COUNTS]
    return points + [measure(32 << 10, "scattered", options, layers=layers) for layers in FULL_LAYERS]


def small(options: argparse.Namespace) -> float:
    """Microseconds to scrub one block, its list's way to the device included: the median of 200."""
    device = torch.device(options.device)
    tensors = [torch.zeros(2, 64, 16, 8, 128, dtype=torch.bfloat16, device=device) for _ in range(options.layers)]
    table = SegmentTable.from_tensors(tensors, layout="kv_blocks")
    block = np.array([7])
    times = [seconds(lambda: scrub(table, block), device) for _ in range(220)][20:]
    return float(np.median(times)) * 1e6


def finite(row: dict[str, Any]) -> dict[str, Any]:
    """What was not measured is null: JSON has no nan."""
    return {name: None if value != value else value for name, value in row.items()}


def main() -> None:
    bench = Bench(__doc__, "kvcustody", "torch", "triton", "numpy")
    bench.add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    bench.add("--mib", type=int, default=128, help="bytes of each point, MiB (use >= 1024 on a GPU)")
    bench.add("--layers", type=int, default=4)
    bench.add("--repeats", type=int, default=15)
    bench.add("--full", action="store_true", help="the whole grid of a device")
    options = bench.parse()
    probe = SegmentTable.from_tensors([torch.zeros(1, 16, device=options.device)])
    path = "triton" if uses_triton(probe) else "torch"
    print(f"{options.device}, {path} path, {options.mib} MiB a point, {options.layers} layers")
    columns = "".join(
        f"{name:>8}" for name in ("zero_", "scrub", "ratio", "paired", "naive", "verify", "copy", "peer", "memset")
    )
    print(f"{'piece':>9}{'lay':>4}{'blocks':>8}  {'order':9}{columns} read back   (GB/s)")
    points = []
    every = full(options) if options.full else (measure(p, o, options) for p in PIECES for o in ORDERS)
    for one in every:
        points.append(one)
        print(
            f"{one.piece_bytes // 1024:>5} KiB{one.layers:>4}{one.blocks:>8}  {one.order:9}{one.zero_gbps:>8.1f}"
            f"{one.scrub_gbps:>8.1f}{one.ratio:>8.2f}{one.paired_ratio:>8.2f}{one.naive_gbps:>8.1f}{one.verify_gbps:>8.1f}{one.copy_gbps:>8.1f}"
            f"{one.peer_gbps:>8.1f}{one.memset_gbps:>8.1f}{one.read_back_gbps:>10.1f}",
            flush=True,
        )
    one_block_us = small(options)
    print(f"one block of {options.layers} layers: {one_block_us:.1f} us")
    settings = {"device": options.device, "path": path, "mib": options.mib, "layers": options.layers}
    listed = [finite(point._asdict() | {"ratio": point.ratio}) for point in points]
    bench.keep({"benchmark": "scrub", "settings": settings, "points": listed, "one_block_us": one_block_us})


if __name__ == "__main__":
    main()
