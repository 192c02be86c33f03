"""A worker that serves generated traffic is marked, and its policy is in effect; one that made history is not."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import Engine

from kvcustody.audit.evidence.processes.marked_processes import read_marked
from kvcustody.audit.evidence.processes.running_policies import read_running_policies
from kvcustody.audit.kinds import GENERATED, REPLAYED, SIMULATED, PolicyActivated, WorkerStarted
from kvcustody.clock import SystemClock
from standins import builders


@pytest.mark.parametrize(
    ("origin", "marked", "runs"),
    [
        ("", [], ["gpu"]),
        (SIMULATED, [SIMULATED], ["gpu"]),
        (GENERATED, [GENERATED], []),
        (REPLAYED, [REPLAYED], []),
    ],
)
def test_what_it_runs(store: Engine, tmp_path: Path, origin: str, marked: list[str], runs: list[str]) -> None:
    clock = SystemClock()
    writer = builders.writer(store, tmp_path / "spill", worker="gpu", clock=clock)
    now = clock.now_us()
    writer.submit([WorkerStarted(now, "gpu", 8, 1, 4096, "cpu", "test", 1, origin=origin)])
    writer.submit_durable(PolicyActivated(now, 1, "x", "shared", "sha256:" + "ab" * 32, "gpu"))
    assert writer.flush()
    with store.connect() as connection:
        assert [one.origin for one in read_marked(connection)] == marked
        assert [one.worker for one in read_running_policies(connection)] == runs
    writer.close()
