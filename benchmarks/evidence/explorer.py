"""How long the audit explorer's first page, facets and histogram take.

python benchmarks/evidence/explorer.py [LEAVES]

A ledger of 40 tenants over 30 days is filled through the writer, its figures folded; each question is asked a few
times and the median is told, with the same at a tenth of the size: what of it grows.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from sqlalchemy import Connection, Engine

from kvcustody.audit.counters.fold import fold
from kvcustody.audit.counters.read_figures import hour_span
from kvcustody.audit.database.engine import open_store
from kvcustody.audit.events import Event, HitCounters, ResidencyOpened, ResidencyReleased
from kvcustody.audit.explore.by_time import find_by_time
from kvcustody.audit.explore.summary import summarize
from kvcustody.audit.query.events import EventFilter
from kvcustody.audit.writer.event_writer import EventWriter
from kvcustody.clock import SystemClock
from kvcustody.migrations.upgrade import upgrade

TENANTS, DAYS, BATCH, ROUNDS = 40, 30, 2_000, 5
_DAY_US = 86_400_000_000


def events(leaves: int) -> Iterator[Event]:
    """Requests of all tenants in turn, evenly over the days; one in fifty is denied."""
    requests = leaves // 2
    step = DAYS * _DAY_US // max(1, requests)
    for number in range(requests):
        tenant, at = f"tenant-{number % TENANTS:02d}", number * step + 1
        if number % 50 == 0:
            yield HitCounters(at, tenant, "tenant-00", "reuse", "deny", "no-restricted", 1, at, 1, 1, 16)
        yield ResidencyOpened(
            at, number + 1, tenant, None, None, False, "internal", (), (), ("own",), 1, at + 10**9
        )
        yield ResidencyReleased(at + 5, number + 1, tenant, "finish", (), 0)


def filled(folder: Path, leaves: int) -> Engine:
    """A ledger with about so many leaves, its figures folded as a service's keeper folds them."""
    engine = open_store(folder / "ledger.db")
    upgrade(engine)
    writer = EventWriter(
        engine, worker="benchmark", clock=SystemClock(), spill_directory=folder / "spill", clear_names=True
    )
    some: list[Event] = []
    for event in events(leaves):
        some.append(event)
        if len(some) == BATCH:
            writer.submit(some)
            some = []
            while writer.status().backlog > BATCH:
                time.sleep(0.005)
    writer.submit(some)
    if not writer.flush(600):
        raise SystemExit("the ledger could not be filled")
    writer.close()
    while fold(engine):
        pass
    return engine


def measure(engine: Engine) -> dict[str, float]:
    """Median milliseconds of each question."""
    with engine.connect() as connection:
        span = hour_span(connection)
    if span is None:
        raise SystemExit("the ledger has no figures")
    last = EventFilter(since_us=span[1] - _DAY_US)
    questions: dict[str, Callable[[Connection], Any]] = {
        "first page": lambda c: find_by_time(c, EventFilter(), limit=50),
        "first page of a kind": lambda c: find_by_time(c, EventFilter(kinds=("hit-counters",)), limit=50),
        "first page of an outcome": lambda c: find_by_time(c, EventFilter(outcome="deny"), limit=50),
        "facets and histogram, all": lambda c: summarize(c, EventFilter()),
        "facets and histogram, last day": lambda c: summarize(c, last),
        "facets and histogram of an outcome": lambda c: summarize(c, EventFilter(outcome="deny")),
        "facets and histogram of a rule": lambda c: summarize(c, EventFilter(rule="no-restricted")),
    }
    found = {}
    for name, ask in questions.items():
        times = []
        for _ in range(ROUNDS):
            with engine.connect() as connection:
                begun = time.perf_counter()
                ask(connection)
                times.append((time.perf_counter() - begun) * 1000)
        found[name] = median(times)
    return found


def main() -> None:
    """Both sizes, side by side."""
    leaves = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    for size in (leaves // 10, leaves):
        with tempfile.TemporaryDirectory() as folder:
            begun = time.perf_counter()
            engine = filled(Path(folder), size)
            print(f"{size:,} leaves, filled in {time.perf_counter() - begun:.0f} s", flush=True)
            with engine.connect() as connection:
                hours = connection.exec_driver_sql("SELECT count(*) FROM counters").scalar()
            print(f"  {hours:,} rows of figures", flush=True)
            for name, milliseconds in measure(engine).items():
                print(f"  {name:38} {milliseconds:8.1f} ms", flush=True)
            engine.dispose()


if __name__ == "__main__":
    main()
