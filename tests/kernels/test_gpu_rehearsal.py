"""`benchmarks/gpu.sh`, rehearsed without a device: every stage runs, failures are reported, finished work is kept."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from standins.waiting import until

pytest.importorskip("triton")

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from gpu import __main__ as runner
from gpu import vllm_cases
from gpu.lab import Lab
from gpu.report import Reason, Report, is_explained, verdict
from gpu.stages import STAGES, conformance, residue, sanitizer, vllm_engine

from kvcustody.testkit.conformance.report import CaseVerdict, ConformanceReport

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.system
SCHEMA = json.loads((ROOT / "benchmarks" / "gpu" / "result.schema.json").read_text())
ON_A_DEVICE_ONLY = {
    "fingerprint": {"the device", "nvidia-smi", "scrub on free"},
    "kernel_tests": {"the device's tests"},
    "copies": {"nothing is left on the device", "rates", "objects of 256 KiB: rates"},
    "far_addresses": {"9 GiB of bfloat16"},
    "sanitizer": {"memcheck", "initcheck", "synccheck", "racecheck"},
    "transformers_engine": {
        "graphs: tokens equal to plain",
        "steps in flight: tokens equal to plain",
        "graphs, steps in flight: tokens equal to plain",
    },
}
WITHOUT_CONTROL = {
    "fingerprint",
    "kernel_tests",
    "bandwidth",
    "sanitizer",
    "transformers_engine",
    "vllm_engine",
}
QUICK = "fingerprint,compiles,far_addresses"


def rehearse(
    out: Path, *arguments: str, script: Path = ROOT / "benchmarks" / "gpu.sh", seconds: int = 1500
) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        ["bash", str(script), "--rehearse", "--json", str(out), *arguments],
        env=environment | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
        timeout=seconds,
    )


def read(out: Path) -> dict[str, Any]:
    """Return a result after checking it against its schema."""
    result: dict[str, Any] = json.loads(out.read_text())
    jsonschema.validate(result, SCHEMA)
    return result


@pytest.fixture
def planted(tmp_path: Path) -> Any:
    """The script over stages of the test's own: a copy of the runner, whose other folders are the repository's."""
    home = tmp_path / "copy"
    shutil.copytree(ROOT / "benchmarks" / "gpu", home / "benchmarks" / "gpu")
    shutil.copy(ROOT / "benchmarks" / "gpu.sh", home / "benchmarks" / "gpu.sh")
    for name in ("harness", "device"):
        (home / "benchmarks" / name).symlink_to(ROOT / "benchmarks" / name)
    (home / "src").symlink_to(ROOT / "src")
    stages = home / "benchmarks" / "gpu" / "stages"

    def plant(**bodies: str) -> Path:
        limits = dict.fromkeys(bodies, 30)
        (stages / "__init__.py").write_text(f"STAGES = {limits!r}\n")
        for name, body in bodies.items():
            text = f'"""Planted."""\nimport os, subprocess, sys, time\n\n\ndef run(report, lab):\n    {body}\n'
            (stages / f"{name}.py").write_text(text)
        return home / "benchmarks" / "gpu.sh"

    return plant


def test_every_stage_runs_and_says_what_only_a_device_can(tmp_path: Path) -> None:
    done = rehearse(tmp_path / "out.json")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    result = read(tmp_path / "out.json")
    assert list(result["stages"]) == list(STAGES)
    assert result["summary"]["FAIL"] == result["summary"]["unexplained"] == 0
    skipped = {
        name: found
        for name, stage in result["stages"].items()
        if (found := {line["check"] for line in stage["lines"] if line["status"] == "SKIP"})
    }
    if result["identity"]["versions"]["vllm"] is None:  # its cases are rehearsed where it is installed
        assert skipped.pop("vllm_engine") == {"vLLM under custody"}
    assert skipped == ON_A_DEVICE_ONLY
    controlled = {name for name, stage in result["stages"].items() if any(x.get("control") for x in stage["lines"])}
    assert controlled == set(STAGES) - WITHOUT_CONTROL
    assert set(result["facts"]) >= {"processor", "commit", "versions"}


def test_the_limits_fit_into_the_whole() -> None:
    assert sum(STAGES.values()) <= runner.SECONDS - 30 and runner.SECONDS == 25 * 60  # some for what is between them


def test_a_failure_is_the_runs(tmp_path: Path, planted: Any) -> None:
    script = planted(
        good='report.check("it holds", True)',
        bad='report.check("it holds", False, "seven of nine")',
        raises='raise ValueError("out of luck")',
        unexplained='report.check("one", True); report.skip("another", "did not feel like it")',
        explained='report.check("one", True); report.skip("another", "tool missing", "no such tool")',
        silent="return",
        ended="os._exit(3)",
    )
    done = rehearse(tmp_path / "out.json", script=script)
    assert done.returncode == 1
    stages = read(tmp_path / "out.json")["stages"]
    failed = {name for name, stage in stages.items() if stage["status"] == "FAIL"}
    assert failed == {"bad", "raises", "unexplained", "silent", "ended"}
    for said in (
        "seven of nine",
        "ValueError: out of luck",
        "did not feel like it",
        "the stage ended with 3",
    ):
        assert said in done.stdout
    assert read(tmp_path / "out.json")["summary"]["unexplained"] == 1
    assert rehearse(tmp_path / "out.json", "--only", "good,explained", script=script).returncode == 0
    assert rehearse(tmp_path / "out.json", "--only", "unexplained", script=script).returncode == 1


def test_a_stage_has_its_own_limit_and_none_is_cut_by_the_others(tmp_path: Path, planted: Any) -> None:
    limit = 30 * runner.SLOWER
    script = planted(first='time.sleep(3); report.check("one", True)', second='report.check("two", True)')
    out = tmp_path / "out.json"
    done = rehearse(out, "--seconds", str(limit + 2), script=script)  # time for one, and not for two
    assert done.returncode == 1 and "second: not reached" in done.stdout
    assert list(read(out)["stages"]) == ["first"], "what was not reached is not kept as anything"
    again = rehearse(out, script=script)
    assert again.returncode == 0 and "first: PASS, kept" in again.stdout
    assert list(read(out)["stages"]) == ["first", "second"]
    text = script.parent / "gpu" / "stages" / "__init__.py"
    text.write_text("STAGES = {'first': 1}\n")
    (script.parent / "gpu" / "stages" / "first.py").write_text(
        '"""Planted."""\nimport time\n\n\ndef run(report, lab):\n    report.check("begun", True); time.sleep(60)\n'
    )
    done = rehearse(out, "--fresh", script=script)
    assert done.returncode == 1 and f"ran past {runner.SLOWER} s" in done.stdout


def test_a_run_that_was_cut_off_goes_on_to_its_end(tmp_path: Path, planted: Any) -> None:
    """The runner alone is killed: what it had finished is kept, its stage ends with all that it started."""
    mark, out = tmp_path / "mark", tmp_path / "out.json"
    waits = (
        f'os.path.exists({str(mark)!r}) or (open({str(mark)!r}, "w").write(str(os.getpgrp())),'
        ' subprocess.run(["sleep", "100"])); report.check("one", True)'
    )
    script = planted(first='report.check("one", True)', second=waits, third='report.check("one", True)')
    process = subprocess.Popen(
        ["bash", str(script), "--rehearse", "--json", str(out)],
        env=os.environ | {"PYTHON": sys.executable},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    until(lambda: mark.exists() and mark.read_text())
    group = int(mark.read_text())
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    until(lambda: not alive(group))
    kept = read(out)["stages"]
    assert list(kept) == ["first"]
    done = rehearse(out, script=script)
    assert done.returncode == 0 and "first: PASS, kept" in done.stdout
    stages = read(out)["stages"]
    assert list(stages) == ["first", "second", "third"] and stages["first"] == kept["first"]


def alive(group: int) -> bool:
    """Return whether a process group has a member that is not a zombie."""
    listed = subprocess.run(["ps", "-eo", "pgid=,stat="], capture_output=True, text=True, check=True).stdout
    return any(line.split()[0] == str(group) and not line.split()[1].startswith("Z") for line in listed.splitlines())


def test_another_source_or_commit_begins_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass is of what was run: tests of kernels and engines, the console and the foundation are part of it."""
    (tmp_path / "tests" / "kernels").mkdir(parents=True)
    (tmp_path / "src" / "kvcustody").mkdir(parents=True)
    monkeypatch.setattr(runner.hardware, "REPOSITORY", tmp_path)
    seen = {runner.sources()}
    for name in ("tests/kernels/test_gpu.py", "src/kvcustody/clock.py"):
        (tmp_path / name).write_text("1\n")
        seen.add(runner.sources())
    assert len(seen) == 3
    assert {"tests/engines", "console"} <= set(runner.SOURCES)
    monkeypatch.undo()
    who = runner.identity(rehearse=True)
    assert set(who) == {"device", "versions", "commit", "sources"}
    out = tmp_path / "out.json"
    runner.write(out, {"format": runner.FORMAT, "identity": who, "stages": {}})
    assert runner.kept(out, who)
    assert not runner.kept(out, who | {"commit": "0" * 40})


