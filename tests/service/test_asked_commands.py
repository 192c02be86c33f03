"""Commands that ask one operation say the same of a ledger and of the control plane that keeps it."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import structlog
from sqlalchemy import func, select, text
from sqlalchemy.exc import OperationalError
from typer.testing import CliRunner

from kvcustody.audit.store.schema.ledger import events
from kvcustody.console.api.ledger_asker import LedgerDesk
from kvcustody.console.main import app
from kvcustody.errors import LedgerError
from kvcustody.governance.api.declarations import every_operation, operations_at
from kvcustody.governance.service.page_cursor import CursorBinding
from kvcustody.governance.service.settings import load_service_settings
from standins.waiting import until

EVER = ("--since", "2020-01-01", "--until", "2100-01-01")
COMMANDS = {
    "showback": ("showback", *EVER),
    "prefixes": ("prefixes", "top", *EVER),
    "tiers": ("tier", "list", *EVER),
    "transfers": ("tier", "transfers"),
    "cases": ("case", "list"),
    "enforcement": ("policy", "enforcement"),
    "reports": ("report", "list"),
    "schedules": ("report", "schedules", "list"),
}
EMPTY_HERE = {"prefixes", "tiers", "transfers"}  # test_tier_command.py has a ledger with copies
NO_QUESTION = CursorBinding("listTiers", "local", {})
RECORDED = ("tiers", "transfers", "cases", "reports")


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is in this process: its log would be on the stdout that is read here."""
    monkeypatch.delenv("KVCUSTODY_DATABASE_URL", raising=False)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


@pytest.fixture(scope="module")
def url(shipped: Any, client: Any, people: Any) -> str:
    """The ledger of the service, with a case and a report of nobody's schedule on record too."""
    case = {"tenant": "acme", "subject": "user-1", "right": "access", "channel": "mail"}
    assert client("POST", "/v1/cases", people["dpo"], json=case).status_code == 201
    order = {"mode": "monitor", "until_us": shipped.clock.utc_us() + 3_600_000_000, "reason": "a trial"}
    ordered = client("POST", "/v1/policies/enforcement:order", people["approver"], json=order)
    assert ordered.status_code == 202, ordered.content
    asked = {"framework": "soc2", "since": 1, "until": 2}
    report = client("POST", "/v1/reports", people["auditor"], json=asked)
    assert report.status_code == 202, report.content
    wanted = {"framework": "soc2", "every": "monthly"}
    assert client("POST", "/v1/reports/schedules", people["auditor"], json=wanted).status_code == 201
    path = f"/v1/jobs/{report.json()['job']}"
    until(lambda: client("GET", path, people["auditor"]).json()["ended_us"] is not None)
    return str(shipped.settings.database_url)


@pytest.fixture
def to(url: str, server: Any, people: Any, tmp_path: Path) -> list[str]:
    key = tmp_path / "auditor.key"
    key.write_text(people["auditor"])
    key.chmod(0o600)
    return ["--server", server.address, "--api-key-file", str(key)]


def run(*words: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, [*words])
    assert done.exit_code == code, (words, done.output, done.exception)
    return done.stdout


def leaves(service: Any, kind: str) -> int:
    with service.reading() as connection:
        return int(connection.scalar(select(func.count()).select_from(events).where(events.c.kind == kind)))


@pytest.mark.parametrize(
    "name",
    [
        *sorted(COMMANDS.keys() - {"reports", "cases"}),
        pytest.param("cases", marks=pytest.mark.system("a case is answered otherwise by a control plane")),
    ],
)
def test_a_ledger_and_its_control_plane_say_the_same(url: str, to: list[str], name: str) -> None:
    here, there = ([*COMMANDS[name], *where] for where in (("--ledger", url), to))
    assert run(*here, "--json") == run(*there, "--json")
    assert run(*here) == run(*there)
    items = next(value for value in json.loads(run(*here, "--json")).values() if isinstance(value, list))
    assert bool(items) is (name not in EMPTY_HERE)


def test_reports_are_the_same_but_for_verdicts_that_lie_beside_the_service(url: str, to: list[str]) -> None:
    [here], [there] = (
        json.loads(run("report", "list", *where, "--json"))["items"] for where in (["--ledger", url], to)
    )
    apart = {name for name in here if here[name] != there[name]}
    assert apart <= {"digest", "error", "opinion", "reasons", "signed_by"} and here.keys() == there.keys()
    assert here["opinion"] is None and there["opinion"] is not None


def test_one_case_and_a_case_that_is_not_there(url: str, to: list[str]) -> None:
    case = json.loads(run("case", "list", "--ledger", url, "--json"))["items"][0]["case_id"]
    assert run("case", "show", case, "--ledger", url, "--json") == run("case", "show", case, *to, "--json")
    told = CliRunner().invoke(app, ["case", "show", "none", "--ledger", url])
    assert told.exit_code == 2 and "case `none` is not in the ledger" in told.output
    refused = CliRunner().invoke(app, ["case", "show", "none", *to])
    assert refused.exit_code == 2 and "is not in the ledger" not in refused.output
    strange = CliRunner().invoke(app, ["case", "show", f"{case}/../{case}", *to])
    assert strange.exit_code == 2, "an id is one segment of the path"


@pytest.mark.parametrize("name", COMMANDS)
def test_two_ledgers_are_refused(url: str, to: list[str], name: str) -> None:
    assert "two ledgers" in CliRunner().invoke(app, [*COMMANDS[name], *to, "--ledger", url]).output


