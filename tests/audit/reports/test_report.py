"""Reports: the same bytes on both databases, an auditor's checklist from files, wording, scope."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import coverage_oracle as oracle
import pytest
import structlog
from oscal_bindings.v1.models import AssessmentResultsDocument
from pydantic import ValidationError
from sqlalchemy import Engine

from kvcustody.audit.evidence.coverage import recount_process as recounting
from kvcustody.audit.evidence.processes.open_processes import open_processes
from kvcustody.audit.exports.export_writer import write_export
from kvcustody.audit.exports.leaves_of_export import leaves_in_export
from kvcustody.audit.exports.ledger_source import LedgerSource
from kvcustody.audit.keep.sqlite_to_postgres import move_ledger
from kvcustody.audit.kinds import DECLARED, SILENCE
from kvcustody.audit.leaf.batch import read_leaves
from kvcustody.audit.reports import section
from kvcustody.audit.reports.build_report import build_report, newest_checkpoint, period
from kvcustody.audit.reports.framework import NAMES, load_framework, refused_words
from kvcustody.audit.reports.model import Report
from kvcustody.audit.reports.parameters import ReportParameters
from kvcustody.audit.reports.sampling.population import VERDICTS
from kvcustody.audit.store.database.engine import WRITE, open_store
from kvcustody.audit.tlog.proofs import ProofError
from kvcustody.audit.verify.verify_export import verify_export
from kvcustody.audit.write.append_leaves import Appender
from kvcustody.audit.write.committer import closing_committer
from kvcustody.audit.write.crash_recovery import Closing, close_process
from kvcustody.clock import SystemClock
from kvcustody.console.render.document_forms import render, render_all
from kvcustody.errors import ConfigError
from kvcustody.migrations.upgrade import upgrade
from standins.audit import falsified
from standins.audit.documents import verify_report
from standins.audit.ledgers import report_ledger
from standins.console.read_page import Chart, Facts, Paragraph, Table, page_of, read_page, strings_of


class Sealed:
    """A ledger that was sealed once, its public key, and the report that was asked of it."""

    def __init__(self, engine: Engine, folder: Path, key: Any) -> None:
        self.engine, self.folder, self.key = engine, folder, key
        self.vkey = str(key.verifier)

    def asked(self, **changes: Any) -> ReportParameters:
        with self.engine.connect() as connection:
            checkpoint = changes.pop("checkpoint", None) or newest_checkpoint(connection)
            bounds = period(connection, checkpoint, None, None)
        return ReportParameters("cc-fdp-rip", checkpoint, *bounds)._replace(**changes)

    def report(self, **changes: Any) -> Report:
        with self.engine.connect() as connection:
            return report_ledger.signed(connection, build_report(connection, self.asked(**changes)))


@pytest.fixture(scope="module")
def sealed(world_class: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sealed]:
    folder = tmp_path_factory.mktemp("sealed")
    engine = open_store(folder / "ledger.db")
    upgrade(engine)
    yield Sealed(engine, folder, report_ledger.fill(engine, world_class, folder))
    engine.dispose()


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on, recounts are made in a process of their own, and in this one never."""

    def only() -> None:
        monkeypatch.setattr(recounting, "BESIDE_LEAVES", 0)
        monkeypatch.setattr(recounting, "_answer", None)

    return only


@pytest.fixture(scope="module")
def documents() -> dict[str, bytes]:
    """The PDFs that `printed` made, by framework."""
    return {}


@pytest.fixture(scope="module")
def printed(sealed: Sealed, documents: dict[str, bytes]) -> Callable[[str], list[str]]:
    """The text of each page of the PDF of a framework's report, made once."""
    pypdf = pytest.importorskip("pypdf")

    @cache
    def texts(framework: str) -> list[str]:
        data = documents[framework] = render(sealed.report(framework=framework, sample=8), "pdf")
        pages = [page.extract_text() for page in pypdf.PdfReader(io.BytesIO(data)).pages]
        # A heading has a space behind its number; where the section is cited, that is U+00A0.
        return [" ".join(re.split(r"[ \n]+", text)).strip() for text in pages]

    return texts


