"""`kvcustody report`: make an evidence report, check one offline, and the record of processing activities."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import orjson
import typer
from rich.console import Console

from kvcustody.audit.evidence.query.known_names import known_tenant
from kvcustody.audit.reports.build_report import build_report, newest_checkpoint, period
from kvcustody.audit.reports.framework import NAMES, Framework, load_framework, read_framework
from kvcustody.audit.reports.model import PolicyProof, Report, ReportedProperty, ReportParameters
from kvcustody.audit.reports.opinion.read_responses import read_responses
from kvcustody.audit.store.database.signed_orders import SignedOrders
from kvcustody.audit.tlog.database_proofs import LedgerProofs
from kvcustody.audit.tlog.signed_note import parse_vkey
from kvcustody.audit.verify.report.figures_again import MadeAgain, again_from_export, again_from_ledger
from kvcustody.audit.verify.report.verify_report import ReportCheck, open_report, verify_report
from kvcustody.console.api.group import OperationGroup
from kvcustody.console.command import Json, print_json, say
from kvcustody.console.files import read_file, read_words, write_files
from kvcustody.console.opening import key_texts, snapshot
from kvcustody.console.options import DEFAULT, At, DuePeriod, GivenLedger, Keys, Ledger, moment_us
from kvcustody.console.report import keys as key_commands
from kvcustody.console.report import ropa as ropa_command
from kvcustody.console.report import schedules as schedule_commands
from kvcustody.console.report.check_files import differing_files
from kvcustody.console.report.document import FORMATS, render_all
from kvcustody.console.report.opinion_pages import share_text
from kvcustody.console.report.package import command as package_command
from kvcustody.console.report.render.number_format import count, percent
from kvcustody.errors import ConfigError, LedgerError
from kvcustody.governance.keys.report_signing_key import (
    read_report_key,
    recorded_report_keys,
    signed_report,
)
from kvcustody.governance.processing.verify_record import is_processing_record
from kvcustody.governance.release.order_signing import read_signed_orders
from kvcustody.governance.service.operations.parameter_groups import ParameterGroup, grouped
from kvcustody.plurals import several

EXIT_NO = 1

app = typer.Typer(
    cls=OperationGroup,
    no_args_is_help=True,
    help="Evidence reports for auditors: the same ledger and arguments give the same bytes. docs/audit/reports.md says "
    "what is in one and how an auditor checks it.",
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
    tenant: Annotated[
        str | None, typer.Option(help="One tenant's own report: nothing of other tenants is in it.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class SampleOptions(ParameterGroup):
    """How the sample is drawn, and how large it is."""

    seed: Annotated[
        str, typer.Option(help="Draws the sample: an auditor's own text, or the value of a public beacon.")
    ] = "kvcustody"
    sample: Annotated[int, typer.Option(min=0, max=10_000, help="How many custodies are drawn.")] = 25
    risk: Annotated[
        float,
        typer.Option(
            min=0, max=50, help="Risk in percent that the sample misleads; with --tolerable, its size."
        ),
    ] = 0
    tolerable: Annotated[
        float, typer.Option(min=0, max=50, help="The rate of custodies not covered that may be, in percent.")
    ] = 0
    expected: Annotated[
        int, typer.Option(min=0, max=100, help="How many not covered are expected in the sample.")
    ] = 0


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
    recount: Annotated[
        bool, typer.Option(help="Compute coverage a second time, from leaves alone, and compare.")
    ] = True
    threshold: Annotated[
        float,
        typer.Option(min=0, max=100, help="Percent of units in time that its reader asks for (first page)."),
    ] = 99.9
    prepared_by: Annotated[str, typer.Option(help="Who answers for the report: a name and a role.")] = ""


@dataclass(frozen=True, kw_only=True)
class ReportFiles(ParameterGroup):
    """The files of a report."""

    format: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(FORMATS)}.")] = ",".join(FORMATS)
    signing_key: Annotated[
        Path | None,
        typer.Option(
            help="The file of the key that signs reports (`report enrol-key`); without it, unsigned."
        ),
    ] = None
    out: Annotated[Path, typer.Option(help="The folder to write to; it is made where it is not there.")] = (
        Path("kvcustody-report")
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
        raise ConfigError(
            "--risk, --tolerable and --expected belong together: a size follows from all of them"
        )
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
        bounds = period(
            connection, checkpoint, moment_us(wanted.period.since), moment_us(wanted.period.until)
        )
        asked = ReportParameters(
            chosen.id, checkpoint, *bounds, drawn.seed, drawn.sample, tenant, beside.extends, beside.recount
        )
        asked = asked._replace(
            risk_ppm=round(drawn.risk * 10_000),
            tolerable_ppm=round(drawn.tolerable * 10_000),
            expected=drawn.expected,
            threshold_ppm=round(beside.threshold * 10_000),
            preparer=beside.prepared_by,
        )
        report = build_report(
            connection, asked, proof=proof, progress=tell, responses=answers, framework=chosen
        )
        if files.signing_key is not None:
            key = read_report_key(files.signing_key, recorded_report_keys(connection.engine))
            report = signed_report(connection, report, key)
        tell("writing")
        rendered = render_all(report, formats)
    write_files(files.out, rendered)
    _answer(report, files.out, sorted(rendered), as_json)


@app.command(
    epilog="Examples:\n\n    kvcustody report verify q1 --key ledger.vkey --export export-1041\n\n"
    "    kvcustody report verify q1/report.json --key ledger.vkey "
    "--digest 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
)
def verify(
    file: Annotated[
        Path, typer.Argument(help="A report.json or ropa.json, or the folder of one with all its files.")
    ],
    *,
    key: Keys,
    export: Annotated[
        Path | None,
        typer.Option(
            help="An export of the report's checkpoint: every figure is made again from its leaves."
        ),
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
    is_record = folder is not None and (folder / "ropa.json").exists()
    data = read_file(file / ("ropa.json" if is_record else "report.json") if folder else file)
    orders = read_signed_orders(trust, parse_vkey(vkeys[0]).name, None)
    if is_processing_record(data):
        record = ropa_command.check_record(folder, data, vkeys, ledger, policy, digest, export, orders)
        _tell_record(*record, as_json)
        return
    again, wrong = _again(data, vkeys, export, ledger, orders), list[str]()
    found = verify_report(data, vkeys, expected_digest=digest, again=again)
    compared: tuple[str, ...] = ()
    if folder is not None and not wrong and not found.problems:
        compared, more = differing_files(folder, open_report(data))
        wrong += more
    found = found._replace(problems=(*wrong, *found.problems))
    _tell(found, compared, as_json)
    if not found.ok:
        raise typer.Exit(EXIT_NO)


def _tell_record(found: ReportCheck, compared: tuple[str, ...], as_json: bool) -> None:
    """What was found of a record of processing."""
    _tell(found, compared, as_json)
    if not found.ok:
        raise typer.Exit(EXIT_NO)


def _again(
    data: bytes, vkeys: list[str], export: Path | None, ledger: str | None, orders: SignedOrders | None
) -> MadeAgain | None:
    """The report made again from what was given.

    Raises `LedgerError` where it cannot be: what was given is missing, damaged or another's, which says nothing of the
    report.
    """
    if export is None and ledger is None:
        return None
    try:
        stated = open_report(data)
    except LedgerError:  # `verify_report` says what is wrong with it
        return None
    try:
        if export is not None:
            return again_from_export(export, stated, vkeys, orders)
        assert ledger is not None
        with snapshot(ledger) as connection:
            return again_from_ledger(connection, stated, orders)
    except (LedgerError, ConfigError) as problem:
        against = f"export `{export}`" if export is not None else "the ledger"
        raise LedgerError(f"the report cannot be checked against {against}: {problem.message}") from None


def _tell(found: ReportCheck, compared: tuple[str, ...], as_json: bool) -> None:
    if as_json:
        unchecked = [each._asdict() for each in found.unchecked]
        print_json({**found._asdict(), "unchecked": unchecked, "formats": list(compared), "ok": found.ok})
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
        f"{verdict}: {signed}{again}{formats}, {found.leaves} sampled leaves, checkpoint {found.checkpoint}, "
        f"SHA-256 {found.digest}"
    )


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
        print_json(
            {
                "folder": os.fspath(out),
                "files": names,
                "digest": digest,
                "rerun": report.rerun(),
                "checkpoint": report.asked.checkpoint,
                "population": {"custodies": report.population.custodies, "digest": report.population.digest},
                "total": report.total._asdict(),
                "opinion": report.opinion.kind,
                "balances": [{**item._asdict(), "holds": item.holds} for item in report.population.balances],
                "recount_agrees": None if report.recount is None else not report.recount.differences,
            }
        )
        return
    total = report.total
    say(f"the opinion is {report.opinion.kind}: {share_text(report.opinion)} of what was due")
    say(
        f"{percent(total.covered, total.due)} of {count(total.due)} units due ended in time with evidence; "
        f"{count(total.due - total.covered)} are not covered; "
        f"{several(len(report.opinion.exceptions), 'exception')} in the opinion, "
        f"{several(report.losses.gaps, 'gap')}"
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
