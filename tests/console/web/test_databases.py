"""Every page on both databases shows the same: on PostgreSQL, a tenant's pages through the wall of rows."""

from __future__ import annotations

import shutil
from contextlib import ExitStack, closing
from pathlib import Path

import httpx
import pytest

from kvcustody.console.web.app import _PAGES
from standins.console.web_world import World, running
from standins.postgres import walled_ledger

pytestmark = pytest.mark.system

TENANT = "tenant-admin@acme"
PAGES = {  # each page's path, and who reads it
    "/": ("auditor", "operator", TENANT),
    "/inbox": ("auditor", TENANT),
    "/audit": ("/audit?tenant=acme", "auditor", TENANT),
    "/audit/event": ("/audit/event?log=tenant/acme&idx=0", "auditor", TENANT),
    "/custody": ("auditor", TENANT),
    "/reuse": ("auditor", TENANT),
    "/custody/subject": ("/custody/subject?tenant=acme&subject=user-1", "auditor", TENANT),
    "/tiers": ("/tiers?residency=1", "auditor", "operator", TENANT),
    "/erasures": ("dpo", TENANT),
    "/erasures/{erasure}": ("/erasures/{asked}", "dpo", TENANT),
    "/cases": ("dpo", TENANT),
    "/deletion": ("/deletion?period=7d", "auditor", TENANT),
    "/policy": ("auditor",),
    "/policy/draft": ("author",),
    "/policy/consents": (TENANT,),
    "/policy/{revision}": ("/policy/1", "auditor"),
    "/grants": ("auditor",),
    "/decisions": (
        "/decisions?reader=labs&owner=acme&classification=confidential&via=grant",
        "approver",
        TENANT,
    ),
    "/decisions/rule": ("/decisions/rule?id=no-restricted&revision=1", "auditor"),
    "/reports": ("auditor", TENANT),
    "/health": ("operator",),
    "/routes": ("operator",),
    "/fleet": ("operator",),
    "/principals": ("key-custodian",),
}
FILES = {
    "/audit/export/{form}",
    "/erasures/{erasure}/{file}",
    "/cases/{case}",
    "/reports/{job}",
    "/reports/{job}/{file}",
}  # what a journey makes
ROWS = {
    "/audit",
    "/audit/event",
    "/custody",
    "/custody/subject",
    "/erasures",
    "/deletion",
    "/grants",
    "/policy",
    "/principals",
}


def _signed_in(world: World, name: str) -> httpx.Client:
    client = httpx.Client(base_url=world.url, timeout=60, verify=False)
    assert client.post("/console/login", data={"key": world.keys[name]}).status_code == 303
    return client


def _seen(world: World) -> dict[tuple[str, str], tuple[int, int]]:
    """Status and number of facts (cells of tables and lists) of every page, by page and reader."""
    answers = {}
    with ExitStack() as stack:
        readers = {who for given in PAGES.values() for who in given if not who.startswith("/")}
        clients = {who: stack.enter_context(closing(_signed_in(world, who))) for who in sorted(readers)}
        asked = {"Authorization": f"Bearer {world.keys['dpo']}", "Idempotency-Key": "one"}
        body = {"tenant": "acme", "subject": "user-2"}
        made = httpx.post(f"{world.url}/v1/erasures", json=body, headers=asked).json()["erasure"]
        for page, given in PAGES.items():
            path = next((item for item in given if item.startswith("/")), page).replace("{asked}", made)
            for who in given:
                if not who.startswith("/"):
                    answer = clients[who].get("/console" + path)
                    cells = answer.text.count("<td") + answer.text.count("<dd")
                    answers[page, who] = answer.status_code, cells
    return answers


def test_every_page_is_listed_here() -> None:
    assert {path for method, path, _ in _PAGES if method == "GET"} == set(PAGES) | FILES


def test_every_page_shows_the_same_on_either_database(tmp_path: Path, migrated: Path) -> None:
    seen = {}
    with walled_ledger() as postgres:
        for name, url in (("sqlite", None), ("postgresql", postgres)):
            folder = tmp_path / name
            folder.mkdir()
            shutil.copy(migrated, folder / "ledger.db")
            with running(folder, url) as world:
                world.release()
                assert world.service.row_walls == (name == "postgresql"), "void: no wall to look through"
                seen[name] = _seen(world)
    assert {status for status, _ in seen["sqlite"].values()} == {200}, seen["sqlite"]
    assert [page for (page, _), (_, cells) in seen["sqlite"].items() if page in ROWS and not cells] == []
    assert seen["postgresql"] == seen["sqlite"]
