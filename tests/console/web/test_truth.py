"""The same fact has the same word on every page, and a page without anything says why and what would fill it."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from sqlalchemy import update
from typer.testing import CliRunner

from kvcustody.audit.store.database.engine import WRITE
from kvcustody.audit.store.schema.service import service_workers
from kvcustody.console.documents import ConsoleDocuments
from kvcustody.console.main import app
from kvcustody.console.web.app import Console
from kvcustody.console.web.page_request import PLACES
from kvcustody.governance.api.app import create_app
from kvcustody.governance.service.access.roles import OF_TENANTS, Role
from kvcustody.governance.service.service import open_service
from kvcustody.governance.service.settings import ServiceSettings
from standins.console.web_world import World, running

TEMPLATES = Path(__file__).resolve().parents[3] / "console" / "web" / "templates"
EMPTY = re.compile(r'<div class="empty"><p class="lead">(.*?)</p>(.*?)</div>', re.DOTALL)


@contextmanager
def signed_in(world: World, name: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=world.url, timeout=60) as client:
        assert client.post("/console/login", data={"key": world.keys[name]}).status_code == 303
        yield client


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, migrated: Path) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("truth")
    shutil.copy(migrated, folder / "ledger.db")
    with running(folder) as opened:
        opened.release()
        opened.service.fleet.heard("worker", opened.worker.incarnation, revision=1, status={"running": 1.0})
        yield opened


def words(world: World) -> dict[str, str]:
    """How the worker stands, wherever that is said."""
    with signed_in(world, "operator") as operator, signed_in(world, "auditor") as auditor:
        health = operator.get("/console/health").text
        policy = auditor.get("/console/policy").text
        overview = auditor.get("/console/").text
        key = {"Authorization": f"Bearer {world.keys['operator']}"}
        api = httpx.get(f"{world.url}/v1/workers", headers=key).json()["items"]
        capacity = httpx.get(f"{world.url}/v1/capacity", headers=key).json()["items"]
        metrics = httpx.get(f"{world.url}/metrics", headers=key).text
    told = CliRunner().invoke(app, ["worker", "list", "--json", "--ledger", world.database_url])
    listed = re.findall(r'"state": "([a-z ]+)"[^{}]*', told.stdout)
    up = re.search(r'kvcustody_worker_up\{worker="worker"\} (\d)', metrics)
    return {
        "health": re.findall(r'class="badge \w+">(at work|silent|ended)<', health)[0],
        "policy": "silent" if "worker (silent)" in policy else "at work",
        "overview": "silent" if re.search(r"on worker \(silent\)", overview) else "at work",
        "api": next(one["state"] for one in api if one["worker"] == "worker"),
        "capacity": next(one["state"] for one in capacity if one["worker"] == "worker"),
        "command": "silent" if "silent" in listed else "at work",
        "metrics": "not read yet" if up is None else {"1": "at work", "0": "silent"}[up[1]],
    }


def settle(world: World, word: str) -> None:
    """All of them come to this word: figures of a scrape come a moment behind."""
    until = time.monotonic() + 20
    while set(words(world).values()) != {word} and time.monotonic() < until:
        time.sleep(0.2)
    assert set(words(world).values()) == {word}, words(world)


def test_page_api_and_command_show_the_same_epochs(world: World) -> None:
    takers = world.service.epochs.takers
    takers.heard("worker", "worker", 0)
    takers.heard("door-1", "door", 0)
    world.service.raise_above(None)
    behind = {one.name: one for one in takers.listed()}
    assert [one.state for one in behind.values()] == ["behind", "behind"]
    told = CliRunner().invoke(app, ["worker", "list", "--json", "--ledger", world.database_url])
    [process] = [one for one in json.loads(told.stdout)["processes"] if one["worker"] == "worker"]
    assert process["epoch_version"] == 0
    assert process["epoch_behind_since_us"] == behind["worker"].behind_since_us
    shown = CliRunner().invoke(app, ["worker", "list", "--ledger", world.database_url]).stdout
    assert "behind since" in shown
    with signed_in(world, "operator") as operator:
        page = operator.get("/console/health").text
    rows = re.findall(r'<td class="left">(door-1|worker)</td><td class="left">(door|worker)</td>.*?>(behind)<', page)
    assert rows == [("door-1", "door", "behind"), ("worker", "worker", "behind")]


@pytest.mark.system("pages disagree on which workers are at work")
def test_who_is_at_work_has_one_word(world: World) -> None:
    settle(world, "at work")
    with world.service.engine.connect().execution_options(**WRITE) as connection, connection.begin():
        long_ago = world.service.clock.utc_us() - 600 * 1_000_000
        connection.execute(update(service_workers).values(seen_us=long_ago))
    settle(world, "silent")


@pytest.fixture(scope="module")
def nothing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, dict[str, str]]]:
    """A service that has just been begun, with people in every role."""
    import asyncio

    folder = tmp_path_factory.mktemp("nothing")
    settings = ServiceSettings(
        database_url=f"sqlite:///{folder / 'ledger.db'}",
        state_path=folder / "state",
        signing_key_path=folder / "signing.key",
        requests_per_second=1e6,
        requests_burst=1_000_000,
    )
    with open_service(settings, documents=ConsoleDocuments()) as service:
        gate = create_app(service, pages=Console(service))
        keys = {}
        for role in Role:
            if role not in (Role.WORKER, Role.BOOTSTRAP):
                tenant = "acme" if role in OF_TENANTS else None
                service.principals.enrol(role.value, [role], tenant=tenant, by="test")
                keys[role.value] = service.principals.issue_key(role.value, days=90, by="test").key

        def get(name: str, path: str) -> httpx.Response:
            async def ask() -> httpx.Response:
                transport = httpx.ASGITransport(app=gate)
                async with httpx.AsyncClient(
                    transport=transport, base_url="http://testserver", follow_redirects=True
                ) as client:
                    await client.post("/console/login", data={"key": keys[name]})
                    return await client.get(path)

            return asyncio.run(ask())

        yield get, keys  # type: ignore[misc]


# Pages that are never empty, and why.
FULL = {"/console/": "tiles", "/console/principals": "whoever looks is on it"}


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.name)
def test_a_page_without_anything_says_why_and_what_would_fill_it(place: object, nothing: object) -> None:
    """Every page of the menu, for everybody who may open it, over a ledger in which nothing has happened yet."""
    get, keys = nothing  # type: ignore[misc]
    opened = 0
    for name in keys:
        answer = get(name, place.path)  # type: ignore[attr-defined]
        if answer.status_code == 403:
            continue
        opened += 1
        assert answer.status_code == 200, (name, answer.text)
        said = EMPTY.findall(answer.text)
        if place.path not in FULL:  # type: ignore[attr-defined]
            assert said or "<tbody><tr" in answer.text.replace("\n", ""), (name, "neither anything nor why")
        for title, text in said:
            assert title.strip().endswith((".", "?")), title
            assert len(re.sub(r"<[^>]+>", "", text).split()) >= 8, (name, title, "what would fill it")
    assert opened


def test_every_empty_view_says_what_would_fill_it() -> None:
    """The templates themselves: an empty view without an explanation is seen, however it is reached."""
    empty_views = 0
    for path in sorted(TEMPLATES.rglob("*.html")):
        for title, text in re.findall(
            r"call empty\((.+?)\) %\}(.*?)\{% endcall %\}", path.read_text(encoding="utf-8"), re.DOTALL
        ):
            empty_views += 1
            plain = re.sub(r"<[^>]+>|\{[%{].*?[%}]\}", " ", text)
            variable = "{{" in text  # the page says why in words of its own
            assert variable or len(plain.split()) >= 8, (path.name, title)
    assert empty_views > 20
