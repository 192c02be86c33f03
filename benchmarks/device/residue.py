"""What freed memory still holds: bytes that a later allocation of the same process, or of another, finds.

    python benchmarks/device/residue.py [--device cuda] [--mib 512] [--json FILE]

A pool is filled with a pattern and freed, once as it is and once after its teardown scrub; then as much memory is
allocated again without being written, by torch's caching allocator in the same process, after `empty_cache` (on CUDA:
cudaFree and cudaMalloc), and by another process. Counted are the bytes that still carry the pattern.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from kvcustody.kernels.scrub import scrub
from kvcustody.kernels.segment import SegmentTable

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "harness"))

from bench import Bench

PATTERN = 0xA7
BLOCK = 1 << 20


def found(device: str, mib: int) -> int:
    """Bytes with the pattern in a fresh, unwritten allocation."""
    fresh = torch.empty(mib, BLOCK, dtype=torch.uint8, device=device)
    return int(sum((row == PATTERN).sum().item() for row in fresh))


def leave(device: str, mib: int, *, scrubbed: bool) -> None:
    """Fill a pool and free it, after a teardown scrub or without."""
    pool = torch.full((mib, BLOCK), PATTERN, dtype=torch.uint8, device=device)
    if scrubbed:
        scrub(SegmentTable.from_tensors([pool]), range(mib))
    if device == "cuda":
        torch.cuda.synchronize()


def measure(device: str, mib: int, *, scrubbed: bool) -> dict[str, int]:
    """The three places where bytes may be met again."""
    leave(device, mib, scrubbed=scrubbed)
    same = found(device, mib)
    leave(device, mib, scrubbed=scrubbed)
    if device == "cuda":
        torch.cuda.empty_cache()
    returned = found(device, mib)
    leave(device, mib, scrubbed=scrubbed)
    if device == "cuda":
        torch.cuda.empty_cache()
    script = f"import residue; print(residue.found({device!r}, {mib}))"
    other = subprocess.run(
        [sys.executable, "-c", script], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
    )
    return {"same_allocator": same, "after_free": returned, "another_process": int(other.stdout)}


def main() -> None:
    """Print one line for each way of leaving."""
    bench = Bench(__doc__, "kvcustody", "torch")
    bench.add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    bench.add("--mib", type=int, default=512)
    options = bench.parse()
    rows = {
        name: measure(options.device, options.mib, scrubbed=name == "scrubbed") for name in ("as it is", "scrubbed")
    }
    print("| pool freed | same allocator | after its memory went back | another process |\n|---|---|---|---|")
    for name, row in rows.items():
        shares = (f"{count / (options.mib << 20):.1%}" for count in row.values())
        print(f"| {name} | {' | '.join(shares)} |")
    bench.keep({"benchmark": "residue", "mib": options.mib, "device": options.device, "bytes": rows})


if __name__ == "__main__":
    main()
