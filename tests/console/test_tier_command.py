"""`kvcustody tier` on the ledger of a Governor with a host tier, direct and through a service that keeps it."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
import uvicorn
from typer.testing import CliRunner

from kvcustody.audit.store.database.engine import open_store
from kvcustody.console.main import app
from kvcustody.console.tier.wording import lines_of
from kvcustody.governance.api.app import create_app
from kvcustody.governance.service.access.roles import Role
from kvcustody.governance.service.service import open_service
from kvcustody.migrations.upgrade import upgrade
from standins.governance.decided_world import DecidedWorld
from standins.governance.offload_world import World, prompt
from standins.service.service_world import settings_in

EVER = ("--since", "2020-01-01")


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is in this process: its log would be on the stdout that is read here."""
    monkeypatch.delenv("KVCUSTODY_DATABASE_URL", raising=False)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


@pytest.fixture(scope="module")
def decided(tmp_path_factory: pytest.TempPathFactory) -> DecidedWorld:
    return DecidedWorld(tmp_path_factory.mktemp("decided"))


@pytest.fixture(scope="module")
def keys(decided: DecidedWorld, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[str]]]:
    """What asks the service as somebody: an operator, an auditor, one of acme's."""
    folder = tmp_path_factory.mktemp("service")
    with open_service(settings_in(folder, database_url=decided.url)) as service:
        config = uvicorn.Config(create_app(service), port=0, log_config=None, lifespan="off", ws="none")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.005)
        address = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        options = {}
        people = {"operator": None, "auditor": None, "tenant-viewer": "acme", "author": None}
        for role, tenant in people.items():
            service.principals.enrol(role, [Role(role)], tenant=tenant, by="test")
            file = folder / f"{role}.key"
            file.write_text(service.principals.issue_key(role, days=1, by="test").key)
            file.chmod(0o600)
            options[role] = ["--server", address, "--api-key-file", str(file)]
        yield options
        server.should_exit = True
        thread.join()


def run(*words: str, code: int = 0) -> Any:
    done = CliRunner().invoke(app, ["tier", *words])
    assert done.exit_code == code, (words, done.output, done.exception)
    return json.loads(done.stdout) if code == 0 and "--json" in words else done.output


@pytest.mark.parametrize("who", ["operator", "auditor"])
def test_the_service_says_what_the_ledger_says(decided: DecidedWorld, keys: dict[str, list[str]], who: str) -> None:
    here, there = ["--ledger", decided.url], keys[who]
    assert run("list", *EVER, *here, "--json")["items"] == run("list", *EVER, *there, "--json")["items"] != []
    asked = ["transfers", "--action", "restore", "--outcome", "failed", "--json"]
    found = run(*asked, *here)
    assert found["items"] == run(*asked, *there)["items"] != [] and found["next"] is None
    request = str(decided.of("restore", reason="slower")[0].residency)
    direct = run("explain", request, *here, "--json")
    assert direct == run("explain", request, *there, "--json") and len(direct["items"]) == 1
    said = run("explain", request, *here)
    assert said == run("explain", request, *there) and len(said.splitlines()) == 5


def test_pages_go_on_where_the_last_one_ended(decided: DecidedWorld, keys: dict[str, list[str]]) -> None:
    for where in (["--ledger", decided.url], keys["auditor"]):
        whole = run("transfers", "--limit", "20", *where, "--json")["items"]
        first = run("transfers", "--limit", "8", *where, "--json")
        second = run("transfers", "--limit", "12", "--cursor", first["next"], *where, "--json")
        assert first["items"] + second["items"] == whole and len(whole) == 20
    assert "more: --cursor" in run("transfers", "--limit", "8", "--ledger", decided.url)


def test_a_tenant_sees_its_own_alone(decided: DecidedWorld, keys: dict[str, list[str]]) -> None:
    own = keys["tenant-viewer"]
    listed = run("transfers", "--limit", "1000", *own, "--json")["items"]
    mine = [one for one in decided.decisions if one.tenant == "acme"]
    assert len(listed) == len(mine) and {one["tenant"] for one in listed} == {"acme"}
    assert run("list", *EVER, *own, "--json") != run("list", *EVER, *keys["auditor"], "--json")
    [tier] = run("list", *EVER, *own, "--json")["items"]
    assert sum(row["decisions"] for row in tier["transfers"]) == len(mine)
    theirs = str(decided.of("restore", tenant="beta")[0].residency)
    [shown] = run("explain", theirs, *keys["auditor"], "--json")["items"]
    assert shown["tenant"] == "beta"  # control
    assert f"no request {theirs}" in run("explain", theirs, *own, code=2)
    assert "beta" not in run("explain", theirs, *own, code=2)
    for words in (("list",), ("transfers",), ("explain", theirs)):
        run(*words, "--tenant", "beta", *own, code=2)
        run(*words, *keys["author"], code=2)


