"""What isolation, doors, erasures and workers cost a fleet, in fast time: `kvcustody simulate fleet`, kept.

    python benchmarks/fleet/isolation_cost.py TRACE TRACE --workers 8 64 512

Exit status 1 where a bound of `problems_of` does not hold.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "harness"))

from bench import Bench

from kvcustody.lab.fleet.fleet_study import FleetWorkload, problems_of, study
from kvcustody.lab.replay.traces.readers import open_trace


def main() -> None:
    """Print one JSON object, with a list of rows for each trace."""
    bench = Bench(__doc__)
    bench.add("traces", type=Path, nargs="+", help="files of Mooncake's form")
    bench.add("--workers", type=int, nargs="+", default=[8, 64])
    options = bench.parse()
    told: dict[str, Any] = {}
    problems: list[str] = []
    for path in options.traces:
        opened = open_trace(path, "mooncake")
        name = path.name.partition(".")[0]
        rows = study(
            FleetWorkload(name, list(opened), opened.block_tokens),
            options.workers,
            progress=lambda row: print(row.part, row.name, file=sys.stderr, flush=True),
        )
        told[name] = [row.as_json() for row in rows]
        problems += [f"{name}: {problem}" for problem in problems_of(rows)]
    bench.keep({"traces": told, "problems": problems}, show=True)
    if problems:
        raise SystemExit("; ".join(problems))


if __name__ == "__main__":
    main()
