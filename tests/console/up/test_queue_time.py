"""The simulated worker of `up` says how long its requests waited: from when each came, over every offer of it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the worker's blocks are tensors")

from kvcustody.governance.governor.governor import Governor
from kvcustody.governance.settings import Settings
from kvcustody.lab.replay.run.runner import RETRY_US
from kvcustody.lab.replay.workload.generator import WorkloadSpec
from kvcustody.lab.traffic import simulated_worker as up_worker
from kvcustody.lab.traffic.traffic_tenants import TrafficTenants
from kvcustody.policies import library
from standins import builders

REQUESTS, WAIT_SECONDS = 60, 120.0
NO_FAULTS = up_worker.Faults(stall_every=0, hang_every=0)


@pytest.mark.parametrize("keeps_its_id", [True, False])
def test_a_request_that_is_offered_again_has_waited_since_it_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, keeps_its_id: bool
) -> None:
    """Control: where each offer is a request of its own, the same crowd has waited for nothing."""
    if not keeps_its_id:
        admit = Governor.admit

        def anew(governor: Governor, *given: Any, request_id: object, **more: Any) -> Any:
            return admit(governor, *given, **more)

        monkeypatch.setattr(Governor, "admit", anew)
    monkeypatch.setattr(up_worker, "POOL_BLOCKS", 256)
    (tmp_path / "policy.yaml").write_text(library.source("single-org"), encoding="utf-8")
    settings = Settings(
        **builders.worker_files(tmp_path),
    )
    spec = WorkloadSpec(tenants=1, conversations=400, span_seconds=40.0)
    worker = up_worker.SimulatedWorker(
        settings, spec, TrafficTenants(library.load("single-org"), spec), faults=NO_FAULTS
    )
    worker.start()
    try:
        until = time.monotonic() + WAIT_SECONDS
        while worker.requests < REQUESTS:
            assert worker.error is None and time.monotonic() < until, worker.error
            time.sleep(0.05)
    finally:
        worker.stop()
    assert worker._governor is not None
    waited_seconds = worker._governor.measures.figures()["queue.sum"]
    assert (waited_seconds >= RETRY_US / 1e6) is keeps_its_id, waited_seconds
