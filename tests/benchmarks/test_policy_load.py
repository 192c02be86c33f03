"""The load of one author's policies runs at a small size: every kind of work is answered while others are served."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.system("a service, and an author beside an auditor, for some seconds")
def test_every_kind_of_work_is_answered_beside_others(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    sizes = (
        "--tenants",
        "60",
        "--events",
        "2000",
        "--pairs",
        "1",
        "--seconds",
        "3",
        "--rate",
        "20",
        "--json",
        str(out),
    )
    subprocess.run([sys.executable, str(BENCHMARKS / "policies" / "policy_load.py"), *sizes], check=True, timeout=500)
    rows = {row["work"]: row for row in json.loads(out.read_text())["rows"]}
    assert set(rows) == {"prove", "review", "diff", "simulate"}
    assert all(row["wrong"] == 0 and row["p99_alone_ms"] > 0 for row in rows.values())
