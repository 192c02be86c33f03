"""A worker that is stopped past its custody lease, and goes on: it reuses nothing until it has heard again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import standins
from standins.service.control_plane_world import APART, PROMPT, ControlPlane

LEASE_SECONDS = 2
LINES = 20  # requests that are looked at
pytestmark = pytest.mark.system("a worker that was stopped reuses what was erased meanwhile")


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[ControlPlane]:
    made = ControlPlane(tmp_path)
    made.release(APART)
    yield made
    made.end()


class Process:
    """The worker's process."""

    def __init__(self, plane: ControlPlane, lease_seconds: int) -> None:
        settings = plane.settings(custody_lease_seconds=lease_seconds, log_level="error")
        given = settings.model_dump_json(exclude_unset=True)
        path = str(Path(standins.__path__[0]).parent)
        command = [sys.executable, "-m", "standins.robust.leased_worker", given]
        self.popen = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": path},
        )

    def lines(self, count: int = LINES) -> list[tuple[int, bool]]:
        """Hit tokens of the next requests, and whether the lease was over when each came."""
        assert self.popen.stderr is not None
        rows: list[tuple[int, bool]] = []
        while len(rows) < count:
            line = self.popen.stderr.readline()
            assert line, "the worker has ended"
            if line.startswith("reused "):
                _, hits, is_over = line.split()
                rows.append((int(hits), is_over == "1"))
        return rows

    def reuses_again(self) -> bool:
        return any(hits for _ in range(500) for hits, _ in self.lines(1))

    def stop(self, seconds: float) -> None:
        """Stopped for so long."""
        self.popen.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.popen.pid, os.WSTOPPED | os.WNOWAIT)
        time.sleep(seconds)  # the lease runs in real time, and nothing is held against how long this takes

    def end(self) -> None:
        self.popen.send_signal(signal.SIGCONT)
        self.popen.kill()
        self.popen.wait()
        assert self.popen.stderr is not None
        self.popen.stderr.close()


@pytest.mark.parametrize("lease_seconds", [LEASE_SECONDS, 86_400])
def test_a_worker_that_was_stopped(plane: ControlPlane, lease_seconds: int) -> None:
    """With a lease that is not over it reuses what it had: the control."""
    worker = Process(plane, lease_seconds)
    try:
        assert worker.reuses_again(), "it reuses at all"
        worker.stop(1.2 * LEASE_SECONDS + 0.2)
        plane.end()
        worker.popen.send_signal(signal.SIGCONT)
        seen = worker.lines(200)  # what it had written before it was stopped is among them
        assert [hits for hits, is_over in seen if is_over and hits] == []
        late = worker.lines()
        if lease_seconds == LEASE_SECONDS:
            assert late == [(0, True)] * LINES
            plane.start()
            assert worker.reuses_again(), "it has heard again"
        else:
            assert late == [(len(PROMPT) - 1, False)] * LINES
    finally:
        worker.end()
