"""`kvcustody report ropa`: the record of processing activities as JSON, a page, PDF or CSV."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from sqlalchemy import Connection

from kvcustody.audit.evidence.coverage.custody_units import CustodySelection, last_event_us
from kvcustody.audit.evidence.query.known_names import known_tenant
from kvcustody.audit.exports.csv_table import csv_text
from kvcustody.audit.reports.build_report import newest_checkpoint, period
from kvcustody.audit.store.database.signed_orders import SignedOrders
from kvcustody.audit.tlog.database_proofs import LedgerProofs
from kvcustody.audit.tlog.proofs import ProofError
from kvcustody.audit.verify.report.verify_report import ReportCheck
from kvcustody.console.command import Json, print_json, say
from kvcustody.console.files import read_file, write_files
from kvcustody.console.opening import connect, one_ledger, selection, snapshot
from kvcustody.console.options import DEFAULT, At, ControlPlane, DuePeriod, Ledger
from kvcustody.console.report.render.html import render_html
from kvcustody.console.report.render.number_format import count, percent
from kvcustody.console.report.render.page_model import Facts, Items, Page, Section, Table
from kvcustody.console.report.render.pdf import render_pdf
from kvcustody.errors import ConfigError
from kvcustody.governance.cases.recipients import GrantedRecipient
from kvcustody.governance.keys.report_signing_key import read_report_key, recorded_report_keys
from kvcustody.governance.processing.build_record import RecordRequest, build_record, signed_record
from kvcustody.governance.processing.record import (
    CONTROLLER,
    PROCESSOR,
    ROLES,
    ControllerStatement,
    ProcessingRecord,
    ServedController,
    record_of_facts,
)
from kvcustody.governance.processing.verify_record import verify_record
from kvcustody.governance.service.operations.parameter_groups import ParameterGroup, grouped
from kvcustody.policies.reading.load_policy import load_policy
from kvcustody.times import iso, readable

FORMATS = ("html", "pdf", "json", "csv")
EPILOG = """Examples:

    kvcustody report ropa --policy policy.yaml --ledger kvcustody.db --controller "Example AG, Bonn"

    kvcustody report ropa --role processor --since 2026-01-01 --until 2026-04-01 --controller "Host AG"
    --controller-of acme="Example AG" --signing-key kvcustody-report.key --format pdf,csv,json --out ropa

    kvcustody report ropa --server https://ledger.example:8443 --api-key-file dpo.key --json

    kvcustody report verify ropa --key ledger.vkey --ledger kvcustody.db
