"""`kvcustody top`: the order of tenants (`--sort`), and what one tenant's row leads to (`--tenant`)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvcustody.audit.evidence.subjects.subject_key_store import open_subject_keys
from kvcustody.audit.kinds import ResidencyOpened, WorkerStarted
from kvcustody.audit.store.database.engine import open_store
from kvcustody.clock import SystemClock
from kvcustody.console.live.top import TenantOrder, _tenants
from kvcustody.console.main import app
from kvcustody.governance.observability.serving_summary import SeenWorker
from standins import builders

WORK = {
    "recomputed_blocks": {"globex": 7.0},
    "prompt_tokens": {"acme": 400.0, "globex": 100.0},
    "hit_tokens": {"acme": 100.0},
    "denials": {"globex": 2.0},
}
MORE = {
    "thrashing": {"globex": 1.0},
    "active_tokens": {"initech": 20.0},
    "prompt_tokens": {"globex": 100.0},
    "hit_tokens": {"globex": 120.0},
    "denials": {"acme": 1.0, "globex": 1.0},
}
SEEN = [
    SeenWorker("gpu-0", 1, False, {}, {"acme": 9, "globex": 4}, WORK),
    SeenWorker("gpu-1", 1, False, {}, {"acme": 1}, MORE),
]


@pytest.mark.parametrize(
    ("order", "names"),
    [
        ("thrashing", ["globex", "acme", "initech"]),
        ("tenant", ["acme", "globex", "initech"]),
        ("blocks", ["acme", "globex", "initech"]),
        ("tokens", ["initech", "acme", "globex"]),
        ("again", ["globex", "acme", "initech"]),
        ("hits", ["globex", "acme", "initech"]),
        ("denied", ["globex", "acme", "initech"]),
    ],
)
def test_tenants_come_in_the_order_that_is_named(order: str, names: list[str]) -> None:
    assert [row["tenant"] for row in _tenants(SEEN, TenantOrder(order))] == names


def test_hits_and_denials_of_tenants_are_of_all_workers() -> None:
    """A tenant whose prompts are not known has no share; workers that know no hits of tenants give none."""
    rows = {row["tenant"]: (row["hit_share"], row["denials"]) for row in _tenants(SEEN)}
    assert rows == {"globex": (0.6, 3), "acme": (0.25, 1), "initech": (None, 0)}
    without = [seen._replace(tenants={**seen.tenants, "hit_tokens": {}}) for seen in SEEN]
    assert {row["hit_share"] for row in _tenants(without)} == {0.0, None}
    unknown = [seen._replace(tenants={"prompt_tokens": {"acme": 400.0}}) for seen in SEEN]
    assert {row["hit_share"] for row in _tenants(unknown)} == {None}


@pytest.fixture
def held(tmp_path: Path, migrated: Path) -> Iterator[Path]:
    """A ledger of a worker that runs, with three requests of ada and one of bob, and one denial."""
    ledger = tmp_path / "ledger.db"
    shutil.copy(migrated, ledger)
    url = f"sqlite:///{ledger}"
    engine, keys = open_store(url), open_subject_keys(url, None, clear=False)
    writer = builders.writer(engine, tmp_path / "spill", worker="gpu-0", keys=keys)
    now_us = SystemClock().now_us()
    writer.submit([WorkerStarted(now_us, "gpu-0", 8, 1, 4096, "cpu", "test")])
    for number, person in enumerate(("ada", "ada", "ada", "bob")):
        opened = ResidencyOpened(now_us, number, "acme", person, None, False, "internal", (), (), ("own",), 1, 9)
        writer.submit([opened])
    assert writer.flush(60)
    yield ledger
    writer.close(60)
    engine.dispose()


def test_a_tenants_row_leads_to_its_subjects(held: Path) -> None:
    words = ["top", "--once", "--ledger", str(held), "--tenant", "acme"]
    document = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert [row["running"] for row in document["subjects"]] == [3, 1]
    assert document["subjects"][0]["subject"] not in {"ada", ""}, "people by pseudonym"
    assert document["denials"] == [] and document["refused"] == ""
    text = CliRunner().invoke(app, words).stdout
    assert "2 of 2 subjects with something now" in text and "kvcustody custody live --tenant acme" in text


def test_denials_of_a_tenant_are_counted_by_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a replay whose one session is drawn to be restricted, which regulated-saas never reuses."""
    monkeypatch.chdir(tmp_path)
    rows = [{"timestamp": at, "input_length": 1024, "output_length": 2, "hash_ids": [1, 2]} for at in (0, 900)]
    Path("t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = CliRunner().invoke(app, ["replay", "t.jsonl", "--pool-blocks", "64", "--json"])
    assert made.exit_code == 0, made.output
    row = next(row for row in json.loads(made.stdout)["tenants"] if row["denials"])
    words = ["top", "--once", "--json", "--ledger", "kvcustody.db", "--tenant", row["tenant"]]
    denials = json.loads(CliRunner().invoke(app, words).stdout)["denials"]
    assert denials and {denial["rule"] for denial in denials} <= row["denials"].keys()
