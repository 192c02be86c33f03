"""Cases in a ledger, on both databases: rows against leaves, actors, the command line, holds, and reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import Connection, Engine, delete, update
from typer.testing import CliRunner

from kvcustody.audit.evidence.cases import case_clock
from kvcustody.audit.evidence.cases.case_record import CaseState
from kvcustody.audit.evidence.cases.read_cases import principal_periods, read_case, read_cases, strangers
from kvcustody.audit.evidence.cases.restrictions import restrictions_in_force
from kvcustody.audit.evidence.subjects.subject_table import names_of
from kvcustody.audit.exports.export_writer import write_export
from kvcustody.audit.exports.ledger_source import LedgerSource
from kvcustody.audit.keep.purge_and_legal_hold import RetentionError, active_holds, lift_hold, place_hold
from kvcustody.audit.keep.unlink_subject import unlink_subject
from kvcustody.audit.kinds import (
    CaseOpened,
    CaseStepped,
    CustodyEnded,
    PrincipalChanged,
    ReportKeyRecorded,
    ResidencyOpened,
    ResidencyReleased,
    WorkerStarted,
)
from kvcustody.audit.kinds.block_runs import Run
from kvcustody.audit.reports.build_report import build_report, newest_checkpoint
from kvcustody.audit.reports.framework import Framework
from kvcustody.audit.reports.model import Report
from kvcustody.audit.reports.parameters import ReportParameters
from kvcustody.audit.store.database.engine import WRITE
from kvcustody.audit.store.schema.leaf_tables import case_steps, cases
from kvcustody.audit.tlog.checkpoint_signer import CheckpointSigner
from kvcustody.audit.tlog.signing_key import SigningKey
from kvcustody.audit.verify.ledger.fsck_ledger import fsck
from kvcustody.clock import SystemClock, VirtualClock
from kvcustody.console.main import app
from kvcustody.console.render.document_forms import render_all
from kvcustody.errors import ConfigError
from kvcustody.governance.cases.show_case import summary_of
from kvcustody.times import DAY_US, moment_us
from standins import builders
from standins.audit.documents import report_again, signed_by_reports_key, verify_report
from standins.console.read_page import Table, page_of, strings_of

DAY_0 = moment_us("2026-05-05T09:00:00Z")
DIGEST = "ab" * 32
ORIGIN = "ledger.example/cases"
REPORT_KEY = SigningKey.generate(f"{ORIGIN}/report")


class Told:
    """Cases of acme: `missed` since June, `late` by a month, `near` in May's last days, `answered` in time."""

    def __init__(self, store: Engine, folder: Path) -> None:
        self.store, self.folder = store, folder
        self.clock = VirtualClock(utc_us=DAY_0)
        self.writer = builders.writer(store, folder / "spill", worker="desk", clock=self.clock)
        self.base = self.clock.now_us()
        self.key = SigningKey.generate(ORIGIN)

    def tell(self) -> None:
        self.writer.submit_durable(self.enrolled("dana"))
        self.writer.submit_durable(ReportKeyRecorded(self.base, "made", str(REPORT_KEY.verifier), "", "governor"))
        self.opened("missed", 0)
        self.opened("late", 0)
        self.opened("answered", 0)
        self.opened("near", 26)
        self.step("answered", 20, "decide", "refused", "12(5)", "", "the ninth this week", "")
        self.step("answered", 21, "answer", "", "", "letter", "", DIGEST)
        self.step("late", 20, "decide", "refused", "12(5)", "", "the ninth this week", "")
        self.step("late", 40, "answer", "", "", "letter", "", DIGEST)
        self.step("missed", 41, "decide", "erased", "", "", "", "")
        assert self.writer.flush(60)

    def enrolled(self, name: str, action: str = "enrolled", at: float = 0) -> PrincipalChanged:
        return PrincipalChanged(self.at(at), name, action, ("dpo",), "", "root")

    def at(self, day: float) -> int:
        return self.base + round(day * DAY_US)

    def opened(self, case: str, day: float, subject: str = "ada", zone: str = "UTC") -> None:
        event = CaseOpened(
            *(
                self.at(day),
                case,
                "acme",
                subject,
                "erasure",
                "mail",
                DAY_0 + round(day * DAY_US),
                zone,
                (),
                "dana",
            )
        )
        self.writer.submit_durable(event)

    def step(self, case: str, day: float, *said: str, actor: str = "dana") -> None:
        self.writer.submit_durable(CaseStepped(self.at(day), case, "acme", *said, actor))

    def sign(self) -> int:
        assert self.writer.flush(60)
        CheckpointSigner(self.store, [self.key], memory=self.folder / "signed", clock=self.clock).sign_once()
        with self.store.connect() as connection:
            return newest_checkpoint(connection)

    def report(self, size: int, until: float, framework: str = "gdpr") -> Report:
        asked = ReportParameters(framework, size, DAY_0, DAY_0 + round(until * DAY_US), sample=0, recount=False)
        with self.store.connect() as connection:
            made = build_report(connection, asked)
            return signed_by_reports_key(connection, made, REPORT_KEY)