@pytest.fixture(scope="module")
def export(sealed: Sealed) -> Path:
    folder = sealed.folder / "export"
    write_export(folder, LedgerSource(sealed.engine), made_at_us=1)
    return folder


@pytest.mark.system("a report of PostgreSQL differs in a byte from that of SQLite")
def test_a_report_repeats_byte_for_byte_and_on_postgresql(
    sealed: Sealed, postgres_store: Engine, beside: Callable[[], None]
) -> None:
    first = render_all(sealed.report(sample=8))
    assert render_all(sealed.report(sample=8)) == first
    move_ledger(sealed.engine, postgres_store)
    beside()
    assert sealed.report(sample=8).to_bytes() == first["report.json"]
    with postgres_store.connect() as connection:
        made = build_report(connection, sealed.asked(sample=8))
        again = render_all(report_ledger.signed(connection, made))
    assert sorted(first) == ["oscal.json", "report.html", "report.json", "report.pdf"]
    assert {name: hashlib.sha256(data).hexdigest() for name, data in again.items()} == {
        name: hashlib.sha256(data).hexdigest() for name, data in first.items()
    }


@pytest.mark.parametrize("trouble", ["another state", "dies", "is not there"])
def test_a_recount_beside_that_fails_is_made_here(
    sealed: Sealed, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    """The answer of a process that died, or read more or less than the tables, is not taken."""
    expected = sealed.report(sample=1).to_bytes()
    monkeypatch.setattr(recounting, "BESIDE_LEAVES", 0)
    if trouble == "another state":
        monkeypatch.setattr(recounting, "_sizes", lambda *_: {"system": 1})
    else:
        monkeypatch.setattr(sys, "executable", "/bin/false" if trouble == "dies" else "/no/python")
    with structlog.testing.capture_logs() as said:
        assert sealed.report(sample=1).to_bytes() == expected
    assert ["in this process" in entry["event"] for entry in said] == [True]


def test_a_report_that_is_not_made_leaves_no_recount_behind(sealed: Sealed, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen

    def noted(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        begun.append(start(*arguments, **options))
        return begun[-1]

    monkeypatch.setattr(recounting, "BESIDE_LEAVES", 0)
    monkeypatch.setattr(subprocess, "Popen", noted)
    monkeypatch.setattr(section, "read_leaf_counts", lambda *_, **__: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        sealed.report()
    assert [process.returncode is not None for process in begun] == [True]


def test_what_is_written_later_changes_nothing(world_class: Any, tmp_path: Path) -> None:
    engine = open_store(tmp_path / "ledger.db")
    upgrade(engine)
    ledger = Sealed(engine, tmp_path, report_ledger.fill(engine, world_class, tmp_path))
    asked = ledger.asked(sample=5)
    with engine.connect() as connection:
        before = build_report(connection, asked).to_bytes()
    with engine.connect().execution_options(**WRITE) as connection, connection.begin():
        more = falsified.leaf_bytes(world_class(9).run(80).events, "f" * 32)
        Appender().append(connection, read_leaves(more))
    report_ledger.sign(engine, ledger.key, tmp_path)
    with engine.connect() as connection:
        assert newest_checkpoint(connection) > asked.checkpoint
        assert build_report(connection, asked).to_bytes() == before
        later = build_report(connection, ledger.asked(extends=asked.checkpoint))
        assert later["population"].custodies > json.loads(before)["population"]["custodies"]
        assert later["boundary"].extends == asked.checkpoint and later["boundary"].consistency
        with pytest.raises(ProofError):
            build_report(connection, asked._replace(checkpoint=asked.checkpoint - 1))
    engine.dispose()


def test_processes_that_did_not_come_back_are_counted_by_who_closed_them(world_class: Any, tmp_path: Path) -> None:
    engine = open_store(tmp_path / "ledger.db")
    upgrade(engine)
    ledger = Sealed(engine, tmp_path, report_ledger.fill(engine, world_class, tmp_path))
    assert not any("without saying so" in line for line in ledger.report()["limitations"]), "control"
    clock = SystemClock()
    with engine.connect() as connection:
        first, second = [one.uuid for one in open_processes(connection)][:2]
    silent = Closing(SILENCE, 8 * 86_400, 7 * 86_400, "plane-1")
    declared = Closing(DECLARED, 90, 0, "olive", "oscar", "burnt down", spill_lost=True)
    with closing_committer(engine, clock) as committer:
        assert close_process(committer, engine, clock, first, silent, "test:closing")
        assert close_process(committer, engine, clock, second, declared, "test:closing")
    report_ledger.sign(engine, ledger.key, tmp_path)
    report = ledger.report()
    [line] = [line for line in report["limitations"] if "without saying so" in line]
    assert "0 closed by a successor, 1 for their silence, 1 declared dead" in line
    ends = {worker.incarnation: worker.end for worker in report["boundary"].workers}
    assert "for a silence of 7 days by plane-1" in ends[first]
    assert "by olive and oscar: burnt down" in ends[second]
    assert b"olive" in report.to_bytes(), "control"
    own = ledger.report(tenant="tenant-0")
    assert b"declared dead by two people" in own.to_bytes()
    assert b"olive" not in own.to_bytes() and b"burnt" not in own.to_bytes(), "no tenant's to read"
    engine.dispose()


def test_the_figures_and_both_sides_of_every_identity(sealed: Sealed) -> None:
    report = sealed.report()
    total = report["total"]
    assert total.due == report["population"].units > 300
    assert min(total.covered, total.late, total.failed + total.missing, total.overdue) > 0
    assert sum(item.due for item in report["timeline"]) == total.due
    assert sum(item.units for item in report["exceptions"]) == total.due - total.covered
    assert report["recount"] is not None and report["recount"].differences == ()
    assert report["recount"].digest == report["population"].digest
    stopped = [item for item in report["population"].balances if "stopped" in item.name or "on shard" in item.name]
    assert len(stopped) == 3 and all(item.holds and item.left > 0 for item in stopped)
    assert [item.outcome for item in report["activity"].erasures] == ["partial"]
    assert report["losses"].gaps >= 1 and report["losses"].spills == 1
    assert any("split views and truncated tails stay undetected" in text for text in report["limitations"])
    assert report["boundary"].policies[0].digest.startswith("sha256:")


def test_an_identity_that_does_not_hold_is_shown_with_both_sides(world_class: Any, tmp_path: Path) -> None:
    """The control: one opening is lost, and the generation counter and the pool's own say so."""
    engine = open_store(tmp_path / "ledger.db")
    upgrade(engine)
    events = report_ledger.histories(world_class)[0]
    gone = next(e for e in events if type(e).__name__ == "ResidencyOpened" and e.written)
    with engine.connect().execution_options(**WRITE) as connection, connection.begin():
        Appender().append(connection, read_leaves(falsified.leaf_bytes([e for e in events if e is not gone], "1" * 32)))
    key = report_ledger.SigningKey.generate(report_ledger.ORIGIN)
    report_ledger.sign(engine, key, tmp_path)
    broken = [item for item in Sealed(engine, tmp_path, key).report()["population"].balances if not item.holds]
    assert any("stopped" in item.name and item.left > item.right for item in broken)
    assert any("generations" in item.name and item.left > item.right for item in broken)
    engine.dispose()


def test_an_auditor_checks_everything_from_the_files_alone(sealed: Sealed, export: Path) -> None:
    """Population, sample, re-performance: from the export's folder, report.json and the public key."""
    report_file = sealed.folder / "report.json"
    report_file.write_bytes(sealed.report().to_bytes())
    key_text = sealed.vkey  # what the auditor was given

    data = report_file.read_bytes()
    body = json.loads(data)
    assert verify_export(export, [key_text]).ok, "the leaves are what the key signed"
    check = verify_report(data, [key_text], expected_digest=sealed.report().digest())
    assert check.ok, check.problems
    assert check.leaves == sum(len(item["leaves"]) for item in body["sample"]) > 50
    manifest = json.loads((export / "manifest.json").read_text())
    assert manifest["root"]["root"] == body["boundary"]["checkpoint"]["root"] or manifest["leaves"]

    # The population: every custody that was due in the period, counted again from leaves.
    asked = body["asked"]
    chosen = oracle.Chosen(asked["since_us"], asked["until_us"])
    custodies = list(oracle.judge(oracle.History(leaves_in_export(export)), chosen))
    members = [
        (item.incarnation, item.verdict == "overdue", item.pool, item.generation, item.block, item)
        for item in custodies
    ]
    members.sort(key=lambda member: member[:4])
    assert len(members) == body["population"]["custodies"]
    assert population_digest(members) == body["population"]["digest"]
    total = oracle.figures(custodies)
    assert (total.due, total.covered, total.late) == tuple(body["total"][name] for name in ("due", "covered", "late"))

    # The sample: drawn again by the seed, stratum by stratum, and each item judged again.
    strata: dict[tuple[str, ...], list[int]] = {}
    causes = {
        (leaf["incarnation"], pool, generation): leaf["cause"]
        for leaf in map(json.loads, leaves_in_export(export))
        if leaf["kind"] == "custody-ended"
        for (pool, generation), _ in oracle.listed(leaf["runs"])
    }
    for number, (uuid, is_late, pool, generation, _, item) in enumerate(members):
        cause = "no end on record" if is_late else causes[uuid, pool, generation]
        strata.setdefault(("device", item.tenant, item.classification, cause), []).append(number)
    parts = [strata[key] for key in sorted(strata)]
    assert [len(part) for part in parts] == [one["members"] for one in body["sampling"]["strata"]]
    shares = [one["drawn"] for one in body["sampling"]["strata"]]
    assert sum(shares) == asked["sample"] and min(shares) >= 1
    drawn = [
        part[place]
        for number, (part, share) in enumerate(zip(parts, shares, strict=True))
        for place in redraw(f"{asked['seed']}:{number}", share, len(part))
    ]
    assert drawn == [item["number"] for item in body["sample"]]
    leaves = set(leaves_in_export(export))
    for item in body["sample"]:
        uuid, _, pool, generation, block, verdict = members[item["number"]]
        stated = item["custody"]
        assert (uuid, pool, generation, block) == tuple(
            stated[name] for name in ("incarnation", "pool", "generation", "block")
        )
        assert (verdict.verdict, verdict.covered) == (stated["verdict"], stated["covered"])
        assert all(leaf["leaf"].encode() in leaves for leaf in item["leaves"])
        by_hand = performed_again([json.loads(leaf["leaf"]) for leaf in item["leaves"]], block, generation)
        assert item["leaves_left_out"] == 0
        if stated["verdict"] in ("in_time", "late", "missing"):
            assert by_hand == stated["verdict"], item

    # The exceptions: all of what is not covered, each with its cause.
    assert sum(item["units"] for item in body["exceptions"]) == total.due - total.covered
    assert all(item["meaning"] for item in body["exceptions"])


def population_digest(members: list[Any]) -> str:
    """The digest that population.py describes, written down again."""
    digest, last = hashlib.sha256(), None
    for uuid, _, pool, generation, block, item in members:
        if uuid != last:
            digest.update(uuid.encode() + b"\n")
            last = uuid
        verdict = VERDICTS.index(item.verdict)
        for number in (pool, generation, block, item.due, verdict, int(item.covered), item.shards):
            digest.update(number.to_bytes(8, "big", signed=True))
    return digest.hexdigest()


def redraw(seed: str, size: int, population: int) -> list[int]:
    numbers: list[int] = []
    turn = 0
    while len(numbers) < size:
        number = int(hashlib.sha256(f"{seed}:{turn}".encode()).hexdigest(), 16) % population
        turn += 1
        if number not in numbers:
            numbers.append(number)
    return numbers


def performed_again(leaves: list[dict[str, Any]], block: int, generation: int) -> str:
    """An auditor's own reading of one custody: two shards, receipts after the last use, in time or late."""
    end = next((leaf for leaf in leaves if leaf["kind"] == "custody-ended"), None)
    if end is None:
        return "overdue"
    releases = {leaf["residency"]: leaf for leaf in leaves if leaf["kind"] == "residency-released"}
    last = max([end["retired_boot_us"], *(leaf["boot_us"] for leaf in releases.values())])
    good = {}
    for leaf in leaves:
        if leaf["kind"] == "receipt" and leaf["result"] == "ok" and leaf["started_boot_us"] >= last:
            shard = leaf["shard"]
            good[shard] = min(good.get(shard, leaf["ended_boot_us"]), leaf["ended_boot_us"])
    if len(good) < 2:
        return "missing"
    deadline = max(end["due_boot_us"], end["retired_boot_us"]) + end["scrub_within_us"]
    return "in_time" if max(good.values()) <= deadline else "late"


def test_a_report_that_was_changed_is_not_sound(sealed: Sealed) -> None:
    data = sealed.report(sample=3).to_bytes()
    body = json.loads(data)
    assert verify_report(data, [sealed.vkey]).ok
    other = str(report_ledger.SigningKey.generate(report_ledger.ORIGIN).verifier)
    assert not verify_report(data, [other]).ok, "another key of the same name"
    assert not verify_report(data, [sealed.vkey], expected_digest="0" * 64).ok
    leaf = body["sample"][0]["leaves"][0]
    changes = {
        "a leaf": (leaf["leaf"], leaf["leaf"].replace('"part":1', '"part":2')),
        "an index": (f'"idx":{leaf["idx"]},', f'"idx":{leaf["idx"] + 1},'),
        "the sample": (f'"number":{body["sample"][0]["number"]}', '"number":0'),
        "the seed": ('"seed":"kvcustody"', '"seed":"another"'),
        "the checkpoint": (body["boundary"]["checkpoint"]["root"], "0" * 64),
        "the block": (f'"block":{body["sample"][0]["custody"]["block"]},', '"block":99999,'),
        "everything": (data.decode(), "[]"),
    }
    for name, (before, after) in changes.items():
        text = json.dumps(before)[1:-1] if name == "a leaf" else before
        changed = data.decode().replace(text, json.dumps(after)[1:-1] if name == "a leaf" else after)
        assert changed != data.decode(), name
        assert not verify_report(changed.encode(), [sealed.vkey]).ok, name


def test_a_receipt_missing_from_the_leaves_changes_the_population(sealed: Sealed, export: Path) -> None:
    leaves = list(leaves_in_export(export))
    whole = oracle.population_digest(oracle.judge(oracle.History(leaves)))
    gone = next(leaf for leaf in leaves if b'"kind":"receipt"' in leaf and b'"tenant":"tenant-1"' in leaf)
    assert oracle.population_digest(oracle.judge(oracle.History(leaf for leaf in leaves if leaf != gone))) != whole


@pytest.mark.parametrize("tenant", ["tenant-0", "tenant-2"])
def test_a_tenants_own_report_shows_nothing_of_others(sealed: Sealed, tenant: str) -> None:
    own = sealed.report(tenant=tenant)
    files = render_all(own, ("html", "json", "oscal"))
    others = {"tenant-0", "tenant-1", "tenant-2"} - {tenant}
    for name, data in files.items():
        assert tenant.encode() in data, name
        assert not [other for other in others if other.encode() in data], name
    whole = sealed.report()
    assert all(other.encode() in whole.to_bytes() for other in others), "the control: all tenants' report has them"
    assert own["total"].due == sum(row.due for row in whole["coverage"] if row.tenant == tenant)
    assert {leaf.log for item in own["sample"] for leaf in item.leaves} == {f"tenant/{tenant}"}
    assert own["recount"] is not None and own["recount"].digest == own["population"].digest
    assert all(worker.allocated is None and not worker.blocks for worker in own["boundary"].workers)
    assert verify_report(own.to_bytes(), [sealed.vkey]).ok


@pytest.mark.parametrize("name", NAMES)
def test_words_that_claim_too_much_are_in_no_report(sealed: Sealed, name: str) -> None:
    report = sealed.report(framework=name, sample=2)
    strings = strings_of(page_of(report))
    assert len(strings) > 150
    assert [refused_words(text) for text in strings if refused_words(text)] == []
    for control in load_framework(name).controls:
        assert report.statement(control.id).startswith(f"Evidence supporting {control.id}, for ")
        assert control.limit and bool(control.evidence) is (control.scope == "ours")
    body = json.loads(render_all(report, ["oscal"])["oscal.json"])
    assert refused_words(json.dumps(body)) == []
    assert "findings" not in body["assessment-results"]["results"][0], (
        "whether a target is satisfied is not ours to say"
    )


def test_the_words_are_found_where_they_are(sealed: Sealed) -> None:
    for text in (
        "is GDPR compliant",
        "securely deleted",
        "complies with",
        "constant latency",
        "tamper-proof",
    ):
        assert refused_words(text), text
    assert not refused_words("evidence supporting SC-4; zeroized; crypto-erased")


def test_an_unknown_framework_is_an_error() -> None:
    with pytest.raises(ConfigError, match="is none of"):
        load_framework("iso-9001")
    assert len({control.id for name in NAMES for control in load_framework(name).controls}) > 40


def test_the_page_is_one_file_and_escapes_what_tenants_wrote(sealed: Sealed) -> None:
    report = sealed.report(sample=2)
    page = render_all(report, ["html"])["report.html"].decode()
    assert "<script" not in page and "https://" not in page and "url(" not in page and "<link" not in page
    assert "no-&lt;grant&gt;" in page and "no-<grant>" not in page
    assert "prefers-color-scheme: dark" in page and "@media print" in page and page.count("<svg") == 3
    assert "split views and truncated tails stay undetected" in page
    text = " ".join(strings_of(read_page(page)))
    assert report.digest() in text and "--framework cc-fdp-rip" in text
    cover = page.split('<div class="tiles">')[0].split("</h1>")[1]
    assert cover.count('<span class="time">') == cover.count("T22:") == 3, "a time stands on one line"


@pytest.mark.system("the PDF lacks a sentence of the page")
def test_the_pdf_says_what_the_page_says(
    sealed: Sealed, printed: Callable[[str], list[str]], documents: dict[str, bytes]
) -> None:
    pypdf = pytest.importorskip("pypdf")
    report, texts = sealed.report(sample=8), printed("cc-fdp-rip")
    text = "\n".join(texts)
    for words in ("System boundary", "Limitations", "Sign-off", report["population"].digest, "no-<grant>"):
        assert words in text, words
    metadata = pypdf.PdfReader(io.BytesIO(documents["cc-fdp-rip"])).metadata
    at = datetime.fromtimestamp(report["boundary"].checkpoint.at_us // 1_000_000, UTC)
    assert metadata.creation_date == at, "the date is the checkpoint's, not of the making"
    assert metadata.title.startswith("Evidence report: ")


def test_the_labels_of_a_short_period_tell_its_parts_apart(sealed: Sealed) -> None:
    page = page_of(sealed.report(sample=1))
    blocks = [block for section in page.sections for block in section.blocks]
    figures = [block for block in blocks if isinstance(block, Chart)]
    (over_time,) = [figure for figure in figures if figure.title.startswith("Units due over")]
    labels = [text for text in over_time.texts if ":" in text]
    assert len(labels) > 3 and len(set(labels)) == len(labels)
    assert "1 gap and 1 spill event under the checkpoint." in strings_of(page)


def test_no_heading_of_the_pdf_is_left_alone_and_what_is_signed_is_on_one_page(
    sealed: Sealed, printed: Callable[[str], list[str]]
) -> None:
    titles = [each.title for each in page_of(sealed.report(sample=8)).sections]
    contents, *texts = printed("cc-fdp-rip")
    for number, name in enumerate(titles, 1):
        title = f"{number}. {name}"
        assert title in contents
        (text,) = [text for text in texts if title in text]
        assert len(text.split(title)[1].split()) > 20, title
    (signed,) = [text for text in texts if "Sign-off and re-run The same command" in text]
    assert "kvcustody report make" in signed and "Auditor: name" in signed
    version = sealed.report(sample=8).version
    for command in (
        f"pip install 'kvcustody-{version}-py3-none-any.whl[reports]'",
        "kvcustody report verify FOLDER --key ledger.vkey --ledger LEDGER",
    ):
        assert any(command in text for text in texts), "no line ends in the middle of a word"


def test_a_report_is_short_but_for_its_annexes(printed: Callable[[str], list[str]]) -> None:
    texts = printed("cc-fdp-rip")
    (annex,) = [place for place, text in enumerate(texts[1:], 1) if ". Annex: sample" in text]
    assert 4 <= annex <= 12
    assert "For the board" in texts[2] and "Terms" in texts[1]


@pytest.mark.parametrize(
    "framework",
    [
        "cc-fdp-rip",
        *(pytest.param(name, marks=pytest.mark.soak) for name in sorted(NAMES) if name != "cc-fdp-rip"),
    ],
)
def test_no_page_of_the_pdf_begins_with_the_end_of_a_list_or_with_a_tables_last_row(
    sealed: Sealed, printed: Callable[[str], list[str]], framework: str
) -> None:
    texts = printed(framework)
    blocks = [*page_of(sealed.report(framework=framework, sample=8)).blocks()]
    for block in blocks:
        if isinstance(block, Facts):
            names = [name for name, _ in block.items]
            assert any(all(name in text for name in names) for text in texts), names
        if isinstance(block, Table) and len(block.rows) > 2:
            last, before = (" ".join(" ".join(row).split()) for row in (block.rows[-1], block.rows[-2]))
            assert any(last in text and before in text for text in texts), last
    for lead, table in itertools.pairwise(blocks):
        if isinstance(lead, Paragraph) and isinstance(table, Table):
            heads = " ".join(table.headings)
            assert any(lead.text in text and heads in text.split(lead.text)[1] for text in texts), lead.text


def _without(where: list[str | int]) -> Callable[[Any], None]:
    def take(body: Any) -> None:
        for step in where[:-1]:
            body = body[step]
        del body[where[-1]]

    return take


def _with(where: list[str | int], value: Any) -> Callable[[Any], None]:
    def put(body: Any) -> None:
        for step in where[:-1]:
            body = body[step]
        body[where[-1]] = value

    return put


_RESULT: list[str | int] = ["assessment-results", "results", 0]
NOT_OSCAL = {
    "a field of our own": _with([*_RESULT, "verdict"], "satisfied"),
    "a result without a start": _without([*_RESULT, "start"]),
    "a start without a zone": _with([*_RESULT, "start"], "2026-01-01T00:00:00"),
    "no plan": _without(["assessment-results", "import-ap"]),
    "an identifier that is none": _with(["assessment-results", "uuid"], "report-1"),
    "a method that is not a token": _with([*_RESULT, "observations", 0, "methods"], []),
    "a property without a value": _without([*_RESULT, "observations", 0, "props", 0, "value"]),
}


def test_oscal_is_valid_by_the_schema_of_nist(sealed: Sealed) -> None:
    """Every framework's document, by models generated from NIST's own JSON schema, which refuse what is not OSCAL."""
    read = AssessmentResultsDocument.model_validate_json
    for name in NAMES:
        data = render_all(sealed.report(framework=name, sample=1), ["oscal"])["oscal.json"]
        assert read(data).assessment_results.results[0].observations, name
    for what, spoil in NOT_OSCAL.items():
        body = json.loads(data)
        spoil(body)
        with pytest.raises(ValidationError):
            read(json.dumps(body))
            pytest.fail(what)
