"""transformers under custody beside plain: equal tokens eagerly, with CUDA graphs, and with steps in flight."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness.hardware import REPOSITORY

from gpu.report import Reason, Report, missing

LIMIT_SECONDS = 240
NEEDS = ("transformers", "sqlalchemy", "cryptography", "pydantic", "structlog")
WAYS = {"eager": [], "graphs": ["--graphs"], "graphs, steps in flight": ["--graphs", "--asynchronous"]}
TOOL = "benchmarks/engines/transformers_cost.py"


def run(report: Report, lab: Any) -> None:
    """The tool compares every pair's tokens and steps, and fails where they differ."""
    if absent := missing(*NEEDS):
        report.skip("transformers under custody", Reason.NOT_INSTALLED, ", ".join(absent))
        return
    size = ["--shape", "tiny" if lab.rehearsal else "llama-8b", "--pairs", str(lab.size(7, 1))]
    for way, flags in WAYS.items():
        if flags and lab.rehearsal:
            report.skip(f"{way}: tokens equal to plain", Reason.REHEARSAL, "the host records no graphs")
            continue
        with tempfile.TemporaryDirectory() as folder:
            kept = Path(folder) / "result.json"
            asked = ["--device", lab.device, *size, "--workloads", "decode", "--json", str(kept), *flags]
            done = subprocess.run(
                [sys.executable, TOOL, *asked], cwd=REPOSITORY, capture_output=True, text=True, check=False
            )
            words = (done.stderr.splitlines() or [""])[-1][:300] if done.returncode else ""
            report.check(f"{way}: tokens equal to plain", done.returncode == 0, words)
            if kept.exists():
                speed = json.loads(kept.read_text())["workloads"]["decode"]["tokens_per_second"]
                report.measured(f"{way}: tokens per second, governed to plain", **numbers(speed))


def numbers(found: dict[str, Any]) -> dict[str, float]:
    """Those of the figures that are numbers."""
    return {name: value for name, value in found.items() if isinstance(value, int | float)}
