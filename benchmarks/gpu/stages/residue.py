"""What freed memory still holds: after kill -9 a second process takes the memory and counts canaries.

Each question has a process of its own, one after the other: the stage itself holds nothing of the device.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gpu.lab import lab_of
from gpu.report import Report
from kvcustody.kernels.ordered import OrderedScrub
from kvcustody.kernels.prepare import prepare
from kvcustody.kernels.segment import SegmentTable

CANARY = 0xA7
SHARE = 0.5  # of a GPU's free memory that the second process takes


def run(report: Report, lab: Any) -> None:
    """Within one process, where the probe must find its canaries, and across a kill."""
    mib = lab.size(4096, 4)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "memory"
        canaries = Probe(lab, path, mib).counted("allocator")
        report.control(
            "not zeroed, through the same allocator: the probe finds its canaries", canaries > 0, found=canaries
        )
        for name, after in (("the same process", "freed"), ("after kill -9, a second process", "killed")):
            plain = Probe(lab, path, mib).counted(after)
            cleared = plain == 0  # by the driver, which the stand-in does not do
            report.measured(f"not zeroed: {name}", found=plain, bytes=mib << 20, cleared_by_the_driver=cleared)
            if lab.rehearsal:
                report.control(f"not zeroed: {name} finds all canaries", plain == mib << 20, found=plain)
            canaries = Probe(lab, path, mib, "scrubbed").counted(after)
            report.check(f"zeroed and freed: {name} finds no canary", canaries == 0, found=canaries)


class Probe(NamedTuple):
    """Processes that fill as much memory with canaries, zero it or not, and count what comes back."""

    lab: Any
    path: Path
    mib: int
    pool: str = "plain"

    def counted(self, after: str) -> int:
        """Canaries found in memory that was given back to torch's `allocator`, `freed`, or whose owner was `killed`."""
        if after == "killed":
            self._killed()
        done = subprocess.run(self._command(after), stdout=subprocess.PIPE, text=True, check=True)
        return int(done.stdout.split()[-1])

    def _killed(self) -> None:
        victim = subprocess.Popen(self._command("hold"), stdout=subprocess.PIPE, text=True)
        assert victim.stdout is not None
        ready = victim.stdout.readline()
        os.kill(victim.pid, signal.SIGKILL)
        victim.wait()
        if ready.strip() != "filled":
            raise RuntimeError(f"the process that is to be killed said `{ready.strip()}`")

    def _command(self, what: str) -> list[str]:
        where = "rehearse" if self.lab.rehearsal else "device"
        ours = [sys.executable, "-m", "gpu.stages.residue", str(self.path), str(self.mib), where]
        return [*ours, self.pool, what]


def main(path: str, mib: str, where: str, kind: str, what: str) -> None:
    """One of the processes."""
    with lab_of(rehearse=where == "rehearse") as lab:
        size = int(mib)
        if what != "killed":
            pool = fill(lab, Path(path), size, scrubbed=kind == "scrubbed")
            if what == "hold":
                print("filled", flush=True)
                signal.pause()
            del pool
            if what == "freed":
                lab.return_memory()
        elif not lab.rehearsal:
            size = max(size, int(torch.cuda.mem_get_info()[0] * SHARE) >> 20)
        print(canaries(lab.memory(Path(path), size)), flush=True)


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


if __name__ == "__main__":
    main(*sys.argv[1:])
