"""`kvcustody report`: make an evidence report, check one offline, and the record of processing activities."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated

import orjson
import typer
from rich.console import Console
from sqlalchemy import Connection

from kvcustody.audit.evidence.query.known_names import known_tenant
from kvcustody.audit.reports.build_report import build_report, newest_checkpoint, period
from kvcustody.audit.reports.document import read_document
from kvcustody.audit.reports.framework import NAMES, Framework, load_framework, read_framework
from kvcustody.audit.reports.given import PolicyProof, ReportedProperty, read_responses
from kvcustody.audit.reports.model import Report
from kvcustody.audit.reports.parameters import ReportParameters
from kvcustody.audit.reports.sections.coverage import SECTION as COVERAGE
from kvcustody.audit.reports.sections.losses import SECTION as LOSSES
from kvcustody.audit.reports.sections.opinion import SECTION as OPINION
from kvcustody.audit.reports.sections.population import SECTION as POPULATION
from kvcustody.audit.reports.sections.recount import SECTION as RECOUNT
from kvcustody.audit.tlog.database_proofs import LedgerProofs
from kvcustody.audit.tlog.signed_note import parse_vkey
from kvcustody.audit.verify.documents.certificate_rules import CertificateRules
from kvcustody.audit.verify.documents.document_check import DocumentCheck
from kvcustody.audit.verify.documents.report_rules import ReportRules
from kvcustody.audit.verify.documents.verify import verify as verify_document
from kvcustody.console.api.group import OperationGroup
from kvcustody.console.command import Json, print_json, say
from kvcustody.console.files import read_file, read_words, write_files
from kvcustody.console.opening import key_texts, snapshot
from kvcustody.console.options import DEFAULT, At, DuePeriod, GivenLedger, Keys, Ledger, moment_us
from kvcustody.console.render.document_forms import FORMATS, render_all
from kvcustody.console.render.number_format import count, percent, share
from kvcustody.console.report import keys as key_commands
from kvcustody.console.report import ropa as ropa_command
from kvcustody.console.report import schedules as schedule_commands
from kvcustody.console.report.check_files import compare_files, document_file
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
    """Which report of which ledger."""

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
    """How the sample is drawn, and how large it is."""

    seed: Annotated[
        str, typer.Option(help="Draws the sample: an auditor's own text, or the value of a public beacon.")
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
    """What the report says beside the figures of its period."""

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
        typer.Option(min=0, max=100, help="Percent of units in time that its reader asks for (first page)."),
    ] = 99.9
    prepared_by: Annotated[str, typer.Option(help="Who answers for the report: a name and a role.")] = ""
    organisation: Annotated[str, typer.Option(help="The organisation that the report is of.")] = ""
    zone: Annotated[str, typer.Option(help="Time zone (IANA name) whose times the pages show beside UTC.")] = "UTC"


@dataclass(frozen=True, kw_only=True)
class ReportFiles(ParameterGroup):
    """The files of a report."""

    format: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(FORMATS)}.")] = ",".join(FORMATS)
    signing_key: Annotated[
        Path | None,
        typer.Option(help="The file of the key that signs reports (`report enrol-key`); without it, unsigned."),
    ] = None
    out: Annotated[Path, typer.Option(help="The folder to write to; it is made where it is not there.")] = Path(
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
        found = verify_document(data, vkeys, rules, expected_digest=digest, source=source, orders=orders)
    if found.source_rejected and not found.problems:
        against = f"export `{export}`" if export is not None else "the ledger"
        raise LedgerError(f"the document cannot be checked against {against}: {found.source_rejected}")
    compared: tuple[str, ...] = ()
    if folder is not None and found.ok:
        files = compare_files(folder, read_document(data, [each.kind for each in rules]))
        unchecked = (*found.unchecked, *files.unchecked)
        compared, found = files.compared, replace(found, problems=tuple(files.problems), unchecked=unchecked)
    _tell(found, compared, as_json)
    if not found.ok:
        raise typer.Exit(EXIT_NO)


@contextmanager
def _source(export: Path | None, ledger: str | None) -> Iterator[Connection | Path | None]:
    """What a document is made again from."""
    if export is not None or ledger is None:
        yield export
        return
    with snapshot(ledger) as connection:
        yield connection


def _tell(found: DocumentCheck, compared: tuple[str, ...], as_json: bool) -> None:
    if as_json:
        said = {field.name: getattr(found, field.name) for field in fields(found) if field.name not in _UNSAID}
        unchecked = [{"path": each.path, "why": each.why} for each in found.unchecked]
        print_json({**said, "unchecked": unchecked, "formats": list(compared), "ok": found.ok})
        return
    for problem in found.problems:
        say(f"problem: {problem}")
    for each in found.unchecked:
        say(f"not checked: {each.path}: {each.why}")
    signed = f"signed by {found.signed_by}" if found.signed_by else "not signed"
    again = f", every figure made again from {found.source}" if found.source else ""
    formats = f", {', '.join(compared)} the same byte for byte" if compared else ""
    verdict = "sound, but for what was not checked" if found.ok else "not sound"
    say(
        f"{verdict}: {signed}{again}{formats}, {several(found.leaves, 'proved leaf')}, checkpoint {found.checkpoint}, "
        f"SHA-256 {found.digest}"
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
    """A framework of the library by its name, or of a file; raises `ConfigError` for neither."""
    if name.endswith(".toml"):
        return read_framework(read_words(Path(name)))
    return load_framework(name)


def prove_policy(path: Path) -> PolicyProof:
    """The proof of a policy file, as a report states it."""
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
    """Says on a terminal what is being done; silent elsewhere."""

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
