"""Print the Python that `make setup` makes its environment with: the fastest build of the version that runs this.

    python3 packaging/interpreter.py

A machine often has several builds of one version, and one compiled with a profile and link-time optimisation runs the
tests in a fifth less time. Distributions strip these flags from what Python reports, so each build runs the same loop.

1. Only builds of this version (3.11, 3.12 ...) count: the locked wheels are the same for them.
2. A build without `venv` and `ensurepip` makes no environment, and does not count.
3. This Python stays unless another takes at least a tenth less processor time.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

SYSTEM_FOLDERS = ("/usr/local/bin", "/usr/bin", "/opt/homebrew/bin")
KEEPS_UP = 0.9  # of this Python's time
PROBE = """\
import ensurepip, sys, time, venv
def loop():
    counts = {}
    for number in range(100_000):
        counts[number % 977] = counts.get(number % 977, 0) + number
        str(number).startswith("9")
def seconds():
    began = time.process_time()
    loop()
    return time.process_time() - began
print("%d.%d" % sys.version_info[:2], min(seconds() for _ in range(5)), sys.executable)
"""


def measure(python: Path) -> tuple[str, float, str] | None:
    """Version, seconds of the loop and executable of this Python; None where it makes no environment."""
    try:
        answer = subprocess.run([python, "-c", PROBE], capture_output=True, text=True, timeout=60, check=True)  # noqa: S603 - a Python on PATH
        version, seconds, executable = answer.stdout.strip().split(maxsplit=2)
        return version, float(seconds), executable
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def fastest(this: Path, version: str, folders: Iterable[Path]) -> str:
    """The executable of the fastest build of `version` in these folders, `this` included."""
    names = [folder / name for folder in folders for name in ("python3", f"python{version}")]
    others = {path.resolve(): path for path in names if path.exists() and path.resolve() != this.resolve()}
    here = measure(this)
    if here is None:
        return str(this)
    found = [answer for path in others.values() if (answer := measure(path)) and answer[0] == version]
    best = min(found, key=lambda answer: answer[1], default=here)
    return best[2] if best[1] < KEEPS_UP * here[1] else here[2]


def main() -> None:
    """Look on PATH and in the folders of the system."""
    folders = [*os.environ.get("PATH", "").split(os.pathsep), *SYSTEM_FOLDERS]
    version = "{}.{}".format(*sys.version_info)
    print(fastest(Path(sys.executable), version, [Path(folder) for folder in folders if folder]))


if __name__ == "__main__":
    main()
