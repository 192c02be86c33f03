"""The server time of every page of the console, on a ledger of a chosen size.

    python benchmarks/pages/page_times.py [--leaves 1000000] [--database postgresql|sqlite] [--json FILE]

1. A ledger of 30 days is filled through the writer (`console_ledger`), and its coverage by hour is judged once.
2. Each page is asked for as an auditor who sees all tenants, in the process of the service: its time is from the
   request to the whole answer, without a network. The median of the rounds counts. On a shared machine the process's
   time on a processor says more; a PostgreSQL server's is not in it.
3. The goals: 200 ms for a page at 10^6 leaves, and 400 ms at 10^7. `--strict` exits with 1 where a page misses it.
4. `--folder DIR` keeps the ledger there, and measures one that is there already. `--url URL` measures the ledger in a
   database of PostgreSQL.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from sqlalchemy import func, select

from kvcustody.audit.evidence.counters.judge_hours import judge
from kvcustody.audit.evidence.processes.sequence_gaps import keep_spans
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.schema.ledger import logs
from kvcustody.clock import SystemClock
from kvcustody.console.documents import ConsoleDocuments
from kvcustody.console.web.app import Console
from kvcustody.governance.api.app import create_app
from kvcustody.governance.service.access.roles import Role
from kvcustody.governance.service.service import Service, open_service
from kvcustody.governance.service.settings import ServiceSettings

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "harness"))

from bench import Bench
from console_ledger import fill
from ledger_stores import fresh_store, postgres

GOALS_MS = {1_000_000: 200, 10_000_000: 400}
PAGES = (
    *(
        "/",
        "/?period=6h",
        "/inbox",
        "/policy",
        "/grants",
        "/decisions",
        "/decisions?period=6h",
        "/decisions?period=30d",
        "/custody",
        "/custody?tenant=tenant-03",
        "/custody/subject?tenant=tenant-03&subject=user-7",
    ),
    *("/tiers", "/tiers?period=30d", "/fleet", "/routes"),
    *(
        "/routes?period=7d",
        "/erasures",
        "/cases",
        "/deletion",
        "/deletion?period=6h",
        "/deletion?period=7d",
        "/deletion?period=30d",
    ),
    *("/deletion?period=30d&tenant=tenant-03", "/audit", "/audit?last=24h", "/reports", "/health", "/principals"),
)


def service_of(url: str, folder: Path) -> Service:
    """A service of that ledger, with its state in a folder."""
    settings = ServiceSettings(
        database_url=url,
        subject_keys_url=f"sqlite:///{folder / 'people.db'}",
        state_path=folder / "state",
        signing_key_path=folder / "signing.key",
        requests_per_second=1e6,
        requests_burst=1_000_000,
    )
    return open_service(settings, documents=ConsoleDocuments())


async def measure(service: Service, rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Return the median milliseconds of each page: by the clock, and of this process on a processor."""
    app: Any = create_app(service, pages=Console(service))
    roles = [Role.AUDITOR, Role.OPERATOR, Role.BOOTSTRAP]
    keys = []
    for role in roles:
        name = f"{role.value}-{time.time_ns()}"  # a kept ledger has those of earlier measurements
        service.principals.enrol(name, [role], by="benchmark")
        keys.append(service.principals.issue_key(name, days=1, by="benchmark").key)
    figures: dict[str, float] = {}
    cpu: dict[str, float] = {}
    transport = httpx.ASGITransport(app=app, client=("127.0.0.1", 1))
    for key in keys:
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=600) as client:
            assert (await client.post("/console/login", data={"key": key})).status_code == 303
            for page in PAGES:
                if page in figures:
                    continue
                times, computed = [], []
                for _ in range(rounds):
                    begun, computing = time.perf_counter(), time.process_time()
                    answer = await client.get("/console" + page)
                    times.append((time.perf_counter() - begun) * 1000)
                    computed.append((time.process_time() - computing) * 1000)
                if answer.status_code == 403:
                    continue
                assert answer.status_code == 200, (page, answer.status_code, answer.text[-2000:])
                figures[page], cpu[page] = round(median(times), 1), round(median(computed), 1)
                print(f"{figures[page]:9.1f} ms, {cpu[page]:9.1f} ms of a processor  {page}", flush=True)
    return figures, cpu


def main() -> None:
    """Fill, judge, and ask for every page."""
    bench = Bench(__doc__, "SQLAlchemy", "psycopg", facts="hardware", rounds=5, strict=True)
    bench.add("--leaves", type=int, default=1_000_000)
    bench.add("--tenants", type=int, default=40)
    bench.add("--database", choices=("postgresql", "sqlite"), default="sqlite")
    bench.add("--folder", type=Path, help="keep the ledger here (SQLite)")
    bench.add("--url", help="measure the ledger that is in this database (PostgreSQL)")
    options = bench.parse()
    with ExitStack() as stack:
        fresh = options.database == "postgresql" and options.url is None
        uri = stack.enter_context(postgres()) if fresh else None
        work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder = options.folder or work
        folder.mkdir(parents=True, exist_ok=True)
        if options.url is not None:
            engine = open_store(options.url, timeout_seconds=60)
        elif (folder / "ledger.db").exists():
            engine = open_store(folder / "ledger.db", timeout_seconds=60)
        else:
            engine = fresh_store(uri, folder, "ledger")
            fill(engine, work, leaves=options.leaves, tenants=options.tenants, until_us=SystemClock().utc_us())
        in_server = engine.dialect.name == "postgresql"
        url = engine.url.render_as_string(hide_password=False) if in_server else f"sqlite:///{folder}/ledger.db"
        service = service_of(url, work)
        service.figures.close()  # it would judge beside the measurement
        stack.callback(service.close)
        begun = time.perf_counter()
        assert service.writer.seal()
        judge(service.reader, service.engine, now_us=SystemClock().utc_us())
        keep_spans(service.engine)
        judged_s = round(time.perf_counter() - begun, 1)
        with engine.connect() as connection:
            leaves = int(connection.scalar(select(func.sum(logs.c.size))) or 0)
        figures, cpu = asyncio.run(measure(service, options.rounds))
        engine.dispose()
    slowest = max(figures, key=lambda page: figures[page])
    print(f"{leaves:,} leaves, judged in {judged_s} s; slowest: {figures[slowest]} ms, {slowest}")
    kept = {"database": engine.dialect.name, "leaves": leaves, "tenants": options.tenants, "judged_s": judged_s}
    bench.keep({**kept, "ms": figures, "cpu_ms": cpu, "slowest_ms": figures[slowest]})
    if options.strict and figures[slowest] > next((goal for size, goal in GOALS_MS.items() if leaves <= size), 400):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
