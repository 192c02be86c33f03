"""A row of the control plane's own tables that cannot be read ends no answer: the others are shown, and it is named.

Every column of every such table of the schema is given odd values behind the service's back, and everything is asked
that reads the table: the operations that read it are found by the statements that they send.
"""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from sqlalchemy import BigInteger, Column, Engine, Integer, LargeBinary, String, event
from typer.testing import CliRunner

from kvcustody.audit.store.database.dialect import dialect_of
from kvcustody.audit.store.database.engine import WRITE, open_store
from kvcustody.audit.store.schema import stored_rows
from kvcustody.audit.store.schema.all_tables import metadata
from kvcustody.console.main import app
from kvcustody.governance.api.openapi_document import whole_document
from kvcustody.governance.service.access.roles import Role
from kvcustody.governance.service.schedules.made_reports import NOT_HERE
from kvcustody.governance.service.service import Service
from standins.service.service_world import Worker, register, settings_in, ship, who_may

TABLES = {table.name: table for table in metadata.sorted_tables if table.name.startswith("service_")}
GOOD = 0  # the number of the row that can be read
NOW_US = 1_780_000_000_000_000
FAR_US = 8_000_000_000_000_000
ROWS: dict[str, dict[str, Any]] = {  # what the two rows of a table have, each `{}` for its name
    "service_principals": {
        "name": "{}", "kind": "person", "roles": "auditor", "enrolled_us": NOW_US, "enrolled_by": "test", "version": 1,
    },
    "service_keys": {
        "prefix": "{}", "principal": "owner", "hash": "$blake2b$00", "issued_us": NOW_US, "expires_us": FAR_US,
    },
    "service_jobs": {
        "job": "{}", "kind": "report", "principal": "auditor", "owner": "another", "state": "finished", "done": 1,
        "total": 1, "parameters": "{{}}", "created_us": NOW_US, "ended_us": NOW_US,
    },
    "service_scan_orders": {
        "scan_order": "{}", "worker": "worker", "actor": "olive", "at_us": NOW_US, "deadline_us": FAR_US,
    },
    "service_report_schedules": {
        "schedule": "{}", "principal": "dana", "roles": "auditor", "framework": "soc2", "formats": "json",
        "destinations": "", "every": "monthly", "zone": "Etc/UTC", "hour": 6, "state": "active", "after_us": FAR_US,
        "made_us": NOW_US, "changed_us": NOW_US, "changed_by": "dana",
    },
    "service_reports": {
        "report": "{}", "schedule": "{:.16}", "principal": "dana", "framework": "soc2", "formats": "json",
        "since_us": NOW_US, "until_us": NOW_US, "due_us": NOW_US, "state": "failed", "owner": "", "lease_us": 0,
        "tries": 1, "next_us": FAR_US, "created_us": NOW_US,
    },
    "service_report_deliveries": {
        "report": "0" * 32, "destination": "{}", "state": "delivered", "tries": 1, "next_us": FAR_US,
    },
    "service_workers": {
        "incarnation": "{}", "worker": "worker", "seen_us": NOW_US, "received_sequence": 0, "policy_revision": 0,
        "status": '{{"blocks.total": 3}}',
    },
    "service_epoch_takers": {"name": "{}", "role": "door", "version": 0, "heard_us": NOW_US, "since_us": NOW_US},
    "service_sessions": {
        "digest": "{}", "principal": "nobody", "begun_us": NOW_US, "used_us": FAR_US, "expires_us": FAR_US,
    },
    "service_answers": {
        "principal": "nobody", "key": "{}", "request": "", "owner": "", "begun_us": FAR_US, "finished": True,
    },
}  # fmt: skip
SHOWN = {  # where the rows of a table are listed, each named by its key
    "service_principals": "/v1/principals",
    "service_keys": "/v1/principals/owner/keys",
    "service_jobs": "/v1/jobs",
    "service_scan_orders": "/v1/orphans/orders",
    "service_report_schedules": "/v1/reports/schedules",
    "service_reports": "/v1/reports",
    "service_report_deliveries": "/v1/reports",
    "service_workers": "/v1/workers",
    "service_epoch_takers": "/v1/doors",
    "service_sessions": None,  # no operation shows them: what they let in is tried below
    "service_answers": None,
}
ONE = {  # how the odd one is asked for by itself
    "service_principals": ("/v1/principals/{}", "/v1/principals/{}/keys"),
    "service_jobs": ("/v1/jobs/{}",),
    "service_scan_orders": ("/v1/orphans/orders/{}",),
}
WHOSE = {  # a row with another value here is another's, or of nothing: it is not this list's to show
    ("service_keys", "principal"), ("service_jobs", "principal"), ("service_workers", "incarnation"),
    ("service_report_deliveries", "report"),
}  # fmt: skip
KEYS = {table: next(name for name, value in row.items() if "{}" in str(value)) for table, row in ROWS.items()}


