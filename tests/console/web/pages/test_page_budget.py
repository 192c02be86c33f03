"""What a page reads does not grow with the ledger: the database's work is counted, and never a clock."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import event, func, select

from kvcustody.audit.evidence.counters.judge_hours import judge
from kvcustody.audit.evidence.processes.sequence_gaps import keep_spans
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.schema.leaf_tables import routes_found
from kvcustody.console.web.pages import custody as custody_page
from kvcustody.console.web.pages.fleet import routes as routes_page
from standins.console.web_world import World, running

sys.path.insert(0, str(Path(__file__).resolve().parents[4] / "benchmarks" / "pages"))

from console_ledger import fill

SUBJECT = "/custody/subject?tenant=tenant-01&subject=user-1"
PAGES = ("/", "/decisions", "/custody", SUBJECT, "/deletion", "/audit", "/health", "/erasures", "/cases", "/reports")
ROWS_OF_PERIOD = ("/routes", "/tiers")  # their charts add up the rows of the period
CONTROLS = ("/deletion?recount=1", f"{SUBJECT}&all=1", "/routes?all=1")
SIZES = (800, 8_000)
STEPS = 100  # of SQLite's machine, counted together


def work_of(world: World) -> dict[str, tuple[int, int]]:
    """Return by page: the statements, and hundreds of steps of the database's machine."""
    counts = Counter[str]()

    def step() -> int:
        counts["steps"] += 1
        return 0

    def hear(connection: Any, _cursor: Any, *_: Any) -> None:
        counts["statements"] += 1
        connection.connection.dbapi_connection.set_progress_handler(step, STEPS)

    reader = world.service.reader
    event.listen(reader, "before_cursor_execute", hear)
    works = {}
    try:
        with httpx.Client(base_url=world.url, timeout=60) as client:
            assert client.post("/console/login", data={"key": world.keys["auditor"]}).status_code == 303
            for page in (*PAGES, *ROWS_OF_PERIOD, *CONTROLS):
                assert client.get(f"/console{page}").status_code == 200  # what is kept of the first is not counted
                counts.clear()
                assert client.get(f"/console{page}").status_code == 200
                works[page] = (counts["statements"], counts["steps"])
    finally:
        event.remove(reader, "before_cursor_execute", hear)
    return works


def test_no_page_reads_more_of_a_larger_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(custody_page, "_READ_MAX", 100)
    monkeypatch.setattr(custody_page, "_OF_PROCESS_MIN", 100)
    monkeypatch.setattr(custody_page, "_OF_SUBJECT_MAX", 2)
    monkeypatch.setattr(routes_page, "_HALVES_MAX", 5)
    works = []
    for size in SIZES:
        folder = tmp_path / str(size)
        folder.mkdir()
        with running(folder) as world:
            service = world.service
            service.figures.close()
            engine = open_store(folder / "ledger.db", timeout_seconds=60)
            fill(engine, folder, leaves=size, tenants=4, until_us=service.clock.utc_us(), days=1)
            engine.dispose()
            assert service.writer.seal()
            judge(service.reader, service.engine, now_us=service.clock.utc_us())
            keep_spans(service.engine)  # as the keeper of figures does every 30 seconds
            works.append(work_of(world))
    small, large = works
    for page in PAGES:
        statements, steps = large[page]
        assert statements <= small[page][0] + 2, (page, small[page], large[page])
        assert steps <= 1.6 * small[page][1] + 60, (page, small[page], large[page])
    for page in ROWS_OF_PERIOD:
        assert large[page][0] <= small[page][0] + 2, (page, small[page], large[page])
    assert 4 * large["/routes"][1] < large["/routes?all=1"][1], "receipts beyond the newest are not joined"
    for page in CONTROLS:
        assert large[page][1] > 4 * small[page][1], page  # control: what reads evidence is heard


def test_routes_measures_the_newest_receipts_and_all_of_them_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes_page, "_HALVES_MAX", 5)
    with running(tmp_path) as world:
        service = world.service
        engine = open_store(tmp_path / "ledger.db", timeout_seconds=60)
        fill(engine, tmp_path, leaves=800, tenants=4, until_us=service.clock.utc_us(), days=1)
        with engine.connect() as connection:
            halves = connection.scalar(select(func.count()).select_from(routes_found)) or 0
        engine.dispose()
        with httpx.Client(base_url=world.url, timeout=60) as client:
            assert client.post("/console/login", data={"key": world.keys["auditor"]}).status_code == 303
            newest = client.get("/console/routes?period=7d").text
            whole = client.get("/console/routes?period=7d&all=1").text
    assert halves > 5
    assert "5 receipts, the newest of this period" in newest and "look at all" in newest
    assert f"{halves} receipts;" in whole and "look at all" not in whole
