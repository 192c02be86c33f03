"""While a worker does not enforce its policy for everybody, no page says that isolation is proved, and no more."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvcustody.audit.kinds import EnforcementChanged, RequestMonitored
from kvcustody.governance.service.fleet import enforcement_orders
from standins.console.web_world import World, running

PAGES = {"operator": ("/console/health",), "auditor": ("/console/", "/console/policy")}
SAID = "Not enforced for"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, migrated: Path) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("monitored")
    shutil.copy(migrated, folder / "ledger.db")
    with running(folder) as opened:
        opened.release()
        yield opened


def pages(world: World) -> dict[str, str]:
    texts = {}
    for name, places in PAGES.items():
        with httpx.Client(base_url=world.url, timeout=60) as client:
            assert client.post("/console/login", data={"key": world.keys[name]}).status_code == 303
            for place in places:
                answer = client.get(place)
                assert answer.status_code == 200, answer.text[:500]
                texts[place] = answer.text
    return texts


def coverage(world: World, name: str, tenant: str = "") -> dict[str, Any]:
    with httpx.Client(base_url=world.url, timeout=60) as client:
        headers = {"Authorization": f"Bearer {world.keys[name]}"}
        answer = client.get(f"/v1/custody/coverage{tenant and f'?tenant={tenant}'}", headers=headers)
        assert answer.status_code == 200, answer.text[:500]
        return dict(answer.json())


def assert_coverage_says_so(world: World) -> None:
    """Coverage and the deletion page, to whoever may know the names of others and to whoever may not."""
    everybody, labs = coverage(world, "auditor"), coverage(world, "auditor", "labs")
    acme = coverage(world, "tenant-viewer@acme")
    assert [one["mode"] for one in everybody["monitored"]] == ["canary"]
    assert "enforced for labs, 2.5 % of the sessions of the others" in everybody["qualification"]
    assert acme["monitored"] == everybody["monitored"]
    assert "for some requests" in acme["qualification"] and "labs" not in str(acme)
    assert (labs["monitored"], labs["qualification"]) == ([], ""), "it was enforced for all of labs"
    with httpx.Client(base_url=world.url, timeout=60) as client:
        assert client.post("/console/login", data={"key": world.keys["auditor"]}).status_code == 303
        assert everybody["qualification"].split(" (")[0] in client.get("/console/deletion").text


@pytest.mark.system("a page says enforced of a tenant that is monitored")
def test_every_page_that_says_what_is_in_effect_says_for_whom(world: World) -> None:
    before = pages(world)
    assert coverage(world, "auditor")["monitored"] == [], "control"
    assert not any(SAID in text for text in before.values()), "control"
    assert "Isolation proved" in before["/console/policy"]
    until_us = world.service.clock.utc_us() + 3_600_000_000
    order = enforcement_orders.order(
        world.service,
        "canary",
        tenants=["labs"],
        share="2.5%",
        until_us=until_us,
        actor="approver",
        reason="first week",
    )
    now = world.worker.now_us
    seconds = until_us // 1_000_000
    changed = EnforcementChanged(now, "canary", ("labs",), 25_000, seconds, 1, order["order"], "approver")
    said = ("no-restricted",)
    request = RequestMonitored(
        now, 900, "acme", "restricted", "would-deny", said, 1, order["order"], 4_000, 3_210, 1_230, 2_340
    )
    world.worker.ship([changed, request])
    after = pages(world)
    assert all(SAID in text for text in after.values()), [place for place, text in after.items() if SAID not in text]
    assert "Isolation proved" not in after["/console/policy"] + after["/console/"]
    policy = after["/console/policy"]
    assert_coverage_says_so(world)
    for part in (
        "labs, 2.5 % of the sessions of all others",
        "Ordered by approver",
        "first week",
        "3,210",
        "1,230",
    ):
        assert part in policy, part
    assert "870" in policy, "what enforcing would have prefilled again"
    world.worker.ship([EnforcementChanged(world.worker.now_us, "enforce", (), 0, 0, 1, order["order"], "approver")])
    assert not any(f"{SAID} e" in text or f"{SAID} all" in text for text in pages(world).values())
