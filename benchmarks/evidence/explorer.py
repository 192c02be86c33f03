"""How long the audit explorer's first page, facets and histogram take.

    python benchmarks/evidence/explorer.py [--leaves 1000000] [--database postgresql|sqlite] [--json FILE]

A ledger of `--tenants` over 30 days is filled through the writer, its figures folded; each question is asked a few
times and the median is told, with the same at a tenth of the size: what of it grows. The goals are 300 ms for a page
and for facets, and a second for a histogram, which comes with the facets.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from sqlalchemy import Connection, Engine, func, select

from kvcustody.audit.evidence.counters.read_figures import hour_span
from kvcustody.audit.evidence.explore.by_time import find_by_time
from kvcustody.audit.evidence.explore.summary import summarize
from kvcustody.audit.evidence.query.events import EventFilter
from kvcustody.audit.kinds import Event, HitCounters, ResidencyOpened, ResidencyReleased
from kvcustody.audit.store.schema.counters import counters
from kvcustody.clock import SystemClock
from kvcustody.times import HOUR_US

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "harness"))

from bench import Bench
from ledger_stores import fresh_store, postgres, write

DAYS, ROUNDS = 30, 7
GOAL_MS = 300
_DAY_US = 86_400_000_000


def events(leaves: int, tenants: int) -> Iterator[Event]:
    """Requests of all tenants in turn, evenly over the days; one in fifty is denied."""
    requests = leaves // 2
    step = DAYS * _DAY_US // max(1, requests)
    for number in range(requests):
        tenant, at = f"tenant-{number % tenants:02d}", number * step + 1
        if number % 50 == 0:
            yield HitCounters(at, tenant, "tenant-00", "reuse", "deny", "no-restricted", 1, at, 1, 1, 16)
        yield ResidencyOpened(at, number + 1, tenant, None, None, False, "internal", (), (), ("own",), 1, at + 10**9)
        yield ResidencyReleased(at + 5, number + 1, tenant, "finish", (), 0)


def fill(engine: Engine, folder: Path, leaves: int, tenants: int) -> None:
    """Write about so many leaves."""
    write(engine, folder, events(leaves, tenants), SystemClock())


def measure(engine: Engine) -> dict[str, dict[str, float]]:
    """Median milliseconds of each question."""
    with engine.connect() as connection:
        span = hour_span(connection)
    if span is None:
        raise SystemExit("the ledger has no figures")
    last = EventFilter(since_us=span[1] - _DAY_US)
    hour = EventFilter(since_us=span[1])
    four = EventFilter(since_us=span[1] - 3 * HOUR_US)
    most = EventFilter(since_us=span[0] + _DAY_US, until_us=span[1])
    questions: dict[str, Callable[[Connection], Any]] = {
        "first page": lambda c: find_by_time(c, EventFilter(), limit=50),
        "first page of a kind": lambda c: find_by_time(c, EventFilter(kinds=("hit-counters",)), limit=50),
        "first page of an outcome": lambda c: find_by_time(c, EventFilter(outcome="deny"), limit=50),
        "facets and histogram, all": lambda c: summarize(c, EventFilter()),
        "facets and histogram, last hour": lambda c: summarize(c, hour),
        "facets and histogram, last four hours": lambda c: summarize(c, four),
        "facets and histogram, last day": lambda c: summarize(c, last),
        "facets and histogram, all days but one": lambda c: summarize(c, most),
        "facets and histogram of a tenant": lambda c: summarize(c, EventFilter(tenant="tenant-03")),
        "facets and histogram of an outcome": lambda c: summarize(c, EventFilter(outcome="deny")),
        "facets and histogram of a rule": lambda c: summarize(c, EventFilter(rule="no-restricted")),
    }
    figures: dict[str, dict[str, float]] = {"ms": {}, "cpu_ms": {}}
    for name, ask in questions.items():
        times, busy = [], []
        for _ in range(ROUNDS):
            with engine.connect() as connection:
                begun, worked = time.perf_counter(), time.process_time()
                ask(connection)
                times.append((time.perf_counter() - begun) * 1000)
                busy.append((time.process_time() - worked) * 1000)
        figures["ms"][name], figures["cpu_ms"][name] = round(median(times), 1), round(median(busy), 3)
    return figures


def main() -> None:
    """Both sizes, side by side."""
    bench = Bench(__doc__, "SQLAlchemy", "psycopg", facts="hardware")
    bench.add("--leaves", type=int, default=1_000_000)
    bench.add("--tenants", type=int, default=40)
    bench.add("--database", choices=("postgresql", "sqlite"), default="sqlite")
    options = bench.parse()
    sizes = {}
    with ExitStack() as stack:
        uri = stack.enter_context(postgres()) if options.database == "postgresql" else None
        for size in (options.leaves // 10, options.leaves):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            engine = fresh_store(uri, folder, f"explored_{size}")
            begun = time.perf_counter()
            fill(engine, folder, size, options.tenants)
            filled_s = time.perf_counter() - begun
            with engine.connect() as connection:
                rows = connection.scalar(select(func.count()).select_from(counters))
            figures = {"fill_s": round(filled_s, 1), "rows_of_figures": rows, **measure(engine)}
            sizes[str(size)] = figures
            print(size, figures, flush=True)
            engine.dispose()
    slowest = max(sizes[str(options.leaves)]["ms"].values())
    bench.keep(
        {
            "database": options.database,
            "tenants": options.tenants,
            "days": DAYS,
            "leaves": sizes,
            "slowest_to_goal": round(slowest / GOAL_MS, 3),
        },
        show=True,
    )


if __name__ == "__main__":
    main()
