"""What a scrape and the overview's figures cost, from evidence and from counters, over one ledger of so many events.

    python benchmarks/evidence/figures_cost.py [--events N] [--db FILE] [--rounds 20] [--json FILE]

`evidence` is how a scrape was made before there were counters: coverage of the last day from ends, uses and receipts,
totals by tenant, denials and findings by scanning their tables (`--slow` times of it). `counters` is what a scrape and
the overview read now, deltas folded and not (`unfolded`: all that the ledger's own commits left). `judge` is the
background's pass over the same coverage; `fold` is all deltas folded. Rounds alternate. Milliseconds, and the most
memory that the process has had after each.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from sqlalchemy import Connection, Engine, func, literal, select

from kvcustody.audit.evidence.counters.hourly_coverage import recent, recent_sums
from kvcustody.audit.evidence.counters.judge_hours import judge
from kvcustody.audit.evidence.counters.read_figures import (
    denials_by_rule,
    largest_tenants,
    orphans_by_class,
    tenant_totals,
)
from kvcustody.audit.evidence.coverage.summary import coverage
from kvcustody.audit.evidence.query.custody import findings
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.schema.leaf_tables import (
    attachments,
    custody_ends,
    hit_counters,
    releases,
    residencies,
)
from kvcustody.audit.write.fold import fold
from kvcustody.times import DAY_US

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "harness"))

from bench import Bench
from report_time import OFFSET_US, fill

UNTIL_US = OFFSET_US + DAY_US
TENANT_LABELS = 100  # as a service has by default


def from_evidence(connection: Connection) -> None:
    """A scrape as it was."""
    for table, *what in (
        (residencies, func.sum(residencies.c.attached_blocks), func.sum(residencies.c.written_blocks)),
        (attachments, func.sum(attachments.c.attached_blocks)),
        (releases, func.sum(releases.c.written_blocks)),
        (custody_ends, func.sum(custody_ends.c.blocks)),
        (hit_counters, literal(1)),
    ):
        connection.execute(select(table.c.tenant, *what).group_by(table.c.tenant)).all()
    findings(connection)
    coverage(connection, since_us=UNTIL_US - DAY_US, until_us=UNTIL_US)


def scrape(connection: Connection) -> None:
    """What `/metrics` reads of the ledger."""
    recent_sums(connection, largest_tenants(connection, TENANT_LABELS).leaves)
    denials_by_rule(connection)
    orphans_by_class(connection)


def overview(connection: Connection) -> None:
    """What the overview reads of the ledger's figures."""
    recent(connection)
    tenant_totals(connection)
    denials_by_rule(connection)


def timed(engine: Engine, read: Callable[[Connection], None], times: int) -> dict[str, float]:
    """Milliseconds at the median and the 99th percentile of so many."""
    took, busy = [], []
    for _ in range(times):
        began, worked = time.perf_counter(), time.process_time()
        with engine.connect() as connection:
            read(connection)
        took.append(1000 * (time.perf_counter() - began))
        busy.append(1000 * (time.process_time() - worked))
    took.sort()
    return {
        "p50_ms": round(took[len(took) // 2], 2),
        "cpu_ms": round(median(busy), 3),
        "p99_ms": round(took[min(len(took) - 1, 99 * len(took) // 100)], 2),
        "memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def main() -> None:
    """Print one JSON object."""
    bench = Bench(__doc__, "SQLAlchemy", "numpy", rounds=200)
    bench.add("--events", type=int, default=100_000)
    bench.add("--slow", type=int, default=3, help="rounds from evidence (default: %(default)s)")
    bench.add("--db", type=Path, help="Where the ledger is kept, or is already.")
    options = bench.parse()
    with tempfile.TemporaryDirectory() as folder:
        path = options.db or Path(folder, "ledger.db")
        if not path.exists():
            fill(path, options.events)
        engine, reader = open_store(path, timeout_seconds=60), open_store(path, read_only=True)
        figures = {"events": options.events, "unfolded": timed(reader, scrape, options.rounds)}
        began = time.perf_counter()
        while fold(engine):
            pass
        figures["fold_s"] = round(time.perf_counter() - began, 2)
        figures["before_first_pass"] = timed(reader, scrape, options.rounds)
        began = time.perf_counter()
        judge(reader, engine, now_us=UNTIL_US)
        figures["judge_s"] = round(time.perf_counter() - began, 2)
        for number in range(options.slow):
            figures[f"scrape_{number}"] = timed(reader, scrape, options.rounds)
            figures[f"overview_{number}"] = timed(reader, overview, options.rounds)
            figures[f"evidence_{number}"] = timed(reader, from_evidence, 1)
    bench.keep(figures, show=True)


if __name__ == "__main__":
    main()
