"""vLLM under custody beside plain: runners, graphs, Mamba, MLA, fp8, windows, speculation, layouts, and its refusals.

Each engine is a process of its own (`gpu.vllm_cases`), four at a time where the device lets several in. A case compares
a governed engine with a plain one: equal answers, no foreign hit, no byte left in a block that is handed out, books
that agree; the plain engine's dirty blocks are the control. Who may read what (tokens that are missing, forged, expired
or replayed, erasure, deadlines) is asked by the suite of `make test-engines`, as it is.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from harness.hardware import REPOSITORY

from gpu.report import Reason, Report, missing
from gpu.stages import STAGES
from gpu.vllm_cases import BASE, CASES, GOVERNED, PLAIN, REFUSED, V1, V2, Case, Found

WIDTH = 4
ENGINE_SECONDS = 60  # that an engine may take from its start to its end; what begins later than that is not begun
SECONDS = STAGES["vllm_engine"] - 15
SUITE = REPOSITORY / "tests" / "engines" / "vllm" / "engine" / "test_isolation.py"
SUITE_TESTS = 12
NEEDS = ("vllm", "pytest", "sqlalchemy", "cryptography", "pydantic", "structlog")
LETS_GO = (
    "hybrid",
    "windowed",
)  # blocks end while their request runs, so hits can be shorter (docs/reference/engines/vllm.md)
NO_LAYOUT = "does not satisfy every"  # vLLM's own words
WORDS = ("Error:", "error:", "Exception")


class Ran(NamedTuple):
    """What an engine's process left, or the words with which it ended; neither where it was not begun."""

    found: Found | None
    words: str
    began: bool = True


def run(report: Report, lab: Any) -> None:
    """Every engine of every case, then what they found, case by case."""
    if absent := missing(*NEEDS):
        report.skip("vLLM under custody", Reason.NOT_INSTALLED, ", ".join(absent))
        return
    wanted: list[tuple[str, str]] = []
    for name, case in (CASES | REFUSED).items():
        if lab.rehearsal and case.device_only:
            report.skip(name, Reason.REHEARSAL, case.device_only)
            continue
        wanted += [(name, PLAIN)] * (not case.like and not case.refused) + [(name, GOVERNED)]
    until = time.monotonic() + (SECONDS if not lab.rehearsal else 3600)
    one_by_one = not lab.rehearsal and exclusive()
    width = 1 if lab.rehearsal or one_by_one else WIDTH
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(width) as pool:
        suites = {}
        for runner, environment in (("V1", V1), ("V2", V2)):
            if lab.rehearsal:
                report.skip(f"{SUITE.stem}, {runner}", Reason.REHEARSAL, "`make test-engines` runs it")
            elif one_by_one:
                report.skip(f"{SUITE.stem}, {runner}", Reason.DEVICE_LACKS, "it takes one process at a time")
            else:
                suites[runner] = pool.submit(suite, environment, until)
        files = [Path(folder) / str(at) for at in range(len(wanted))]
        done = pool.map(lambda one, file: engine(*one, file, until), wanted, files)
        ran = dict(zip(wanted, done, strict=True))
    for runner, future in suites.items():
        code, passed, words = future.result()
        report.check(f"{SUITE.stem}, {runner}", code == 0 and passed >= SUITE_TESTS, words, tests=passed)
    for name in dict.fromkeys(name for name, _ in wanted):
        plain = ran[CASES[name].like or name, PLAIN] if name in CASES else None
        governed = ran[name, GOVERNED]
        if not (governed.began and (plain is None or plain.began)):
            late(report, name, one_by_one=one_by_one)
        elif plain is None:
            refused(report, name, governed)
        else:
            compare(report, name, CASES[name], plain, governed)


def late(report: Report, name: str, *, one_by_one: bool) -> None:
    """A case for which no time was left: foreseen where the device takes one process at a time."""
    if one_by_one:
        report.skip(name, Reason.DEVICE_LACKS, "it takes one process at a time, and no time was left for this")
    else:
        report.check(f"{name}: its engines begin in time", False)


