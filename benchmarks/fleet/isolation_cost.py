"""What isolation, doors, erasures and workers cost a fleet, in fast time: `kvcustody simulate fleet`, kept.

    python benchmarks/fleet/isolation_cost.py TRACE TRACE --workers 8 64 512
    python benchmarks/fleet/isolation_cost.py TRACE --router smg --programs .venv-smg/bin --requests 800

Exit status 1 where a bound of `problems_of` does not hold for the model. A router's own program is measured as it is.
"""

from __future__ import annotations

import sys
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "harness"))

from bench import Bench

from kvcustody.lab.fleet.fleet_study import FleetWorkload, problems_of, study
from kvcustody.lab.fleet.open_router import MODEL, ROUTER_NAMES, router_opener
from kvcustody.lab.replay.traces.readers import open_trace


def main() -> None:
    """Print one JSON object, with a list of rows for each trace."""
    bench = Bench(__doc__)
    bench.add("traces", type=Path, nargs="+", help="files of Mooncake's form")
    bench.add("--workers", type=int, nargs="+", default=[8, 64])
    bench.add("--router", choices=ROUTER_NAMES, default=MODEL)
    bench.add("--programs", type=Path, nargs="*", default=[], help="folders with the router's program")
    bench.add("--requests", type=int, default=0, help="of each trace; 0 for all (default: %(default)s)")
    options = bench.parse()
    traces: dict[str, Any] = {}
    problems: list[str] = []
    for path in options.traces:
        opened = open_trace(path, "mooncake")
        name = path.name.partition(".")[0]
        with tempfile.TemporaryDirectory() as logs:
            rows = study(
                FleetWorkload(name, list(islice(opened, options.requests or None)), opened.block_tokens),
                options.workers,
                open_router=router_opener(options.router, options.programs, Path(logs)),
                progress=lambda row: print(row.part, row.name, row.outcome, file=sys.stderr, flush=True),
            )
        traces[name] = [row.as_json() for row in rows]
        problems += [f"{name}: {problem}" for problem in problems_of(rows)]
    bench.keep(
        {"router": options.router, "requests": options.requests, "traces": traces, "problems": problems},
        show=True,
    )
    if problems and options.router == MODEL:
        raise SystemExit("; ".join(problems))


if __name__ == "__main__":
    main()
