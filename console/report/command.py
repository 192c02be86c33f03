"""`kvcustody report`: make an evidence report, check one offline, and the record of processing activities."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, NamedTuple

import orjson
import typer
from rich.console import Console
from sqlalchemy import Connection

from kvcustody._version import __version__
from kvcustody.audit.evidence.query.known_names import known_tenant
from kvcustody.audit.reports.build_report import build_report, newest_checkpoint, period
from kvcustody.audit.reports.document import Document, read_document
from kvcustody.audit.reports.framework import NAMES, Framework, load_framework, read_framework
from kvcustody.audit.reports.given import PolicyProof, ReportedProperty, read_responses
from kvcustody.audit.reports.model import REPORT, Report
from kvcustody.audit.reports.parameters import ReportParameters
from kvcustody.audit.reports.sections.coverage import SECTION as COVERAGE
from kvcustody.audit.reports.sections.losses import SECTION as LOSSES
from kvcustody.audit.reports.sections.opinion import SECTION as OPINION
from kvcustody.audit.reports.sections.population import SECTION as POPULATION
from kvcustody.audit.reports.sections.recount import SECTION as RECOUNT
from kvcustody.audit.tlog.database_proofs import LedgerProofs
from kvcustody.audit.tlog.signed_note import parse_vkey
from kvcustody.audit.verify.documents.certificate_rules import CertificateRules
from kvcustody.audit.verify.documents.document_check import DocumentCheck, Unchecked
from kvcustody.audit.verify.documents.report_rules import ReportRules, open_report
from kvcustody.audit.verify.documents.verify import verify as verify_document
from kvcustody.console.api.group import OperationGroup
from kvcustody.console.command import Json, print_json, say
from kvcustody.console.files import read_file, read_words, write_files
from kvcustody.console.opening import key_texts, snapshot
from kvcustody.console.options import DEFAULT, At, DuePeriod, GivenLedger, Keys, Ledger, moment_us
from kvcustody.console.render.document_forms import FORMATS, forms_of, render_all
from kvcustody.console.render.number_format import count, percent, share
from kvcustody.console.render.pdf import makers_of
from kvcustody.console.report import keys as key_commands
from kvcustody.console.report import ropa as ropa_command
from kvcustody.console.report import schedules as schedule_commands
from kvcustody.console.report.package import command as package_command
from kvcustody.errors import ConfigError, LedgerError
from kvcustody.governance.keys.report_signing_key import (
    read_report_key,
    recorded_report_keys,
    signed_report,
)
from kvcustody.governance.processing.record_rules import RecordRules
from kvcustody.governance.release.order_signing import read_signed_orders
from kvcustody.governance.service.operations.parameter_groups import ParameterGroup, grouped
from kvcustody.plurals import several
from kvcustody.policies.reading.load_policy import load_policy
from kvcustody.time_zones import check_zone

EXIT_NO = 1

app = typer.Typer(
    cls=OperationGroup,
    no_args_is_help=True,
    help="Evidence reports for auditors: the same ledger and arguments give the same bytes. "
    "docs/concepts/reports.md says what is in one and how an auditor checks it.",
)


@dataclass(frozen=True, kw_only=True)
class ReportOptions(ParameterGroup):
    """The report and its ledger."""

    framework: Annotated[
        str,
        typer.Option(
            help=f"One of: {', '.join(NAMES)}; or a file of your own (.toml).",
            autocompletion=lambda: list(NAMES),
        ),
    ]
    ledger: Ledger = DEFAULT
    period: DuePeriod
    as_of: At = None
    tenant: Annotated[str | None, typer.Option(help="One tenant's own report: nothing of other tenants is in it.")] = (
        None
    )


@dataclass(frozen=True, kw_only=True)
class SampleOptions(ParameterGroup):
    """The sample's size and draw."""

    seed: Annotated[
        str, typer.Option(help="Seed of the sample: an auditor's own text, or the value of a public beacon.")
    ] = "kvcustody"
    sample: Annotated[int, typer.Option(min=0, max=10_000, help="How many custodies are drawn.")] = 25
    risk: Annotated[
        float,
        typer.Option(min=0, max=50, help="Risk in percent that the sample misleads; with --tolerable, its size."),
    ] = 0
    tolerable: Annotated[
        float, typer.Option(min=0, max=50, help="The rate of custodies not covered that may be, in percent.")
    ] = 0
    expected: Annotated[int, typer.Option(min=0, max=100, help="How many not covered are expected in the sample.")] = 0