def test_the_runner_never_touches_the_device(tmp_path: Path) -> None:
    """It does not even import torch: a device that takes one process at a time is free for its stages."""
    program = (
        "import sys; from gpu.__main__ import main; code = main();"
        "print('torch' in sys.modules, 'triton' in sys.modules); sys.exit(code)"
    )
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            program,
            "--rehearse",
            "--only",
            "fingerprint",
            "--json",
            str(tmp_path / "out.json"),
        ],
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'benchmarks'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "False False"), done.stdout + done.stderr


def test_a_stage_whose_processes_use_the_device_leaves_it_to_them(tmp_path: Path) -> None:
    """`residue` asks of processes alone: a lab that has no device would refuse anything else."""

    class Nowhere(Lab):
        rehearsal, device = True, "nowhere"

    report = Report(tmp_path / "lines")
    environment = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = f"{ROOT / 'src'}:{ROOT / 'benchmarks'}:{environment}"
    try:
        residue.run(report, Nowhere())
    finally:
        os.environ["PYTHONPATH"] = environment
    assert verdict(report.lines) == "PASS", report.lines


TOOLS = {  # what a compute-sanitizer prints, for the fault and for the matrix, with its exit statuses
    "sound": ("ERROR SUMMARY: 1 error", 9, "ERROR SUMMARY: 0 errors", 0, "PASS"),
    "racecheck": (
        "RACECHECK SUMMARY: 1 hazard displayed (1 error)", 9, "RACECHECK SUMMARY: 0 hazards displayed", 0, "PASS",
    ),
    "blind": ("ERROR SUMMARY: 0 errors", 0, "ERROR SUMMARY: 0 errors", 0, "FAIL"),
    "found something": ("ERROR SUMMARY: 1 error", 9, "ERROR SUMMARY: 3 errors", 9, "FAIL"),
    "died": ("Segmentation fault", 139, "", 139, "FAIL"),
    "no summary of the matrix": ("ERROR SUMMARY: 1 error", 9, "every kernel ran", 0, "FAIL"),
    "cannot look": ("========= Error: Device not supported.", 1, "", 1, "SKIP"),
    "no raw kernels": ("ERROR SUMMARY: 0 errors", 3, "", 0, "SKIP"),
}  # fmt: skip


