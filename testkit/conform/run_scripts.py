"""Runs a target's scripts, each in a process of its own of the environment that has the product."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvcustody.testkit.conform.findings import FOUND, HOLDS, NOT_RUN, CaseFinding, ConformReport
from kvcustody.testkit.conform.public_cases import Target

SCRIPTS = Path(__file__).resolve().parent / "scripts"
_SECONDS = 300.0


def script_of(target: Target) -> Path:
    """The script that asks all cases of a target."""
    name = target.script or target.name.replace("-", "_")
    [found] = SCRIPTS.glob(f"*/{name}.py")
    return found


def run_target(
    target: Target,
    python: str,
    cases: Sequence[str] = (),
    progress: Callable[[CaseFinding], None] = lambda _: None,
) -> ConformReport:
    """Every case of a target, or these; what cannot run says why."""
    if "/" in python:
        python = str(Path(python).absolute())  # a script runs in its own folder
    version, why = _version(target, python)
    findings = []
    for case in cases or target.cases:
        finding = CaseFinding(case, NOT_RUN, why, script_of(target).name, 0.0) if why else _run(target, python, case)
        progress(finding)
        findings.append(finding)
    return ConformReport(target, version, tuple(findings))


def _version(target: Target, python: str) -> tuple[str, str]:
    """The installed version, or why there is none."""
    ask = (
        "import importlib.util, importlib.metadata as m, sys\n"
        "assert importlib.util.find_spec(sys.argv[1]) is not None, 'not installed'\n"
        "print(m.version(sys.argv[2]))"
    )
    try:
        done = _ask(python, "-c", ask, target.needs, target.product)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"{python} does not run: {type(error).__name__}"
    if done.returncode:
        return "", f"`{target.product}` is not installed where this ran; name its environment with --python"
    return done.stdout.split()[-1], ""


def _run(target: Target, python: str, case: str) -> CaseFinding:
    script, began = script_of(target), time.monotonic()
    try:
        done = _ask(python, str(script), case, *target.words)
        said = json.loads(done.stdout.strip().splitlines()[-1])
        verdict, evidence = FOUND if said["found"] else HOLDS, str(said["evidence"])
    except (OSError, subprocess.TimeoutExpired) as error:
        verdict, evidence = NOT_RUN, type(error).__name__
    except (ValueError, IndexError, KeyError, TypeError):
        verdict, evidence = NOT_RUN, (done.stderr.strip().splitlines() or ["the script said nothing"])[-1]
    return CaseFinding(case, verdict, evidence, script.name, time.monotonic() - began)


def _ask(python: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the interpreter that was named, in the folder of scripts."""
    return subprocess.run(  # noqa: S603
        [python, *words], capture_output=True, text=True, timeout=_SECONDS, cwd=SCRIPTS.parent, check=False
    )


def this_python() -> str:
    """The interpreter that runs this."""
    return sys.executable
