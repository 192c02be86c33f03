"""Buckets fit the period; what is not known is no zero; and the last of many tenants are added up."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import httpx
import pytest
from sqlalchemy import event

from kvcustody.audit.evidence.counters import fine_figures
from kvcustody.audit.store.database.engine import open_store
from kvcustody.console.render.time_chart import Buckets, summed
from kvcustody.governance.service.fleet import figure_keeper
from kvcustody.times import DAY_US, HOUR_US, MINUTE_US, SECOND_US
from standins.console.page_tables import rows_of
from standins.console.web_world import running

sys.path.insert(0, str(Path(__file__).resolve().parents[4] / "benchmarks" / "pages"))

from console_ledger import fill

NOW_US = 1_780_000_000_000_000


@pytest.mark.parametrize(
    ("period_us", "width_us"),
    [
        (40 * SECOND_US, SECOND_US),
        (30 * MINUTE_US, 30 * SECOND_US),
        (HOUR_US, MINUTE_US),
        (DAY_US, 30 * MINUTE_US),
        (7 * DAY_US, 3 * HOUR_US),
        (30 * DAY_US, 12 * HOUR_US),
        (365 * DAY_US, 7 * DAY_US),
        (10 * 365 * DAY_US, 91 * DAY_US),
    ],
)
def test_buckets_fit_the_period(period_us: int, width_us: int) -> None:
    buckets = Buckets.of(NOW_US - period_us, NOW_US)
    assert buckets.width_us == width_us and 20 <= len(buckets.starts_us) <= 63
    assert buckets.starts_us[0] <= NOW_US - period_us and buckets.starts_us[-1] < NOW_US
    assert Buckets.of(NOW_US - period_us, NOW_US, least_us=HOUR_US).width_us == max(HOUR_US, width_us)


def test_no_data_is_none_and_small_tenants_are_one_series() -> None:
    buckets = Buckets.of(NOW_US - 10 * HOUR_US, NOW_US, least_us=HOUR_US)
    first, second, *_ = buckets.starts_us
    sums = [(f"tenant-{number}", first + 5, 100 - number) for number in range(12)]
    series = summed(buckets, sums, [first, second])
    assert [one.name for one in series] == [*(f"tenant-{number}" for number in range(7)), "5 others"]
    assert series[-1].values[0] == sum(100 - number for number in range(7, 12))
    assert [one.values[1] for one in series] == [0] * 8 and {one.values[2] for one in series} == {None}


def buckets_of(page: str, title: str) -> tuple[str, list[list[str]]]:
    """Return the width of a chart's buckets in words, and the rows of its table."""
    width = re.search(rf"<figcaption>{title} <span class=\"quiet\">by (.+?), UTC<", page)
    assert width is not None, title
    return width[1], rows_of(page, title)


def total(rows: list[list[str]]) -> int:
    """Return the sum of a table's figures."""
    return sum(int(cell.replace(",", "")) for row in rows for cell in row[1:] if cell != "–")


