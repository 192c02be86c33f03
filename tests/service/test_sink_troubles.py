"""A sink that fails for an hour, a restored ledger and a purge: told in health, the inbox, metrics and commands."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete, select
from typer.testing import CliRunner

from kvcustody.audit.siem import commit_order_reader
from kvcustody.audit.siem.commit_order_reader import START, read_in_commit_order
from kvcustody.audit.store.database.append_only_triggers import triggers_lifted
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.schema.ledger import events, logs
from kvcustody.clock import SystemClock
from kvcustody.console import clock as console_clock
from kvcustody.console.main import app
from kvcustody.governance.service.fleet import webhooks
from kvcustody.governance.service.service import Service, open_service
from kvcustody.governance.service.settings import Webhook
from kvcustody.times import HOUR_US, MINUTE_US
from standins.service.service_world import settings_in
from standins.sinks import WebhookReceiver
from standins.waiting import until

KEY = b"0123456789abcdef0123456789abcdef"


class HandClock(SystemClock):
    """The machine's clocks, moved on by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.ahead_us = 0

    def now_us(self) -> int:
        return super().now_us() + self.ahead_us

    def utc_us(self) -> int:
        return super().utc_us() + self.ahead_us


@pytest.fixture
def receiver() -> Iterator[WebhookReceiver]:
    with WebhookReceiver() as opened:
        yield opened


class Plane:
    """A service with one sink, started and ended as often as a test wants, on a ledger that it may restore."""

    def __init__(self, folder: Path, receiver: WebhookReceiver, make_client: Any, make_people: Any) -> None:
        key = folder / "hook.key"
        key.write_bytes(KEY)
        key.chmod(0o600)
        self.ledger = folder / "ledger.db"
        self.clock = HandClock()
        hook = Webhook(name="siem", url=receiver.url, key_path=key, shape="leaf")
        self.settings = settings_in(folder, webhooks=(hook,))
        self._config = folder / "service.toml"
        self._config.write_text(
            f'state_path = "{self.settings.state_path}"\n'
            f'webhooks = [{{name = "siem", shape = "leaf", url = "{receiver.url}", key_path = "{key}"}}]\n'
        )
        self._make = make_client, make_people
        self._service: Service | None = None
        self.people: Any = None

    def open(self) -> Service:
        """Start it."""
        self._service = open_service(self.settings, clock=self.clock)
        make_client, make_people = self._make
        self.client = make_client(self._service)
        self.people = self.people or make_people(self._service)
        self.people.service = self._service
        return self._service

    def close(self) -> None:
        """End it."""
        if self._service is not None:
            self._service.close()

    def ask(self, path: str, who: str = "operator") -> Any:
        """The body of an answer."""
        answer = self.client("GET", path, self.people[who])
        assert answer.status_code == 200, answer.text
        return answer.text if path == "/metrics" else answer.json()

    def sink(self) -> dict[str, Any]:
        """The sink's status."""
        [found] = self.ask("/v1/sinks")["items"]
        return dict(found)

    def told(self) -> dict[str, Any]:
        """What each place says of the sink."""
        health = self.ask("/v1/health")
        waits = [item for item in self.ask("/v1/inbox")["items"] if item["kind"] == "sink"]
        local = self.inbox_command()
        metrics = dict(re.findall(r'kvcustody_sink_(\w+)\{sink="siem"\} (\S+)', self.ask("/metrics")))
        return {
            "health": health["status"],
            "troubles": health["sink_troubles"],
            "inbox": sorted((item["about"], item["state"]) for item in waits),
            "inbox command": sorted((item["about"], item["state"]) for item in local),
            "metrics": {name: float(value) for name, value in metrics.items()},
        }

    def inbox_command(self) -> list[dict[str, Any]]:
        """The sinks that `kvcustody inbox` shows of the same files."""
        asked = ["inbox", "--json", "--ledger", self.settings.database_url, "--config", str(self._config)]
        found = CliRunner().invoke(app, asked)
        assert found.exit_code == 0, found.output
        return [item for item in json.loads(found.stdout)["items"] if item["kind"] == "sink"]


@pytest.fixture
def plane(
    tmp_path: Path,
    migrated: Path,
    receiver: WebhookReceiver,
    make_client: Any,
    make_people: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Plane]:
    shutil.copy(migrated, tmp_path / "ledger.db")
    made = Plane(tmp_path, receiver, make_client, make_people)
    monkeypatch.setattr(console_clock, "deadline_us", made.clock.utc_us)
    yield made
    made.close()


