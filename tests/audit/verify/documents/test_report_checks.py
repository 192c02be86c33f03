"""What a check of a report covers: its file by itself, against an export and the ledger, and each of its forms."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from sqlalchemy import Engine, insert, select

from kvcustody.audit.exports.export_writer import write_export
from kvcustody.audit.exports.ledger_source import LedgerSource
from kvcustody.audit.exports.manifest import OPENINGS, root_line
from kvcustody.audit.reports.build_report import build_report, newest_checkpoint, period
from kvcustody.audit.reports.parameters import ReportParameters
from kvcustody.audit.reports.sections.boundary import Witnessed
from kvcustody.audit.reports.signing.document_signature import sign_document
from kvcustody.audit.reports.signing.read_report import report_of
from kvcustody.audit.store.database.engine import WRITE, open_store
from kvcustody.audit.store.schema.retention import cosignatures
from kvcustody.audit.store.schema.trees import signed_checkpoints
from kvcustody.audit.tlog.signed_note import KeyKind, NoteError, parse_note
from kvcustody.audit.tlog.signing_key import SigningKey
from kvcustody.audit.tlog.witness.status import UNWITNESSED
from kvcustody.audit.verify.documents import report_rules
from kvcustody.audit.verify.documents.document_check import MadeAgain, is_unchecked
from kvcustody.audit.verify.documents.report_rules import read_report
from kvcustody.console.render.document_forms import render_all
from kvcustody.console.report.command import compare_files
from kvcustody.migrations.upgrade import upgrade
from standins.audit.documents import UNSIGNED, report_again, signed_again, verify_report
from standins.audit.ledgers import report_ledger, tiered_ledger

pytestmark = pytest.mark.system

EARLIER_STATE = report_rules._earlier_state
WITNESS = SigningKey.generate("witness.example", KeyKind.COSIGNATURE)


class Signed:
    """A ledger, its export, and a signed report of it."""

    def __init__(self, engine: Engine, folder: Path, key: SigningKey, *, is_rendered: bool = False) -> None:
        self.engine, self.folder, self.vkey = engine, folder / "export", str(key.verifier)
        write_export(self.folder, LedgerSource(engine), made_at_us=1)
        with engine.connect() as connection:
            size = newest_checkpoint(connection)
            self.asked = ReportParameters("cc-fdp-rip", size, *period(connection, size, None, None), sample=4)
            self.report = report_ledger.signed(connection, build_report(connection, self.asked))
        self.data = self.report.to_bytes()
        self.body: dict[str, Any] = json.loads(self.data)
        self.files = render_all(self.report) if is_rendered else {}
        self.made = report_again(self.folder, self.report, [self.vkey])

    def resigned(self, body: dict[str, Any]) -> bytes:
        """As somebody signs who has the key of reports."""
        with self.engine.connect() as connection:
            return report_ledger.signed(connection, report_of(body).replace(signature=None)).to_bytes()

    def again(self, body: dict[str, Any]) -> MadeAgain:
        """What an auditor makes of the export for these parameters."""
        if body["asked"] == self.body["asked"]:
            return self.made
        return report_again(self.folder, report_of(body), [self.vkey])


@pytest.fixture(scope="module")
def signed(world_class: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Signed]:
    folder = tmp_path_factory.mktemp("forged")
    engine = open_store(folder / "ledger.db")
    upgrade(engine)
    yield Signed(engine, folder, report_ledger.fill(engine, world_class, folder), is_rendered=True)
    engine.dispose()


@pytest.fixture(scope="module")
def witnessed(world_class: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Signed]:
    """The same of a ledger that a witness has signed, before the report's checkpoint was."""
    folder = tmp_path_factory.mktemp("witnessed")
    engine = open_store(folder / "ledger.db")
    upgrade(engine)
    key = report_ledger.fill(engine, world_class, folder)
    with engine.connect().execution_options(**WRITE) as connection, connection.begin():
        size = newest_checkpoint(connection)
        note = connection.execute(select(signed_checkpoints).where(signed_checkpoints.c.size == size)).one()
        seconds = note.at_us // 1_000_000 - 1
        line = WITNESS.sign(parse_note(bytes(note.note)).text, at_seconds=seconds).line().encode()
        row = {"witness": WITNESS.name, "size": size, "line": line, "at_us": seconds * 1_000_000}
        connection.execute(insert(cosignatures).values(row))
    yield Signed(engine, folder, key)
    engine.dispose()


