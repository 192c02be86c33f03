"""compute-sanitizer over the matrix of variants, with four tools, and over one planted fault for each of them.

A tool is quiet about the matrix and loud about its fault, or it has shown nothing. Each process has what is left of the
stage's time, less a reserve for those after it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from device import sanitize
from harness.hardware import REPOSITORY

from gpu.report import Reason, Report
from gpu.stages import STAGES

SECONDS = STAGES["sanitizer"] - 15  # of all processes together
RESERVE = 12  # seconds, for each of those that follow
FOUND = 9  # a tool's exit status where it found something
FAULTS = {"memcheck": "write", "initcheck": "read", "synccheck": "barrier", "racecheck": "race"}
SCRIPT = REPOSITORY / "benchmarks" / "device" / "sanitize.py"
SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard")
# Its own words, on lines of its own, where it cannot look at this device or may not.
CANNOT = re.compile(r"^=+ .*(not supported|no attachable process|permission|unable to attach)", re.I | re.M)


class Said(NamedTuple):
    """How a process ended, what its summary counted (None where there was none), why it could not look, last words."""

    code: int
    errors: int | None
    cannot: str
    words: str


class Sanitizer:
    """The program, and the time that is left to it; without a program the script by itself."""

    def __init__(self, program: str, runs: int, seconds: float = SECONDS) -> None:
        self._program, self._runs = program, runs
        self._until = time.monotonic() + seconds

    def run(self, tool: str, *arguments: str) -> Said:
        """The script under one tool."""
        self._runs -= 1
        seconds = max(self._until - time.monotonic() - self._runs * RESERVE, RESERVE)
        under = [self._program, "--tool", tool, "--error-exitcode", str(FOUND)] if tool else []
        # each tensor an allocation that the tool knows
        environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        try:
            done = subprocess.run(
                [*under, sys.executable, str(SCRIPT), *arguments],
                env=environment, capture_output=True, text=True, check=False, timeout=seconds,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return Said(124, None, "", f"it ran past {seconds:.0f} s")
        text = done.stdout + done.stderr
        counted = [one or other for one, other in SUMMARY.findall(text)]
        lines = [line for line in text.splitlines() if line.strip()]
        cannot = CANNOT.search(text)
        return Said(
            done.returncode,
            int(counted[-1]) if counted else None,
            cannot[0].strip("= ")[:200] if cannot else "",
            " / ".join(lines[-3:])[:300],
        )


def run(report: Report, lab: Any) -> None:
    """The matrix by itself first: a tool would only repeat its failure."""
    found = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    program = found if Path(found).exists() else ""
    if lab.rehearsal:
        launches = sanitize.sweep(lab, (40, 96))
        report.check("every variant does its work", launches > 0, variants=launches)
        for tool in FAULTS:
            report.skip(tool, Reason.REHEARSAL)
        return
    sanitizer = Sanitizer(program, runs=1 + 2 * len(FAULTS))
    said = sanitizer.run("")
    report.check("every variant does its work", said.code == 0, said.words)
    for tool, fault in FAULTS.items():
        if program:
            ask(report, sanitizer, tool, fault)
        else:
            report.skip(tool, Reason.TOOL_MISSING, "compute-sanitizer is not on the path")


def ask(report: Report, sanitizer: Sanitizer, tool: str, fault: str) -> None:
    """The fault first: a tool that cannot look says so, and one that is quiet about it has failed."""
    outcome = sanitizer.run(tool, "--fault", fault)
    if outcome.code == sanitize.NO_COMPILER or (outcome.errors is None and outcome.cannot):
        report.skip(tool, Reason.TOOL_REFUSED, outcome.cannot or outcome.words)
        return
    seen = outcome.code == FOUND and bool(outcome.errors)
    report.control(
        f"{tool} sees a planted {fault}",
        seen,
        "" if seen else outcome.words,
        exit_status=outcome.code,
        errors=outcome.errors,
    )
    outcome = sanitizer.run(tool)
    clean = outcome.code == 0 and outcome.errors == 0
    report.check(tool, clean, "" if clean else outcome.words, exit_status=outcome.code, errors=outcome.errors)
