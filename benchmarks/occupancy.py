"""What occupancy of a pool tells one tenant of another: bits of an amount that one look gives away, by profile.

The victim holds one of eight amounts of the pool (so 3 bits is all there is to tell), cached or in running requests;
the attacker looks in four ways (`tests/redteam/occupancy/` says which). Estimates are plug-in mutual
information, each beside the 95 % quantile that chance alone gives; 0 means that every trial looked the same.
Run: `python benchmarks/occupancy.py --json benchmarks/results/occupancy-cpu.json` [--trials 2000].
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "harness"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "lib"))

from bench import Bench

from standins.redteam.occupancy_channel import SETTINGS, WAYS, measure


def main() -> None:
    """Measure every setting, print a table, keep it."""
    bench = Bench(__doc__, "numpy", facts="")
    bench.add("--trials", type=int, default=2000, help="trials of each setting")
    arguments = bench.parse()
    rows = []
    print(f"{'bits of 3 (by chance)':36}{'victim':9}" + "".join(f"{way:>16}" for way in WAYS))
    for name, setting in SETTINGS.items():
        for running in (False, True):
            found = measure(setting, arguments.trials, running=running)
            held = "running" if running else "cached"
            cells = "".join(f"{f'{c.bits:.2f} ({c.chance:.2f})':>16}" for c in found.values())
            print(f"{name:36}{held:9}{cells}", flush=True)
            rows.append({"setting": name, "victim": held, "ways": {w: c._asdict() for w, c in found.items()}})
    bench.keep({"trials": arguments.trials, "rows": rows})


if __name__ == "__main__":
    main()
