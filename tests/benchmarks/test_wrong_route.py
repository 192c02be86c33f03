"""A governed engine behind a real router that was given the wrong worker computes nothing of what it may not serve."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.system("a governed engine computes a prompt that policy lets other workers alone serve")


@pytest.mark.parametrize("router", ["smg", "vllm-router"])
def test_a_wrong_route_fails_closed(router: str) -> None:
    """The script ends with a message where a prompt is computed, or where nothing is with the defences off."""
    script = ROOT / "benchmarks/fleet/routers/wrong_route.py"
    command = [sys.executable, str(script), router, "--requests", "20"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode == 69:
        pytest.skip("this router cannot be installed here")
    assert done.returncode == 0, done.stderr
    *defended, control = json.loads(done.stdout)["rows"]
    assert [row["blocks_handed_out"] for row in defended] == [0, 0] and control["blocks_handed_out"]
