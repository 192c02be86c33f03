"""compute-sanitizer over the matrix of variants: memcheck, initcheck, synccheck, and what the first two must see."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from typing import Any

from device import sanitize
from harness.hardware import REPOSITORY

from gpu.report import Reason, Report

LIMIT_SECONDS = 240
SECONDS = 100  # for one tool
FOUND = 9  # its exit status where it found something
FAULTS = {"memcheck": "write", "initcheck": "read", "synccheck": None}
SCRIPT = REPOSITORY / "benchmarks" / "device" / "sanitize.py"
SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error")


def run(report: Report, lab: Any) -> None:
    """The matrix by itself first: a tool would only repeat its failure."""
    launches = sanitize.sweep(lab, (40, 96) if lab.rehearsal else sanitize.WIDTHS)
    report.check("every variant does its work", launches > 0, variants=launches)
    program = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    for tool, fault in FAULTS.items():
        if lab.rehearsal:
            report.skip(tool, Reason.REHEARSAL)
        elif program is None:
            report.skip(tool, Reason.TOOL_MISSING, "compute-sanitizer is not on the path")
        else:
            ask(report, program, tool, fault)


def ask(report: Report, program: str, tool: str, fault: str | None) -> None:
    """One tool over the matrix, and over its fault; a tool that did not attach was refused, in its own words."""
    code, errors, words = sanitized(program, tool, [])
    if errors is None:
        report.skip(tool, Reason.TOOL_REFUSED, words)
        return
    report.check(tool, code == 0 and errors == 0, "" if not code else words, errors=errors, exit_status=code)
    if fault is not None:
        code, errors, words = sanitized(program, tool, ["--fault", fault])
        report.control(
            f"{tool} sees a stray {fault}", code == FOUND and bool(errors), exit_status=code, errors=errors
        )


def sanitized(program: str, tool: str, arguments: list[str]) -> tuple[int, int | None, str]:
    """Exit status, errors by its summary (None where it gave none), and its last words."""
    command = [
        program,
        "--tool",
        tool,
        "--error-exitcode",
        str(FOUND),
        sys.executable,
        str(SCRIPT),
        *arguments,
    ]
    environment = os.environ | {
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"
    }  # each tensor an allocation that it knows
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return 124, 0, f"it ran past {SECONDS} s"
    text = done.stdout + done.stderr
    found = SUMMARY.findall(text)
    lines = [line for line in text.splitlines() if line.strip()]
    return done.returncode, int(found[-1]) if found else None, " / ".join(lines[-3:])[:300]
