"""The record of processing: of a period and its policies, signed, verified, and forged field by field."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sqlalchemy import Engine
from typer.testing import CliRunner

from kvcustody.audit.kinds import (
    PolicyActivated,
    WorkerStarted,
)
from kvcustody.audit.reports.build_report import newest_checkpoint
from kvcustody.audit.reports.model import REPORT
from kvcustody.audit.tlog.checkpoint_signer import CheckpointSigner
from kvcustody.clock import VirtualClock
from kvcustody.console.main import app
from kvcustody.console.render.document_forms import render_all
from kvcustody.errors import ConfigError
from kvcustody.governance.processing.record import (
    OPEN,
    PROCESSOR,
    ServedController,
)
from kvcustody.policies.reading.load_policy import load_policy
from standins import builders
from standins.audit.documents import signed_again, verify_report
from standins.audit.ledgers import record_ledger
from standins.audit.ledgers.record_ledger import THIRD, RecordLedger, day


@pytest.fixture
def ledger(any_store: Engine, tmp_path: Path) -> RecordLedger:
    return record_ledger.fill(any_store, tmp_path)


def test_it_has_the_policies_of_its_period_and_no_others(ledger: RecordLedger) -> None:
    names = {
        (5, 20): ["first"],
        (30, 45): ["first", "second"],
        (45, 55): ["second"],
    }
    for (since, until), policies in names.items():
        record = ledger.record(since, until)
        assert [one.name for one in record.policies] == policies
        assert {one.policy_digest for one in record.time_limits} == {one.digest for one in record.policies}
    both = ledger.record(30, 45)
    assert [limit.since_birth for limit in both.time_limits] == ["8h", "1h"]
    assert (both.policies[0].until_us, both.policies[1].since_us) == (day(40), day(40))
    assert both.policy == "second" and both.policies[0].workers == ("gpu-0",)
    with pytest.raises(ConfigError, match="no policy was in effect"):
        ledger.record(70, 80)


def test_recipients_are_those_of_the_period_up_to_the_class_as_granted(ledger: RecordLedger) -> None:
    [early] = ledger.record(5, 20).recipients
    assert (early.owner, early.reader, early.by, early.at_most) == ("holder", "reader", "grant reads", "low")
    assert (early.until_us, early.first_use_us) == (day(40), day(10)), "the next policy took its place"
    [late] = ledger.record(41, 49).recipients
    assert late.until_us == day(50), "it was taken back then"
    assert ledger.record(51, 55).recipients == (), "and is open to nobody after"


def test_a_processor_names_the_controllers_that_it_acts_for(ledger: RecordLedger) -> None:
    named = (ServedController("holder", "Example AG"),)
    record = ledger.record(5, 20, role=PROCESSOR, controllers=named)
    assert record.controllers == named and ledger.record(5, 20).controllers == ()
    assert record.purposes == OPEN
    page = render_all(record.document(), ["html", "pdf", "csv", "json"])
    assert b"30(2)(a)" in page["ropa.html"] and b"Example AG" in page["ropa.html"]
    assert page["ropa.pdf"].startswith(b"%PDF-") and b"holder: Example AG" in page["ropa.csv"]


def test_measures_name_controls_with_the_status_of_the_period(ledger: RecordLedger) -> None:
    controls = {one.control: one for one in ledger.record(5, 20).controls}
    assert {"Art. 25", "Art. 32", "Art. 5(1)(e)"} <= controls.keys()
    assert controls["Art. 5(1)(e)"].status == "none in the period" and controls["Art. 5(1)(e)"].sections == ()
    assert "Art. 28" not in controls, "what is not ours is no measure of ours"


def test_a_policy_of_which_nobody_has_the_document_is_named(ledger: RecordLedger) -> None:
    events = [PolicyActivated(0, 2, "hidden", "shared", "sha256:" + "ab" * 32, "governor")]
    clock = VirtualClock(utc_us=day(57))
    started = WorkerStarted(clock.now_us(), "gpu-1", 8, 1, 64, "cpu", "test")
    told_ = [started, *(one._replace(at_us=clock.now_us()) for one in events)]
    builders.record(ledger.store, ledger.folder / "more", told_, worker="gpu-1", clock=clock)
    CheckpointSigner(ledger.store, [ledger.key], memory=ledger.folder / "signed", clock=clock).sign_once()
    with ledger.store.connect() as connection:
        later = ledger._replace(size=newest_checkpoint(connection))
    hidden = [one for one in later.record(56, 58).policies if one.name == "hidden"]
    assert [one.source for one in hidden] == ["unknown"]
    assert not any(one.policy_digest == hidden[0].digest for one in later.record(56, 58).time_limits)
    assert [one.name for one in ledger.record(56, 58).policies] == ["second"], "not under the checkpoint of before"


def test_it_verifies_and_says_what_was_not_checked(ledger: RecordLedger) -> None:
    record = ledger.document(30, 45)
    found = ledger.check(record.to_bytes(), expected_digest=record.digest())
    assert found.problems == () and found.signed_by == str(ledger.report_key.verifier)
    assert {one.path for one in found.unchecked} >= {"controller", "purposes"}
    assert not {"recipients", "policies"} & {one.path for one in found.unchecked}
    alone = ledger.check(record.to_bytes(), is_compared=False)
    assert alone.ok and {"recipients", "policies", "due"} <= {one.path for one in alone.unchecked}
    given = load_policy(THIRD, name="third")
    with_more = ledger.document(30, 45, given=given)
    assert [one["source"] for one in with_more.facts["policies"]] == ["leaves", "leaves", "given"]
    assert ledger.check(with_more.to_bytes(), given=given).problems == ()
    lacking = ledger.check(with_more.to_bytes())
    assert lacking.ok and "recipients" in {one.path for one in lacking.unchecked}


def test_it_is_verified_against_an_export_alone(ledger: RecordLedger) -> None:
    folder, record = ledger.exported(), ledger.document(30, 45)
    found = ledger.check(record.to_bytes(), is_compared=False, source=folder)
    assert found.problems == () and found.source == "the export"
    assert not {"recipients", "policies", "due", "controls"} & {one.path for one in found.unchecked}
    later = record.facts | {"checkpoint": record.checkpoint + 1}
    bad = ledger.check(signed_again(record, later, ledger.report_key).to_bytes(), is_compared=False, source=folder)
    assert not bad.ok and "is of checkpoint" in bad.source_rejected
    leaves = max(folder.rglob("*.ndjson*"), key=lambda path: path.stat().st_size)
    data = leaves.read_bytes()
    leaves.write_bytes(data[:-20] + bytes([data[-20] ^ 1]) + data[-19:])
    torn = ledger.check(record.to_bytes(), is_compared=False, source=folder)
    assert not torn.ok and "is not sound" in torn.source_rejected


def test_a_signature_of_a_record_is_none_of_a_report_and_the_reverse(ledger: RecordLedger) -> None:
    """Two kinds of documents under one key: neither signature counts for the other."""
    record = ledger.document(30, 45)
    assert verify_report(record.to_bytes(), [str(ledger.key.verifier)]).problems
    as_report = record._replace(kind=REPORT)
    false = record._replace(signature=signed_again(as_report, record.facts, ledger.report_key).signature)
    assert any("signature" in problem for problem in ledger.check(false.to_bytes()).problems)
    same = record._replace(signature=signed_again(record, record.facts, ledger.report_key).signature)
    assert ledger.check(same.to_bytes()).problems == (), "control: of its own kind it counts"


def test_the_command_line_makes_signs_and_verifies_every_format(ledger: RecordLedger) -> None:
    folder = ledger.folder
    (folder / "log.vkey").write_text(str(ledger.key.verifier))
    url = ledger.store.url.render_as_string(hide_password=False)
    url = f"sqlite:///{folder}/ledger.db" if ledger.store.dialect.name == "sqlite" else url
    arguments = ["report", "ropa", "--ledger", url, "--since", "2026-02-01", "--until", "2026-02-15", "--format"]
    formats = [
        "csv",
        "html",
        "json",
        *(["pdf"] if ledger.store.dialect.name == "sqlite" else []),
    ]  # printed once
    arguments += [",".join(formats), "--signing-key", str(folder / "report.key"), "--out", str(folder / "ropa")]
    answer = CliRunner().invoke(app, [*arguments, "--role", "processor", "--controller-of", "hodler=Example AG"])
    assert answer.exit_code == 2 and "knows no tenant" in answer.output, "a name that the ledger never saw"
    answer = CliRunner().invoke(app, [*arguments, "--json"])
    assert answer.exit_code == 0, answer.output
    verifying = ["report", "verify", str(folder / "ropa"), "--key", str(folder / "log.vkey"), "--ledger", url]
    checked = json.loads(CliRunner().invoke(app, [*verifying, "--json"]).stdout)
    assert checked["ok"] and checked["formats"] == [f"ropa.{name}" for name in formats]
    alone = [*verifying[:-2], "--export", str(ledger.exported()), "--json"]
    from_export = json.loads(CliRunner().invoke(app, alone).stdout)
    assert from_export["ok"] and from_export["source"] == "the export"
    assert checked["digest"] == json.loads(answer.stdout)["digest"]
    page = (folder / "ropa" / "ropa.html").read_text()
    (folder / "ropa" / "ropa.html").write_text(page.replace("reader", "nobody"))
    bad = CliRunner().invoke(app, verifying)
    assert bad.exit_code == 1 and "`ropa.html` is not what the signed record gives" in bad.output
