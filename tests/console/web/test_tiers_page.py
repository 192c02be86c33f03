"""The page of tiers over the ledger of a Governor with a host tier: figures are recounted from what it decided."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import event
from typer.testing import CliRunner

from kvcustody.clock import SystemClock, VirtualClock
from kvcustody.console.main import app
from kvcustody.console.render.number_format import size, time_text
from kvcustody.governance.observability.serving_summary import TierServing, tier_servings
from standins.console.page_tables import rows_of
from standins.console.web_world import World, running
from standins.governance.decided_world import DecidedWorld
from standins.service.control_plane_world import APART

SECOND_US = 1_000_000


@pytest.fixture(scope="module")
def decided(tmp_path_factory: pytest.TempPathFactory) -> DecidedWorld:
    """An hour ago."""
    clock = VirtualClock(utc_us=SystemClock().utc_us() - 3600 * SECOND_US)
    return DecidedWorld(tmp_path_factory.mktemp("decided"), clock)


@pytest.fixture(scope="module")
def tiered(decided: DecidedWorld, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with running(tmp_path_factory.mktemp("console"), decided.url) as opened:
        yield opened


@pytest.fixture
def client() -> Iterator[Callable[[World, str], httpx.Client]]:
    with ExitStack() as stack:

        def make(world: World, name: str) -> httpx.Client:
            made = stack.enter_context(httpx.Client(base_url=world.url, timeout=60))
            assert made.post("/console/login", data={"key": world.keys[name]}).status_code == 303
            return made

        yield make


@pytest.mark.system("the page of tiers shows another figure than was decided")
def test_every_figure_is_what_the_governor_decided(
    decided: DecidedWorld, tiered: World, client: Callable[[World, str], httpx.Client]
) -> None:
    page = client(tiered, "auditor").get("/console/tiers").text
    rows = {row[1]: row for row in rows_of(page, "Stores and restores by tier")}
    for action in ("store", "restore"):
        mine, row = decided.of(action), rows[action]
        moved = [one for one in mine if one.choice == "transfer"]
        done = [one for one in moved if one.outcome == "done"]
        known = [one for one in done if one.transfer_us]
        part = [one.part_blocks for one in moved if one.outcome == "partial"]
        part_bytes = sum(one.bytes * one.part_blocks // one.blocks for one in moved if one.outcome == "partial")
        assert row[:5] == [
            "host", action, str(len(mine)), str(len(moved)), str(sum(one.blocks for one in done) + sum(part)),
        ]  # fmt: skip
        assert row[5] == size(sum(one.bytes for one in done) + part_bytes)
        assert row[6] == time_text(sum(one.actual_us for one in moved) // len(moved))
        wrong = sum(abs(one.transfer_us - one.actual_us) for one in known)
        assert row[7] == f"{wrong / sum(one.actual_us for one in known):.0%}"
        came = [one for one in mine if one.outcome == "partial"]
        saved = sum(one.recompute_us - one.actual_us for one in done)
        saved += sum(one.recompute_us * one.part_blocks // one.blocks - one.actual_us for one in came)
        saved -= sum(one.actual_us for one in mine if one.outcome == "failed" and one.recompute_us)
        assert row[8] == (time_text(saved) if action == "restore" else "–")
        outcomes = [str(sum(one.outcome == name for one in moved)) for name in ("partial", "failed")]
        assert row[9:11] == outcomes
    assert f"{len(decided.of('restore', reason='slower'))} slower" in rows["restore"][11]
    assert page.count("<figure") == 3 and "restored" in page
    [copies] = rows_of(page, "Copies by tier, of all time")
    assert copies[0] == "host" and int(copies[1].replace(",", "")) > 0
    assert len(rows_of(page, "Decisions about moving copies")) == 50 and 'rel="next"' in page


def test_a_tenant_sees_its_own_and_an_operator_the_workers(
    decided: DecidedWorld, tiered: World, client: Callable[[World, str], httpx.Client]
) -> None:
    own = client(tiered, "tenant-viewer@acme").get("/console/tiers").text
    mine = [one for one in decided.decisions if one.tenant == "acme"]
    rows = {row[1]: int(row[2]) for row in rows_of(own, "Stores and restores by tier")}
    assert sum(rows.values()) == len(mine) < len(decided.decisions)
    assert "beta" not in own and "tiers, since each began" not in own
    foreign = client(tiered, "tenant-viewer@acme").get("/console/tiers?tenant=beta")
    assert foreign.status_code == 404
    theirs = decided.of("restore", tenant="beta")[0].residency
    asked = f"/console/tiers?residency={theirs}&incarnation={decided.incarnation}"
    assert "of `beta`" in client(tiered, "auditor").get(asked).text  # control
    assert "No such request." in client(tiered, "tenant-viewer@acme").get(asked).text
    assert client(tiered, "author").get("/console/tiers").status_code == 403
    assert "/console/tiers" not in client(tiered, "author").get("/console/").text


def test_a_workers_tiers_and_what_moving_cost_its_serving(
    decided: DecidedWorld, tiered: World, client: Callable[[World, str], httpx.Client]
) -> None:
    operator = client(tiered, "operator")
    assert "No worker that runs has a tier." in operator.get("/console/tiers").text  # control
    fleet, worker = tiered.service.fleet, tiered.worker
    fleet.heard("worker", worker.incarnation, status=decided.status)
    [run] = [one for one in fleet.running() if one.incarnation == worker.incarnation]
    [row] = rows_of(operator.get("/console/tiers").text, "Tiers of workers")
    use = decided.uses["host"]
    assert row[:2] == ["worker", "host"] and f"of {size(1 << 20)}" in row[2]
    assert row[5:7] == [str(use.stored_blocks), str(use.restored_blocks)]
    assert row[7:9] == [
        time_text(use.store_us // use.stored_blocks), time_text(use.restore_us // use.restored_blocks),
    ]  # fmt: skip
    assert row[10] == str(use.decided_against)
    share = (use.store_us + use.restore_us) / (run.seen_us - run.started_us)
    assert row[12] == f"{100 * share:.2f} %"
    top = ["top", "--ledger", decided.url]
    [seen] = json.loads(CliRunner().invoke(app, [*top, "--json"]).stdout)["workers"]
    assert seen["tiers"] == [one._asdict() for one in tier_servings(decided.status)]
    shown = CliRunner().invoke(app, [*top, "--once"]).stdout
    [line] = [line for line in shown.splitlines() if line.split()[:2] == ["worker", "host"]]
    assert f"{use.stored_blocks:,}" in line and f"{use.restored_blocks:,}" in line
    assert "Tiers of workers" not in client(tiered, "dpo").get("/console/tiers").text
    fleet.heard("worker", worker.incarnation, status={"running": 1.0})
    fleet.flush(now=True)
    assert "restoring" not in CliRunner().invoke(app, [*top, "--once"]).stdout  # control: no tier, no table


def test_a_policys_tiers_that_no_worker_has_are_told(
    decided: DecidedWorld, tiered: World, client: Callable[[World, str], httpx.Client]
) -> None:
    document = APART.replace("offload: {low: never,", "offload: {low: {tiers: [host, nvme], encrypt: required},")
    author = client(tiered, "author")
    fleet, worker = tiered.service.fleet, tiered.worker

    def told() -> list[str]:
        [token, *_] = re.findall(r'name="csrf" value="(\w+)"', author.get("/console/policy/draft").text)
        page = author.post("/console/policy/draft", data={"csrf": token, "source": document}).text
        key = {"Authorization": f"Bearer {tiered.keys['author']}"}
        found = author.post("/v1/policies:lint", json={"source": document}, headers=key).json()
        messages = [one["message"] for one in found["problems"] if "offloaded" in one["message"]]
        shown = html.unescape(re.sub(r"</?code>", "", page))
        assert all(message.replace("`", "") in shown for message in messages)
        return [tier for tier in ("host", "nvme") if any(f"`{tier}`" in message for message in messages)]

    fleet.heard("worker", worker.incarnation, status={"running": 1.0})
    assert told() == ["host", "nvme"]
    fleet.heard("worker", worker.incarnation, status=decided.status)
    assert told() == ["nvme"]


def test_one_request_is_explained_where_it_is_named(
    decided: DecidedWorld, tiered: World, client: Callable[[World, str], httpx.Client]
) -> None:
    auditor = client(tiered, "auditor")
    page = auditor.get("/console/tiers").text
    link = re.search(r'<a href="(/console/tiers\?[^"]*residency=(\d+)[^"]*)"', page)
    assert link is not None
    shown = auditor.get(link[1].replace("&amp;", "&")).text
    assert f"request {link[2]} of `" in shown and "found in host" in shown and decided.incarnation in shown
    assert "No such request." in auditor.get("/console/tiers?residency=99999").text
    assert auditor.get("/console/tiers?residency=1&incarnation=zz").status_code == 422
    assert auditor.get("/console/tiers?residency=x").status_code == 422


def test_an_empty_page_says_what_would_fill_it(world: World, client: Callable[[World, str], httpx.Client]) -> None:
    for name in ("auditor", "operator", "tenant-viewer@acme"):
        page = client(world, name).get("/console/tiers").text
        assert "No tier has been used." in page and "KVCUSTODY_HOST_TIER_BYTES" in page
        assert "Decisions, newest first" not in page


def test_a_period_without_decisions_says_so(
    decided: DecidedWorld, tmp_path: Path, client: Callable[[World, str], httpx.Client]
) -> None:
    old = DecidedWorld(tmp_path, VirtualClock(utc_us=SystemClock().utc_us() - 3 * 86_400 * SECOND_US))
    folder = tmp_path / "console"
    folder.mkdir()
    with running(folder, old.url) as world:
        auditor = client(world, "auditor")
        assert "Nothing was decided about moving copies in this period." in auditor.get("/console/tiers").text
        assert "Stores and restores by tier" in auditor.get("/console/tiers?period=7d").text


def test_sums_and_charts_come_from_one_read_of_the_decisions(
    tiered: World, client: Callable[[World, str], httpx.Client]
) -> None:
    statements: list[str] = []

    def hear(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        statements.append(statement)

    event.listen(tiered.service.reader, "before_cursor_execute", hear)
    try:
        page = client(tiered, "auditor").get("/console/tiers").text
    finally:
        event.remove(tiered.service.reader, "before_cursor_execute", hear)
    assert "Stores and restores by tier" in page and "Blocks moved" in page
    added = [statement for statement in statements if "FROM transfer_decisions" in statement and "sum(" in statement]
    assert len(added) == 1


def test_what_a_worker_says_of_its_tiers_between_two_looks(decided: DecidedWorld) -> None:
    [since] = tier_servings(decided.status)
    use = decided.uses["host"]
    assert (since.stored_blocks, since.restored_blocks) == (use.stored_blocks, use.restored_blocks)
    assert since.capacity_bytes == 1 << 20 and since.prediction_error == pytest.approx(use.error)
    [between] = tier_servings(decided.status, decided.status)
    assert between.stored_blocks == between.left_alone == 0 == between.restore_seconds
    assert between.copies == since.copies
    assert tier_servings({"running": 1.0}) == []
    assert since.busy_share(0) is None
    half = TierServing("host", 0, 0, None, 0, 0, 0, 2.0, 3.0, 0, 0, None)
    assert half.busy_share(10) == pytest.approx(0.5)
