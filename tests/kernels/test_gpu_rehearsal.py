"""`benchmarks/gpu.sh`, rehearsed without a device: every stage runs, what fails is seen, what was finished is kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("triton")

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from gpu.report import Reason, Report, is_explained, verdict
from gpu.stages import STAGES

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.system
REHEARSED_ON_A_DEVICE_ONLY = {
    "kernel_tests": {"the device's tests"},
    "transformers_engine": {
        "graphs: tokens equal to plain",
        "graphs, steps in flight: tokens equal to plain",
    },
    "vllm_engine": {"vLLM under custody"},
}
QUICK = "fingerprint,compiles,far_addresses"


def command(out: Path, *arguments: str) -> list[str]:
    return ["bash", str(ROOT / "benchmarks" / "gpu.sh"), "--rehearse", "--json", str(out), *arguments]


def rehearse(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        command(out, *arguments),
        env=environment | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
        timeout=540,
    )


def test_every_stage_runs_and_says_what_only_a_device_can(tmp_path: Path) -> None:
    done = rehearse(tmp_path / "out.json")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    result = json.loads((tmp_path / "out.json").read_text())
    assert list(result["stages"]) == list(STAGES)
    assert result["summary"]["FAIL"] == result["summary"]["unexplained"] == 0
    skipped = {
        name: {line["check"] for line in stage["lines"] if line.get("reason") == Reason.REHEARSAL}
        for name, stage in result["stages"].items()
    }
    for name, checks in REHEARSED_ON_A_DEVICE_ONLY.items():
        assert checks <= skipped[name], name
    left_out = {name: checks for name, checks in skipped.items() if checks}
    assert sum(len(checks) for checks in left_out.values()) <= 12, left_out
    controls = {
        name for name, stage in result["stages"].items() if any(x.get("control") for x in stage["lines"])
    }
    assert {"ordering", "captures", "compiles", "residue", "late_audits", "conformance"} <= controls
    assert set(result["facts"]) >= {"processor", "commit", "versions"}


def test_a_run_that_was_cut_off_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    process = subprocess.Popen(
        command(out, "--only", QUICK),
        env=os.environ | {"PYTHON": sys.executable},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    until = time.monotonic() + 120
    while time.monotonic() < until and not out.exists():
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    finished = list(json.loads(out.read_text())["stages"])
    assert finished and finished[0] == "fingerprint"
    seconds = json.loads(out.read_text())["stages"]["fingerprint"]["seconds"]
    again = rehearse(out, "--seconds", "0")  # what is finished is kept, and nothing else is reached
    assert "== fingerprint: PASS, kept" in again.stdout
    assert again.returncode == 1 and "not reached" in again.stdout
    assert json.loads(out.read_text())["stages"]["fingerprint"]["seconds"] == seconds


def test_a_failure_is_the_runs(tmp_path: Path) -> None:
    """The result of a finished stage is edited to a failure: the run that goes on says so."""
    out = tmp_path / "out.json"
    assert rehearse(out, "--only", "fingerprint").returncode == 0
    result = json.loads(out.read_text())
    result["stages"]["fingerprint"]["status"] = "FAIL"
    out.write_text(json.dumps(result))
    done = rehearse(out, "--seconds", "0")
    assert done.returncode == 1 and "failed: ['fingerprint']" in done.stdout


def test_a_skip_has_to_be_foreseen(tmp_path: Path) -> None:
    report = Report(tmp_path / "lines")
    report.check("one", True)
    report.skip("another", Reason.TOOL_REFUSED, "no permission for counters")
    assert verdict(report.lines) == "PASS" and is_explained(report.lines[-1])
    report.skip("a third", "did not feel like it")
    assert verdict(report.lines) == "FAIL" and not is_explained(report.lines[-1])
    assert verdict([]) == "FAIL"


@pytest.mark.parametrize("arguments", [["--only", "nothing"], []])
def test_a_wrong_call_is_told(tmp_path: Path, arguments: list[str]) -> None:
    asked = ["--json", str(tmp_path / "x"), *arguments] if arguments else []
    done = subprocess.run(
        ["bash", str(ROOT / "benchmarks" / "gpu.sh"), *asked],
        env=os.environ | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and ("no such stage" in done.stderr or "--json OUT is needed" in done.stderr)
