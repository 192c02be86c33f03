"""The tests on a loaded machine, in another order each time: what fails depends on the clock (`make test-loaded`).

    python tests/loaded.py                                    # five orders of all that `make test` runs
    python tests/loaded.py --seeds 1 -- tests/audit/evidence/processes # one order of a folder

Two busy loops take what they can of the processors, at the same priority as the tests. `KVCUSTODY_TEST_ORDER=SEED` with
the printed seed repeats an order without the load. What pytest says of a seed stands in `.cache/loaded-SEED.log`.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOGS = Path(".cache")
LOOPS = 2
SPIN = "import os\nwhile os.getppid() == {parent}:\n    pass"  # it ends with its parent, however that ends


@contextmanager
def load(loops: int) -> Iterator[None]:
    """So many busy loops meanwhile."""
    busy = [subprocess.Popen([sys.executable, "-c", SPIN.format(parent=os.getpid())]) for _ in range(loops)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def run(seed: int, arguments: list[str]) -> int:
    """One order; the exit status of pytest."""
    command = [sys.executable, "-m", "pytest", "-q", "--forks", "2"]
    command += ["-m", "not soak and not system", *arguments]
    began = time.monotonic()
    with load(LOOPS):
        done = subprocess.run(
            command,
            env=os.environ | {"KVCUSTODY_TEST_ORDER": str(seed)},
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
    LOGS.mkdir(exist_ok=True)
    (LOGS / f"loaded-{seed}.log").write_text(done.stdout, encoding="utf-8")
    for line in done.stdout.splitlines():
        if re.match(r"(FAILED|ERROR) ", line):
            print(line)
    summary = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else "no output"
    print(f"seed {seed}: {summary} ({time.monotonic() - began:,.0f} s)", flush=True)
    return done.returncode


def main() -> int:
    """0 if every order passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="orders to try (default: %(default)s)")
    parser.add_argument("--first", type=int, default=1, help="the first seed (default: %(default)s)")
    parser.add_argument("arguments", nargs="*", help="for pytest, after --")
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.seeds)
    return max([run(seed, options.arguments) for seed in seeds], default=0)


if __name__ == "__main__":
    sys.exit(main())
