"""The page of routes over the ledger of a door and three workers: its figures are those that a recorder saw."""

from __future__ import annotations

import re
import shutil
from html import unescape
from pathlib import Path

import httpx
import pytest

from kvcustody.audit.store.database.engine import open_store
from kvcustody.clock import MICROSECONDS, SystemClock
from kvcustody.console.render.number_format import count
from kvcustody.console.routes.print_routes import percent
from standins.console.page_tables import rows_of
from standins.console.web_world import running
from standins.integrations.door_world import make_signers
from standins.integrations.routed_fleet import RoutedFleet, truth_of
from standins.redteam.two_worlds import model

HOUR_US = 3600 * MICROSECONDS
LOST = 60  # more than a page of findings shows


@pytest.mark.system("the page of routes shows another figure than the recorder saw")
def test_the_map_of_workers_is_what_the_recorder_saw(tmp_path: Path, migrated: Path) -> None:
    shutil.copy(migrated, tmp_path / "ledger.db")
    store = open_store(tmp_path / "ledger.db")
    fleet = RoutedFleet(tmp_path, make_signers(), store, model(), utc_us=SystemClock().utc_us() - 2 * HOUR_US)
    fleet.run(60)
    for _ in range(LOST):
        fleet.ask(fleet.edge.clients.acme, "lost", "acme", 20, mute="door")
    fleet.close()
    store.dispose()
    seen = truth_of(fleet.seen)
    (tmp_path / "console").mkdir()
    with running(tmp_path / "console", str(tmp_path / "ledger.db")) as world:
        with httpx.Client(base_url=world.url, timeout=60) as client:
            assert client.post("/console/login", data={"key": world.keys["operator"]}).status_code == 303
            page = client.get("/console/routes")
            assert page.status_code == 200
            shown = {row[0]: row[1:3] for row in rows_of(page.text, "Workers by what was found there")}
            assert shown == {
                worker: [count(requests), percent(found / prompt)]
                for worker, (requests, prompt, found) in seen.by_worker.items()
            }
            lost, pages = 0, 0
            while True:
                lost += [row[2] for row in rows_of(page.text, "Findings")].count("no-door-half")
                pages += 1
                following = re.search(r'href="([^"]+)" rel="next"', page.text)
                if following is None:
                    break
                page = client.get(unescape(following[1]))
                assert page.status_code == 200
            assert lost == LOST and pages > 1
            asked = client.get(f"/console/routes?receipt={fleet.seen[0].receipt}")
            assert len(rows_of(asked.text, "Receipts")) == 1
        with httpx.Client(base_url=world.url, timeout=60) as client:
            assert client.post("/console/login", data={"key": world.keys["tenant-viewer@acme"]}).status_code == 303
            assert client.get("/console/routes").status_code == 403, "control: no tenant sees the fleet"
