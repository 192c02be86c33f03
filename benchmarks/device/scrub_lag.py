"""From the end of custody to zeroed, under the two recorded traces, against the policy's deadlines.

    python benchmarks/device/scrub_lag.py --traces FOLDER [--limit 4000] [--json benchmarks/results/scrub-lag-cpu.json]

Each trace is replayed whole through the Governor with real tensors under `regulated-saas`, one after the other; with
`--limit` only its first requests, and the output says so. The lag of every block is the replay's own figure: its
receipt less its due time. Idle stretches of a trace are skipped and work takes as long as it takes, so what else the
machine does shows. `late` counts blocks beyond their classification's deadline by the ledger's coverage.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from kvcustody.lab.replay.summary import LAG_EDGES_US

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "harness"))

from bench import Bench

TRACES = {"mooncake": "mooncake_conv_dev40.jsonl.gz", "agentic": "agentic_v6_dev.jsonl.gz"}


def replay(kind: str, trace: Path, limit: int | None) -> dict[str, Any]:
    """One trace through `kvcustody replay --json`."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "kvcustody.console.main",
            "replay",
            str(trace),
            "--trace-format",
            kind,
            "--json",
        ]
        command += ["--ledger", str(Path(folder) / "ledger.db"), "--html", str(Path(folder) / "page.html")]
        command += ["--limit", str(limit)] if limit else []
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    """Replay both traces, print a line each."""
    bench = Bench(__doc__, "kvcustody", "torch", "numpy")
    bench.add("--traces", type=Path, required=True, help="the folder of the recorded traces")
    bench.add("--limit", type=int, help="only the first requests of each")
    options = bench.parse()
    rows = {}
    print(f"whole traces: {'no, the first ' + str(options.limit) + ' requests of each' if options.limit else 'yes'}")
    print("| trace | requests | blocks | p50 ms | p99 ms | max ms | due | in time | late | read back |")
    print(f"{'|---' * 10}|")
    for kind, name in TRACES.items():
        result = replay(kind, options.traces / name, options.limit)
        lag, coverage = result["scrub_lag"], result["coverage"]
        late = coverage["late"] + coverage["failed"] + coverage["missing"] + coverage["overdue"]
        rows[kind] = {
            "requests": result["totals"]["requests"],
            "virtual_seconds": result["virtual_seconds"],
            "seconds": result["seconds"],
            "lag": lag,
            "late": late,
            "coverage": coverage,
        }
        cells = [kind, str(result["totals"]["requests"]), str(lag["blocks"])]
        cells += [f"{lag[one] / 1000:.1f}" for one in ("p50_us", "p99_us", "max_us")]
        cells += [str(one) for one in (coverage["due"], coverage["in_time"], late, coverage["reread_blocks"])]
        print(f"| {' | '.join(cells)} |", flush=True)
    bench.keep(
        {
            "benchmark": "scrub_lag",
            "policy": "regulated-saas",
            "limit": options.limit,
            "whole_traces": options.limit is None,
            "histogram_edges_us": LAG_EDGES_US,
            "traces": rows,
        }
    )


if __name__ == "__main__":
    main()