def odd_values(column: Column[Any], in_file: bool) -> Iterator[Any]:
    """What the database takes there and no program writes: bytes are a BLOB, a tuple is text of these bytes."""
    if isinstance(column.type, Integer):
        yield from (-1, (1 << 63) - 1) if in_file or isinstance(column.type, BigInteger) else (-1,)
        yield from (b"\xff", "soon", "NaN", 2.5, 9e99) if in_file else ()
    elif isinstance(column.type, String):
        yield from (b"\xff\x00", (b"caf\xe9",), (b"a\x00b",)) if in_file else ()
        if "json" in column.info:
            yield from ("{", "[]", "null", '{"a": NaN}', "7", "\u202e")
        if "json" in column.info and column.info["json"] != "object":
            yield '{"a": "x"}'
        if "words" in column.info:
            yield from ("tomorrow", "\u202e", "")
        if "form" in column.info:
            yield from ("$blake2b$ö", "")
    elif isinstance(column.type, LargeBinary):
        yield from ("text", 1 << 40, 2.5) if in_file else (b"",)


class Rows:
    """Writes rows as only the owner of the database could; `workers`: incarnations that are on record."""

    def __init__(self, engine: Engine, workers: list[str]) -> None:
        self.engine = engine
        self.workers = workers
        self.in_file = dialect_of(engine).in_file
        with engine.connect() as connection:
            self.before = {
                name: [row[0] for row in connection.exec_driver_sql(f"SELECT {KEYS[name]} FROM {name}")]
                for name in TABLES
            }

    def key(self, table: str, number: int) -> str:
        """What a row goes by."""
        column: Any = TABLES[table].c[KEYS[table]]
        return self.workers[number] if table == "service_workers" else f"{number:x}" * (column.type.length or 32)

    def put(self, table: str, number: int, odd: dict[str, Any] | None = None) -> None:
        key = self.key(table, number)
        values = {
            column: value.format(key) if isinstance(value, str) else value for column, value in ROWS[table].items()
        } | (odd or {})
        marks = ["CAST(? AS TEXT)" if isinstance(value, tuple) else "?" for value in values.values()]
        plain = tuple(value[0] if isinstance(value, tuple) else value for value in values.values())
        self.run(f"INSERT INTO {table} ({', '.join(values)}) VALUES ({', '.join(marks)})", plain)

    def clear(self, table: str) -> None:
        """Take away what was put, whatever became of its key."""
        kept = [key for key in self.before[table] if key not in self.workers]
        marks = ", ".join("?" * len(kept))
        self.run(f"DELETE FROM {table}" + (f" WHERE {KEYS[table]} NOT IN ({marks})" if kept else ""), tuple(kept))

    def run(self, statement: str, values: tuple[Any, ...] = ()) -> None:
        with self.engine.connect().execution_options(**WRITE) as connection, connection.begin():
            connection.exec_driver_sql(dialect_of(connection).with_placeholders(statement), values)


class Desk(NamedTuple):
    """Who asks a service what, and which of it reads a table."""

    service: Service
    rows: Rows
    get: Callable[[str], httpx.Response]
    reading: dict[str, list[str]]


@pytest.fixture(scope="module")
def desk(service_on_each: Service, make_people: Any, make_client: Any) -> Desk:
    service = service_on_each
    people, client = make_people(service), make_client(service)
    workers = [Worker() for _ in range(15)]
    for worker in workers:
        assert register(client, people["worker"], worker).status_code == 200
        ship(client, people["worker"], worker, worker.batch([worker.started(), *worker.request("acme")]))
    document = whole_document()
    who = {
        path: who_may(people, action) if (action := item["get"].get("x-kvcustody-action")) else None
        for path, item in document["paths"].items()
        if "get" in item
    }

    def get(path: str) -> httpx.Response:
        found = next(key for pattern, key in who.items() if _matches(pattern, path.partition("?")[0]))
        return client("GET", path, found)

    asked = [
        path + ("?wait=0" if any(one["name"] == "wait" for one in item["get"].get("parameters", ())) else "")
        for path, item in document["paths"].items()
        if "get" in item and "{" not in path
    ]
    for path in asked:
        get(path)  # nobody's key is looked up behind this
    sent: list[str] = []
    reading: dict[str, list[str]] = {name: [] for name in TABLES}

    def note(*call: Any) -> None:
        sent.append(call[2])

    event.listen(Engine, "before_cursor_execute", note)
    for path in asked:
        sent.clear()
        get(path)
        for name in TABLES:
            if any(re.search(rf"\b{name}\b", statement) for statement in sent):
                reading[name].append(path)
    event.remove(Engine, "before_cursor_execute", note)
    return Desk(service, Rows(service.engine, [worker.incarnation for worker in workers]), get, reading)