@dataclass(frozen=True, kw_only=True)
class EvidenceOptions(ParameterGroup):
    """The report's content besides its period's figures."""

    extends: Annotated[
        int | None, typer.Option(help="An earlier report's checkpoint: a proof that this one extends it.")
    ] = None
    policy: Annotated[Path | None, typer.Option(help="The policy to prove for the report (YAML).")] = None
    responses: Annotated[
        Path | None,
        typer.Option(help="What people answered to exceptions (TOML: id, owner, date, response, ...)."),
    ] = None
    recount: Annotated[bool, typer.Option(help="Compute coverage a second time, from leaves alone, and compare.")] = (
        True
    )
    threshold: Annotated[
        float,
        typer.Option(min=0, max=100, help="The reader's target for units in time, in percent (first page)."),
    ] = 99.9
    prepared_by: Annotated[str, typer.Option(help="Who is responsible for the report: a name and a role.")] = ""
    organisation: Annotated[str, typer.Option(help="The report's organisation.")] = ""
    zone: Annotated[str, typer.Option(help="Time zone (IANA name) whose times the pages show beside UTC.")] = "UTC"


@dataclass(frozen=True, kw_only=True)
class ReportFiles(ParameterGroup):
    """The report's files."""

    format: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(FORMATS)}.")] = ",".join(FORMATS)
    signing_key: Annotated[
        Path | None,
        typer.Option(help="The file of the key that signs reports (`report enrol-key`); without it, unsigned."),
    ] = None
    out: Annotated[Path, typer.Option(help="The folder to write to; it is created if needed.")] = Path(
        "kvcustody-report"
    )


@app.command(
    epilog="Examples:\n\n    kvcustody report make --framework soc2 --since 2026-01-01 --until 2026-04-01 --out q1\n\n"
    "    kvcustody report make --framework cc-fdp-rip --as-of 1041 --policy policy.yaml --format json --json"
)
@grouped
def make(
    *,
    wanted: ReportOptions,
    drawn: SampleOptions,
    beside: EvidenceOptions,
    files: ReportFiles,
    as_json: Json = False,
) -> None:
    """Make an evidence report of a period: coverage, sample with proofs, reconciliation, exceptions, limitations.

    It is made as of a signed checkpoint (the newest, unless you name one), so that it can be made again later: the
    report states the command and the SHA-256 that it has to give. It states no verdict on any control.
    """
    formats = [name.strip() for name in files.format.split(",") if name.strip()]
    unknown = [name for name in formats if name not in FORMATS]
    if unknown or not formats:
        raise ConfigError(f"format `{files.format}` names none of: {', '.join(FORMATS)}", format=files.format)
    if bool(drawn.risk) != bool(drawn.tolerable) or (drawn.expected and not drawn.risk):
        raise ConfigError("--risk, --tolerable and --expected belong together: a size follows from all of them")
    check_zone(beside.zone)
    chosen = asked_framework(wanted.framework)
    proof = None if beside.policy is None else prove_policy(beside.policy)
    answers = () if beside.responses is None else read_responses(read_words(beside.responses))
    with snapshot(wanted.ledger) as connection, _telling() as tell:
        tenant = known_tenant(connection, wanted.tenant)
        checkpoint = (
            newest_checkpoint(connection)
            if wanted.as_of is None
            else LedgerProofs(connection).checkpoint(wanted.as_of).size
        )
        bounds = period(connection, checkpoint, moment_us(wanted.period.since), moment_us(wanted.period.until))
        asked = ReportParameters(
            chosen.id, checkpoint, *bounds, drawn.seed, drawn.sample, tenant, beside.extends, beside.recount
        )
        asked = asked._replace(
            risk_ppm=round(drawn.risk * 10_000),
            tolerable_ppm=round(drawn.tolerable * 10_000),
            expected=drawn.expected,
            threshold_ppm=round(beside.threshold * 10_000),
            preparer=beside.prepared_by,
            organisation=beside.organisation,
            zone=beside.zone,
        )
        report = build_report(connection, asked, proof=proof, progress=tell, responses=answers, framework=chosen)
        if files.signing_key is not None:
            key = read_report_key(files.signing_key, recorded_report_keys(connection.engine))
            report = signed_report(connection, report, key)
        tell("writing")
    written = render_all(report, [name for name in formats if name != "pdf"])
    write_files(files.out, written)
    if "pdf" in formats:  # the last: where it cannot be made, the others are there
        printed = render_all(report, ["pdf"])
        write_files(files.out, printed)
        written |= printed
    _answer(report, files.out, sorted(written), as_json)


