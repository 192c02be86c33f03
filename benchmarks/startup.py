"""What a command costs before it does anything: CPU seconds of a process, the median of many, against its goal.

A bare Python that imports nothing is measured beside each. The ledger is an empty one; the service is none (what is
measured ends where it cannot be reached).
Run: `python benchmarks/startup.py --json benchmarks/results/startup-cpu.json`.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "harness"))

from bench import Bench, alternate

COMMANDS = {  # what it is: its words, the goal in CPU seconds
    "--help": (["--help"], 0.3),
    "version": (["version"], 0.3),
    "a local command": (["audit", "status", "--ledger", "LEDGER"], 0.6),
    "a local command that writes": (["db", "upgrade", "--ledger", "LEDGER"], 0.6),
    "an api command, of a server": (
        ["api", "version", "--server", "http://127.0.0.1:9", "--api-key-file", "KEY"],
        1.0,
    ),
    "an api command, of a ledger": (["api", "version", "--ledger", "LEDGER"], 1.0),
}


def cpu_seconds(command: list[str], folder: Path) -> float:
    """User and system seconds of one process and what it starts."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)  # os.times() counts in steps of 10 ms
    subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    bench = Bench(__doc__, "typer", "sqlalchemy", "fastapi", rounds=11, strict=True)
    options = bench.parse()
    program = [sys.executable, "-m", "kvcustody.console.main"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ledger, key = f"sqlite:///{folder}/ledger.db", folder / "key"
        key.write_text("kvcs_0")
        key.chmod(0o600)
        made = [*program, "db", "upgrade", "--ledger", ledger]
        subprocess.run(made, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        words = {
            what: [*program, *({"LEDGER": ledger, "KEY": str(key)}.get(word, word) for word in given)]
            for what, (given, _) in COMMANDS.items()
        }
        words["python alone"] = [sys.executable, "-c", ""]
        sides = {what: partial(cpu_seconds, command, folder) for what, command in words.items()}
        taken = alternate(sides, options.rounds)
    median = {what: statistics.median(values) for what, values in taken.items()}
    print("| command | CPU s | of a bare Python | goal |\n|---|---|---|---|")
    for what, (_, goal) in COMMANDS.items():
        found = median[what]
        state = "met" if found <= goal else "missed"
        print(f"| {what} | {found:.2f} | {found / median['python alone']:.0f}× | ≤ {goal} {state} |")
    goals = {what: goal for what, (_, goal) in COMMANDS.items()}
    bench.keep({"cpu_seconds": median, "goals": goals})
    return bench.status(all(median[what] <= goal for what, goal in goals.items()))


if __name__ == "__main__":
    sys.exit(main())
