"""What freed memory still holds: after kill -9 a second process takes the memory and counts canaries."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from gpu.lab import lab_of
from gpu.report import Report
from kvcustody.kernels.ordered import OrderedScrub
from kvcustody.kernels.prepare import prepare
from kvcustody.kernels.segment import SegmentTable

LIMIT_SECONDS = 90
CANARY = 0xA7
SHARE = 0.5  # of a GPU's free memory that the second process takes


def run(report: Report, lab: Any) -> None:
    """Within one process, where the probe must find its canaries, and across a kill."""
    mib = lab.size(4096, 4)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "memory"
        in_allocator(report, lab, path, mib)
        for name, take in (("the same process", after_free), ("after kill -9, a second process", after_kill)):
            plain = take(lab, path, mib, scrubbed=False)
            cleared = plain == 0  # by the driver, which the stand-in does not do
            report.measured(
                f"not zeroed: {name}", found=plain, bytes=mib << 20, cleared_by_the_driver=cleared
            )
            if lab.rehearsal:
                report.control(f"not zeroed: {name} finds all canaries", plain == mib << 20, found=plain)
            found = take(lab, path, mib, scrubbed=True)
            report.check(f"zeroed and freed: {name} finds no canary", found == 0, found=found)


def in_allocator(report: Report, lab: Any, path: Path, mib: int) -> None:
    """torch's allocator hands the same memory out again: the probe finds what was left there."""
    pool = fill(lab, path, mib, scrubbed=False)
    lab.synchronize()
    del pool
    found = canaries(lab.memory(path, mib))
    report.control(
        "not zeroed, through the same allocator: the probe finds its canaries", found > 0, found=found
    )


def fill(lab: Any, path: Path, mib: int, *, scrubbed: bool) -> torch.Tensor:
    """A pool of canaries, zeroed by an order or not."""
    pool: torch.Tensor = lab.memory(path, mib)
    pool.fill_(CANARY)
    if scrubbed:
        table = SegmentTable.from_tensors([pool])
        prepare(table)
        scrubber = OrderedScrub(table, streams=lab.streams())
        scrubber.used()
        scrubber.launch([(torch.arange(mib).numpy(), False)])
        lab.synchronize()
        scrubber.settle()
    lab.synchronize()
    return pool


def canaries(pool: torch.Tensor) -> int:
    """Bytes that carry the pattern."""
    return sum(int((row == CANARY).sum()) for row in pool)


def after_free(lab: Any, path: Path, mib: int, *, scrubbed: bool) -> int:
    """The memory goes back to the driver, and the same process asks for as much."""
    pool = fill(lab, path, mib, scrubbed=scrubbed)
    del pool
    lab.return_memory()
    return canaries(lab.memory(path, mib))


def after_kill(lab: Any, path: Path, mib: int, *, scrubbed: bool) -> int:
    """One process fills and is killed; another takes as much memory as it can and counts."""
    lab.return_memory()
    ours = [
        sys.executable,
        "-m",
        "gpu.stages.residue",
        str(path),
        str(mib),
        "rehearse" if lab.rehearsal else "device",
    ]
    victim = subprocess.Popen([*ours, "scrubbed" if scrubbed else "plain"], stdout=subprocess.PIPE, text=True)
    assert victim.stdout is not None
    ready = victim.stdout.readline()
    os.kill(victim.pid, signal.SIGKILL)
    victim.wait()
    if ready.strip() != "filled":
        raise RuntimeError(f"the process that is to be killed said `{ready.strip()}`")
    done = subprocess.run([*ours, "count"], stdout=subprocess.PIPE, text=True, check=True)
    return int(done.stdout.split()[-1])


def main(path: str, mib: str, where: str, what: str) -> None:
    """The killed process, or the one after it."""
    with lab_of(rehearse=where == "rehearse") as lab:
        if what == "count":
            size = int(mib)
            if not lab.rehearsal:
                size = max(size, int(torch.cuda.mem_get_info()[0] * SHARE) >> 20)
            print(canaries(lab.memory(Path(path), size)), flush=True)
            return
        pool = fill(lab, Path(path), int(mib), scrubbed=what == "scrubbed")
        print("filled", flush=True)
        signal.pause()
        del pool


if __name__ == "__main__":
    main(*sys.argv[1:])
