"""The kernels' own tests on the device: graphs, formats, faults, tuning, slots, and every layout against an oracle."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from typing import Any

from harness.hardware import REPOSITORY

from gpu.report import Reason, Report

DEVICE = ["-m", "gpu", "tests/kernels/test_gpu.py"]
ORACLE = ["tests/kernels/test_kernels.py"]
SOME = ["-k", "fault or entries_name or bad_lists"]


def run(report: Report, lab: Any) -> None:
    """Two files of tests, neither of which needs the suite's own fixtures."""
    code, passed, skipped, words = tests(DEVICE)
    if lab.rehearsal:  # each of them is found, and says that it needs a device
        report.check("the device's tests load", code == 0 and passed == 0 and skipped >= 8, words, skipped=skipped)
        report.skip("the device's tests", Reason.REHEARSAL)
    else:
        report.check("the device's tests", code == 0 and passed >= 8 and not skipped, words, tests=passed)
    if importlib.util.find_spec("hypothesis") is None:
        report.skip("every layout against an oracle", Reason.NOT_INSTALLED, "hypothesis")
        return
    where = {} if lab.rehearsal else {"KVCUSTODY_TEST_DEVICE": "cuda"}
    code, passed, skipped, words = tests([*ORACLE, *(SOME if lab.rehearsal else [])], **where)
    report.check("every layout against an oracle", code == 0 and passed >= 8, words, tests=passed, skipped=skipped)


def tests(arguments: list[str], **environment: str) -> tuple[int, int, int, str]:
    """Exit status, tests that passed and that were skipped, and the last words where one failed."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest", *arguments]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=REPOSITORY, env=kept | environment, capture_output=True, text=True, check=False)
    counted = {word: int(number) for number, word in re.findall(r"(\d+) (passed|skipped)", done.stdout)}
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith(("FAILED", "ERROR", "E  "))]
    words = " / ".join(lines[-4:])[:400] if done.returncode else ""
    return done.returncode, counted.get("passed", 0), counted.get("skipped", 0), words
