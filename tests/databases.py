"""Which suites run on both databases in `make test`: writes `tests/databases.json`, from what the suites enter.

    python tests/databases.py

Runs every suite on `any_store`, on SQLite and PostgreSQL, and takes the cheapest suites that together enter every
branch between the databases (`standins/database_branches.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).resolve().parent
sys.path.insert(0, str(TESTS / "lib"))

from standins.database_branches import TABLE  # noqa: E402 - its folder is named above


def cheapest_cover(branches: dict[str, set[str]], seconds: dict[str, float]) -> list[str]:
    """Suites that together enter every branch: at each step the one that adds most a second."""
    missing, chosen = set().union(*branches.values()), list[str]()
    while missing:
        best = max(sorted(branches), key=lambda suite: len(branches[suite] & missing) / (0.1 + seconds[suite]))
        chosen.append(best)
        missing -= branches[best]
    return sorted(chosen)


def main() -> int:
    """Run the suites and write the table; the exit status of pytest where a test failed."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    suites = [str(file) for file in sorted(TESTS.rglob("test_*.py")) if "any_store" in file.read_text()]
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-n",
            "2",
            "-m",
            "not soak",
            "-k",
            "sqlite or postgresql",
        ]
        done = subprocess.run(
            [*command, *suites], env=os.environ | {"KVCUSTODY_DATABASE_BRANCHES": folder}, check=False
        )
        if done.returncode:
            return done.returncode
        branches: dict[str, set[str]] = {}
        seconds: Counter[str] = Counter()
        for file in Path(folder).iterdir():
            for line in file.read_text(encoding="utf-8").splitlines():
                record = json.loads(line)
                branches.setdefault(record["suite"], set()).update(record["branches"])
                seconds[record["suite"]] += record["seconds"]
    chosen = cheapest_cover(branches, seconds)
    table = {"suites": chosen, "branches": sorted(set().union(*branches.values()))}
    TABLE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    print(
        f"{len(chosen)} of {len(branches)} suites enter all {len(table['branches'])} branches:"
        f" {sum(seconds[suite] for suite in chosen):.0f} of {sum(seconds.values()):.0f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