@pytest.mark.parametrize("kind", TOOLS)
def test_a_tool_has_to_see_its_fault_and_to_sum_up(tmp_path: Path, kind: str) -> None:
    fault, fault_code, matrix, matrix_code, expected = TOOLS[kind]
    program = tmp_path / "compute-sanitizer"
    program.write_text(
        f'#!/bin/sh\ncase "$*" in *--fault*) echo "{fault}"; exit {fault_code};; esac\n'
        f'echo "{matrix}"; exit {matrix_code}\n'
    )
    program.chmod(0o755)
    report = Report(tmp_path / "lines")
    sanitizer.ask(report, sanitizer.Sanitizer(str(program), 2), "memcheck", "write")
    assert verdict(report.lines) == expected, report.lines


def test_a_tool_that_takes_too_long_has_failed_and_leaves_time_to_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "compute-sanitizer"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    assert (1 + 2 * len(sanitizer.FAULTS)) * sanitizer.RESERVE < sanitizer.SECONDS < STAGES["sanitizer"]
    monkeypatch.setattr(sanitizer, "RESERVE", 1)
    said = sanitizer.Sanitizer(str(program), 3, seconds=3).run("memcheck")
    assert (said.errors, said.words) == (None, "it ran past 1 s")


def test_a_case_of_the_kit_that_fails_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Sized(Lab):
        rehearsal = True

    told = ConformanceReport("engine", (CaseVerdict("scope/look-up", "fail", "a foreign hit", 0.1, 1),))
    monkeypatch.setattr("kvcustody.testkit.conformance.kit.run", lambda engine: told)
    report = Report(tmp_path / "lines")
    conformance.run(report, Sized())
    failed = [line["check"] for line in report.lines if line["status"] == "FAIL"]
    assert failed == ["the kit over ReferenceEngine", "the kit over NativeEngine"]


