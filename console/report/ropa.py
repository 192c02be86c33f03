"""`kvcustody report ropa`: the record of processing activities as JSON, a page, PDF or CSV."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from sqlalchemy import Connection

from kvcustody.audit.evidence.coverage.custody_units import CustodySelection, last_event_us
from kvcustody.audit.evidence.query.known_names import known_tenant
from kvcustody.audit.reports.build_report import newest_checkpoint, period
from kvcustody.audit.reports.document import Document, read_document
from kvcustody.audit.tlog.backend import canonical_json
from kvcustody.audit.tlog.database_proofs import LedgerProofs
from kvcustody.audit.tlog.proofs import ProofError
from kvcustody.audit.verify.documents.record_agreement import RECORD
from kvcustody.console.command import Json, print_json, say
from kvcustody.console.files import read_file, write_files
from kvcustody.console.opening import connect, one_ledger, selection, snapshot
from kvcustody.console.options import DEFAULT, At, ControlPlane, DuePeriod, Ledger
from kvcustody.console.render.document_forms import FORMS, render_all
from kvcustody.errors import ConfigError
from kvcustody.governance.keys.report_signing_key import read_report_key, recorded_report_keys
from kvcustody.governance.processing.build_record import RecordRequest, build_record, signed_record
from kvcustody.governance.processing.record import (
    CONTROLLER,
    PROCESSOR,
    ROLES,
    ControllerStatement,
    ServedController,
    record_of_facts,
)
from kvcustody.governance.service.operations.parameter_groups import ParameterGroup, grouped
from kvcustody.policies.reading.load_policy import load_policy

FORMATS = tuple(FORMS[RECORD].files)
EPILOG = """Examples:

    kvcustody report ropa --policy policy.yaml --ledger kvcustody.db --controller "Example AG, Bonn"

    kvcustody report ropa --role processor --since 2026-01-01 --until 2026-04-01 --controller "Host AG"
    --controller-of acme="Example AG" --signing-key kvcustody-report.key --format pdf,csv,json --out ropa

    kvcustody report ropa --server https://ledger.example:8443 --api-key-file dpo.key --json

    kvcustody report verify ropa --key ledger.vkey --ledger kvcustody.db
"""


@dataclass(frozen=True, kw_only=True)
class RecordOptions(ParameterGroup):
    """The record's controller or processor, and its period."""

    policy: Annotated[
        Path | None,
        typer.Option(help="A policy (YAML) to put beside those in effect, whoever runs it; needed where none was."),
    ] = None
    role: Annotated[str, typer.Option(help=f"Whose record: of a {CONTROLLER} (30(1)) or of a {PROCESSOR} (30(2)).")] = (
        CONTROLLER
    )
    ledger: Ledger = DEFAULT
    period: DuePeriod
    as_of: At = None


@dataclass(frozen=True, kw_only=True)
class StatementOptions(ParameterGroup):
    """The controller's or processor's own statements."""

    controller: Annotated[
        str, typer.Option(help="Name of the controller (30(1)(a)), or of the processor (30(2)(a)).")
    ] = ""
    controller_of: Annotated[
        list[str] | None,
        typer.Option(help="Of a processor: TENANT=NAME of a controller that it acts for; may be given again."),
    ] = None
    contact: Annotated[str, typer.Option(help="Contact details.")] = ""
    officer: Annotated[str, typer.Option(help="The data-protection officer.")] = ""
    purposes: Annotated[str, typer.Option(help="Purposes of the processing (30(1)(b)).")] = ""
    subjects: Annotated[str, typer.Option(help="Categories of data subjects (30(1)(c)).")] = ""
    data: Annotated[str, typer.Option(help="Categories of personal data.")] = ""
    transfers: Annotated[str, typer.Option(help="Transfers to third countries (30(1)(e)).")] = ""


@dataclass(frozen=True, kw_only=True)
class RecordFiles(ParameterGroup):
    """The record's files."""

    format: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(FORMATS)}.")] = "html,json"
    signing_key: Annotated[
        Path | None,
        typer.Option(help="The file of the key that signs reports; without it, unsigned. A server signs itself."),
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
            document = _document_of(asked.post("/v1/reports:processing", body | more))
    else:
        given = None if source is None or wanted.policy is None else load_policy(source, name=wanted.policy.name)
        with snapshot(wanted.ledger) as connection:
            named = tuple(one._replace(tenant=known_tenant(connection, one.tenant) or one.tenant) for one in named)
            request = _request(connection, wanted.role, chosen, wanted.as_of, stated, named)
            try:
                record = build_record(connection, request, given=given)
            except ConfigError as problem:
                raise (ConfigError(f"--policy is needed: {problem.message}") if given is None else problem) from None
            if to.signing_key is not None:
                key = read_report_key(to.signing_key, recorded_report_keys(connection.engine))
                document = signed_record(connection, record, key)
            else:
                document = record.document()
    files = render_all(document, formats)
    write_files(to.out, files)
    if as_json:
        print_json(
            {
                "folder": str(to.out),
                "files": sorted(files),
                "digest": document.digest(),
                "record": document.body(),
            }
        )
    else:
        say(f"{', '.join(sorted(files))} in {to.out}; SHA-256 of the record {document.digest()}")


def _request(
    connection: Connection,
    role: str,
    chosen: CustodySelection,
    as_of: int | None,
    stated: ControllerStatement,
    named: tuple[ServedController, ...],
) -> RecordRequest:
    """Return the state of the ledger to read: at its newest signed checkpoint or, without one, as it is."""
    try:
        size = newest_checkpoint(connection) if as_of is None else LedgerProofs(connection).checkpoint(as_of).size
    except ProofError:
        if as_of is not None:
            raise
        since_us = 0 if chosen.since_us is None else chosen.since_us
        until_us = last_event_us(connection, None) + 1 if chosen.until_us is None else chosen.until_us
        return RecordRequest(role, 0, since_us, until_us, stated, named)
    bounds = period(connection, size, chosen.since_us, chosen.until_us)
    return RecordRequest(role, size, *bounds, stated, named)


def served_controllers(given: list[str]) -> tuple[ServedController, ...]:
    """Return controllers given as `TENANT=NAME`.

    Raises:
        ConfigError: a text has another form.
    """
    controllers = []
    for text in given:
        tenant, is_pair, name = text.partition("=")
        if not (tenant and is_pair and name):
            raise ConfigError(f"--controller-of `{text}` is not `TENANT=NAME`")
        controllers.append(ServedController(tenant, name))
    return tuple(sorted(controllers))


def _document_of(body: dict[str, Any]) -> Document:
    """Return the record from a control plane's answer.

    Raises:
        LedgerError: the answer is no record.
    """
    document = read_document(canonical_json(body), [RECORD])
    record_of_facts(document.facts)
    return document