def _matches(pattern: str, path: str) -> bool:
    return re.fullmatch(re.sub(r"\\{[^}]+\\}", "[^/]+", re.escape(pattern)), path) is not None


def test_every_table_of_the_control_plane_is_tried_where_it_is_read(desk: Desk) -> None:
    """Control: each list that shows a table's rows is found by the statements that it sends."""
    assert TABLES.keys() == ROWS.keys() == SHOWN.keys()
    for name, path in SHOWN.items():
        assert path is None or "owner" in path or path in desk.reading[name], (name, desk.reading[name])


@pytest.mark.parametrize("name", TABLES)
def test_odd_rows_end_no_answer_and_are_named(desk: Desk, name: str) -> None:
    """One column after the other: a row that can be read, and one for each odd value."""
    asked = 0
    for column in TABLES[name].c:
        number = _put(desk.rows, name, column)
        where = f"{name}.{column.name}"
        for path in {*desk.reading[name], *filter(None, [SHOWN[name]])}:
            answer = desk.get(path)
            assert answer.status_code < 500, (where, path, answer.text)
            asked += 1
        by_itself = ONE.get(name, ()) if column.name != KEYS[name] else ()
        for path, odd in itertools.product(by_itself, range(1, number + 1)):
            answer = desk.get(path.format(desk.rows.key(name, odd)))
            assert answer.status_code == (404 if (name, column.name) in WHOSE else 200), (where, odd)
        if SHOWN[name] is not None:
            _check_shown(desk, name, column.name, number)
        if "report" in name:
            desk.service.scheduler.turn()
    assert asked or not desk.reading[name]
    _clear(desk.rows, name)


def _put(rows: Rows, name: str, column: Column[Any]) -> int:
    """A row that can be read, and after it those that cannot; how many."""
    _clear(rows, name)
    values = list(odd_values(column, rows.in_file))
    if name == "service_reports":
        for number in range(len(values) + 1):
            rows.put("service_report_schedules", number)
    if name == "service_report_deliveries":
        rows.put("service_report_schedules", GOOD)
        rows.put("service_reports", GOOD)
    if name == "service_keys":
        rows.put("service_principals", GOOD, {"name": "owner"})
    rows.put(name, GOOD)
    for number, value in enumerate(values, 1):
        rows.put(name, number, {column.name: value})
    return len(values)


def _clear(rows: Rows, name: str) -> None:
    for each in {name, "service_principals", "service_report_schedules", "service_reports"}:
        rows.clear(each)


def _check_shown(desk: Desk, name: str, column: str, number: int) -> None:
    path, key = SHOWN[name], "incarnation" if name == "service_workers" else KEYS[name]
    assert path is not None
    key = {"scan_order": "order"}.get(key, key)
    answer = desk.get(path)
    where = f"{name}.{column}"
    assert answer.status_code == 200, (where, answer.text)
    items = answer.json()["items"]
    if name == "service_report_deliveries":
        items = [each for item in items for each in item["deliveries"]]
    whole = desk.rows.key(name, GOOD)
    said = [(item[key], item.get("unread") or item.get("error") or "") for item in items]
    assert next(text for shown, text in said if shown == whole) in {"", NOT_HERE}, (where, said)
    if (name, column) not in WHOSE:
        named = [text for _, text in said if f"{name} `" in text and f"`{column}` " in text]
        assert len(named) == number, (where, said)
    if name in PAGED:
        assert list(_paged(desk, path, key)).count(whole) == 1, where


PAGED = {"service_principals", "service_jobs", "service_scan_orders", "service_reports"}


def _paged(desk: Desk, path: str, key: str) -> Iterator[str]:
    cursor = ""
    for _ in range(100):
        page = desk.get(f"{path}?limit=1{cursor}").json()
        yield from (item[key] for item in page["items"])
        if page["next"] is None:
            return
        cursor = f"&cursor={page['next']}"
    raise AssertionError("pages do not end")


@pytest.mark.parametrize("column", ["begun_us", "used_us", "expires_us", "principal"])
def test_a_session_that_cannot_be_read_is_nobodys(desk: Desk, make_people: Any, make_client: Any, column: str) -> None:
    """Control: before it is edited it is somebody's."""
    service, client = desk.service, make_client(desk.service)
    people, name = make_people(service), f"person-{column.replace('_', '-')}"
    key = people.add(name, Role.AUDITOR)
    for value in odd_values(TABLES["service_sessions"].c[column], desk.rows.in_file):
        begun = client("POST", "/v1/session", key)
        cookie = {"Cookie": begun.headers["set-cookie"].partition(";")[0]}
        assert client("GET", "/v1/whoami", headers=cookie).status_code == 200
        mark = "CAST(? AS TEXT)" if isinstance(value, tuple) else "?"
        plain = value[0] if isinstance(value, tuple) else value
        desk.rows.run(f"UPDATE service_sessions SET {column} = {mark} WHERE principal = ?", (plain, name))
        assert client("GET", "/v1/whoami", headers=cookie).status_code == 401, value
        assert client("DELETE", "/v1/session", headers=cookie).status_code in (204, 401, 403)


