"""The record of processing: of a period and its policies, signed, verified, and forged field by field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import pytest
from sqlalchemy import Engine
from typer.testing import CliRunner

from kvcustody.audit.exports.export_writer import write_export
from kvcustody.audit.exports.ledger_source import LedgerSource
from kvcustody.audit.kinds import (
    DecisionRecorded,
    GrantsRevoked,
    PolicyActivated,
    PolicyText,
    WorkerStarted,
    WorkerStopped,
)
from kvcustody.audit.reports.build_report import newest_checkpoint
from kvcustody.audit.reports.signing.report_signature import sign_digest
from kvcustody.audit.tlog.checkpoint_signer import CheckpointSigner
from kvcustody.audit.tlog.signing_key import SigningKey
from kvcustody.audit.verify.report.verify_report import ReportCheck, verify_report
from kvcustody.clock import VirtualClock
from kvcustody.console.main import app
from kvcustody.console.report.ropa import render_record
from kvcustody.errors import ConfigError
from kvcustody.governance.keys.report_signing_key import open_report_key
from kvcustody.governance.processing.build_record import RecordRequest, build_record, signed_record
from kvcustody.governance.processing.record import (
    OPEN,
    PROCESSOR,
    STATEMENT,
    ControllerStatement,
    ProcessingRecord,
    ServedController,
    read_fields,
)
from kvcustody.governance.processing.verify_record import verify_record
from kvcustody.policies.document.digest import digest
from kvcustody.policies.reading.load_policy import load_policy
from kvcustody.times import DAY_US, moment_us
from standins import builders

ORIGIN = "ledger.example/ropa"
DAY_0 = moment_us("2026-01-01")
FIRST = builders.policy(name="first", more=builders.grant("2026-03-01"))
SECOND = builders.policy(
    name="second", retention="{idle: 5m, absolute: 1h, active_max: 1h}", more=builders.grant()
)
THIRD = builders.policy(name="third")


def day(number: int) -> int:
    return DAY_0 + number * DAY_US


class Ledger(NamedTuple):
    """Policy `first` from day 0, `second` from day 40, whose grant is taken back on day 50, and the end on day 60."""

    store: Engine
    key: SigningKey
    report_key: SigningKey
    size: int
    folder: Path

    def record(self, since: int, until: int, *, is_signed: bool = True, **how: Any) -> ProcessingRecord:
        given = how.pop("given", None)
        asked = RecordRequest(
            "controller", self.size, day(since), day(until), ControllerStatement("Example AG")
        )
        with self.store.connect() as connection:
            made = build_record(connection, asked._replace(**how), given=given)
            return signed_record(connection, made, self.report_key) if is_signed else made

    def check(self, data: bytes, *, is_compared: bool = True, **how: Any) -> ReportCheck:
        with self.store.connect() as connection:
            against = connection if is_compared else None
            return verify_record(data, [str(self.key.verifier)], connection=against, **how)


def told(document: str, at_us: int) -> list[Any]:
    policy = load_policy(document, name="policy")
    activated = PolicyActivated(at_us, 1, policy.name, "shared", digest(policy), "governor")
    half = len(document) // 2
    texts = (document[:half], document[half:])
    return [
        activated,
        *(PolicyText(at_us, digest(policy), number, 2, text) for number, text in enumerate(texts, 1)),
    ]


@pytest.fixture
def ledger(any_store: Engine, tmp_path: Path) -> Ledger:
    clock = VirtualClock(utc_us=DAY_0)
    writer = builders.writer(any_store, tmp_path / "spill", worker="gpu-0", clock=clock)
    base = clock.now_us()
    writer.submit([WorkerStarted(base, "gpu-0", 8, 1, 64, "cpu", "test"), *told(FIRST, base + 1)])
    used = base + 10 * DAY_US
    writer.submit(
        [DecisionRecorded(used, "reuse", "permit", "reader", "holder", "low", ("own",), 1, "grant")]
    )
    writer.submit(told(SECOND, base + 40 * DAY_US))
    writer.submit([GrantsRevoked(base + 50 * DAY_US, ("reads",), 1, "dana")])
    file = tmp_path / "report.key"
    report_key = open_report_key(file, ORIGIN, any_store, writer, clock)
    assert writer.flush(60)
    writer.submit([WorkerStopped(base + 60 * DAY_US, "gpu-0", "closed", 0, (0,))])
    assert writer.flush(60)
    clock.advance(60 * DAY_US)
    key = SigningKey.generate(ORIGIN)
    writer.close(60)
    CheckpointSigner(any_store, [key], memory=tmp_path / "signed", clock=clock).sign_once()
    with any_store.connect() as connection:
        size = newest_checkpoint(connection)
    return Ledger(any_store, key, report_key, size, tmp_path)


def test_it_has_the_policies_of_its_period_and_no_others(ledger: Ledger) -> None:
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


def test_recipients_are_those_of_the_period_up_to_the_class_as_granted(ledger: Ledger) -> None:
    [early] = ledger.record(5, 20).recipients
    assert (early.owner, early.reader, early.by, early.at_most) == ("holder", "reader", "grant reads", "low")
    assert (early.until_us, early.first_use_us) == (day(40), day(10)), "the next policy took its place"
    [late] = ledger.record(41, 49).recipients
    assert late.until_us == day(50), "it was taken back then"
    assert ledger.record(51, 55).recipients == (), "and is open to nobody after"


def test_a_processor_names_the_controllers_that_it_acts_for(ledger: Ledger) -> None:
    named = (ServedController("holder", "Example AG"),)
    record = ledger.record(5, 20, role=PROCESSOR, controllers=named)
    assert record.controllers == named and ledger.record(5, 20).controllers == ()
    assert record.purposes == OPEN
    page = render_record(record, ["html", "pdf", "csv", "json"])
    assert b"30(2)(a)" in page["ropa.html"] and b"Example AG" in page["ropa.html"]
    assert page["ropa.pdf"].startswith(b"%PDF-") and b"holder: Example AG" in page["ropa.csv"]


def test_measures_name_controls_with_the_status_of_the_period(ledger: Ledger) -> None:
    controls = {one.control: one for one in ledger.record(5, 20).controls}
    assert {"Art. 25", "Art. 32", "Art. 5(1)(e)"} <= controls.keys()
    assert controls["Art. 5(1)(e)"].status == "none in the period" and controls["Art. 5(1)(e)"].sections == ()
    assert "Art. 28" not in controls, "what is not ours is no measure of ours"


def test_a_policy_of_which_nobody_has_the_document_is_named(ledger: Ledger) -> None:
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
    assert [one.name for one in ledger.record(56, 58).policies] == ["second"], (
        "not under the checkpoint of before"
    )


def test_it_verifies_and_says_what_was_not_checked(ledger: Ledger) -> None:
    record = ledger.record(30, 45)
    found = ledger.check(record.to_bytes(), expected_digest=record.digest())
    assert found.problems == () and found.signed_by == str(ledger.report_key.verifier)
    assert {one.path for one in found.unchecked} >= {"controller", "purposes"}
    assert not {"recipients", "policies"} & {one.path for one in found.unchecked}
    alone = ledger.check(record.to_bytes(), is_compared=False)
    assert alone.ok and {"recipients", "policies", "due"} <= {one.path for one in alone.unchecked}
    given = load_policy(THIRD, name="third")
    with_more = ledger.record(30, 45, given=given)
    assert [one.source for one in with_more.policies] == ["leaves", "leaves", "given"]
    assert ledger.check(with_more.to_bytes(), given=given).problems == ()
    lacking = ledger.check(with_more.to_bytes())
    assert lacking.ok and "recipients" in {one.path for one in lacking.unchecked}


def forged(record: ProcessingRecord) -> dict[str, bytes]:
    """Each value of a record, changed: numbers by one, texts by a letter, lists without their last."""
    made: dict[str, bytes] = {}

    def change(value: Any) -> Any:
        if isinstance(value, bool) or value is None:
            return "x"
        if isinstance(value, int):
            return value + 1
        return value + "x" if isinstance(value, str) else value[:-1]

    def walk(path: tuple[Any, ...], value: Any) -> None:
        items = (
            value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        )
        for key, each in items:
            walk((*path, key), each)
        if path and not isinstance(value, dict) and value != []:
            whole = orjson.loads(record.to_bytes())
            place = whole
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = change(value)
            made[".".join(map(str, path))] = (
                orjson.dumps(whole, option=orjson.OPT_SORT_KEYS | orjson.OPT_INDENT_2) + b"\n"
            )

    walk((), record.facts())
    return made


def test_every_field_that_is_changed_is_found_with_the_log_key_alone(ledger: Ledger) -> None:
    record = ledger.record(30, 45, role=PROCESSOR, controllers=(ServedController("holder", "Example AG"),))
    every = forged(record)
    assert len(every) > 100
    assert [path for path, data in every.items() if ledger.check(data, is_compared=False).ok] == []


@pytest.mark.system("a key holder signs a false field that nothing contradicts")
@pytest.mark.parametrize("source", ["ledger", "export"])
def test_who_holds_the_key_is_found_by_what_it_is_made_of(ledger: Ledger, source: str) -> None:
    """Signed anew, so that the signature holds: what the ledger contradicts is found, what is stated is unchecked."""
    how: dict[str, Any] = {}
    if source == "export":
        how = {"is_compared": False, "export": exported(ledger)}
    record = ledger.record(30, 45, is_signed=False)
    stated = set(ControllerStatement._fields)
    passed = []
    one_of_each = {
        tuple(part for part in path.split(".") if not part.isdecimal()): path for path in forged(record)
    }
    every = forged(record)
    for path, data in ((path, every[path]) for path in one_of_each.values()):
        field = path.partition(".")[0]
        if field in ("schema_name", "signature", "version", "checkpoint"):
            continue
        body = orjson.loads(data)
        try:
            false = _signed(ledger, body)
        except (TypeError, AttributeError):
            continue  # of another type, which is no record
        if ledger.check(false.to_bytes(), **how).ok:
            passed.append(field)
    assert set(passed) <= stated | {"since_us", "until_us"}, passed
    assert stated | {"since_us", "until_us"} <= {
        one.path for one in ledger.check(record.to_bytes(), **how).unchecked
    }
    assert {"purposes", "controller"} <= set(passed), "control: a statement is theirs who state it"


def exported(ledger: Ledger) -> Path:
    folder = ledger.folder / "export"
    if not folder.exists():
        write_export(folder, LedgerSource(ledger.store), made_at_us=1)
    return folder


def test_it_is_verified_against_an_export_alone(ledger: Ledger) -> None:
    folder, record = exported(ledger), ledger.record(30, 45)
    found = ledger.check(record.to_bytes(), is_compared=False, export=folder)
    assert found.problems == () and found.source == "the export"
    assert not {"recipients", "policies", "due", "controls"} & {one.path for one in found.unchecked}
    later = record._replace(checkpoint=record.checkpoint + 1)
    bad = ledger.check(_signed_as(ledger, later).to_bytes(), is_compared=False, export=folder)
    assert any("is of checkpoint" in problem for problem in bad.problems)
    leaves = max(folder.rglob("*.ndjson*"), key=lambda path: path.stat().st_size)
    data = leaves.read_bytes()
    leaves.write_bytes(data[:-20] + bytes([data[-20] ^ 1]) + data[-19:])
    torn = ledger.check(record.to_bytes(), is_compared=False, export=folder)
    assert any("is not sound" in problem for problem in torn.problems)


def _signed_as(ledger: Ledger, record: ProcessingRecord) -> ProcessingRecord:
    with ledger.store.connect() as connection:
        return record._replace(
            signature=sign_digest(connection, record.digest(), ledger.report_key, STATEMENT)
        )


def _signed(ledger: Ledger, body: dict[str, Any]) -> ProcessingRecord:
    with ledger.store.connect() as connection:
        return signed_record(connection, read_fields(ProcessingRecord, body), ledger.report_key)


def test_a_signature_of_a_record_is_none_of_a_report_and_the_reverse(ledger: Ledger) -> None:
    """Two kinds of documents under one key: neither signature counts for the other."""
    record = ledger.record(30, 45)
    assert verify_report(record.to_bytes(), [str(ledger.key.verifier)]).problems
    with ledger.store.connect() as connection:
        as_report = sign_digest(connection, record.digest(), ledger.report_key)
    false = record._replace(signature=as_report)
    assert any("signature" in problem for problem in ledger.check(false.to_bytes()).problems)


def test_the_command_line_makes_signs_and_verifies_every_format(ledger: Ledger) -> None:
    folder = ledger.folder
    (folder / "log.vkey").write_text(str(ledger.key.verifier))
    url = ledger.store.url.render_as_string(hide_password=False)
    url = f"sqlite:///{folder}/ledger.db" if ledger.store.dialect.name == "sqlite" else url
    made = ["report", "ropa", "--ledger", url, "--since", "2026-02-01", "--until", "2026-02-15", "--format"]
    made += ["json,csv,html,pdf", "--signing-key", str(folder / "report.key"), "--out", str(folder / "ropa")]
    found = CliRunner().invoke(app, [*made, "--role", "processor", "--controller-of", "hodler=Example AG"])
    assert found.exit_code == 2 and "knows no tenant" in found.output, "a name that the ledger never saw"
    found = CliRunner().invoke(app, [*made, "--json"])
    assert found.exit_code == 0, found.output
    verifying = ["report", "verify", str(folder / "ropa"), "--key", str(folder / "log.vkey"), "--ledger", url]
    checked = json.loads(CliRunner().invoke(app, [*verifying, "--json"]).stdout)
    assert checked["ok"] and checked["formats"] == ["ropa.csv", "ropa.html", "ropa.json", "ropa.pdf"]
    alone = [*verifying[:-2], "--export", str(exported(ledger)), "--json"]
    from_export = json.loads(CliRunner().invoke(app, alone).stdout)
    assert from_export["ok"] and from_export["source"] == "the export"
    assert checked["digest"] == json.loads(found.stdout)["digest"]
    page = (folder / "ropa" / "ropa.html").read_text()
    (folder / "ropa" / "ropa.html").write_text(page.replace("reader", "nobody"))
    bad = CliRunner().invoke(app, verifying)
    assert bad.exit_code == 1 and "`ropa.html` is not what the signed record gives" in bad.output
