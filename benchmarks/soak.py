"""The full sizes: every test that is marked `soak`, and what came of each, kept with commit and hardware.

`make soak` runs it: attacks, simulations and conformance at up to 10^6 operations, an hour and a half on two cores. A
run of a part names it as pytest does, and is kept only where `--json` says so.
Run: `python benchmarks/soak.py --json benchmarks/results/soak-cpu.json` [tests/redteam ...].
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).resolve().parent / "harness"))

from bench import Bench


def results(report: Path) -> list[dict[str, Any]]:
    """What a JUnit report says of each test: name, outcome, seconds, its figures, and why it was skipped or failed."""
    rows = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        problem = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        outcome = "passed" if problem is None else "skipped" if problem.tag == "skipped" else "failed"
        row = {
            "test": f"{case.get('classname', '')}.{case.get('name', '')}",
            "outcome": outcome,
            "seconds": round(float(case.get("time", 0)), 1),
        }
        figures = [each.get("value") for each in case.iter("property") if each.get("name") == "figure"]
        if figures:
            row["figures"] = figures
        if problem is not None:
            row["why"] = (problem.get("message") or "").splitlines()[0][:200]
        rows.append(row)
    return rows


def main() -> int:
    """Run, keep, and answer as pytest does."""
    bench = Bench(__doc__, "pytest", "hypothesis", "torch", facts="")
    bench.add("tests", nargs="*", help="a part of them, as pytest names it")
    arguments = bench.parse()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-m", "soak", f"--junitxml={report}"]
        done = subprocess.run([*command, *arguments.tests], check=False).returncode
        rows = results(report) if report.exists() else []
        for row in rows:
            for figure in row.get("figures", ()):
                print(f"{row['test']}: {figure}")
        if arguments.json and rows:
            counts = {kind: sum(row["outcome"] == kind for row in rows) for kind in ("passed", "failed", "skipped")}
            bench.keep(counts | {"tests": rows})
    return done


if __name__ == "__main__":
    sys.exit(main())
