"""Reports that somebody changed: without the key every change is found; with it, found or listed as not checked."""

from __future__ import annotations

import json
import random
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
from kvcustody.audit.reports.model import Report, ReportParameters
from kvcustody.audit.reports.signing.read_report import report_of
from kvcustody.audit.reports.system_boundary import Witnessed
from kvcustody.audit.store.database.engine import WRITE, open_store
from kvcustody.audit.store.schema.retention import cosignatures
from kvcustody.audit.store.schema.trees import signed_checkpoints
from kvcustody.audit.tlog.signed_note import KeyKind, parse_note
from kvcustody.audit.tlog.signing_key import SigningKey
from kvcustody.audit.tlog.witness.status import UNWITNESSED
from kvcustody.audit.verify.report import figures_again
from kvcustody.audit.verify.report import verify_report as verifying
from kvcustody.audit.verify.report.figures_again import MadeAgain, again_from_export, again_from_ledger
from kvcustody.audit.verify.report.verify_report import is_unchecked, open_report, verify_report
from kvcustody.console.report.check_files import differing_files
from kvcustody.console.report.document import render_all
from kvcustody.errors import CustodyError, LedgerError
from kvcustody.migrations.upgrade import upgrade
from standins.audit.ledgers import report_ledger, tiered_ledger

pytestmark = pytest.mark.system

EARLIER_STATE = figures_again._earlier_state
WITNESS = SigningKey.generate("witness.example", KeyKind.COSIGNATURE)
Path_ = tuple[str | int, ...]


class Signed:
    """A ledger, its export, and a signed report of it."""

    def __init__(self, engine: Engine, folder: Path, key: SigningKey) -> None:
        self.engine, self.folder, self.vkey = engine, folder / "export", str(key.verifier)
        write_export(self.folder, LedgerSource(engine), made_at_us=1)
        with engine.connect() as connection:
            size = newest_checkpoint(connection)
            self.asked = ReportParameters("cc-fdp-rip", size, *period(connection, size, None, None), sample=4)
            self.report = report_ledger.signed(connection, build_report(connection, self.asked))
        self.data = self.report.to_bytes()
        self.body: dict[str, Any] = json.loads(self.data)
        self.made = again_from_export(self.folder, self.report, [self.vkey])

    def resigned(self, body: dict[str, Any]) -> bytes:
        """As somebody signs who has the key of reports."""
        with self.engine.connect() as connection:
            return report_ledger.signed(connection, report_of(body)._replace(signature=None)).to_bytes()

    def again(self, body: dict[str, Any]) -> MadeAgain:
        """What an auditor makes of the export for these parameters."""
        if body["asked"] == self.body["asked"]:
            return self.made
        return again_from_export(self.folder, report_of(body), [self.vkey])


@pytest.fixture(scope="module")
def signed(world_class: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Signed]:
    folder = tmp_path_factory.mktemp("forged")
    engine = open_store(folder / "ledger.db")
    upgrade(engine)
    yield Signed(engine, folder, report_ledger.fill(engine, world_class, folder))
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
def test_a_report_of_a_witnessed_ledger_is_sound_against_its_export(
    witnessed: Signed, framework: str
) -> None:
    """Statuses and limitations follow from the witness too. Control: made without it, they differ."""
    with witnessed.engine.connect() as connection:
        asked = witnessed.asked._replace(framework=framework)
        report = report_ledger.signed(connection, build_report(connection, asked))
    assert report.boundary.witnessed.witnesses == (WITNESS.name,)
    again = again_from_export(witnessed.folder, report, [witnessed.vkey])
    found = verify_report(report.to_bytes(), [witnessed.vkey], again=again)
    assert found.ok, found.problems
    assert is_unchecked("boundary.witnessed.size", found.unchecked), "who witnessed is still in no leaf"
    alone = report._replace(boundary=report.boundary._replace(witnessed=Witnessed((), 0, None, UNWITNESSED)))
    blind = again_from_export(witnessed.folder, alone, [witnessed.vkey])
    blind = blind._replace(report=blind.report._replace(boundary=report.boundary))
    assert not verify_report(report.to_bytes(), [witnessed.vkey], again=blind).ok


def test_a_report_is_made_again_from_an_export_and_from_the_ledger_field_by_field(signed: Signed) -> None:
    found = verify_report(signed.data, [signed.vkey], again=signed.made)
    assert found.ok, found.problems
    assert found.signed_by == str(report_ledger.REPORT_KEY.verifier)
    assert {each.path.split(".")[0] for each in found.unchecked} == {
        *("boundary", "asked", "version", "window", "responses")
    }
    with signed.engine.connect() as connection:
        whole = again_from_ledger(connection, signed.report)
    found = verify_report(signed.data, [signed.vkey], again=whole)
    by_people = ["responses", "asked.preparer", "asked.threshold_ppm"]
    assert found.ok and [each.path for each in found.unchecked] == ["version", "boundary.orders", *by_people]


