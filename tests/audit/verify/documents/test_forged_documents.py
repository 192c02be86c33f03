"""Changed documents: without the key every change is found; with it, found or listed as unchecked."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from sqlalchemy import Engine

from kvcustody.audit.exports.amalgamate import standalone
from kvcustody.audit.exports.export_writer import write_export
from kvcustody.audit.exports.ledger_source import LedgerSource
from kvcustody.audit.reports.build_report import build_report, newest_checkpoint, period
from kvcustody.audit.reports.document import Document, Facts
from kvcustody.audit.reports.erasure.certificate import CERTIFICATE
from kvcustody.audit.reports.model import REPORT, ReportParameters
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.tlog.signing_key import SigningKey
from kvcustody.audit.verify.documents import certificate_rules, verify
from kvcustody.audit.verify.documents.certificate_rules import CertificateRules
from kvcustody.audit.verify.documents.document_check import DocumentCheck, MadeAgain, is_unchecked
from kvcustody.audit.verify.documents.record_agreement import RECORD
from kvcustody.audit.verify.documents.verify import make_again
from kvcustody.governance.processing.record import (
    PROCESSOR,
    ControllerStatement,
    ServedController,
)
from kvcustody.migrations.upgrade import upgrade
from standins.audit.documents import (
    report_again,
    signed_again,
    verify_certificate,
    verify_record,
    verify_report,
)
from standins.audit.forgeries import CHANGES, Forgery, forge_any, walk
from standins.audit.ledgers import record_ledger, report_ledger
from standins.audit.ledgers.record_ledger import RecordLedger
from standins.audit.verifiers import ALONE
from standins.erasure.certificate_case import KEY, VKEYS, Case
from standins.erasure.signing import OLGA, orders

pytestmark = pytest.mark.system
SOAK = pytest.param(1000, marks=pytest.mark.soak)
MADE_OF = {"asked": REPORT, **dict.fromkeys(("role", "since_us", "until_us", "checkpoint"), RECORD)}
MADE_OF |= dict.fromkeys((*ControllerStatement._fields, "controllers"), RECORD)


class Forgeable(NamedTuple):
    """A sound document, the key that signed it, and how its reader checks one, with what it may be compared with."""

    document: Document
    key: SigningKey
    vkey: str
    check: Callable[[bytes, Facts], DocumentCheck]

    def unsigned(self, forgery: Forgery) -> DocumentCheck:
        """As whoever has no key makes it: under the signature of the document that it was."""
        return self.check(self.document._replace(facts=forgery.facts).to_bytes(), forgery.facts)

    def signed(self, forgery: Forgery) -> DocumentCheck:
        """As somebody makes it who has the key."""
        return self.check(signed_again(self.document, forgery.facts, self.key).to_bytes(), forgery.facts)

    def survivors(self, forgeries: Iterable[Forgery]) -> list[tuple[str, str]]:
        """Forgeries by the holder of the key that are neither found nor listed."""
        every = (each for each in forgeries if each.facts != self.document.facts)
        return [
            (each.how, each.path)
            for each in every
            if (check := self.signed(each)).ok and not is_unchecked(each.path, check.unchecked)
        ]


def of_reports(world_class: Any, folder: Path) -> Iterator[Forgeable]:
    """A report, which is compared with an export."""
    engine = open_store(folder / "ledger.db")
    upgrade(engine)
    vkeys = [str(report_ledger.fill(engine, world_class, folder).verifier)]
    write_export(folder / "export", LedgerSource(engine), made_at_us=1)
    with engine.connect() as connection:
        size = newest_checkpoint(connection)
        asked = ReportParameters("cc-fdp-rip", size, *period(connection, size, None, None), sample=4)
        report = report_ledger.signed(connection, build_report(connection, asked))
    made = report_again(folder / "export", report, vkeys)
    document = report.document()

    def check(data: bytes, facts: Facts) -> DocumentCheck:
        is_same = facts.get("asked") == document.facts["asked"]
        return verify_report(data, vkeys, source=made if is_same else folder / "export")

    yield Forgeable(document, report_ledger.REPORT_KEY, vkeys[0], check)
    engine.dispose()


def of_certificates(folder: Path, *, lost: bool = False, exported: bool = False) -> Iterator[Forgeable]:
    """A certificate, complete or partial; `exported`: it is compared with an export."""
    engine = open_store(folder / "ledger.db")
    upgrade(engine)
    case = Case(engine, folder, lost=lost)
    remade: MadeAgain | None = None
    if exported:
        write_export(folder / "export", LedgerSource(engine), made_at_us=1)
        remade = make_again(case.data, VKEYS, [CertificateRules()], folder / "export")

    def check(data: bytes, facts: Facts) -> DocumentCheck:
        stated = case.document.facts
        is_same = all(facts.get(name) == stated[name] for name in ("erasure", "issued_us", "request"))
        source = None if remade is None else remade if is_same else folder / "export"
        return verify_certificate(data, VKEYS, case.opening, source=source)

    yield Forgeable(case.document, KEY, VKEYS[0], check)
    engine.dispose()


def of_records(folder: Path, source: str) -> Iterator[Forgeable]:
    """A record of processing, which is compared with the ledger or with an export."""
    engine = open_store(folder / "ledger.db")
    upgrade(engine)
    ledger: RecordLedger = record_ledger.fill(engine, folder)
    document = ledger.document(30, 45, role=PROCESSOR, controllers=(ServedController("holder", "Example AG"),))

    def check(data: bytes, facts: Facts) -> DocumentCheck:
        if source == "export":
            return verify_record(data, [str(ledger.key.verifier)], source=ledger.exported())
        return ledger.check(data)

    yield Forgeable(document, ledger.report_key, str(ledger.key.verifier), check)
    engine.dispose()


KINDS = {
    "report": of_reports,
    "certificate": lambda _, folder: of_certificates(folder),
    "certificate by an export": lambda _, folder: of_certificates(folder, exported=True),
    "partial certificate": lambda _, folder: of_certificates(folder, lost=True),
    "record by the ledger": lambda _, folder: of_records(folder, "ledger"),
    "record by an export": lambda _, folder: of_records(folder, "export"),
}


@pytest.fixture(scope="module", params=KINDS)
def forgeable(
    request: pytest.FixtureRequest, world_class: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Forgeable]:
    yield from KINDS[request.param](world_class, tmp_path_factory.mktemp("forged"))


def test_the_control_the_document_itself_is_sound(forgeable: Forgeable) -> None:
    check = forgeable.check(forgeable.document.to_bytes(), forgeable.document.facts)
    assert check.ok, check.problems
    assert check.signed_by == str(forgeable.key.verifier)
    same = Forgery("none", "", dict(forgeable.document.facts))
    assert forgeable.signed(same).ok, "signed anew it is as it was"


def test_whoever_has_no_key_is_found_at_every_place(forgeable: Forgeable) -> None:
    every = [each for each in walk(forgeable.document.facts) if each.facts != forgeable.document.facts]
    assert len(every) > 150 and {each.how for each in every} == {*CHANGES}
    assert [(each.how, each.path) for each in every if forgeable.unsigned(each).ok] == []


def test_whoever_has_the_key_is_found_at_every_place_or_it_is_listed(forgeable: Forgeable) -> None:
    assert forgeable.survivors(walk(forgeable.document.facts)) == []


@pytest.mark.parametrize("count", [300, SOAK])
def test_every_forgery_is_found_or_its_field_is_among_those_not_checked(forgeable: Forgeable, count: int) -> None:
    if forgeable.document.kind == RECORD:
        count //= 10  # each is made again
    every = [forge_any(forgeable.document.facts, random.Random(seed)) for seed in range(count)]
    every = [each for each in every if each.facts != forgeable.document.facts]
    assert [each.path for each in every if forgeable.unsigned(each).ok] == [], "whoever has no key"
    assert forgeable.survivors(every) == [], "whoever has the key"


def test_the_control_without_the_comparison_forgeries_survive(
    forgeable: Forgeable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "_differences", lambda *_: [])
    monkeypatch.setattr(certificate_rules, "certificate_disagreements", lambda *_: [])
    facts = forgeable.document.facts
    survived = forgeable.survivors(forge_any(facts, random.Random(seed)) for seed in range(120))
    assert len(survived) > 5


def found_alone(forgeable: Forgeable, data: bytes) -> tuple[str, ...]:
    """What the stand-alone verifier finds, by the log's key."""
    try:
        problems: tuple[str, ...] = ALONE.check_file_alone(data, [ALONE.parse_vkey(forgeable.vkey)]).problems
    except ALONE.LedgerError as problem:
        return (problem.message,)
    return problems


