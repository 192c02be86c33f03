"""LMCache's `aesgcm` serde and ours, in turns, on the same chunks: how fast each seals and opens, and by how much.

    .venv-lmcache/bin/python benchmarks/engines/lmcache_serde.py [--rounds 9] [--json FILE]

Both have 256-bit keys, one thread, LMCache's memory objects, and run twice: as the process is, and with an allocator
that keeps large pieces (`MALLOC_MMAP_THRESHOLD_`, `MALLOC_TRIM_THRESHOLD_`), which the other serde's copies need. The
goal is 1.3 with both tuned.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "harness"))

from bench import Bench, alternate, frozen

GOAL, SIZES = 1.3, (256 << 10, 1 << 20, 4 << 20)
TUNED = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 32)}
_CHILD = "KVCUSTODY_SERDE_BENCH"


def measure(rounds: int) -> dict[str, Any]:
    """Medians of paired ratios by size, and gigabytes a second."""
    import pytest
    import torch
    from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
    from lmcache.v1.distributed.serde.aesgcm import AesGcmDeserializer, AesGcmSerializer
    from lmcache.v1.distributed.serde.key_provider import HkdfKeyProvider
    from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "lib"))
    from kvcustody.integrations.lmcache.sealed_serde import SealedDeserializer, SealedSerializer, make_serde
    from standins.engines.lmcache.chunk_world import ChunkWorld

    torch.set_num_threads(1)

    def memory(size: int, *, filled: bool = False) -> TensorMemoryObj:
        raw = torch.randint(0, 256, (size,), dtype=torch.uint8) if filled else torch.zeros(size, dtype=torch.uint8)
        facts = MemoryObjMetadata(raw.shape, torch.uint8, 0, size, 1, fmt=MemoryFormat.BINARY)
        return TensorMemoryObj(raw, facts, None)

    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        world = ChunkWorld(Path(folder), patch)
        for name in ("KVCUSTODY_NVME_TIER_PATH", "KVCUSTODY_NVME_TIER_BYTES"):
            patch.delenv(name)
        serde = make_serde({})
        keys = HkdfKeyProvider(os.urandom(32), key_len=32, info_prefix=b"benchmark")
        sides: dict[str, tuple[Any, Any]] = {
            "aesgcm": (AesGcmSerializer(keys), AesGcmDeserializer(keys)),
            "ours": (SealedSerializer(serde.custody), SealedDeserializer(serde.custody)),
        }
        named = ObjectKey(bytes(32), "tiny", 0, 0, world.salt("acme"))
        for size in SIZES:
            layout = MemoryLayoutDesc(shapes=[torch.Size([size])], dtypes=[torch.uint8])
            count = max(4, (32 << 20) // size)
            sources = [memory(size, filled=True) for _ in range(count)]
            target = memory(size)
            runs: dict[str, Callable[[], float]] = {}
            for name, (seal, open_) in sides.items():
                frames = [memory(seal.estimate_serialized_size(layout)) for _ in range(count)]

                def sealing(seal: Any = seal, frames: list[Any] = frames, sources: list[Any] = sources) -> float:
                    began_ns = time.perf_counter_ns()
                    for source, frame in zip(sources, frames, strict=True):
                        seal.serialize(source, frame, named)
                    return time.perf_counter_ns() - began_ns

                def opening(open_: Any = open_, frames: list[Any] = frames, target: Any = target) -> float:
                    began_ns = time.perf_counter_ns()
                    for frame in frames:
                        open_.deserialize(frame, target, named)
                    return time.perf_counter_ns() - began_ns

                runs[f"{name} seal"], runs[f"{name} open"] = sealing, opening
            with frozen():
                took = alternate(runs, rounds, warm=2)
            row: dict[str, float] = {}
            for what in ("seal", "open"):
                pairs = zip(took[f"aesgcm {what}"], took[f"ours {what}"], strict=True)
                row[f"{what}_ratio"] = median(theirs / ours for theirs, ours in pairs)
                for name in sides:
                    row[f"{name}_{what}_gb_s"] = size * count / median(took[f"{name} {what}"])
            rows[str(size)] = row
        serde.close()
        world.close()
    return rows


def main() -> int:
    bench = Bench(__doc__, "torch", rounds=9, strict=True)
    options = bench.parse()
    if os.environ.get(_CHILD):
        print(json.dumps(measure(options.rounds)))
        return 0
    figures: dict[str, Any] = {}
    for allocator, more in (("as it is", {}), ("tuned", TUNED)):
        command = [sys.executable, __file__, "--rounds", str(options.rounds)]
        done = subprocess.run(
            command, env={**os.environ, _CHILD: "1", **more}, capture_output=True, text=True, check=True
        )
        figures[allocator] = json.loads(done.stdout.splitlines()[-1])
    for allocator, sizes in figures.items():
        for size, row in sizes.items():
            shown = "  ".join(f"{name} {value:.2f}" for name, value in row.items())
            print(f"{allocator}, {int(size) >> 10} KiB: {shown}")
    least = min(min(row["seal_ratio"], row["open_ratio"]) for row in figures["tuned"].values())
    bench.keep({"goal": GOAL, "least_tuned": least, "allocators": figures})
    return bench.status(least >= GOAL)


if __name__ == "__main__":
    sys.exit(main())