def test_one_request_in_words(decided: DecidedWorld) -> None:
    moved = decided.of("restore", reason="faster", outcome="done")[0]
    explained = run("explain", str(moved.residency), "--ledger", decided.url)
    assert decided.incarnation in explained and f"request {moved.residency} of `{moved.tenant}`" in explained
    assert f"found in host: {moved.blocks} blocks" in explained and "as that was predicted to be faster" in explained
    assert "than predicted" in explained and "saved against computing" in explained
    document = run("explain", str(moved.residency), "--worker", "worker-0", "--ledger", decided.url, "--json")
    [request] = document["items"]
    [decision] = request["decisions"]
    assert (decision["transfer_us"], decision["recompute_us"], decision["actual_us"]) == (
        moved.transfer_us, moved.recompute_us, moved.actual_us,
    )  # fmt: skip
    assert document["any_tier"] and lines_of(request) == explained.splitlines()[1:]


def test_tables_show_what_the_documents_have(decided: DecidedWorld) -> None:
    here = ("--ledger", decided.url)
    shown = run("list", *EVER, *here)
    [tier] = run("list", *EVER, *here, "--json")["items"]
    for row in tier["transfers"]:
        line, *by_size = [line for line in shown.splitlines() if line.split()[:2] == ["host", row["action"]]]
        assert len(by_size) == len(row["sizes"])
        assert line.split()[2:4] == [str(row["decisions"]), str(row["transfers"])]
        assert all(f"{number} {reason}" in line for reason, number in row["against"].items())
    assert "there are no decisions about moving copies" in run(
        "list", "--since", "2020-01-01", "--until", "2020-01-02", *here
    )
    assert "failed" in run("transfers", "--outcome", "failed", *here)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("explain", "99999"),
            "has no request 99999 that fits; `kvcustody audit query --kind residency-opened`",
        ),
        (("explain", "5", "--worker", "gpu-9"), "has no request 5 that fits"),
        (
            ("explain", "5", "--incarnation", "xyz"),
            "--incarnation `xyz` does not fit `^[0-9a-f]{32}$`: only this process: 32 hexadecimal digits",
        ),
        (("explain", "5", "--tenant", "acne"), "acme"),
        (("transfers", "--cursor", "12"), "--cursor `12` is no cursor of this command"),
        (("transfers", "--tier", "tape"), "`tape` is not one of 'host', 'nvme', 'remote'"),
        (("transfers", "--tier", "nvm"), "did you mean `nvme`?"),
        (("transfers", "--limit", "5000"), "'--limit': must be 1000 or less"),
        (("list", "--since", "yesterday"), "--since `yesterday` is no ISO 8601 date or time; write `2026-"),
        (("list", "--since", "2026-01-02", "--until", "2026-01-01"), "`since` is not before `until`"),
    ],
)
def test_errors_say_what_is_wrong_and_what_to_do(decided: DecidedWorld, words: tuple[str, ...], said: str) -> None:
    found = " ".join(run(*words, "--ledger", decided.url, code=2).split())
    assert said in found and "Traceback" not in found and found.startswith("error: KVC")


def test_a_ledger_without_tiers_says_what_would_fill_it(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/ledger.db"
    engine = open_store(url)
    upgrade(engine)
    engine.dispose()
    assert "KVCUSTODY_HOST_TIER_BYTES" in run("list", "--ledger", url)
    assert run("list", "--ledger", url, "--json")["items"] == []
    refused = run("explain", "1", "--ledger", url, code=2)
    assert "has no request 1" in refused and "KVCUSTODY_HOST_TIER_BYTES" in refused
    assert run("transfers", "--ledger", url, "--json") == {"items": [], "next": None}


def test_a_request_of_a_ledger_without_tiers_is_told_why(tmp_path: Path) -> None:
    world = World(tmp_path, "")
    world.serve("acme", prompt(1, 4))
    world.worker.close()
    said = run("explain", "1", "--ledger", f"sqlite:///{tmp_path / 'ledger.db'}")
    assert "nothing is on record of any tier" in said and "request 1 of `acme`" in said


def test_two_processes_with_the_same_number_are_told_apart(tmp_path: Path) -> None:
    world = World(tmp_path, "host")
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    names = []
    for _ in range(2):
        world.serve("acme", prompt(1, 10))
        names.append(world.worker.writer.incarnation)
        world.worker.close()
        world.clock.advance(5_000_000)
        world.open()
    world.worker.close()
    refused = run("explain", "1", "--ledger", url, code=2)
    assert "request 1 is of 2 processes" in refused and all(name in refused for name in names)
    for name in names:
        found = run("explain", "1", "--incarnation", name, "--ledger", url, "--json")
        assert [item["incarnation"] for item in found["items"]] == [name]