@app.command(
    epilog="Examples:\n\n    kvcustody report verify q1 --key ledger.vkey --export export-1041\n\n"
    "    kvcustody report verify q1/report.json --key ledger.vkey "
    "--digest 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
)
def verify(
    file: Annotated[
        Path,
        typer.Argument(help="A report.json, ropa.json or certificate, or the folder of a report or record."),
    ],
    *,
    key: Keys,
    export: Annotated[
        Path | None,
        typer.Option(help="An export of the report's checkpoint: every figure is made again from its leaves."),
    ] = None,
    ledger: GivenLedger = None,
    policy: Annotated[
        Path | None, typer.Option(help="Of a record of processing: the policy that it was made with (YAML).")
    ] = None,
    digest: Annotated[str | None, typer.Option(help="The SHA-256 that the report should have.")] = None,
    trust: Annotated[
        Path | None,
        typer.Option(
            help="A trust configuration: its keys with the role `orders` signed every order of the export or ledger."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check a report: its signature, its figures against an export or the ledger itself, and every format's bytes.

    With nothing but the log's public key: who signed, every sampled leaf, and that the report agrees with itself. What
    was not checked is printed, with the reason. Exit code 1 says that something is wrong with the report. 2 says that
    it cannot be checked: what is given beside it is missing, damaged or another's. A record of processing
    (`report ropa`) is checked the same way.
    """
    vkeys = key_texts(key)
    for text in vkeys:
        parse_vkey(text)
    folder = file if file.is_dir() else None
    data = read_file(document_file(folder) if folder else file)
    orders = read_signed_orders(trust, parse_vkey(vkeys[0]).name, None)
    given = None if policy is None else load_policy(read_file(policy), name=policy.name)
    rules = (ReportRules(), RecordRules(given), CertificateRules())
    with ExitStack() as stack:
        try:
            source = stack.enter_context(_source(export, ledger))
        except (LedgerError, ConfigError) as problem:
            raise LedgerError(f"the document cannot be checked against the ledger: {problem.message}") from None
        checked = verify_document(data, vkeys, rules, expected_digest=digest, source=source, orders=orders)
    if checked.source_rejected and not checked.problems:
        against = f"export `{export}`" if export is not None else "the ledger"
        raise LedgerError(f"the document cannot be checked against {against}: {checked.source_rejected}")
    compared: tuple[str, ...] = ()
    if folder is not None and checked.ok:
        files = compare_files(folder, read_document(data, [each.kind for each in rules]))
        unchecked = (*checked.unchecked, *files.unchecked)
        compared, checked = files.compared, replace(checked, problems=tuple(files.problems), unchecked=unchecked)
    _tell(checked, compared, as_json)
    if not checked.ok:
        raise typer.Exit(EXIT_NO)


@contextmanager
def _source(export: Path | None, ledger: str | None) -> Iterator[Connection | Path | None]:
    """Yield the source from which a document is recomputed."""
    if export is not None or ledger is None:
        yield export
        return
    with snapshot(ledger) as connection:
        yield connection


def _tell(checked: DocumentCheck, compared: tuple[str, ...], as_json: bool) -> None:
    if as_json:
        said = {field.name: getattr(checked, field.name) for field in fields(checked) if field.name not in _UNSAID}
        unchecked = [{"path": each.path, "why": each.why} for each in checked.unchecked]
        print_json({**said, "unchecked": unchecked, "formats": list(compared), "ok": checked.ok})
        return
    for problem in checked.problems:
        say(f"problem: {problem}")
    for each in checked.unchecked:
        say(f"not checked: {each.path}: {each.why}")
    signed = f"signed by {checked.signed_by}" if checked.signed_by else "not signed"
    again = f", every figure made again from {checked.source}" if checked.source else ""
    formats = f", {', '.join(compared)} the same byte for byte" if compared else ""
    verdict = "sound, except for what was not checked" if checked.ok else "not sound"
    say(
        f"{verdict}: {signed}{again}{formats}, {several(checked.leaves, 'proved leaf')}, "
        f"checkpoint {checked.checkpoint}, SHA-256 {checked.digest}"
    )


_UNSAID = ("unchecked", "shown", "source_rejected")


app.command(
    name="enrol-key",
    epilog="Example:\n\n    kvcustody report enrol-key --signing-key kvcustody-report.key --actor dana",
)(key_commands.enrol_key)
app.command(
    name="rotate-key",
    epilog="Example:\n\n    kvcustody report rotate-key --signing-key kvcustody-report.key --actor dana",
)(key_commands.rotate_key)
app.command(name="ropa", epilog=ropa_command.EPILOG)(ropa_command.ropa)
app.command(name="package", epilog=package_command.EPILOG)(package_command.package)
app.command(name="retry", epilog=schedule_commands.RETRY_EPILOG)(schedule_commands.retry)
app.add_typer(schedule_commands.app, name="schedules")


def asked_framework(name: str) -> Framework:
    """Return a framework from the library by name, or from a file.

    Raises:
        ConfigError: it is neither.
    """
    if name.endswith(".toml"):
        return read_framework(read_words(Path(name)))
    return load_framework(name)


def prove_policy(path: Path) -> PolicyProof:
    """Return a policy file's proof, as a report states it."""
    from kvcustody.policies.reading.load_policy import load_policy
    from kvcustody.policies.table.compile import compile_policy
    from kvcustody.policies.workbench.prove.prove import prove

    policy = load_policy(read_file(path), name=str(path.name))
    proof = prove(compile_policy(policy, revision=1), declared=policy)
    digest = hashlib.sha256(orjson.dumps(proof.data(), option=orjson.OPT_SORT_KEYS)).hexdigest()
    return PolicyProof(
        policy.name,
        proof.table_digest,
        proof.holds,
        False,
        digest,
        tuple(ReportedProperty(item.id, item.title, item.holds, item.cells) for item in proof.properties),
    )


def _answer(report: Report, out: Path, names: list[str], as_json: bool) -> None:
    digest = report.digest()
    if as_json:
        recount = report[RECOUNT]
        print_json(
            {
                "folder": os.fspath(out),
                "files": names,
                "digest": digest,
                "rerun": report.rerun(),
                "checkpoint": report.asked.checkpoint,
                "population": {
                    "custodies": report[POPULATION].custodies,
                    "digest": report[POPULATION].digest,
                },
                "total": report[COVERAGE].total._asdict(),
                "opinion": report[OPINION].kind,
                "balances": [{**item._asdict(), "holds": item.holds} for item in report[POPULATION].balances],
                "recount_agrees": None if recount is None else not recount.differences,
            }
        )
        return
    total, opinion = report[COVERAGE].total, report[OPINION]
    covered = share(opinion.low_ppm, opinion.high_ppm, opinion.unknown)
    say(f"the opinion is {opinion.kind}: {covered} of what was due")
    say(
        f"{percent(total.covered, total.due)} of {count(total.due)} units due ended in time with evidence; "
        f"{count(total.due - total.covered)} are not covered; "
        f"{several(len(report[OPINION].exceptions), 'exception')} in the opinion, "
        f"{several(report[LOSSES].gaps, 'gap')}"
    )
    say(f"{', '.join(names)} in {out}; SHA-256 of report.json {digest}")


class _telling:  # noqa: N801 - a context manager that reads as a verb
    """Prints progress on a terminal; silent elsewhere."""

    def __enter__(self) -> Callable[[str], None]:
        self._console = Console(stderr=True)
        self._status = self._console.status("reading") if self._console.is_terminal else None
        if self._status:
            self._status.start()

        def tell(part: str) -> None:
            if self._status:
                self._status.update(part)

        return tell

    def __exit__(self, *_: object) -> None:
        if self._status:
            self._status.stop()


# Comparing a document's files with its facts: each format, and each long table's CSV, is made again and compared as
# bytes.

_NAMES = ("report.json", "ropa.json")


def document_file(folder: Path) -> Path:
    """Return the JSON of a report or record in its folder.

    Raises:
        ConfigError: there is none.
    """
    found = next((folder / name for name in _NAMES if (folder / name).exists()), None)
    if found is None:
        raise ConfigError(f"`{folder}` has no {' and no '.join(_NAMES)}", path=folder)
    return found


class ComparedFiles(NamedTuple):
    """The compared files of a folder, their differences, and the files that could not be compared."""

    compared: tuple[str, ...]
    problems: list[str]
    unchecked: tuple[Unchecked, ...] = ()


def compare_files(folder: Path, document: Document) -> ComparedFiles:
    """Make each file of the folder again and compare bytes. A PDF made by other versions is not compared."""
    shown = open_report(document) if document.kind == REPORT else document
    there = [form for form, name in forms_of(shown).files.items() if (folder / name).exists()]
    version = document.facts["version"]
    if version != __version__ and len(there) > 1:
        said = f"version {version} rendered it and this is {__version__}: its pages can be compared with that one"
        return ComparedFiles((), [said])
    rendered_files = render_all(shown, there)
    absent = [name for name in rendered_files if not (folder / name).exists()]
    given = {name: read_file(folder / name) for name in rendered_files if name not in absent}
    wrong = [name for name, data in given.items() if data != rendered_files[name]]
    others = tuple(
        Unchecked(
            name, f"`{theirs}` made it and this is `{makers_of(rendered_files[name])}`: bytes differ between them"
        )
        for name in wrong
        if name.endswith(".pdf") and (theirs := makers_of(given[name])) not in ("", makers_of(rendered_files[name]))
    )
    unlike = {each.path for each in others}
    return ComparedFiles(
        tuple(sorted(given.keys() - unlike)),
        [
            *(f"`{name}` is not there, and a page names it for its table's rows" for name in absent),
            *(
                f"`{name}` is not what the signed {document.kind.name} gives, byte for byte"
                for name in wrong
                if name not in unlike
            ),
        ],
        others,
    )