def test_an_hour_of_failure_is_told_everywhere_and_over_a_restart(plane: Plane, receiver: WebhookReceiver) -> None:
    receiver.status = 404
    plane.open()
    until(lambda: plane.sink()["failing_since_us"] is not None)
    assert plane.told()["health"] == "ok" and not plane.told()["inbox"], "a receiver may be away for minutes"
    since_us = plane.sink()["failing_since_us"]
    plane.clock.ahead_us = 50 * MINUTE_US
    plane.close()
    plane.open()
    plane.clock.ahead_us = HOUR_US - MINUTE_US
    assert plane.sink()["failing_since_us"] == since_us and plane.sink()["dead"] == 0
    shown = plane.told()
    assert shown["health"] == "degraded" and "404" in shown["troubles"][0]
    assert shown["inbox"] == shown["inbox command"] == [("siem-failing", "waiting")]
    assert shown["metrics"]["failing_seconds"] >= 3000 and shown["metrics"]["dead_batches"] == 0
    folder = plane.settings.state_path / "sinks" / "siem"
    plane.close()
    receiver.status = 200
    service = plane.open()
    with service.reading() as connection:
        here = {
            (row.name, idx) for row in connection.execute(select(logs.c.name, logs.c.size)) for idx in range(row.size)
        }
    until(lambda: here <= receiver.leaves())
    shown = plane.told()
    assert (shown["health"], shown["inbox"], shown["metrics"]["failing_seconds"]) == ("ok", [], 0)
    assert CliRunner().invoke(app, ["audit", "sink", "status", str(folder)]).exit_code == 0
    receiver.status = 400
    plane.people["approver"]  # a leaf more
    until(lambda: plane.sink()["dead"] > 0)
    shown = plane.told()
    assert shown["health"] == "degraded" and "400" in shown["troubles"][0]
    assert shown["inbox"] == shown["inbox command"] == [("siem-given-up", "overdue")]
    assert shown["metrics"]["dead_batches"] >= 1
    assert CliRunner().invoke(app, ["audit", "sink", "status", str(folder)]).exit_code == 1