def test_without_the_ledger_it_says_what_it_did_not_check(signed: Signed) -> None:
    found = verify_report(signed.data, [signed.vkey])
    assert found.ok
    listed = {each.path for each in found.unchecked}
    assert {"activity", "coverage", "total", "boundary", "population", "losses"} <= listed
    bare = signed.report._replace(signature=None).to_bytes()
    assert verify_report(bare, [signed.vkey]).problems == (verifying.UNSIGNED,)


def test_decisions_limitations_a_witness_and_totals_that_were_made_up(signed: Signed) -> None:
    """The four that were sound before, each by itself: by who has no key, and by who has the report's."""
    for name, change in {
        "decisions": lambda body: body["decided"]["counts"][0].update(requests=999_999),
        "limitations": lambda body: body.update(limitations=["None."]),
        "a witness": lambda body: body["boundary"]["witnessed"].update(
            witnesses=["witness.example"], size=1, age_us=5
        ),
        "totals": lambda body: body["total"].update(due=2 * body["total"]["due"]),
    }.items():
        body = json.loads(signed.data)
        change(body)  # type: ignore[no-untyped-call]
        forged = report_of(body).to_bytes()
        assert not verify_report(forged, [signed.vkey]).ok, name
        found = verify_report(signed.resigned(body), [signed.vkey], again=signed.made)
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
    assert report.boundary.consistency and any(row.due for row in report.tiers.rows)
    made = again_from_export(tmp_path / "export", report, vkeys)
    assert verify_report(report.to_bytes(), vkeys, again=made).ok
    assert {each.path for each in made.unchecked} == {
        *("boundary.witnessed", "boundary.checkpoint.at_us", "boundary.checkpoint.signed_us", "window"),
        *("responses", "asked.preparer", "asked.threshold_ppm"),
    }
    assert report.changes, "void: nothing came later"
    for forged in (
        (),
        (*report.changes[:-1], report.changes[-1]._replace(before=report.changes[-1].before + 1)),
    ):
        found = verify_report(report._replace(changes=forged).to_bytes(), vkeys, again=made)
        assert any("changes" in problem for problem in found.problems)
    monkeypatch.setattr(figures_again, "_earlier_state", without_an_opening)
    closed = again_from_export(tmp_path / "export", report, vkeys)
    assert (
        figures_again.EARLIER_EDITION in closed.unchecked
        and verify_report(report.to_bytes(), vkeys, again=closed).ok
    )
    monkeypatch.undo()
    path = report.boundary.consistency
    for extends, forged in (
        (sealed.first, path[:-1]),
        (sealed.first, path[::-1]),
        (sealed.first - 1, path),
        (10**6, path),
    ):
        other = report._replace(
            asked=report.asked._replace(extends=extends),
            boundary=report.boundary._replace(extends=extends, consistency=forged),
        )
        again = again_from_export(tmp_path / "export", other, vkeys)
        found = verify_report(other.to_bytes(), vkeys, again=again)
        assert any("boundary.consistency" in problem for problem in found.problems), extends


def test_the_file_alone_agrees_with_itself_on_tiers_workers_and_ages(
    world_class: Any, tmp_path: Path
) -> None:
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
        "other tenants": lambda made: made["board"].update(tenants_covered=1),
        "other erasures": lambda made: made["board"].update(erasures_on_time=99),
        "more workers": lambda made: made["board"].update(workers_covered=3),
        "fewer workers": lambda made: (
            made["board"].update(workers_covered=0, workers=3) or made.update(unscanned=[])
        ),
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
    assert verify_report(report.to_bytes(), vkeys).problems == (verifying.UNSIGNED,), "control"
    for said, change in changes.items():
        forged = json.loads(json.dumps(body))
        change(forged)
        found = verify_report(report_of(forged).to_bytes(), vkeys)
        assert any(said in problem for problem in found.problems), (said, found.problems)


def places(value: Any, at: Path_ = ()) -> Iterator[Path_]:
    """Every field of the JSON, and every list and object."""
    yield at
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, each in items:
        yield from places(each, (*at, name))