@pytest.mark.parametrize("name", ["service_principals", "service_keys"])
def test_a_key_whose_row_cannot_be_read_lets_nobody_in(
    desk: Desk, make_people: Any, make_client: Any, name: str
) -> None:
    """Control: before its row is edited the key lets in."""
    service, client = desk.service, make_client(desk.service)
    people = make_people(service)
    mine = {"service_principals": "name", "service_keys": "principal"}[name]
    tries = [(column, value) for column in TABLES[name].c for value in odd_values(column, desk.rows.in_file)]
    for number, (column, value) in enumerate(tries):
        who = f"{name.replace('_', '-')}-{number}"
        key = people.add(who, Role.AUDITOR)
        assert client("GET", "/v1/whoami", key).status_code == 200
        service.principals.narrowings += 1
        mark = "CAST(? AS TEXT)" if isinstance(value, tuple) else "?"
        plain = value[0] if isinstance(value, tuple) else value
        desk.rows.run(f"UPDATE {name} SET {column.name} = {mark} WHERE {mine} = ?", (plain, who))
        assert client("GET", "/v1/whoami", key).status_code == 401, (column.name, value)


def test_an_answer_that_is_kept_and_cannot_be_read_is_a_conflict(
    desk: Desk, make_people: Any, make_client: Any
) -> None:
    """Control: until it is edited it is given again."""
    client = make_client(desk.service)
    key = make_people(desk.service).add("repeats", Role.AUDITOR)
    table = TABLES["service_answers"]
    for column in (table.c.owner, table.c.begun_us, table.c.sealed):
        for number, value in enumerate(odd_values(column, desk.rows.in_file)):
            again = {"Idempotency-Key": f"{column.name}-{number}"}
            first = client("POST", "/v1/session", key, headers=again)
            assert client("POST", "/v1/session", key, headers=again).json() == first.json()
            mark = "CAST(? AS TEXT)" if isinstance(value, tuple) else "?"
            plain = value[0] if isinstance(value, tuple) else value
            desk.rows.run(f"UPDATE service_answers SET {column.name} = {mark} WHERE principal = ?", (plain, "repeats"))
            answer = client("POST", "/v1/session", key, headers=again)
            assert answer.status_code in (201, 409), (column.name, value, answer.text)
            desk.rows.run("DELETE FROM service_answers WHERE principal = ?", ("repeats",))


def test_control_without_the_reader_of_odd_rows_answers_fail(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_rows, "_read", lambda column, value: (value, ""))
    _put(desk.rows, "service_principals", TABLES["service_principals"].c.enrolled_us)
    assert desk.get("/v1/principals").status_code == 500
    _clear(desk.rows, "service_principals")


COMMANDS = {  # where commands on the ledger itself list the rows of a table
    "service_principals": ["principal", "list"],
    "service_keys": ["apikey", "list", "owner"],
    "service_report_schedules": ["report", "schedules", "list"],
    "service_reports": ["report", "list"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_on_the_ledger_name_them_too(
    name: str, tmp_path: Path, migrated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a table and as JSON; `fsck` names principals and keys."""
    shutil.copy(migrated, tmp_path / "ledger.db")
    settings = settings_in(tmp_path)
    for setting in ("database_url", "state_path", "signing_key_path", "listen"):
        monkeypatch.setenv(f"KVCUSTODY_SERVICE_{setting.upper()}", str(getattr(settings, setting)))
    monkeypatch.chdir(tmp_path)
    columns = [column for column in TABLES[name].c if (name, column.name) not in WHOSE]
    for column in columns[:: max(1, len(columns) // 3)]:
        engine = open_store(tmp_path / "ledger.db")
        rows = Rows(engine, [])
        number = _put(rows, name, column)
        for shown in ([], ["--json"]):
            ledger = ["--ledger", str(tmp_path / "ledger.db")]
            done = CliRunner().invoke(app, [*COMMANDS[name], *ledger, *shown])
            assert done.exit_code == 0, (column.name, done.output)
            assert rows.key(name, GOOD)[:12] in done.output, (column.name, done.output)
            assert f"`{column.name}` " in done.output, (column.name, done.output)
        if name in ("service_principals", "service_keys"):
            found = CliRunner().invoke(app, ["audit", "fsck", "--ledger", str(tmp_path / "ledger.db")])
            assert found.output.count("nobody can sign in with it") == number, found.output
        _clear(rows, name)
        engine.dispose()