HANDED = {"steps": 9, "blocks": 9, "dirty_blocks": 0, "nonzero_bytes": 0, "drafted": 5}
CHURNED = {"finished": 15, "aborted": 5}
GOVERNED = vllm_cases.Found([[1, 2]], 96, 0, CHURNED, 3, HANDED, 0, [])
PLAIN = GOVERNED._replace(handed=HANDED | {"dirty_blocks": 7, "nonzero_bytes": 900})
DEFECTS = {
    "answers": ({"answers": [[1, 3]]}, {}),
    "before its next write": ({"handed": HANDED | {"nonzero_bytes": 1}}, {}),
    "zero before": ({"left_bytes": 1}, {}),
    "aborts": ({"churned": CHURNED | {"aborted": 0}}, {}),
    "preemption": ({"preempted": 0}, {}),
    "none of another's": ({"foreign_cached": 32}, {}),
    "own hits": ({"own_cached": 64}, {}),
    "books": ({"disagreements": ["block 3"]}, {}),
    "drafted": ({"handed": HANDED | {"drafted": 0}}, {}),
    "hands out what others left": ({}, {"handed": HANDED}),
    "governed engine runs": ({"refused": "RuntimeError"}, {}),
}


@pytest.mark.parametrize("defect", ["", *DEFECTS])
def test_every_check_of_a_vllm_case_can_fail(tmp_path: Path, defect: str) -> None:
    governed, plain = DEFECTS.get(defect, ({}, {}))
    report = Report(tmp_path / "lines")
    vllm_engine.compare(
        report,
        "case",
        vllm_cases.CASES["n-gram speculation"],
        vllm_engine.Ran(PLAIN._replace(**plain), ""),
        vllm_engine.Ran(GOVERNED._replace(**governed), ""),
    )
    failed = [line["check"] for line in report.lines if line["status"] == "FAIL"]
    assert len(failed) == bool(defect) and all(defect in one for one in failed)


def test_a_vllm_that_does_not_start_is_a_skip_of_its_options_alone(tmp_path: Path) -> None:
    dead = vllm_engine.Ran(GOVERNED._replace(refused="RuntimeError"), "no such dtype")
    for name, expected in ((vllm_cases.BASE, "FAIL"), ("fp8 KV cache", "SKIP")):
        report = Report(tmp_path / "lines")
        vllm_engine.compare(report, name, vllm_cases.CASES[name], dead, dead)
        assert verdict(report.lines) == expected
    for one_by_one, expected in ((True, "SKIP"), (False, "FAIL")):
        report = Report(tmp_path / "lines")
        vllm_engine.late(report, "MLA", one_by_one=one_by_one)
        assert verdict(report.lines) == expected


def test_a_refusal_is_in_its_own_words(tmp_path: Path) -> None:
    name = "another connector"
    said, ended = vllm_cases.REFUSED[name].refused, GOVERNED._replace(refused="RuntimeError")
    for ran, expected in (
        (vllm_engine.Ran(ended, f"ConfigError: connector `x` {said}"), "PASS"),
        (vllm_engine.Ran(ended, "out of memory"), "FAIL"),
        (vllm_engine.Ran(GOVERNED, said), "FAIL"),
        (vllm_engine.Ran(None, said), "FAIL"),
    ):
        report = Report(tmp_path / "lines")
        vllm_engine.refused(report, name, ran)
        assert verdict(report.lines) == expected


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
