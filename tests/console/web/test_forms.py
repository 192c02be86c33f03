"""Pages and forms of operators and officers at a real service, asked without a browser."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import httpx
import pytest
from web_world import World

SignIn = Callable[[str], httpx.Client]


@pytest.fixture
def client(world: World) -> Iterator[SignIn]:
    """A signed-in client of a person, without a browser."""
    with ExitStack() as stack:

        def make(name: str) -> httpx.Client:
            made = stack.enter_context(httpx.Client(base_url=world.url, timeout=60))
            assert made.post("/console/login", data={"key": world.keys[name]}).status_code == 303
            return made

        yield make


def rows_of(page: str, caption: str) -> list[list[str]]:
    """The cells of the table with this caption, row by row, as text."""
    [table] = [part for part in page.split("<table")[1:] if f'<caption class="hidden">{caption}<' in part]
    body = table.split("</thead>")[1].split("</table>")[0]
    return [
        [
            html.unescape(re.sub(r"<[^>]*>", "", cell)).strip()
            for cell in re.findall(r"<td[^>]*>(.*?)</td>", row)
        ]
        for row in re.findall(r"<tr>(.*?)</tr>", body, re.DOTALL)
    ]


def _of_worker(person: httpx.Client) -> list[list[str]]:
    return [row for row in rows_of(person.get("/console/health").text, "Workers") if row[0] == "worker"]


def test_the_workers_page_shows_what_a_worker_says_of_itself(world: World, client: SignIn) -> None:
    operator = client("operator")
    [silent] = _of_worker(operator)
    assert silent[6:10] == ["–"] * 4, "control: it has said nothing"
    said = {"blocks.total": 4096.0, "blocks.active": 90.0, "blocks.cached": 1000.0, "running": 3.0}
    status = said | {"overdue": 2.0, "drift": 5.0}
    world.service.fleet.heard("worker", world.worker.incarnation, revision=7, status=status)
    [row] = _of_worker(operator)
    assert row[5:10] == ["7", "3", "1,090 of 4,096", "2", "5"]


def test_an_operator_asks_a_worker_for_a_scan(world: World, client: SignIn) -> None:
    world.service.fleet.heard("worker", world.worker.incarnation, revision=7, status={"running": 3.0})
    operator, auditor = client("operator"), client("auditor")
    button = re.compile(r'name="csrf" value="(\w+)"><input type="hidden" name="worker" value="worker"')
    assert button.search(auditor.get("/console/health").text) is None, "an auditor looks on"
    [token] = button.findall(operator.get("/console/health").text)
    asked = {"csrf": token, "worker": "worker"}
    for person, form, status in (
        (auditor, asked, 403),
        (operator, {"worker": "worker"}, 403),
        (operator, asked, 303),
    ):
        assert person.post("/console/health/scan", data=form).status_code == status
    assert operator.post("/console/health/scan", data=asked).status_code == 303, "once more, while it waits"
    assert operator.post("/console/health/scan", data=asked | {"worker": "nobody"}).status_code == 404
    page = auditor.get("/console/health").text
    [row] = rows_of(page, "Scans of workers")
    assert row[:3] == ["worker", "waiting", "operator"] and row[5:] == ["–", "–"]
    assert button.search(operator.get("/console/health").text) is None, "what is asked for has no button"
    [order] = world.service.scans.orders.owed("worker")
    world.service.scans.orders.answer("worker", order.order, world.worker.incarnation, scan=None, reason="X")
    [row] = rows_of(operator.get("/console/health").text, "Scans of workers")
    assert row[1] == "failed X"