def problems(connection: Connection) -> list[str]:
    """What fsck finds, but for the book of principals, which these ledgers have none of."""
    return [one.what for one in fsck(connection).problems if "service_principals" not in one.what]


@pytest.fixture
def case_ledger(any_store: Engine, tmp_path: Path) -> Any:
    made = Told(any_store, tmp_path)
    made.tell()
    yield made
    made.writer.close(60)


def test_they_are_read_as_their_leaves_say_and_fsck_holds_the_rows_against_them(case_ledger: Told) -> None:
    with case_ledger.store.connect() as connection:
        cases_by_id = {case.opened.case_id: case for case in read_cases(connection)}
        assert cases_by_id.keys() == {"missed", "late", "answered", "near"}
        states = {name: case.state(DAY_0 + 45 * DAY_US) for name, case in cases_by_id.items()}
        assert states == {
            "missed": CaseState.MISSED,
            "late": CaseState.LATE,
            "answered": CaseState.ANSWERED,
            "near": CaseState.OPEN,
        }
        assert cases_by_id["near"].state(DAY_0 + 54 * DAY_US) is CaseState.NEAR
        assert "confirm the person's identity first" in cases_by_id["missed"].steps[0].void, (
            "recorded by hand, and counts for nothing"
        )
        assert cases_by_id["missed"].outcome == ""
        assert read_cases(connection, tenant="labs") == () and len(read_cases(connection, tenant="acme")) == 4
        assert problems(connection) == []


@pytest.mark.parametrize("column", ["received_us", "holidays"])
def test_an_edited_row_of_a_case_is_found(case_ledger: Told, column: str) -> None:
    value = 5 if column == "received_us" else "false"
    edit = update(cases).where(cases.c.case_id == "late").values({column: value})
    with case_ledger.store.connect().execution_options(**WRITE) as connection, connection.begin():
        connection.execute(edit)
    with case_ledger.store.connect() as connection:
        assert any("cases" in what for what in problems(connection))


@pytest.mark.parametrize("column", ["outcome", ""])
def test_an_edited_or_lost_row_of_a_step_is_found(case_ledger: Told, column: str) -> None:
    one = case_steps.c.case_id == "late"
    edit = update(case_steps).where(one).values({column: "false"}) if column else delete(case_steps).where(one)
    with case_ledger.store.connect().execution_options(**WRITE) as connection, connection.begin():
        connection.execute(edit)
    with case_ledger.store.connect() as connection:
        assert any("case_steps" in what for what in problems(connection))


def test_an_actor_whom_no_leaf_had_enrolled_by_then_is_named(case_ledger: Told) -> None:
    case_ledger.step("near", 27, "identity", "asked", "", "", "", "", actor="mallory")
    case_ledger.writer.submit_durable(case_ledger.enrolled("eve", at=30))
    case_ledger.step("near", 29, "identity", "asked", "", "", "", "", actor="eve")
    case_ledger.writer.submit_durable(case_ledger.enrolled("dana", "disabled", at=31))
    case_ledger.step("near", 30, "identity", "asked", "", "", "", "")
    case_ledger.step("near", 32, "identity", "asked", "", "", "", "", actor="idp:carl")
    assert case_ledger.writer.flush(60)
    with case_ledger.store.connect() as connection:
        case, known = read_case(connection, "near"), principal_periods(connection)
        assert strangers(case, known, ["idp"]) == ("eve", "mallory")
        assert "idp:carl" in strangers(case, known)
        case_ledger.step("near", 33, "identity", "asked", "", "", "", "")
        assert case_ledger.writer.flush(60)
    with case_ledger.store.connect() as connection:
        assert "dana" in strangers(read_case(connection, "near"), principal_periods(connection))


