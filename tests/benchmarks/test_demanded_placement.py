"""A dedicated tenant's requests, behind a real router and behind the door's own proxy, reach no other worker."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.system("a real router posts a prompt to a worker that policy does not let serve it")


@pytest.mark.parametrize("router", ["none", "vllm-router"])
def test_no_prompt_reaches_a_worker_that_may_not_serve_it(router: str) -> None:
    """The script ends with a message where one does, or where its controls reach no other worker."""
    script = ROOT / "benchmarks/fleet/routers/demanded_placement.py"
    command = [sys.executable, str(script), router, "--requests", "120"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode == 69:
        pytest.skip("this router cannot be installed here")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ruled"]["at a worker that may not serve them"] == 0
    assert all(control["at a worker that may not serve them"] for control in found["controls"])