def exclusive() -> bool:
    """Whether the device takes one process at a time."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return False
    asked = [tool, "--id=0", "--query-gpu=compute_mode", "--format=csv,noheader"]
    return "Exclusive" in subprocess.run(asked, capture_output=True, text=True, check=False).stdout


def suite(environment: Mapping[str, str], until: float) -> tuple[int, int, str]:
    """Exit status, tests that passed, and the names of those that did not."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not soak", str(SUITE)]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    try:
        done = subprocess.run(
            command, cwd=REPOSITORY, env=kept | dict(environment),
            capture_output=True, text=True, check=False, timeout=until - time.monotonic(),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return 124, 0, "it ran past the stage's time"
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    found = re.search(r"(\d+) passed", done.stdout)
    return done.returncode, int(found[1]) if found else 0, " / ".join(failed)[:300]


def engine(name: str, kind: str, out: Path, until: float) -> Ran:
    """One engine from start to end."""
    left = until - time.monotonic()
    if left < ENGINE_SECONDS:
        return Ran(None, "", began=False)
    command = [sys.executable, "-m", "gpu.vllm_cases", name, kind, str(out)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=left)
    except subprocess.TimeoutExpired:
        return Ran(None, f"it ran past {left:.0f} s")
    lines = (done.stdout + done.stderr).splitlines()
    words = [line.strip() for line in lines if any(word in line for word in WORDS)]
    found = Found(**json.loads(out.read_text())) if out.exists() else None
    return Ran(found, " / ".join(dict.fromkeys(words))[:2000])


def compare(report: Report, name: str, case: Case, plain: Ran, governed: Ran) -> None:
    """One case: the control, then what governance promises."""
    if plain.found is not None and plain.found.refused and name != BASE:
        report.skip(name, Reason.ENGINE_LACKS, f"plain vLLM does not start: {plain.words[-300:]}")
        return
    if governed.found is not None and governed.found.refused and NO_LAYOUT in governed.words:
        report.skip(name, Reason.ENGINE_LACKS, "its attention does not read this layout")
        return
    for kind, one in ((PLAIN, plain), (GOVERNED, governed)):
        if one.found is None or one.found.refused:
            why = one.found.refused if one.found is not None else "it ended early"
            report.check(f"{name}: the {kind} engine runs", False, f"{why} {one.words[-300:]}")
            return
    control, ours = plain.found, governed.found
    assert control is not None and ours is not None
    if not case.like:
        report.control(
            f"{name}: plain vLLM hands out what others left",
            control.handed["dirty_blocks"] > 0,
            **control.handed,
        )
    same = sum(one == other for one, other in zip(ours.answers, control.answers, strict=True))
    report.check(f"{name}: answers are plain vLLM's", same == len(ours.answers), equal=same, of=len(ours.answers))
    zero = ours.handed["blocks"] > 0 and not ours.handed["nonzero_bytes"] and not ours.left_bytes
    report.check(
        f"{name}: every block is zero before its next write",
        zero,
        **ours.handed,
        left_bytes=ours.left_bytes,
    )
    pressed = ours.preempted > 0 or case.model != "full"  # others' blocks may be too large to outgrow the pool
    busy = ours.churned["finished"] > 5 and ours.churned["aborted"] > 0 and pressed
    report.check(f"{name}: churn, aborts and preemption", busy, **ours.churned | {"preempted": ours.preempted})
    as_plain = ours.own_cached == control.own_cached
    shorter = case.model in LETS_GO and ours.own_cached < control.own_cached
    report.check(
        f"{name}: own hits as plain vLLM's, none of another's",
        ours.foreign_cached == 0 and (as_plain or shorter),
        own=ours.own_cached, plain=control.own_cached, foreign=ours.foreign_cached,
    )  # fmt: skip
    report.check(f"{name}: the books agree", not ours.disagreements, "; ".join(ours.disagreements)[:300])
    if "speculative_config" in case.options:
        report.check(f"{name}: tokens were drafted", ours.handed["drafted"] > 0, drafted=ours.handed["drafted"])


def refused(report: Report, name: str, governed: Ran) -> None:
    """Governance does not start, and says why; the cases before are the control that it starts otherwise."""
    said = REFUSED[name].refused in governed.words
    started = governed.found is None or not governed.found.refused
    report.check(f"refused: {name}", said and not started, "" if said else governed.words[-300:])