"""


@dataclass(frozen=True, kw_only=True)
class RecordOptions(ParameterGroup):
    """Whose record, of which period."""

    policy: Annotated[
        Path | None,
        typer.Option(
            help="A policy (YAML) to put beside those in effect, whoever runs it; needed where none was."
        ),
    ] = None
    role: Annotated[
        str, typer.Option(help=f"Whose record: of a {CONTROLLER} (30(1)) or of a {PROCESSOR} (30(2)).")
    ] = CONTROLLER
    ledger: Ledger = DEFAULT
    period: DuePeriod
    as_of: At = None


@dataclass(frozen=True, kw_only=True)
class StatementOptions(ParameterGroup):
    """What the controller or processor states."""

    controller: Annotated[
        str, typer.Option(help="Name of the controller (30(1)(a)), or of the processor (30(2)(a)).")
    ] = ""
    controller_of: Annotated[
        list[str] | None,
        typer.Option(
            help="Of a processor: TENANT=NAME of a controller that it acts for; may be given again."
        ),
    ] = None
    contact: Annotated[str, typer.Option(help="Contact details.")] = ""
    officer: Annotated[str, typer.Option(help="The data-protection officer.")] = ""
    purposes: Annotated[str, typer.Option(help="Purposes of the processing (30(1)(b)).")] = ""
    subjects: Annotated[str, typer.Option(help="Categories of data subjects (30(1)(c)).")] = ""
    data: Annotated[str, typer.Option(help="Categories of personal data.")] = ""
    transfers: Annotated[str, typer.Option(help="Transfers to third countries (30(1)(e)).")] = ""


@dataclass(frozen=True, kw_only=True)
class RecordFiles(ParameterGroup):
    """The files of a record."""

    format: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(FORMATS)}.")] = "html,json"
    signing_key: Annotated[
        Path | None,
        typer.Option(
            help="The file of the key that signs reports; without it, unsigned. A server signs itself."
        ),
    ] = None
    out: Annotated[Path, typer.Option(help="The folder to write to.")] = Path("kvcustody-ropa")


@grouped
def ropa(
    *,
    ctx: typer.Context,
    wanted: RecordOptions,
    says: StatementOptions,
    to: RecordFiles,
    plane: ControlPlane,
    as_json: Json = False,
) -> None:
    """Export the record of processing activities (GDPR 30): every policy in effect in a period, limits and recipients.

    Recipients are up to the classification as granted; measures name computed controls. What only the controller or
    processor knows is an option; what is left out stays open in the record and says so. It is of a signed checkpoint,
    where there is one, so that `report verify` can make it again.
    """
    formats = [name.strip() for name in to.format.split(",") if name.strip()]
    if not formats or set(formats) - set(FORMATS):
        raise ConfigError(f"format `{to.format}` names none of: {', '.join(FORMATS)}", format=to.format)
    if wanted.role not in ROLES:
        raise ConfigError(f"--role `{wanted.role}` is none of: {', '.join(ROLES)}", role=wanted.role)
    source = None if wanted.policy is None else read_file(wanted.policy)
    chosen = selection(wanted.period.since, wanted.period.until, None, None, None, None)
    stated = ControllerStatement(
        says.controller, says.contact, says.officer, says.purposes, says.subjects, says.data, says.transfers
    )
    named = served_controllers(says.controller_of or [])
    if plane.server is not None:
        one_ledger(ctx)
        with connect(plane) as asked:
            text = None if source is None else source.decode(errors="replace")
            body = {"policy": text, "since": chosen.since_us, "until": chosen.until_us, **stated._asdict()}
            more = {
                "role": wanted.role,
                "as_of": wanted.as_of,
                "controllers": {one.tenant: one.name for one in named},
            }
            record = record_of_facts(asked.post("/v1/reports:processing", body | more))
    else:
        given = (
            None if source is None or wanted.policy is None else load_policy(source, name=wanted.policy.name)
        )
        with snapshot(wanted.ledger) as connection:
            named = tuple(
                one._replace(tenant=known_tenant(connection, one.tenant) or one.tenant) for one in named
            )
            request = _request(connection, wanted.role, chosen, wanted.as_of, stated, named)
            try:
                record = build_record(connection, request, given=given)
            except ConfigError as problem:
                raise (
                    ConfigError(f"--policy is needed: {problem.message}") if given is None else problem
                ) from None
            if to.signing_key is not None:
                key = read_report_key(to.signing_key, recorded_report_keys(connection.engine))
                record = signed_record(connection, record, key)
    files = render_record(record, formats)
    write_files(to.out, files)
    if as_json:
        print_json(
            {
                "folder": str(to.out),
                "files": sorted(files),
                "digest": record.digest(),
                "record": record.facts(),
            }
        )
    else:
        say(f"{', '.join(sorted(files))} in {to.out}; SHA-256 of the record {record.digest()}")


def _request(
    connection: Connection,
    role: str,
    chosen: CustodySelection,
    as_of: int | None,
    stated: ControllerStatement,
    named: tuple[ServedController, ...],
) -> RecordRequest:
    """What is asked of a ledger: as its newest signed checkpoint left it, or, where none is signed, as it is."""
    try:
        size = (
            newest_checkpoint(connection)
            if as_of is None
            else LedgerProofs(connection).checkpoint(as_of).size
        )
    except ProofError:
        if as_of is not None:
            raise
        since_us = 0 if chosen.since_us is None else chosen.since_us
        until_us = last_event_us(connection, None) + 1 if chosen.until_us is None else chosen.until_us
        return RecordRequest(role, 0, since_us, until_us, stated, named)
    bounds = period(connection, size, chosen.since_us, chosen.until_us)
    return RecordRequest(role, size, *bounds, stated, named)


def served_controllers(given: list[str]) -> tuple[ServedController, ...]:
    """Controllers as `TENANT=NAME`; raises `ConfigError` for another text."""
    made = []
    for text in given:
        tenant, is_pair, name = text.partition("=")
        if not (tenant and is_pair and name):
            raise ConfigError(f"--controller-of `{text}` is not `TENANT=NAME`")
        made.append(ServedController(tenant, name))
    return tuple(sorted(made))


def render_record(record: ProcessingRecord, formats: list[str]) -> dict[str, bytes]:
    """The files of a record, by name."""
    return {f"ropa.{name}": _MAKERS[name](record) for name in formats}


def check_record(
    folder: Path | None,
    data: bytes,
    vkeys: list[str],
    ledger: str | None,
    policy: Path | None,
    digest: str | None,
    export: Path | None = None,
    orders: SignedOrders | None = None,
) -> tuple[ReportCheck, tuple[str, ...]]:
    """What `report verify` finds of a record, and which files of its folder were compared."""
    given = None if policy is None else load_policy(read_file(policy), name=policy.name)
    if ledger is None:
        found = verify_record(data, vkeys, expected_digest=digest, given=given, export=export, orders=orders)
    else:
        with snapshot(ledger) as connection:
            found = verify_record(
                data, vkeys, expected_digest=digest, connection=connection, given=given, orders=orders
            )
    if folder is None or found.problems:
        return found, ()
    there = [name for name in FORMATS if (folder / f"ropa.{name}").exists()]
    made = render_record(_opened(data), there)
    wrong = tuple(
        f"`{name}` is not what the signed record gives, byte for byte"
        for name, each in made.items()
        if read_file(folder / name) != each
    )
    return found._replace(problems=wrong), tuple(sorted(made))


def _opened(data: bytes) -> ProcessingRecord:
    import orjson

    return record_of_facts(orjson.loads(data))


def to_json(record: ProcessingRecord) -> bytes:
    """The record as JSON, keys in order."""
    return record.to_bytes()


def to_csv(record: ProcessingRecord) -> bytes:
    """The record as rows for a register: one a policy and classification; what a spreadsheet would run is quoted."""
    shared = (
        "role",
        "activity",
        "controller",
        "contact",
        "officer",
        "purposes",
        "subjects",
        "data",
        "transfers",
    )
    limits = record.time_limits[0]._fields if record.time_limits else ()
    last = (
        "controllers",
        "recipients",
        "erasure_within",
        "measures",
        "controls",
        "policies",
        "history",
        "orders",
        "digest",
    )
    rows = [["since", "until", "checkpoint", *shared, *limits, *last]]
    policies = "; ".join(_policy_text(record, one.digest) for one in record.policies)
    for limit in record.time_limits:
        mine = [one for one in record.recipients if one.policy_digest == limit.policy_digest]
        cells = [iso(record.since_us), iso(record.until_us), str(record.checkpoint)]
        cells += [str(getattr(record, name)) for name in shared] + list(limit)
        cells += [
            "; ".join(f"{one.tenant}: {one.name}" for one in record.controllers),
            "; ".join(_recipient_text(one) for one in mine if one.at_most == limit.classification),
            record.erasure_within,
            " ".join(record.measures),
            "; ".join(f"{one.control}: {one.status}" for one in record.controls),
            policies,
            record.history,
            record.orders,
            record.digest(),
        ]
        rows.append(cells)
    return csv_text(rows).encode()


def _recipient_text(one: GrantedRecipient) -> str:
    return f"{one.reader} reads {one.owner} up to {one.at_most} ({one.by})"


def _policy_text(record: ProcessingRecord, digest: str) -> str:
    """When a policy was in effect."""
    one = next(each for each in record.policies if each.digest == digest)
    until = readable(one.until_us) if one.until_us else "now"
    return f"{one.name} {one.digest} from {readable(one.since_us)} to {until}"


def page_of(record: ProcessingRecord) -> Page:
    """The record as a page."""
    article, who = ("30(2)", "processor") if record.role == PROCESSOR else ("30(1)", "controller")
    facts = [
        (f"{who} ({article}(a))", record.controller),
        ("contact", record.contact),
        ("data-protection officer", record.officer),
        ("purposes (b)", record.purposes),
        ("data subjects (c)", record.subjects),
        ("personal data (c)", record.data),
        ("transfers (e)", record.transfers),
        ("erasure on request within", record.erasure_within),
        ("period", f"{iso(record.since_us)} to {iso(record.until_us)}"),
        (
            "as of checkpoint",
            str(record.checkpoint) if record.checkpoint else "none: nobody signed this ledger",
        ),
        ("policy", f"{record.policy}, digest {record.policy_digest}"),
        ("run by", ", ".join(record.run_by) or "no worker in the period, by the ledger"),
        (
            "evidence",
            f"{count(record.covered)} of {count(record.due)} units due ended in time with evidence "
            f"({percent(record.covered, record.due)})",
        ),
        ("orders", record.orders or "nothing is said of who gave them: nobody signed this ledger"),
        ("SHA-256 of the record", record.digest()),
        ("signed by", record.signature.key if record.signature else "nobody"),
    ]
    served = Section(
        "Controllers that it acts for (30(2)(a))",
        (Table(("tenant", "controller"), [tuple(one) for one in record.controllers], left=2),),
    )
    limits = [tuple(one) for one in record.time_limits]
    return Page(
        "Record of processing activities",
        f"GDPR {article}. {record.activity}. {record.history}",
        (),
        (
            Section(f"{who.capitalize()} and processing", (Facts(facts),)),
            *((served,) if record.role == PROCESSOR else ()),
            _policies(record),
            Section(
                "Categories of processing",
                (
                    Table(
                        ("tenant", "class", "units due", "covered"),
                        [
                            (one.tenant, one.classification, count(one.due), count(one.covered))
                            for one in record.categories
                        ]
                        or [("nothing was due in the period", "", "", "")],
                        left=2,
                    ),
                ),
            ),
            Section(
                "Time limits (f)",
                (
                    Table(
                        (
                            *("class", "after last use", "after birth", "running at most"),
                            *("overwritten within", "read back", "where", "policy"),
                        ),
                        [(*one[:-1], one[-1][:15]) for one in limits],
                        left=8,
                    ),
                ),
            ),
            _recipients(record),
            Section(
                "Technical and organisational measures (g)",
                (
                    Items(record.measures),
                    Table(
                        ("control", "about", "evidence in the period", "where in the report"),
                        [
                            (one.control, one.title, one.status, ", ".join(one.sections))
                            for one in record.controls
                        ]
                        or [("none was computed: nobody signed this ledger", "", "", "")],
                        left=4,
                    ),
                ),
            ),
        ),
        "kvcustody. Time limits and measures are those of the policies; what the controller states is theirs.",
    )


def _policies(record: ProcessingRecord) -> Section:
    rows = [
        (
            one.name + (f" ({one.stage})" if one.stage else ""),
            one.digest,
            readable(one.since_us),
            readable(one.until_us) if one.until_us else "still",
            ", ".join(one.workers),
            one.source,
        )
        for one in record.policies
    ]
    headings = ("policy", "digest", "from (UTC)", "until", "workers", "document from")
    table = Table(headings, rows, left=6, widths=(0.16, 0.34, 0.14, 0.14, 0.12, 0.1))
    return Section("Policies in effect in the period", (table,))


def _recipients(record: ProcessingRecord) -> Section:
    rows = [
        (
            one.owner,
            one.reader,
            one.by,
            one.at_most,
            one.reason,
            readable(one.until_us) if one.until_us else "no end",
            readable(one.first_use_us) if one.first_use_us else "none on record",
        )
        for one in record.recipients
    ]
    headings = ("owner", "reader", "by", "up to", "reason", "until (UTC)", "first use (UTC)")
    none = Items(("None: no grant or segment opens one tenant's blocks to another.",))
    return Section("Recipients (d)", (Table(headings, rows, left=7) if rows else none,))


def _html(record: ProcessingRecord) -> bytes:
    return render_html(page_of(record))


def _pdf(record: ProcessingRecord) -> bytes:
    return render_pdf(page_of(record))


_MAKERS: dict[str, Callable[[ProcessingRecord], Any]] = {
    "json": to_json,
    "csv": to_csv,
    "html": _html,
    "pdf": _pdf,
}
