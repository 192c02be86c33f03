"""`kvcustody observe` over real sockets into a real ledger, in a process of its own, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from kvcustody.audit.evidence.coverage.summary import coverage
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.schema.ledger import incarnations
from kvcustody.console.command import CustodyGroup
from kvcustody.console.plugins import GROUP, add_command
from kvcustody.errors import ConfigError
from kvcustody.integrations.events.command import read_salts
from kvcustody.integrations.events.publisher import EventPublisher
from standins import LIBRARY
from standins.integrations.kv_wires import some_removed, some_stored
from standins.integrations.observed_totals import observed_totals
from standins.waiting import until

LOCAL = "tcp://127.0.0.1:0"
ENTRY = EntryPoint("observe", "kvcustody.integrations.events.command:observe", GROUP)
APP = typer.Typer(cls=CustodyGroup, pretty_exceptions_enable=False)
APP.callback()(lambda: None)
add_command(APP, ENTRY)
STRICT = """
schema: kvcustody/policy@1
name: short
profile: shared
classifications: [internal, restricted]
classify: [{tenant: acme, as: internal}]
tenants: {acme: {quota: {guaranteed: 20%, cap: 60%}}}
rules: [{id: own, effect: permit, action: reuse, when: {reader: owner}}]
retention:
  internal:   {idle: 1s, absolute: 1s, active_max: 1s}
  restricted: {idle: 0s, absolute: 0s, active_max: 1s}
scrub: {default: {within: 1s, verify: all}}
offload: {internal: never, restricted: never}
audit: {on_outage: {decisions: deny, lifecycle: spill, own_hits: aggregate}}
"""


def run(*arguments: object) -> Any:
    return CliRunner().invoke(APP, ["observe", *map(str, arguments)])


def start(*arguments: object) -> subprocess.Popen[str]:
    """The same command in a process of its own."""
    command = [sys.executable, __file__, "observe", *map(str, arguments)]
    with_standins = {**os.environ, "PYTHONPATH": str(LIBRARY)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=with_standins)


@pytest.mark.system("`observe` does not end cleanly")
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_it_watches_records_and_ends_cleanly(tmp_path: Path, ending: int) -> None:
    policy, salts, ledger = tmp_path / "short.yaml", tmp_path / "salts.yaml", tmp_path / "ledger.db"
    policy.write_text(STRICT)
    salts.write_text("acme: [pepper-of-acme]\n")
    with EventPublisher(LOCAL, LOCAL, tokens_published=True) as engine:  # tokens and salts, as an ungoverned one
        engine.publish([some_stored(0, 3)])
        engine.publish([some_stored(50, 2, salt=None)])
        process = start(
            *("--endpoint", engine.endpoint, "--replay", engine.replay_endpoint, "--policy", policy),
            *(
                "--salts",
                salts,
                "--ledger",
                ledger,
                "--spill",
                tmp_path / "spill",
                "--name",
                "gpu-7",
                "--json",
            ),
        )
        until(lambda: engine.stats().replays)
        store = open_store(ledger)

        def overdue() -> bool:
            with store.connect() as connection:
                return sum(row.overdue_blocks for row in observed_totals(connection)) == 5

        until(overdue)
        engine.publish([some_removed(0, 1)])
        time.sleep(0.5)
        process.send_signal(ending)
        out, err = process.communicate(timeout=30)
    assert process.returncode == (130 if ending == signal.SIGINT else 0) and err == ""
    document = json.loads(out)
    assert document["observed"] is True and document["enforced"] is False
    assert document["blocks"] == 4 and document["overdue_blocks"] == 4 and not document["unsure"]
    assert {row["tenant"]: row["blocks"] for row in document["tenants"]} == {"acme": 2, None: 2}
    assert "pepper" not in out
    with store.connect() as connection:
        rows = {row.tenant: row for row in observed_totals(connection)}
        assert rows["acme"].stored_blocks == 3 and rows["acme"].overdue_blocks == 3
        assert rows["acme"].removed_blocks == rows["acme"].removed_late_blocks == 1
        assert coverage(connection).rows == ()
        (life,) = connection.execute(incarnations.select()).all()
        assert life.end == "stopped" and life.shards is None


def test_it_stops_by_itself_and_shows_a_table(tmp_path: Path) -> None:
    with EventPublisher(LOCAL, LOCAL) as engine:
        engine.publish([some_stored(0, 3)])
        result = run(
            *("--endpoint", engine.endpoint, "--replay", engine.replay_endpoint),
            *("--policy", "regulated-saas", "--trust-scope", "--seconds", 1),
        )
    assert result.exit_code == 0 and result.stderr == ""
    out = result.stdout
    assert "observed, not enforced" in out and "acme" in out and "1 batches" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--policy", "absent.yaml"), "absent.yaml"),
        (("--policy", "regulated-saas", "--endpoint", "nowhere"), "is no endpoint"),
        (("--policy", "regulated-saas", "--unattributed", "secret"), "no classification `secret`"),
        (("--policy", "regulated-saas", "--ledger", "mysql://x"), "neither SQLite nor PostgreSQL"),
        (("--policy", "regulated-saas", "--name", "a b"), "engine"),
        ((), "--policy"),
    ],
)
def test_mistakes_are_one_line(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2 and result.stdout == ""
    assert message in result.stderr and len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "text",
    [
        "- a\n",
        "acme: salt\n",
        "acme: [1]\n",
        "acme: ['']\n",
        "acme: [s]\nbeta: [s]\n",
        "{",
        "7: [x]\n",
        "\x00",
    ],
)
def test_wrong_salts_are_refused_without_quoting_one(tmp_path: Path, text: str) -> None:
    path = tmp_path / "salts.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"salts\.yaml") as refused:
        read_salts(path)
    assert "[s]" not in str(refused.value)
    path.write_text("acme: [a, b]\nbeta: [c]\n")
    assert read_salts(path) == {"a": "acme", "b": "acme", "c": "beta"}


if __name__ == "__main__":
    APP()