def written(at: Path_) -> str:
    """A path as the verifier writes it."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in at).removeprefix(".")


def changed(value: Any, chance: random.Random) -> Any:
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return chance.choice((value + 1, 2 * value + 7, max(0, value - 1) if value else 3, 999_999))
    if isinstance(value, str):
        return chance.choice((value + "x", "None.", value[:-1] or "y"))
    if isinstance(value, list):
        if not value:
            return ["made up"]
        return chance.choice((value[1:], [*value, value[-1]], []))
    if value is None:
        return chance.choice((1, "made up"))
    return dict(list(value.items())[1:])


def forge(body: dict[str, Any], chance: random.Random) -> tuple[dict[str, Any], str]:
    """One field of a section that chance takes, and what it was."""
    made = json.loads(json.dumps(body))
    section = chance.choice(sorted(made.keys() - {"signature", "schema"}))
    at = (section, *chance.choice(list(places(made[section]))))
    holder = made
    for step in at[:-1]:
        holder = holder[step]  # type: ignore[index]
    holder[at[-1]] = changed(holder[at[-1]], chance)  # type: ignore[index]
    return made, written(at)


def survives(signed: Signed, body: dict[str, Any], path: str) -> bool:
    """Whether a forgery by the holder of the report's key is neither found nor listed."""
    try:
        data = signed.resigned(body)
        again = signed.again(body)
    except (CustodyError, LookupError, TypeError, ValueError):
        return False  # it is no report of the model, or none can be made of its parameters
    if data == signed.data:
        return False  # nothing was changed
    found = verify_report(data, [signed.vkey], again=again)
    return found.ok and not is_unchecked(path, found.unchecked)


@pytest.mark.parametrize("count", [300, pytest.param(1000, marks=pytest.mark.soak)])
def test_every_forgery_is_found_or_its_field_is_among_those_not_checked(signed: Signed, count: int) -> None:
    survived, unsigned = [], []
    for seed in range(count):
        body, path = forge(signed.body, random.Random(seed))
        if body == signed.body:
            continue
        try:
            data = json.dumps(body).encode()
            data = report_of(body).to_bytes()
        except LedgerError:
            pass
        if data != signed.data and verify_report(data, [signed.vkey]).ok:
            unsigned.append((seed, path))
        if survives(signed, body, path):
            survived.append((seed, path))
    assert unsigned == [], "whoever has no key"
    assert survived == [], "whoever has the key of reports"


def test_the_control_without_the_comparison_forgeries_survive(
    signed: Signed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifying, "_differences", lambda *_: [])
    survived = [seed for seed in range(60) if survives(signed, *forge(signed.body, random.Random(seed)))]
    assert len(survived) > 5


def test_a_file_beside_the_report_that_says_something_else_is_found(signed: Signed, tmp_path: Path) -> None:
    files = render_all(signed.report)
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    assert differing_files(tmp_path, signed.report) == (
        ("oscal.json", "report.html", "report.json", "report.pdf"),
        [],
    )
    covered = str(signed.report.total.covered).encode()
    (tmp_path / "report.html").write_bytes(files["report.html"].replace(covered, b"1" + covered))
    (tmp_path / "oscal.json").write_bytes(files["oscal.json"].replace(covered, b"1" + covered))
    (tmp_path / "report.pdf").write_bytes(files["report.pdf"][:-9] + b"forged\n%%")
    assert [text.split("`")[1] for text in differing_files(tmp_path, signed.report)[1]] == [
        "oscal.json", "report.html", "report.pdf",
    ] or len(differing_files(tmp_path, signed.report)[1]) == 3  # fmt: skip


def test_one_digest_and_signature_in_every_format(signed: Signed) -> None:
    files = render_all(signed.report)
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
    from kvcustody.audit.reports.signing.report_signature import sign_digest, statement_text
    from kvcustody.audit.tlog.signed_note import NoteError
    from kvcustody.audit.tlog.signing_key import sign_statement

    with signed.engine.connect() as connection, pytest.raises(NoteError, match="does not sign reports"):
        sign_digest(connection, signed.report.digest(), other)
    assert signed.report.signature is not None
    import base64

    made = sign_statement(other, statement_text(other.name, signed.report.digest()))
    forged: Report = signed.report._replace(
        signature=signed.report.signature._replace(
            key=str(other.verifier), key_id=made.key_id.hex(), data=base64.b64encode(made.data).decode()
        )
    )
    found = verify_report(forged.to_bytes(), [signed.vkey], again=signed.made)
    assert any("no leaf of the ledger names" in problem for problem in found.problems)
    assert open_report(forged.to_bytes()) == forged, "control: it is a report all the same"