def test_without_the_look_for_troubles_an_hour_of_failure_reads_as_well(
    plane: Plane, receiver: WebhookReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test above."""
    monkeypatch.setattr(webhooks, "find_troubles", lambda *_: ())
    with pytest.raises(AssertionError):
        test_an_hour_of_failure_is_told_everywhere_and_over_a_restart(plane, receiver)


def test_a_restore_and_a_purge_are_told_until_somebody_acknowledges(plane: Plane, receiver: WebhookReceiver) -> None:
    plane.open()
    plane.people["auditor"], plane.people["operator"]
    until(lambda: plane.sink()["delivered"] > 0)
    plane.close()
    restore = backup(plane.ledger)
    service = plane.open()
    plane.people["dpo"], plane.people["author"]
    with service.reading() as connection:
        size = connection.scalar(select(logs.c.size).where(logs.c.name == "system"))
    until(lambda: ("system", size - 1) in receiver.leaves())
    plane.close()
    restore()
    purge(plane.ledger, "system", 3)
    receiver.batches.clear()
    service = plane.open()
    until(lambda: plane.sink()["restarted"] > 0)
    with service.reading() as connection:
        expected = {
            (row.name, row.idx)
            for row in connection.execute(select(logs.c.name, events.c.idx).join(logs, logs.c.id == events.c.log))
        }
    until(lambda: expected <= receiver.leaves())
    shown = plane.told()
    assert shown["health"] == "degraded" and "read again from its first leaf" in shown["troubles"][0]
    assert "purged 1 leaf" in shown["troubles"][0]
    [(about, state)] = shown["inbox"]
    assert about.startswith("siem-lost-") and state == "overdue" and shown["inbox command"] == shown["inbox"]
    assert shown["metrics"]["restarted_logs_total"] >= 1 and shown["metrics"]["purged_leaves_total"] == 1
    folder = plane.settings.state_path / "sinks" / "siem"
    assert CliRunner().invoke(app, ["audit", "sink", "status", str(folder)]).exit_code == 1
    what = {"reason": "restored on 3 May"}
    seen = plane.client("POST", "/v1/sinks/siem/acknowledge", plane.people["operator"], json=what).json()
    assert seen["losses"] == [] and seen["restarted"] >= 1
    shown = plane.told()
    assert (shown["troubles"], shown["inbox"], shown["metrics"]["losses_unseen"]) == ([], [], 0)
    kinds = [one["kind"] for one in plane.ask("/v1/health")["troubles"]]
    assert kinds == ["signer"], "what was restored does not extend what was signed"
    found = plane.ask("/v1/audit/events?kind=sink-changed", "auditor")["items"]
    assert found[-1]["leaf"]["action"] == "acknowledged" and found[-1]["leaf"]["reason"] == what["reason"]
    plane.close()
    plane.open()
    assert plane.told()["inbox"] == [], "over a restart too"


def test_a_cursor_ahead_of_a_restored_ledger_begins_again_and_says_so(plane: Plane) -> None:
    ask = "/v1/audit/stream?shape=leaf&limit=1000"
    plane.open()
    plane.people["auditor"]
    first = to_the_end(plane, ask)
    plane.close()
    restore = backup(plane.ledger)
    plane.open()
    lost = to_the_end(plane, f"{ask}&cursor={first}")
    plane.close()
    restore()
    plane.open()
    page = plane.ask(f"{ask}&cursor={lost}", "auditor")
    assert page["restarted"] and (page["items"][0]["log"], page["items"][0]["idx"]) == ("system", 0)
    after = plane.ask(f"{ask}&cursor={page['next']}", "auditor")
    assert not after["restarted"], "said once"


@pytest.mark.parametrize("order", ["log", "newest", "oldest"])
def test_a_page_of_a_restored_ledger_does_not_go_on_as_if_it_had_ended(plane: Plane, order: str) -> None:
    """Control: before the restore the same cursor gives the next page."""
    ask = f"/v1/audit/events?kind=principal-changed&order={order}&limit=1"
    plane.open()
    plane.people["auditor"]
    plane.close()
    restore = backup(plane.ledger)
    plane.open()
    for more in ("operator", "dpo", "author", "approver"):
        plane.people[more]
    lost, page = "", plane.ask(ask, "auditor")
    while page["next"] and (order != "newest" or not lost):
        lost, page = page["next"], plane.ask(f"{ask}&cursor={page['next']}", "auditor")
    plane.ask(f"{ask}&cursor={lost}", "auditor")
    plane.close()
    restore()
    plane.open()
    answer = plane.client("GET", f"{ask}&cursor={lost}", plane.people["auditor"])
    assert (answer.status_code, answer.json()["type"]) == (400, "urn:kvcustody:problem:cursor-invalid")
    assert plane.ask(ask, "auditor")["items"], "without it everything is there"


def test_without_the_digest_a_cursor_ahead_of_the_ledger_reads_as_nothing_new(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test above."""
    monkeypatch.setattr(commit_order_reader, "_continues", lambda *_: True)
    with pytest.raises(AssertionError):
        test_a_cursor_ahead_of_a_restored_ledger_begins_again_and_says_so(plane)


@pytest.mark.parametrize("limit", [1, 3, 1000])
def test_a_stream_counts_what_a_purge_took(plane: Plane, limit: int) -> None:
    service = plane.open()
    assert plane.people["auditor"] and service.writer.seal()
    plane.close()
    purge(plane.ledger, "system", 2)
    engine = open_store(plane.ledger, read_only=True)
    at, purged = START, 0
    with engine.connect() as connection:
        while True:
            page = read_in_commit_order(connection, at, limit=limit)
            purged += page.purged
            at = page.position
            if not page.rows and not page.more:
                break
    engine.dispose()
    assert purged == 1


def to_the_end(plane: Plane, path: str) -> str:
    """The cursor after everything that is there but what is put on record about the asking itself."""
    page = plane.ask(path, "auditor")
    assert not page["restarted"] and page["purged"] == 0
    while any(item["event"]["kind"] != "access" for item in page["items"]):
        page = plane.ask(f"{path.partition('&cursor')[0]}&cursor={page['next']}", "auditor")
    return str(page["next"])


def backup(ledger: Path) -> Callable[[], None]:
    """Copy a ledger of which no process writes, and return what brings it back."""
    with sqlite3.connect(ledger) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    content = ledger.read_bytes()

    def restore() -> None:
        for name in ("-wal", "-shm"):
            ledger.with_name(ledger.name + name).unlink(missing_ok=True)
        ledger.write_bytes(content)

    return restore


def purge(ledger: Path, log: str, idx: int) -> None:
    """Delete one leaf, as retention does."""
    engine = open_store(ledger)
    with engine.begin() as connection, triggers_lifted(connection):
        number = select(logs.c.id).where(logs.c.name == log).scalar_subquery()
        connection.execute(delete(events).where(events.c.log == number, events.c.idx == idx))
    engine.dispose()
