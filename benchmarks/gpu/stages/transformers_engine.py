"""transformers under custody beside plain: equal tokens, with and without graphs and steps in flight."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness.hardware import REPOSITORY

from gpu.report import Reason, Report, missing

NEEDS = ("transformers", "sqlalchemy", "cryptography", "pydantic", "structlog")
WAYS = {  # flags, and why a host cannot
    "step by step": ([], ""),
    "served": (["--served"], ""),
    "graphs": (["--graphs"], "the host records no graphs"),
    "steps in flight": (["--asynchronous"], "transformers keeps steps in flight on a device alone"),
    "graphs, steps in flight": (["--graphs", "--asynchronous"], "the host records no graphs"),
}
TOOL = "benchmarks/engines/transformers_cost.py"


def run(report: Report, lab: Any) -> None:
    """The tool compares every pair's tokens and steps, and fails where they differ and plain repeats its own."""
    if absent := missing(*NEEDS):
        report.skip("transformers under custody", Reason.NOT_INSTALLED, ", ".join(absent))
        return
    size = ["--shape", "tiny" if lab.rehearsal else "llama-1b", "--pairs", str(lab.size(3, 1))]
    for way, (flags, cannot) in WAYS.items():
        if cannot and lab.rehearsal:
            report.skip(f"{way}: tokens equal to plain", Reason.REHEARSAL, cannot)
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
                decode = json.loads(kept.read_text())["workloads"]["decode"]
                found = decode["tokens_per_second"]
                speed = {name: found[name] for name in ("plain", "governed")}
                report.measured(f"{way}: tokens per second", **speed, ratio=found["ratio"]["value"])
                if unlike := decode["rounds_in_which_plain_differs_from_itself"]:
                    report.measured(f"{way}: rounds in which plain gives other tokens each time", rounds=unlike)