def test_a_young_ledger_fills_its_charts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten minutes of traffic are many bars in a chart of the last day, and add up to what hours say."""
    with running(tmp_path) as world, httpx.Client(base_url=world.url, timeout=60) as client:
        service = world.service
        engine = open_store(tmp_path / "ledger.db", timeout_seconds=60)
        fill(engine, tmp_path, leaves=400, tenants=3, until_us=service.clock.utc_us(), days=10 / 1440)
        engine.dispose()
        assert client.post("/console/login", data={"key": world.keys["auditor"]}).status_code == 303
        titles = {"/": "Blocks of prompts, found and computed", "/decisions": "Denied requests, by who asked"}
        fine = {
            place: buckets_of(client.get(f"/console{place}?period=1h").text, title) for place, title in titles.items()
        }
        for bound in (fine_figures.LEAVES_MAX, 1):  # custody is counted back from now, by cells and by hours
            monkeypatch.setattr(fine_figures, "LEAVES_MAX", bound)
            page = client.get("/console/?period=1h").text
            width, cells = buckets_of(page, "Blocks in custody, by tenant")
            now = re.search(r"<b>([0-9,]+)</b>\s*<span><a href=\"/console/custody\">blocks in custody now", page)
            assert ("second" in width or "minute" in width) == (bound > 1)
            assert (
                now is not None
                and total([[row for row in cells if row[1] != "–"][-1]]) == int(now[1].replace(",", "")) > 0
            )
        hourly = {
            place: buckets_of(client.get(f"/console{place}?period=1h").text, title) for place, title in titles.items()
        }
    for place in titles:
        (width, cells), (other, hours) = fine[place], hourly[place]
        assert "second" in width and other == "hour", place
        assert sum(any(cell not in ("–", "0") for cell in row[1:]) for row in cells) > 2
        touched = {row[0][:13] for row in cells}
        assert total(cells) == total([row for row in hours if row[0][:13] in touched]) > 0, place


DENIED, DUE = "Denied requests, by who asked", "Units due for deletion, by when they were due"
TABLES = {  # the page's chart, its table, and the column that adds up to the chart
    "/decisions": (DENIED, "Denied requests", 4),
    "/deletion": (DUE, "Coverage by tenant and classification", 2),
}


def test_custody_of_a_short_period_is_counted_back_from_now(tmp_path: Path) -> None:
    """A period that has ended shows what the same buckets have in a period that ends now."""
    with running(tmp_path) as world, httpx.Client(base_url=world.url, timeout=60) as client:
        engine = open_store(tmp_path / "ledger.db", timeout_seconds=60)
        now_us = world.service.clock.utc_us() // HOUR_US * HOUR_US - 20 * MINUTE_US
        fill(engine, tmp_path, leaves=1_500, tenants=3, until_us=now_us, days=40 / 1440)
        engine.dispose()
        assert client.post("/console/login", data={"key": world.keys["auditor"]}).status_code == 303
        custody: list[dict[str, list[str]]] = []
        for until_us in (now_us, now_us - 15 * MINUTE_US):
            page = client.get("/console/", params={"since": now_us - 50 * MINUTE_US, "until": until_us}).text
            width, rows = buckets_of(page, "Blocks in custody, by tenant")
            assert width == "minute"
            custody.append({row[0]: sorted(row[1:]) for row in rows})
    whole, part = custody
    assert len(part) > 10 and part == {at: whole[at] for at in part} and len({*map(tuple, part.values())}) > 1


def test_a_short_period_narrows_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three minutes of twelve: tables and charts agree, and are less than the whole."""
    monkeypatch.setattr(figure_keeper, "_FINE_SECONDS", 0.0)
    monkeypatch.setattr(figure_keeper, "_REST", 0)
    with running(tmp_path) as world, httpx.Client(base_url=world.url, timeout=60) as client:
        service = world.service
        engine = open_store(tmp_path / "ledger.db", timeout_seconds=60)
        now_us = service.clock.utc_us() // MINUTE_US * MINUTE_US
        fill(engine, tmp_path, leaves=2_000, tenants=3, until_us=now_us, days=24 / 1440)
        engine.dispose()
        service.figures.close()  # its thread, whose work this test does
        assert service.writer.seal()
        service.figures.keep()
        assert client.post("/console/login", data={"key": world.keys["auditor"]}).status_code == 303
        heard = list[str]()
        event.listen(service.reader, "before_cursor_execute", lambda *given: heard.append(given[2]))
        with service.reading() as connection:
            over_us = service.clock.utc_us() - 10 * MINUTE_US
            assert service.figures.fine.read(connection, over_us - 30 * MINUTE_US, over_us) is not None
        assert heard and not any("events.leaf" in statement for statement in heard), "the keeper counted them ahead"
        for place, (chart, table, column) in TABLES.items():
            sums = []
            for minutes in (40, 3):
                period = {"since": now_us - (10 + minutes) * MINUTE_US, "until": now_us - 10 * MINUTE_US}
                page = client.get(f"/console{place}", params=period).text
                rows = [row[column].replace(",", "") for row in rows_of(page, table)]
                sums.append(sum(map(int, rows)))
                assert sums[-1] == total(buckets_of(page, chart)[1]) > 0, (place, minutes)
            assert sums[1] < sums[0] / 2, place
