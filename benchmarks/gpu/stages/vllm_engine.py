"""vLLM under custody, V1 and V2 runner: isolation, residue, pressure, and answers equal to those of the plain engine.

The suites of `tests/engines/vllm/engine` run as they are, on the device that vLLM finds. fp8, MLA, hybrid models and
speculative decoding are not asked here yet: the suites' tiny models have none of them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

from harness.hardware import REPOSITORY

from gpu.report import Reason, Report, missing

LIMIT_SECONDS = 420
SUITES = ("test_plain.py", "test_residue.py", "test_isolation.py", "test_pressure.py")
RUNNERS = {"V1": "0", "V2": "1"}


def run(report: Report, lab: Any) -> None:
    """Each suite compares with a plain engine beside it, or has its own controls."""
    if lab.rehearsal:
        report.skip(
            "vLLM under custody", Reason.REHEARSAL, "its own suites run on the host: tests/engines/run.sh"
        )
        return
    if absent := missing("vllm", "pytest", "sqlalchemy", "cryptography"):
        report.skip("vLLM under custody", Reason.NOT_INSTALLED, ", ".join(absent))
        return
    suites = [f"tests/engines/vllm/engine/{name}" for name in SUITES]
    for runner, value in RUNNERS.items():
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not soak", *suites],
            cwd=REPOSITORY,
            env=os.environ | {"VLLM_USE_V2_MODEL_RUNNER": value},
            capture_output=True,
            text=True,
            check=False,
        )
        passed = int(found[1]) if (found := re.search(r"(\d+) passed", done.stdout)) else 0
        failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        report.check(
            f"{runner} runner",
            done.returncode == 0 and passed > 0,
            " / ".join(failed[:4])[:300],
            tests=passed,
        )