def test_a_report_is_qualified_by_who_was_not_answered_in_time(case_ledger: Told, tmp_path: Path) -> None:
    early = case_ledger.sign()
    case_ledger.opened("later", 45)
    size = case_ledger.sign()
    report = case_ledger.report(size, 55)
    states = {case.case_id: case.state for case in report["activity"].cases}
    assert states == {
        "missed": "missed",
        "late": "late",
        "answered": "answered",
        "near": "open",
        "later": "open",
    }
    qualifying = {one.id: one for one in report["opinion"].exceptions}
    assert {"case:missed", "case:late"} <= qualifying.keys() and not {
        "case:near",
        "case:answered",
    } & qualifying.keys()
    assert "answered 2026-06-14" in qualifying["case:late"].cause
    assert "later" not in {case.case_id for case in case_ledger.report(early, 55)["activity"].cases}
    assert {case.state for case in case_ledger.report(size, 25)["activity"].cases} == {"near", "answered"}
    case_ledger.step("near", 53, "identity", "asked", "", "", "", "")
    soon = case_ledger.report(case_ledger.sign(), 54)
    assert {case.case_id: case.state for case in soon["activity"].cases}["near"] == "near"
    assert not any(one.id == "case:near" for one in soon["opinion"].exceptions), "near is listed, and no exception"
    page = render_all(soon, ["html"])["report.html"].decode()
    assert "are to be answered within a week, or were not answered in time" in page
    write_export(tmp_path / "export", LedgerSource(case_ledger.store), made_at_us=1)
    vkeys = [str(case_ledger.key.verifier)]
    again = report_again(tmp_path / "export", soon, vkeys)
    assert verify_report(soon.to_bytes(), vkeys, source=again).problems == ()
    false = [case._replace(state="answered") if case.case_id == "missed" else case for case in soon["activity"].cases]
    forged = soon.replace(activity=soon["activity"]._replace(cases=tuple(false)))
    with case_ledger.store.connect() as connection:
        forged = signed_by_reports_key(connection, forged, REPORT_KEY)
    wrong = verify_report(forged.to_bytes(), vkeys, source=again).problems
    assert any("cases" in problem for problem in wrong), "signed by who holds the key, and found"


def deadlines_in(report: Report) -> list[str]:
    """What a report says of the time in which a person is answered."""
    text = " ".join((*strings_of(page_of(report)), *(f"{one.id} {one.risk}" for one in report["opinion"].exceptions)))
    words = ("due before 2026", "in the time that", "within a week", "case:missed", "GDPR 12", "GDPR 18")
    tables = [block for section in page_of(report).sections for block in section.blocks if isinstance(block, Table)]
    states = {
        row[table.headings.index("state")] for table in tables if table.headings[0] == "case" for row in table.rows
    }
    return [word for word in words if word in text] + sorted(states & {"missed", "late"})


