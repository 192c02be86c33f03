"""Validates a device: stages in processes of their own, a line for each check, exit status 1 where anything failed.

    benchmarks/gpu.sh --json OUT [--only STAGE,...] [--list] [--fresh] [--rehearse] [--seconds 1500]

- OUT (`result.schema.json`) is written after every stage. Where it is of the same device, versions, commit and sources,
  finished stages are not run again (`--fresh` runs all, `--only` those named): a run that was cut off goes on.
- A stage begins where its whole limit is left, so that none is cut by the others' time; otherwise it is not reached.
- Exit status: 0, or 1 where a check failed, a skip is unexplained, or a stage was not reached.
- This process never touches the device, which may be in exclusive-process mode; a stage ends with it.
- `--rehearse` runs the same stages at small sizes without a device (`lab.Rehearsal`); what cannot be says so.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import hardware

from gpu.report import FAIL, PASS, SKIP, Line, Report, is_explained, told, verdict
from gpu.stages import STAGES

FORMAT = 2
SECONDS = 25 * 60
SLOWER = 4  # a rehearsal's limits: a host does a device's work, often a busy one
SOURCES = (
    "allocator",
    "audit",
    "benchmarks",
    "console",
    "governance",
    "integrations",
    "kernels",
    "lab",
    "migrations",
    "policies",
    "src",
    "testkit",
    "tests/lib",
    "tests/engines",
    "tests/kernels",
)
SUFFIXES = {".py", ".sh", ".yaml", ".sql", ".mako"}


def main() -> int:
    """Run what is left to run; the exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks/gpu.sh", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="result file; a run that was cut off goes on from it")
    parser.add_argument("--only", help="stages, with commas between; they are run again if they were finished")
    parser.add_argument("--list", action="store_true", help="name the stages and their limits")
    parser.add_argument("--fresh", action="store_true", help="begin again, whatever OUT holds")
    parser.add_argument("--rehearse", action="store_true", help="without a device, at small sizes")
    parser.add_argument("--seconds", type=int, help=f"of all stages together (default: {SECONDS})")
    parser.add_argument("--device", action="store_true", help=argparse.SUPPRESS)  # what it is
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)  # one, in this process
    parser.add_argument("--lines", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--runner", type=int, help=argparse.SUPPRESS)  # a pipe that ends with it
    options = parser.parse_args()
    if options.list:
        print("\n".join(f"{name:22}{limit:>4} s  {summary_of(name)}" for name, limit in STAGES.items()))
        return 0
    if options.device:
        print(json.dumps(the_device()))
        return 0
    if options.stage:
        if options.runner is not None:
            end_with(options.runner)
        return in_this_process(options.stage, options.lines, rehearse=options.rehearse)
    chosen = options.only.split(",") if options.only else list(STAGES)
    if unknown := sorted(set(chosen) - set(STAGES)):
        parser.error(f"no such stage: {', '.join(unknown)}")
    if options.json is None:
        parser.error("--json OUT is needed")
    if options.seconds is None:
        options.seconds = SECONDS * (SLOWER if options.rehearse else 1)
    return run(options, chosen)


def run(options: argparse.Namespace, chosen: list[str]) -> int:
    """Every chosen stage that is not finished, each kept as it ends."""
    who = identity(rehearse=options.rehearse)
    result = {} if options.fresh else kept(options.json, who)
    if not result:
        facts = hardware.facts("torch", "triton")
        result = {"benchmark": "gpu", "format": FORMAT, "identity": who, "facts": facts, "stages": {}}
    stages: dict[str, Any] = result["stages"]
    began = time.monotonic()
    for name in chosen:
        if name in stages and not options.only:
            print(f"== {name}: {stages[name]['status']}, kept")
            continue
        limit = STAGES[name] * (SLOWER if options.rehearse else 1)
        left = options.seconds - (time.monotonic() - began)
        if left < limit:
            print(f"== {name}: not reached, {left:.0f} s are left and it may take {limit}; run again to go on")
            continue
        print(f"== {name}", flush=True)
        stages[name] = in_a_process(name, limit, rehearse=options.rehearse)
        result["summary"] = summary(stages)
        write(options.json, result)
    result["summary"] = summary(stages)
    write(options.json, result)
    missing = [name for name in chosen if name not in stages]
    bad = [name for name in chosen if name in stages and stages[name]["status"] == FAIL]
    print(f"{result['summary']} failed: {bad or 'none'}; not reached: {missing or 'none'}")
    return 1 if bad or missing else 0


def in_a_process(name: str, seconds: float, *, rehearse: bool) -> dict[str, Any]:
    """One stage: its lines as far as it came, and how it ended."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "lines"
        its_end, ours = os.pipe()  # nobody writes: it is at its end when this process is
        command = [sys.executable, "-m", "gpu", "--stage", name, "--lines", str(file)]
        command += ["--runner", str(its_end), *(["--rehearse"] if rehearse else [])]
        process = subprocess.Popen(command, start_new_session=True, pass_fds=[its_end])
        os.close(its_end)
        ended = ""
        try:
            code = process.wait(seconds)
            ended = f"the stage ended with {code}" if code else ""
        except subprocess.TimeoutExpired:
            ended = f"the stage ran past {seconds:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):  # with all that it started
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            os.close(ours)
        lines: list[Line] = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    if ended:
        lines.append({"status": FAIL, "check": "the stage came to its end", "detail": ended})
        print(told(lines[-1]))
    status = verdict(lines)
    print(f"{status} {name}", flush=True)
    return {"status": status, "seconds": round(time.monotonic() - began, 1), "lines": lines}


def end_with(runner: int) -> None:
    """From now on this process and all that it starts end when the pipe does, however its runner ended."""

    def watch() -> None:
        os.read(runner, 1)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, name="runner", daemon=True).start()


def in_this_process(name: str, file: Path, *, rehearse: bool) -> int:
    """The stage itself; what it raises is a line."""
    from gpu.lab import lab_of

    report = Report(file)
    try:
        run_stage: Callable[[Report, Any], None] = importlib.import_module(f"gpu.stages.{name}").run
        with lab_of(rehearse=rehearse) as lab:
            run_stage(report, lab)
    except Exception as error:
        traceback.print_exc()
        report.check("nothing was raised", False, f"{type(error).__name__}: {str(error)[:300]}")
    return 0


def summary_of(name: str) -> str:
    """The stage's first line, read without importing it: stages import torch."""
    source = (Path(__file__).parent / "stages" / f"{name}.py").read_text()
    return (ast.get_docstring(ast.parse(source)) or "").splitlines()[0]


def summary(stages: dict[str, Any]) -> dict[str, int]:
    """How many stages ended how, and unexplained skips among their lines."""
    count = {one: sum(stage["status"] == one for stage in stages.values()) for one in (PASS, FAIL, SKIP)}
    lines = [line for stage in stages.values() for line in stage["lines"]]
    return count | {"unexplained": sum(line["status"] == SKIP and not is_explained(line) for line in lines)}


def identity(*, rehearse: bool) -> dict[str, Any]:
    """What a result is of: another device, version, commit or source begins again."""
    device = "rehearsal"
    if not rehearse:
        asked = [sys.executable, "-m", "gpu", "--device"]  # a process that is over before any stage begins
        done = subprocess.run(asked, stdout=subprocess.PIPE, text=True, check=False)
        device = json.loads(done.stdout or '""')
        if not device:
            raise SystemExit("no CUDA or ROCm device is visible (`--rehearse` runs without one)")
    versions = {name: hardware.version(name) for name in ("torch", "triton", "transformers", "vllm")}
    commit = (hardware.commit() or "").rstrip("+")  # what differs from it is in the sources' digest
    return {"device": device, "versions": versions, "commit": commit or None, "sources": sources()}


def the_device() -> str:
    """Name, number and size of the first one, or nothing."""
    import torch

    if not torch.cuda.is_available():
        return ""
    found = torch.cuda.get_device_properties(0)
    return f"{found.name} {getattr(found, 'uuid', '')} {found.total_memory}"


def sources() -> str:
    """SHA-256 over what is run: a copy without its history has it too."""
    digest = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((hardware.REPOSITORY / folder).rglob("*")):
            if path.suffix in SUFFIXES and path.is_file():
                digest.update(str(path.relative_to(hardware.REPOSITORY)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def kept(file: Path, who: dict[str, Any]) -> dict[str, Any]:
    """The result that goes on, or nothing where it is of something else or cannot be read."""
    try:
        found: dict[str, Any] = json.loads(file.read_text())
        return found if (found["format"], found["identity"]) == (FORMAT, who) else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def write(file: Path, result: dict[str, Any]) -> None:
    """Replace the result in one step."""
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(file.name + ".new")
    new.write_text(json.dumps(result, indent=1) + "\n")
    new.replace(file)


if __name__ == "__main__":
    sys.exit(main())
