"""What a command costs before it does anything: CPU and wall seconds of a process, the median of many, and how many
modules it imports, against its goal in wall seconds.

A bare Python that imports nothing is measured beside each. The ledger is a replay's, with some two thousand leaves; the
service is none (what is measured ends where it cannot be reached). `--program` measures an installation.
Run: `python benchmarks/startup.py --json benchmarks/results/startup-cpu.json`.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent / "harness"))

from bench import Bench, alternate

COMMANDS = {  # what it is: its words, the goal in seconds
    "--help": (["--help"], 0.15),
    "version": (["version"], 0.2),
    "a look at the ledger": (["audit", "status", "--ledger", "LEDGER"], 0.6),
    "a list of the ledger": (["case", "list", "--ledger", "LEDGER"], 0.8),
    "a local command that writes": (["db", "upgrade", "--ledger", "LEDGER"], 0.6),
    "an operation, of a server": (
        ["service", "version", "--server", "http://127.0.0.1:9", "--api-key-file", "KEY"],
        0.8,
    ),
    "an operation that reads": (["audit", "query", "--limit", "10", "--ledger", "LEDGER"], 0.8),
    "an operation that acts": (["job", "export", "--out", "exported", "--ledger", "LEDGER"], 1.5),
}


class Cost(NamedTuple):
    """Seconds of one process and what it starts."""

    cpu: float
    wall: float


def cost(command: list[str], folder: Path) -> Cost:
    """What one run costs."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)  # os.times() counts in steps of 10 ms
    began = time.perf_counter()
    subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    wall = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Cost(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall)


def count_modules(command: list[str], folder: Path) -> int:
    """The modules that one run imports; a run that asks a ledger has to succeed."""
    told = {**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}
    done = subprocess.run(command, cwd=folder, env=told, capture_output=True, text=True, check=False)
    assert done.returncode == (2 if "--server" in command else 0), done.stderr[-500:]
    return done.stderr.count("import time:") - 1  # the head of the table


def main() -> int:
    bench = Bench(__doc__, "typer", "sqlalchemy", "fastapi", rounds=7, strict=True)
    bench.add("--program", nargs="+", default=[sys.executable, "-m", "kvcustody.console.main"])
    options = bench.parse()
    program: list[str] = options.program
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ledger, key = f"sqlite:///{folder}/ledger.db", folder / "key"
        key.write_text("kvcs_0")
        key.chmod(0o600)
        replay = ["replay", "--ledger", f"{folder}/ledger.db", "--limit", "1200"]
        replay += ["--signing-key", f"{folder}/kvcustody-signing.key"]  # the one that a service signs with
        own = [sys.executable, "-m", "kvcustody.console.main", *replay]  # an installation may lack torch
        subprocess.run(own, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        words = {
            what: [*program, *({"LEDGER": ledger, "KEY": str(key)}.get(word, word) for word in given)]
            for what, (given, _) in COMMANDS.items()
        }
        words["python alone"] = [sys.executable, "-c", ""]
        sides = {what: partial(cost, command, folder) for what, command in words.items()}
        taken = alternate(sides, options.rounds, warm=1)
        modules = {what: count_modules(command, folder) for what, command in words.items()}
    cpu = {what: statistics.median(one.cpu for one in values) for what, values in taken.items()}
    wall = {what: statistics.median(one.wall for one in values) for what, values in taken.items()}
    print("| command | CPU s | wall s | least wall s | modules | goal |\n|---|---|---|---|---|---|")
    for what, (_, goal) in COMMANDS.items():
        state = "met" if wall[what] <= goal else "missed"
        least = min(one.wall for one in taken[what])
        figures = f"{cpu[what]:.2f} | {wall[what]:.2f} | {least:.2f} | {modules[what]}"
        print(f"| {what} | {figures} | ≤ {goal} {state} |")
    goals = {what: goal for what, (_, goal) in COMMANDS.items()}
    bench.keep({"cpu_seconds": cpu, "wall_seconds": wall, "modules": modules, "goals": goals})
    return bench.status(all(wall[what] <= goal for what, goal in goals.items()))


if __name__ == "__main__":
    sys.exit(main())