@pytest.mark.parametrize("framework", ["soc2", "hipaa", "iso-27001", "csa-aicm"])
def test_only_a_framework_with_the_month_of_an_answer_says_it(
    case_ledger: Told, framework: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = case_ledger.sign()
    assert {"case:missed", "within a week", "late", "missed"} <= {*deadlines_in(case_ledger.report(size, 55))}
    report = case_ledger.report(size, 55, framework)
    assert len(report["activity"].cases) >= 4 and deadlines_in(report) == []
    monkeypatch.setattr(Framework, "has_answer_deadline", True)  # the control: a framework that has it would say it
    assert {"case:missed", "late", "missed"} <= {*deadlines_in(case_ledger.report(size, 55, framework))}


def test_a_report_says_whose_processing_was_restricted_then(case_ledger: Told) -> None:
    case_ledger.step("missed", 10, "restrict", "", "18(1)(a)", "", "", "")
    case_ledger.step("near", 30, "restrict", "", "18(1)(c)", "", "", "")
    case_ledger.step("near", 35, "lift-restriction", "", "", "", "over", "")
    size = case_ledger.sign()

    def restricted(until: float) -> set[str]:
        return {case.case_id for case in case_ledger.report(size, until)["activity"].cases if case.restricted}

    assert [restricted(day) for day in (9, 20, 32, 50)] == [set(), {"missed"}, {"missed", "near"}, {"missed"}]
    page = render_all(case_ledger.report(size, 50), ["html"])["report.html"].decode()
    assert "erased, restricted" in page or "not decided, restricted" in page


def test_a_hold_on_one_person_keeps_their_pseudonyms_and_no_other_persons(case_ledger: Told) -> None:
    case_ledger.opened("of-bob", 1, "bob")
    assert case_ledger.writer.flush(60)
    place_hold(
        case_ledger.store, "case-9", "acme", subject="ada", actor="counsel", reason="litigation", clear_names=True
    )
    with case_ledger.store.connect() as connection:
        [hold] = active_holds(connection)
        [ada] = names_of(connection, "acme", "ada")
        assert hold.subject == ada != "ada"
    with pytest.raises(RetentionError, match="case-9"):
        unlink_subject(case_ledger.store, "acme", "ada", keys=None, actor="dana", reason="asked")
    assert unlink_subject(case_ledger.store, "acme", "bob", keys=None, actor="dana", reason="asked").pseudonyms == 1
    lift_hold(case_ledger.store, "case-9", actor="counsel", reason="over")
    assert unlink_subject(case_ledger.store, "acme", "ada", keys=None, actor="dana", reason="asked").pseudonyms == 1
    with case_ledger.store.connect() as connection:
        assert problems(connection) == [] and read_case(connection, "late").opened.subject == ada


def test_from_the_command_line_on_the_ledger_itself(
    any_store: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real time: a request of 20 days ago, so that nothing is missed while it runs."""
    monkeypatch.chdir(tmp_path)
    clock = SystemClock()
    base = clock.now_us()
    run = Run(np.arange(2), 1)
    events: list[Any] = [
        WorkerStarted(base, "w", 64, 1, 4096, "cpu", "test"),
        ResidencyOpened(
            *(
                base,
                1,
                "acme",
                "ada",
                None,
                False,
                "internal",
                (1,),
                (),
                ("own-scope",),
                3,
                base + 10**9,
                (run,),
            )
        ),
        ResidencyReleased(base + 10, 1, "acme", "finish", (), 0),
        CustodyEnded(base + 20, "acme", "internal", (run,), "expired", base, base, base, 10**6, base + 10**9),
    ]
    builders.record(any_store, tmp_path / "spill", events, worker="w")
    url = any_store.url.render_as_string(hide_password=False)
    url = f"sqlite:///{tmp_path}/ledger.db" if any_store.dialect.name == "sqlite" else url
    enrolled = CliRunner().invoke(app, ["principal", "add", "dana", "--role", "dpo", "--ledger", url])
    assert enrolled.exit_code == 0, enrolled.output
    on = ["--ledger", url, "--subject-names", "clear", "--as", "dana"]

    def asked(*words: str, code: int = 0) -> str:
        found = CliRunner().invoke(app, ["case", *words])
        assert found.exit_code == code, found.output
        return found.output if code else found.stdout

    (tmp_path / "holidays.txt").write_text("2026-12-25  # Christmas\n")
    wanted = ["open", "--tenant", "acme", "--subject", "ada", "--right", "erasure", "--channel", "mail"]
    wanted += ["--zone", "Europe/Berlin", "--holidays", str(tmp_path / "holidays.txt")]
    stranger = [*on[:-1], "mallory"]
    assert "`mallory`: no principal has that name" in asked(*wanted, *stranger, code=2)
    assert "did you mean `acme`" in asked(*wanted[:2], "acne", *wanted[3:], *on, code=2)
    assert "names the person" in asked(*wanted[:8], "mail of Ada", *wanted[9:], *on, code=2)
    case = json.loads(asked(*wanted, *on, "--json"))["case_id"]
    assert "`reason` names the person" in asked(
        "step", case, "exempt", "--ground", "17(3)(e)", "--reason", "ADA sues", *on, code=2
    )
    assert "confirm the person's identity first" in asked("step", case, "decide", "--outcome", "erased", *on, code=2)
    asked("step", case, "identity", "--outcome", "confirmed", *on)
    assert "1 residencies" in asked("step", case, "decide", "--outcome", "not-found", *on, code=2)
    reason = ["--ground", "12(5)", "--reason", "the ninth this week"]
    asked("step", case, "decide", "--outcome", "refused", *reason, *on)
    to = [
        "--to",
        "Ada",
        "--date",
        "2026-06-01",
        "--format",
        "text,html,pdf",
        "--out",
        str(tmp_path / "letter"),
    ]
    digests = json.loads(asked("letter", case, *to, "--ledger", url, "--json"))["files"]
    asked("step", case, "answer", "--about", "letter", "--file", str(tmp_path / "letter" / "letter.pdf"), *on)
    found = json.loads(asked("show", case, "--ledger", url, "--json"))
    assert found["state"] == "answered" and found["steps"][-1]["digest"] == digests["letter.pdf"]
    assert (found["zone"], found["strangers"], found["contradictions"]) == ("Europe/Berlin", [], [])
    assert [one["case_id"] for one in json.loads(asked("list", "--ledger", url, "--json"))["items"]] == [case]
    own = tmp_path / "ours.txt"
    own.write_text("# Antwort\n{{ case.case_id }}\n\n{{ reason }}\n")
    asked("letter", case, *to, "--template", str(own), "--ledger", url)
    assert "Antwort" in (tmp_path / "letter" / "letter.txt").read_text()
    own.write_text("# X\n{{ ''.__class__.__mro__ }}")
    assert "template" in asked("letter", case, *to, "--template", str(own), "--ledger", url, code=2)


def test_a_case_of_a_zone_that_this_machine_lacks_ends_no_list(
    case_ledger: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is shown with what could not be read, restrictions go on, and a report counts it as due at the earliest.

    Control: with an error in place of the earliest end, the list ends, other cases with it.
    """
    case_ledger.opened("afar", 1, zone="Nowhere/Land")
    case_ledger.step("afar", 2, "extend", "", "complexity", "", "three systems", "")
    case_ledger.step("afar", 3, "identity", "confirmed", "", "", "", "")
    case_ledger.step("afar", 4, "restrict", "", "18(1)(a)", "", "", "")
    assert case_ledger.writer.flush(60)
    with case_ledger.store.connect() as connection:
        found = [summary_of(case, case_ledger.clock.utc_us()) for case in read_cases(connection)]
        assert [one.case_id for one in found if one.unread] == ["afar"] and len(found) == 5
        far = next(one for one in found if one.unread)
        assert "`Nowhere/Land`" in far.unread and far.extended and far.restricted
        assert [one.case_id for one in restrictions_in_force(connection)] == ["afar"]
    assert any(one.case_id == "afar" for one in case_ledger.report(case_ledger.sign(), 60)["activity"].cases)
    url = case_ledger.store.url.render_as_string(hide_password=False)
    url = f"sqlite:///{case_ledger.folder}/ledger.db" if case_ledger.store.dialect.name == "sqlite" else url
    listed = CliRunner().invoke(app, ["case", "list", "--ledger", url])
    assert listed.exit_code == 0 and "not read: its time zone `Nowhere/Land`" in listed.output
    shown = CliRunner().invoke(app, ["case", "show", "afar", "--ledger", url])
    assert shown.exit_code == 0 and "the earliest that may count" in shown.output
    monkeypatch.setattr(case_clock, "_end", _no_end)
    with case_ledger.store.connect() as connection, pytest.raises(ConfigError):
        [summary_of(case, 0) for case in read_cases(connection)]


def _no_end(*_: object) -> None:
    raise ConfigError("a zone is not known")