def test_the_stand_alone_verifier_finds_whoever_has_no_key_and_nothing_that_is_sound(
    forgeable: Forgeable,
) -> None:
    """What it finds, `verify` finds too; the reverse is what it says that it does not show."""
    document = forgeable.document
    assert found_alone(forgeable, document.to_bytes()) == (), "control"
    every = [each for each in walk(document.facts, seed=1) if each.facts != document.facts]
    assert [
        each.path for each in every if not found_alone(forgeable, document._replace(facts=each.facts).to_bytes())
    ] == []
    signed = [(each, signed_again(document, each.facts, forgeable.key).to_bytes()) for each in every]
    by_itself = [(each, data) for each, data in signed if found_alone(forgeable, data)]
    assert len(by_itself) > 20, "it finds what the file says twice, whoever signed"
    if document.kind != RECORD:
        assert [each.path for each, data in by_itself if forgeable.check(data, each.facts).ok] == []


def test_the_stand_alone_program_checks_a_document(forgeable: Forgeable, tmp_path: Path) -> None:
    program, file = tmp_path / "verify_kvcustody.py", tmp_path / "document.json"
    program.write_bytes(standalone())
    file.write_bytes(forgeable.document.to_bytes())
    command = [sys.executable, "-I", str(program), str(file), "--key", forgeable.vkey]
    found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (found.returncode, found.stdout.split(":")[0]) == (0, "SOUND"), found.stdout
    assert forgeable.document.digest() in found.stdout and "Not shown:" in found.stdout
    file.write_bytes(forgeable.document.to_bytes().replace(b'"signature":{', b'"signature" :{'))
    found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (found.returncode, found.stdout.split(":")[0]) == (1, "NOT SOUND"), found.stdout


def test_a_statement_is_theirs_who_state_it(tmp_path: Path) -> None:
    """The control of records: what somebody states is listed, and a false statement passes under their key."""
    for forgeable in of_records(tmp_path, "ledger"):
        for name in ("purposes", "controller"):
            false = Forgery("edit", name, dict(forgeable.document.facts) | {name: "made up"})
            check = forgeable.signed(false)
            assert check.ok and is_unchecked(name, check.unchecked)


def test_what_is_not_shown_is_said_and_shrinks_with_the_opening(store: Engine, tmp_path: Path) -> None:
    case = Case(store, tmp_path)
    assert case.document.kind == CERTIFICATE
    bare = {one.path for one in verify_certificate(case.data, VKEYS).unchecked}
    opened = {one.path for one in verify_certificate(case.data, VKEYS, case.opening).unchecked}
    assert bare - opened == {"request.commitment"}
    assert opened == {"issued_us", "workers", "population", "monitored", "holds", "leaves", "request"}
    ordered = {one.path for one in verify_certificate(case.data, VKEYS, case.opening, orders(OLGA)).unchecked}
    assert opened - ordered == {"request"}