@pytest.mark.parametrize("framework", ["cc-fdp-rip", "soc2"])
def test_a_report_of_a_witnessed_ledger_is_sound_against_its_export(witnessed: Signed, framework: str) -> None:
    """Statuses and limitations follow from the witness too. Control: made without it, they differ."""
    with witnessed.engine.connect() as connection:
        asked = witnessed.asked._replace(framework=framework)
        report = report_ledger.signed(connection, build_report(connection, asked))
    assert report["boundary"].witnessed.witnesses == (WITNESS.name,)
    again = report_again(witnessed.folder, report, [witnessed.vkey])
    found = verify_report(report.to_bytes(), [witnessed.vkey], source=again)
    assert found.ok, found.problems
    assert is_unchecked("boundary.witnessed.size", found.unchecked), "who witnessed is still in no leaf"
    alone = report.replace(boundary=report["boundary"]._replace(witnessed=Witnessed((), 0, None, UNWITNESSED)))
    blind = report_again(witnessed.folder, alone, [witnessed.vkey])
    blind = blind._replace(facts={**blind.facts, "boundary": report.document().facts["boundary"]})
    assert not verify_report(report.to_bytes(), [witnessed.vkey], source=blind).ok


def test_a_report_is_made_again_from_an_export_and_from_the_ledger_field_by_field(signed: Signed) -> None:
    check = verify_report(signed.data, [signed.vkey], source=signed.made)
    assert check.ok, check.problems
    assert check.signed_by == str(report_ledger.REPORT_KEY.verifier)
    assert {each.path.split(".")[0] for each in check.unchecked} == {
        *("boundary", "asked", "version", "window", "responses")
    }
    with signed.engine.connect() as connection:
        whole = report_again(connection, signed.report, [signed.vkey])
    check = verify_report(signed.data, [signed.vkey], source=whole)
    by_people = ["responses", "asked.preparer", "asked.organisation", "asked.threshold_ppm", "asked.zone"]
    assert check.ok and {each.path for each in check.unchecked} == {"version", "boundary.orders", *by_people}


def test_without_the_ledger_it_says_what_it_did_not_check(signed: Signed) -> None:
    found = verify_report(signed.data, [signed.vkey])
    assert found.ok
    listed = {each.path for each in found.unchecked}
    assert {"activity", "coverage", "total", "boundary", "population", "losses"} <= listed
    bare = signed.report.replace(signature=None).to_bytes()
    assert verify_report(bare, [signed.vkey]).problems == (UNSIGNED,)


def test_decisions_limitations_a_witness_and_totals_that_were_made_up(signed: Signed) -> None:
    """The four that were sound before, each by itself: by who has no key, and by who has the report's."""
    for name, change in {
        "decisions": lambda body: body["decided"]["counts"][0].update(requests=999_999),
        "limitations": lambda body: body.update(limitations=["None."]),
        "a witness": lambda body: body["boundary"]["witnessed"].update(witnesses=["witness.example"], size=1, age_us=5),
        "totals": lambda body: body["total"].update(due=2 * body["total"]["due"]),
    }.items():
        body = json.loads(signed.data)
        change(body)  # type: ignore[no-untyped-call]
        forged = report_of(body).to_bytes()
        assert not verify_report(forged, [signed.vkey]).ok, name
        found = verify_report(signed.resigned(body), [signed.vkey], source=signed.made)
        assert not found.ok or name == "a witness", name
        assert is_unchecked("boundary.witnessed.size", found.unchecked)


