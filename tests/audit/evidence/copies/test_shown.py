"""Copies in reports, pages and commands: checked offline, and changed rows are detected."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from sqlalchemy import Engine
from typer.testing import CliRunner

from kvcustody.audit.evidence.coverage import recount_process as recounting
from kvcustody.audit.exports.export_writer import write_export
from kvcustody.audit.exports.ledger_source import LedgerSource
from kvcustody.audit.kinds import Event, TransferDecided, WorkerStarted, WorkerStopped
from kvcustody.audit.reports.build_report import build_report, newest_checkpoint, period
from kvcustody.audit.reports.framework import refused_words
from kvcustody.audit.reports.model import Report
from kvcustody.audit.reports.parameters import ReportParameters
from kvcustody.audit.reports.signing.read_report import report_of
from kvcustody.audit.tlog.checkpoint_signer import CheckpointSigner
from kvcustody.audit.tlog.signing_key import SigningKey
from kvcustody.clock import SystemClock
from kvcustody.console.main import app
from kvcustody.console.render.document_forms import render_all
from kvcustody.governance.tiers.copy_event import CopyEvent
from kvcustody.governance.tiers.copy_leaves import copy_leaves
from standins.audit.copy_world import CopyWorld
from standins.audit.documents import UNSIGNED, verify_report
from standins.audit.verifiers import is_sound, run_alone
from standins.console.read_page import page_of, strings_of

KEY = SigningKey.generate("ledger.test")
VKEY = str(KEY.verifier)
DECISIONS = [
    TransferDecided(10, "restore", "nvme", "acme", 7, 48, 3 << 20, 812, 40_312, "transfer", "done", 799, "faster"),
    TransferDecided(11, "restore", "nvme", "acme", 8, 4, 1 << 20, 200, 400, "transfer", "done", 201, "faster"),
    TransferDecided(12, "restore", "host", "labs", 9, 1, 99, 900, 200, "recompute", "", 0, "tier is slow"),
]


class Told:
    """A worker with two tiers that ran, ended every copy, and stopped with its counters."""

    def __init__(self, store: Engine, writer: Any, folder: Path, *, lost: str = "") -> None:
        self.store, self.worlds = store, [CopyWorld(tier, 5).run(150) for tier in ("host", "nvme")]
        for world in self.worlds:
            for copy in [*world.living.values()]:
                world.end(copy, "teardown")
            for copy in [*world.waiting.values()]:
                world.destroy(copy)
        counts = [world.counts() for world in self.worlds]
        tiers = tuple(world.tier for world in self.worlds)
        counters = (tuple(getattr(one, name) for one in counts) for name in ("stored", "ended", "destroyed"))
        events: list[Event] = [WorkerStarted(1, "worker-1", 64, 1, 4096, "cpu", "test")]
        for world in self.worlds:
            events += copy_leaves(world.tier, self.without(world.events, lost))
        events += DECISIONS
        now = max(world.now for world in self.worlds) + 1
        events.append(WorkerStopped(now, "worker-1", "closed", 0, (0,), tiers, *counters))
        writer.submit(events)
        assert writer.flush()
        CheckpointSigner(store, [KEY], memory=folder / "memory", clock=SystemClock()).sign_once()

    @staticmethod
    def without(events: list[CopyEvent], lost: str) -> list[CopyEvent]:
        place = next((number for number, event in enumerate(events) if event.step == lost), len(events))
        return events[:place] + events[place + 1 :]

    def report(self, tenant: str | None = None) -> Report:
        with self.store.connect() as connection:
            checkpoint = newest_checkpoint(connection)
            bounds = period(connection, checkpoint, None, None)
            asked = ReportParameters("cc-fdp-rip", checkpoint, *bounds, tenant=tenant)
            return build_report(connection, asked)


@pytest.fixture
def copies_ledger(any_store: Engine, make_writer: Callable[..., Any], tmp_path: Path) -> Told:
    return Told(any_store, make_writer(any_store), tmp_path)


def text_of(report: Report) -> str:
    return "\n".join(strings_of(page_of(report)))


def test_a_report_has_a_chapter_of_tiers_and_is_sound(copies_ledger: Told) -> None:
    report = copies_ledger.report()
    tiers = report["tiers"]
    stored = sum(event.step == "stored" for world in copies_ledger.worlds for event in world.events)
    assert sum(row.due for row in tiers.rows) == stored and {row.tier for row in tiers.rows} == {
        "host",
        "nvme",
    }
    assert sum(row.covered for row in tiers.rows) > 0 and all(item.holds for item in tiers.balances)
    assert len(tiers.balances) == 2 + 2 * 3
    assert [(one.tier, one.choice, one.decisions, one.recompute_us, one.actual_us) for one in tiers.decisions] == [
        ("host", "recompute", 1, 200, 0),
        ("nvme", "transfer", 2, 40_712, 1000),
    ]
    assert report["recount"] is not None and report["recount"].differences == ()
    assert report["total"].due == 0  # blocks are counted apart
    assert verify_report(report.to_bytes(), [VKEY]).problems == (UNSIGNED,)
    said = text_of(report)
    assert "copies stored in nvme by its counter when it stopped = in leaves" in said
    assert refused_words(said) == [] and any("counted by tier" in text for text in report["limitations"])
    drawn = [item for item in report["sample"] if item.custody.tier in ("host", "nvme")]
    assert len(drawn) == min(25, stored) and {item.custody.tier for item in drawn} == {"host", "nvme"}
    steps = [{leaf.kind for leaf in item.leaves if leaf.kind.startswith("copies-")} for item in drawn]
    assert all({"copies-stored", "copies-ended", "copies-destroyed"} == kinds for kinds in steps)
    assert all(item.custody.covered == (item.custody.verdict == "covered") for item in drawn)
    forms = ("html", "json", "oscal")
    assert render_all(copies_ledger.report(), forms) == render_all(report, forms)


def test_a_tenants_own_report_has_its_own_copies_alone(copies_ledger: Told) -> None:
    whole, own = copies_ledger.report(), copies_ledger.report("acme")
    assert own["tiers"].rows == tuple(row for row in whole["tiers"].rows if row.tenant == "acme") != ()
    assert [one.tier for one in own["tiers"].decisions] == ["nvme"]
    assert all("counter" not in item.name for item in own["tiers"].balances)
    assert "labs" not in own.to_bytes().decode() and all(worker.tiers == () for worker in own["boundary"].workers)


@pytest.mark.parametrize("lost", ["stored", "ended", "destroyed"])
def test_a_step_that_no_leaf_has_is_shown_with_both_sides(
    store: Engine, make_writer: Callable[..., Any], tmp_path: Path, lost: str
) -> None:
    report = Told(store, make_writer(store), tmp_path, lost=lost).report()
    broken = [item for item in report["tiers"].balances if not item.holds]
    # What was unlinked in nvme has a second piece of evidence, its key's.
    tiers = ["host"] if lost == "destroyed" else ["host", "nvme"]
    assert [item.left - item.right for item in broken] == [1] * len(tiers)
    assert all(f"copies {lost} in {tier}" in item.name for item, tier in zip(broken, tiers, strict=True))


def test_a_report_whose_verdicts_do_not_add_up_is_refused(copies_ledger: Told) -> None:
    body = json.loads(copies_ledger.report().to_bytes())
    body["tiers"]["rows"][0]["covered"] += 1
    found = verify_report(report_of(body).to_bytes(), [VKEY])
    assert any("do not add up" in problem for problem in found.problems)


def run(*arguments: str, code: int = 0) -> str:
    group = "audit" if arguments[0] == "recompute" else "coverage"
    found = CliRunner().invoke(app, [group, *arguments])
    assert found.exit_code == code, found.output
    return found.output


def test_the_command_shows_tiers_and_recomputes_them(
    store: Engine, make_writer: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Told(store, make_writer(store), tmp_path)
    ledger = str(tmp_path / "ledger.db")
    shown = orjson.loads(run("show", "--ledger", ledger, "--json"))
    again = orjson.loads(run("recompute", "--ledger", ledger, "--json"))
    assert shown["copies"] == again["copies"] and again["agrees"] is True and shown["copies"]["rows"]
    monkeypatch.setattr(recounting, "BESIDE_LEAVES", 0)  # in a process of its own
    assert orjson.loads(run("recompute", "--ledger", ledger, "--json")) == again
    one = orjson.loads(run("show", "--ledger", ledger, "--tier", "nvme", "--tenant", "acme", "--json"))
    assert {row["tier"] for row in one["copies"]["rows"]} == {"nvme"} and one["total"]["due"] == 0
    assert "copies off the device" in run("show", "--ledger", ledger)
    assert "copies off the device" not in run("show", "--ledger", ledger, "--tier", "device")
    folder = tmp_path / "export"
    write_export(folder, LedgerSource(store), made_at_us=1)
    assert is_sound(folder, VKEY) and run_alone(folder, VKEY).returncode == 0
    exported = orjson.loads(run("recompute", "--export", str(folder), "--json"))
    assert exported["copies"] == again["copies"]


def test_a_row_that_its_leaf_does_not_give_is_found_by_the_leaves(
    store: Engine, make_writer: Callable[..., Any], tmp_path: Path
) -> None:
    Told(store, make_writer(store), tmp_path)
    with store.begin() as connection:
        connection.exec_driver_sql("UPDATE copy_steps SET tenant = 'labs' WHERE tenant = 'acme'")
    ledger = str(tmp_path / "ledger.db")
    found = orjson.loads(run("recompute", "--ledger", ledger, "--tenant", "acme", "--json", code=1))
    assert found["agrees"] is False
    assert {item["figure"] for item in found["differences"]} >= {"host: due", "nvme: covered"}