def test_a_tenant_that_the_ledger_does_not_know_is_refused_with_the_nearest(url: str) -> None:
    for name in ("tiers", "transfers", "cases", "reports"):
        told = CliRunner().invoke(app, [*COMMANDS[name], "--tenant", "acmee", "--ledger", url])
        assert told.exit_code == 2 and "did you mean `acme`" in told.output, name
        run(*COMMANDS[name], "--tenant", "acme", "--ledger", url)


def test_a_question_to_the_ledger_itself_is_not_on_record(shipped: Any, url: str, to: list[str]) -> None:
    before = leaves(shipped, "access")
    for words in COMMANDS.values():
        run(*words, "--ledger", url)
    assert leaves(shipped, "access") == before
    for name in RECORDED:
        run(*COMMANDS[name], *to)
    assert leaves(shipped, "access") == before + len(RECORDED), "control: a request of an auditor is on record"


def test_a_question_changes_nothing_and_reads_no_settings_of_a_service(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "copied" / "ledger.db"
    copy.parent.mkdir()
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as ledger:
        ledger.execute("VACUUM INTO ?", (str(copy),))
    monkeypatch.setenv("KVCUSTODY_SERVICE_CONFIG", str(tmp_path / "none.toml"))
    digest = hashlib.sha256(copy.read_bytes()).hexdigest()
    for name, words in COMMANDS.items():
        if name != "cases":  # their days are by the clock that a service keeps
            run(*words, "--ledger", str(copy))
    assert hashlib.sha256(copy.read_bytes()).hexdigest() == digest
    assert [path.name for path in copy.parent.iterdir()] == ["ledger.db"]
    run("inbox", "--ledger", str(copy), code=2)  # control: a command that reads them


def test_the_parts_of_a_ledger_open_when_they_are_used(url: str, tmp_path: Path) -> None:
    nowhere = f"sqlite:///{tmp_path}/none.db"
    keys = f"sqlite:///{tmp_path}/no-folder/keys.db"
    with LedgerDesk(nowhere, lambda: keys, load_service_settings) as desk:
        place = desk.cursors.write(NO_QUESTION, [1, 2, 3])
        assert desk.clock.utc_us() > 0 and desk.cursors.read(NO_QUESTION, place) == [1, 2, 3]
        with pytest.raises(LedgerError), desk.reading():
            pass
        with pytest.raises(LedgerError):
            _ = desk.subject_keys
    with LedgerDesk(url, lambda: None, load_service_settings) as desk, desk.reading() as connection:
        with pytest.raises(OperationalError, match="readonly"):
            connection.execute(text("DELETE FROM events"))
        assert connection.scalar(select(func.count()).select_from(events))


def modules(*words: str) -> set[str]:
    """What a process has imported when a command is over."""
    source = (
        "import os, sys; from kvcustody.console.main import app\n"
        "out = os.dup(1); os.dup2(os.open(os.devnull, os.O_WRONLY), 1)\n"
        "try: app(sys.argv[1:])\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "sys.stdout.flush(); os.dup2(out, 1); print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", source, *words], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("name", COMMANDS)
def test_a_question_to_the_ledger_itself_needs_nothing_of_http(url: str, name: str) -> None:
    found = modules(*COMMANDS[name], "--ledger", url)
    assert not found & {"fastapi", "starlette", "uvicorn", "httpx"}
    if name != "enforcement":  # every policy command is imported with it
        assert "kvcustody.governance.service.service" not in found


def test_a_call_of_the_api_needs_a_service_and_nothing_of_http(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "ledger.db"
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as ledger:
        ledger.execute("VACUUM INTO ?", (str(copy),))
    monkeypatch.chdir(tmp_path)
    found = modules("tier", "list", "--as", "auditor", "--ledger", str(copy))
    assert "kvcustody.governance.service.service" in found
    assert not found & {"fastapi", "starlette", "uvicorn", "httpx"}
    served = "import sys, kvcustody.governance.api.app; print(*sys.modules)"
    shown = subprocess.run([sys.executable, "-c", served], capture_output=True, text=True, check=True).stdout
    assert "starlette" in shown.split(), "void: nothing of HTTP would be seen"


def test_how_a_path_begins_says_which_operations_may_have_it() -> None:
    """A call in this process finds what a server would, in fewer operations."""
    whole = every_operation().operations
    for operation in whole.by_name.values():
        path = re.sub(r"\{[a-z_]+\}", "7", operation.path)
        few = operations_at(path).operations
        assert few.find(operation.method, path) == whole.find(operation.method, path) == operation
        assert len(few.by_name) < len(whole.by_name) / 3
    assert operations_at("/v1/nothing").operations.find("GET", "/v1/nothing") is None


@pytest.mark.system("a database of PostgreSQL that takes no writes, as a standby's")
def test_a_standby_answers(postgres_store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    place = postgres_store.url.render_as_string(hide_password=False)
    with postgres_store.connect() as connection, connection.begin():
        name = postgres_store.url.database
        connection.exec_driver_sql(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    for words in COMMANDS.values():
        run(*words, "--ledger", place)
    order = ("enforce", "--reason", "a trial")
    told = CliRunner().invoke(app, ["policy", "enforce", *order, "--ledger", place])
    assert told.exit_code == 2 and "read-only" in told.output, "control: an act needs writes"