def without_an_opening(folder: Path, size: int) -> Any:
    """As where the salt of a leaf of the root log was destroyed."""
    lines = (folder / OPENINGS).read_bytes().splitlines(keepends=True)
    closed = folder.parent / "closed"
    closed.mkdir(exist_ok=True)
    first = root_line(bytes.fromhex(orjson.loads(lines[0])["leaf"]), None)
    (closed / OPENINGS).write_bytes(b"".join([first, *lines[1:]]))
    return EARLIER_STATE(closed, size)


def test_an_export_shows_which_checkpoint_was_extended(
    world_class: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a ledger with tiers and two checkpoints: every part but what no leaf says; another path is found."""
    engine = open_store(tmp_path / "ledger.db")
    upgrade(engine)
    sealed = tiered_ledger.fill(engine, world_class, tmp_path)
    write_export(tmp_path / "export", LedgerSource(engine), made_at_us=1)
    vkeys = [str(tiered_ledger.NEW.verifier)]
    with engine.connect() as connection:
        asked = ReportParameters("cc-fdp-rip", sealed.last, *period(connection, sealed.last, None, None))
        report = build_report(connection, asked._replace(extends=sealed.first))
    engine.dispose()
    assert report["boundary"].consistency and any(row.due for row in report["tiers"].rows)
    remade = report_again(tmp_path / "export", report, vkeys)
    assert verify_report(report.to_bytes(), vkeys, source=remade).ok
    assert {each.path for each in remade.unchecked} == {
        *("boundary.witnessed", "boundary.checkpoint.at_us", "boundary.checkpoint.signed_us", "window"),
        *("responses", "asked.preparer", "asked.organisation", "asked.threshold_ppm", "asked.zone"),
    }
    assert report["changes"], "void: nothing came later"
    for forged in (
        (),
        (*report["changes"][:-1], report["changes"][-1]._replace(before=report["changes"][-1].before + 1)),
    ):
        check = verify_report(report.replace(changes=forged).to_bytes(), vkeys, source=remade)
        assert any("changes" in problem for problem in check.problems)
    first = report["changes"][0]
    for other, said in (
        (
            report.replace(changes=(first._replace(after=first.after + 1),)),
            "not one to the report's own figure",
        ),
        (report.replace(asked=report.asked._replace(extends=None)), "extends no earlier checkpoint"),
    ):
        assert any(said in problem for problem in verify_report(other.to_bytes(), vkeys).problems)
    assert not any("own figure" in problem for problem in verify_report(report.to_bytes(), vkeys).problems)
    monkeypatch.setattr(report_rules, "_earlier_state", without_an_opening)
    closed = report_again(tmp_path / "export", report, vkeys)
    assert (
        report_rules.EARLIER_EDITION in closed.unchecked and verify_report(report.to_bytes(), vkeys, source=closed).ok
    )
    monkeypatch.undo()
    path = report["boundary"].consistency
    for extends, forged in (
        (sealed.first, path[:-1]),
        (sealed.first, path[::-1]),
        (sealed.first - 1, path),
        (10**6, path),
    ):
        other = report.replace(
            asked=report.asked._replace(extends=extends),
            boundary=report["boundary"]._replace(extends=extends, consistency=forged),
        )
        again = report_again(tmp_path / "export", other, vkeys)
        check = verify_report(other.to_bytes(), vkeys, source=again)
        assert any("boundary.consistency" in problem for problem in check.problems), extends


def test_the_file_alone_agrees_with_itself_on_tiers_workers_and_ages(world_class: Any, tmp_path: Path) -> None:
    """A figure that another section has, changed in one of them: found without any ledger."""
    engine = open_store(tmp_path / "ledger.db")
    upgrade(engine)
    sealed = tiered_ledger.fill(engine, world_class, tmp_path)
    with engine.connect() as connection:
        asked = ReportParameters("cc-fdp-rip", sealed.last, *period(connection, sealed.last, None, None))
        report = build_report(connection, asked)
    engine.dispose()
    body = json.loads(report.to_bytes())
    changes: dict[str, Any] = {
        "strata of copies": lambda made: made["tiers"]["rows"][0].update(
            due=made["tiers"]["rows"][0]["due"] - 1, covered=made["tiers"]["rows"][0]["covered"] - 1
        ),
        "identities of copies": lambda made: made["tiers"]["balances"][0].update(left=7, right=7),
        "other tenants": lambda made: made["board"].update(tenants_due=1),
        "other erasures": lambda made: made["board"].update(erasures_on_time=99),
        "more workers": lambda made: made["board"].update(workers_scanned=3),
        "fewer workers": lambda made: made["board"].update(workers_scanned=0, workers=3) or made.update(unscanned=[]),
        "last period of the trend": lambda made: made["board"]["trend"][-1].update(covered=1),
        "custodies of the population": lambda made: made["storage"][0].update(
            overdue=made["storage"][0]["overdue"] + 1
        ),
        "what ended custody": lambda made: made["storage"][0].update(by_eviction=99),
        "the time from its leaf": lambda made: made["window"].update(longest_us=5),
        "ends later": lambda made: made["window"].update(
            longest_us=made["window"]["longest_us"] + 10**15, signed_us=made["window"]["signed_us"] + 10**15
        ),
    }
    vkeys = [str(tiered_ledger.NEW.verifier), str(tiered_ledger.OLD.verifier)]
    assert verify_report(report.to_bytes(), vkeys).problems == (UNSIGNED,), "control"
    for said, change in changes.items():
        forged = json.loads(json.dumps(body))
        change(forged)
        found = verify_report(report_of(forged).to_bytes(), vkeys)
        assert any(said in problem for problem in found.problems), (said, found.problems)


def test_a_file_beside_the_report_that_says_something_else_is_found(signed: Signed, tmp_path: Path) -> None:
    files = signed.files
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    names = ("oscal.json", "report.html", "report.json", "report.pdf")
    assert compare_files(tmp_path, signed.report.document()) == (names, [], ())
    covered = str(signed.report["total"].covered).encode()
    (tmp_path / "report.html").write_bytes(files["report.html"].replace(covered, b"1" + covered))
    (tmp_path / "oscal.json").write_bytes(files["oscal.json"].replace(covered, b"1" + covered))
    (tmp_path / "report.pdf").write_bytes(files["report.pdf"].replace(b"endobj", b"endobi", 1))
    wrong = compare_files(tmp_path, signed.report.document()).problems
    assert {text.split("`")[1] for text in wrong} == {"oscal.json", "report.html", "report.pdf"}
    body, _, makers = files["report.pdf"].rstrip().rpartition(b"\n")
    (tmp_path / "report.pdf").write_bytes(body + b"\n" + makers.replace(b"Pango 1", b"Pango 9") + b"\n")
    found = compare_files(tmp_path, signed.report.document())
    assert [each.path for each in found.unchecked] == ["report.pdf"] and "Pango 9" in found.unchecked[0].why
    assert "report.pdf" not in (*found.compared, *found.problems), "nothing is said of it"


def test_one_digest_and_signature_in_every_format(signed: Signed) -> None:
    files = signed.files
    assert signed.report.signature is not None
    for name in ("report.html", "oscal.json"):
        text = files[name].decode().replace("&#43;", "+").replace("&#x2B;", "+")
        assert signed.report.digest() in text and signed.report.signature.data in text, name
    pypdf = pytest.importorskip("pypdf")
    import io

    pages = pypdf.PdfReader(io.BytesIO(files["report.pdf"])).pages
    text = "".join("".join(page.extract_text().split()) for page in pages)
    assert signed.report.digest() in text and signed.report.signature.data in text


def test_a_key_that_the_ledger_does_not_name_signs_nothing(signed: Signed) -> None:
    other = SigningKey.generate(f"{report_ledger.ORIGIN}/report")
    document = signed.report.document()
    with signed.engine.connect() as connection, pytest.raises(NoteError, match="does not sign reports"):
        sign_document(connection, document, other)
    forged = signed_again(document, document.facts, other)
    found = verify_report(forged.to_bytes(), [signed.vkey], source=signed.made)
    assert any("no leaf of the ledger names" in problem for problem in found.problems)
    assert read_report(forged.to_bytes()).document() == forged, "control: it is a report all the same"
