"""The measure of an online change runs at a small size: a worker and a reader beside it, and proofs that stay."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "evidence" / "online_change.py"


@pytest.mark.system("a server of its own, and processes that write and read beside the change")
def test_a_worker_and_a_reader_go_on_during_a_change(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    sizes = ["--leaves", "400", "--months", "4", "--quiet-seconds", "0.5", "--json", str(out)]
    subprocess.run([sys.executable, str(SCRIPT), *sizes], check=True, capture_output=True, timeout=120)
    found = json.loads(out.read_text())
    assert found["proofs_equal"] and found["fsck_problems"] == 0
    assert found["changing"]["read"]["failed"] == 0 and found["changing"]["hand_in"]["spilled_bytes"] == 0
    assert found["changing"]["read"]["times"] > 1 and found["changing"]["hand_in"]["times"] > 0
