"""`kvcustody report ropa`: the record of processing activities as JSON, a page, PDF or CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import orjson
import typer

from kvcustody.audit.coverage.summary import coverage
from kvcustody.audit.processes.marked_processes import history, read_marked
from kvcustody.audit.processes.running_policies import read_running_policies
from kvcustody.console.command import Json, print_json
from kvcustody.console.files import read_file, write_files
from kvcustody.console.opening import connect, one_ledger, selection, snapshot
from kvcustody.console.options import DEFAULT, Authority, KeyFile, Ledger, Server, Since, Until
from kvcustody.console.report.render.html import render_html
from kvcustody.console.report.render.number_format import count, percent
from kvcustody.console.report.render.page_model import Facts, Items, Page, Section, Table
from kvcustody.console.report.render.pdf import render_pdf
from kvcustody.errors import ConfigError, PolicyError
from kvcustody.governance.observability.processing_record import (
    ControllerStatement,
    ProcessingRecord,
    record_of,
    record_of_facts,
)
from kvcustody.governance.release.policies_in_effect import PoliciesInEffect, policies_in_effect
from kvcustody.policies.document.digest import digest
from kvcustody.policies.document.model import Policy
from kvcustody.policies.reading.load_policy import load_policy

FORMATS = ("html", "pdf", "json", "csv")
EPILOG = """Examples:

    kvcustody report ropa --policy policy.yaml --ledger kvcustody.db --controller "Example AG, Bonn"

    kvcustody report ropa --policy policy.yaml --ledger kvcustody.db --since 2026-01-01 --format csv --out ropa

    kvcustody report ropa --server https://ledger.example:8443 --api-key-file dpo.key --json
"""


def ropa(
    ctx: typer.Context,
    *,
    policy: Annotated[
        Path | None,
        typer.Option(
            help="The policy (YAML) whose limits are the record's; else the one that workers run, by the ledger."
        ),
    ] = None,
    ledger: Ledger = DEFAULT,
    since: Since = None,
    until: Until = None,
    controller: Annotated[str, typer.Option(help="Name of the controller (30(1)(a)).")] = "",
    contact: Annotated[str, typer.Option(help="Contact details.")] = "",
    officer: Annotated[str, typer.Option(help="The data-protection officer.")] = "",
    purposes: Annotated[str, typer.Option(help="Purposes of the processing (30(1)(b)).")] = "",
    subjects: Annotated[str, typer.Option(help="Categories of data subjects (30(1)(c)).")] = "",
    data: Annotated[str, typer.Option(help="Categories of personal data.")] = "",
    transfers: Annotated[str, typer.Option(help="Transfers to third countries (30(1)(e)).")] = "",
    format: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(FORMATS)}.")] = "html,json",
    out: Annotated[Path, typer.Option(help="The folder to write to.")] = Path("kvcustody-ropa"),
    server: Server = None,
    key_file: KeyFile = None,
    authority: Authority = None,
    as_json: Json = False,
) -> None:
    """Export the record of processing activities (GDPR 30): time limits and measures from the policy, as it runs.

    What only the controller knows is an option; what is left out stays open in the record and says so.
    """
    formats = [name.strip() for name in format.split(",") if name.strip()]
    if not formats or set(formats) - set(FORMATS):
        raise ConfigError(f"format `{format}` names none of: {', '.join(FORMATS)}", format=format)
    source = None if policy is None else read_file(policy)
    chosen = selection(since, until, None, None, None, None)
    stated = ControllerStatement(controller, contact, officer, purposes, subjects, data, transfers)
    if server is not None:
        one_ledger(ctx)
        with connect(server, key_file, authority) as asked:
            text = None if source is None else source.decode(errors="replace")
            body = {"policy": text, "since": chosen.since_us, "until": chosen.until_us, **stated._asdict()}
            record = record_of_facts(asked.post("/v1/reports:processing", body))
    else:
        given = None if source is None or policy is None else load_policy(source, name=policy.name)
        with snapshot(ledger) as connection:
            effect = policies_in_effect(read_running_policies(connection), None)
            total = coverage(connection, since_us=chosen.since_us, until_us=chosen.until_us).total
            said = history(read_marked(connection))
        found, revoked = _the_one(effect) if given is None else (given, frozenset[str]())
        run_by = effect.run_by(digest(found))
        record = record_of(found, total, stated, history=said, run_by=run_by, revoked=revoked)
    files = {f"ropa.{name}": _MAKERS[name](record) for name in formats}
    write_files(out, files)
    if as_json:
        print_json({"folder": str(out), "files": sorted(files), "record": record.facts()})
    else:
        print(f"{', '.join(sorted(files))} in {out}")


def _the_one(effect: PoliciesInEffect) -> tuple[Policy, frozenset[str]]:
    try:
        one = effect.the_one()
    except PolicyError as error:
        raise ConfigError(f"--policy is needed: {error.message}") from None
    assert one.policy is not None, "the one in effect is known"
    return one.policy, one.revoked


def to_json(record: ProcessingRecord) -> bytes:
    """The record as JSON, keys in order."""
    return orjson.dumps(record.facts(), option=orjson.OPT_SORT_KEYS | orjson.OPT_INDENT_2) + b"\n"


def to_csv(record: ProcessingRecord) -> bytes:
    """The record as rows for a register: one a classification. A text that a spreadsheet would run is quoted."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    shared = (
        "activity",
        "controller",
        "contact",
        "officer",
        "purposes",
        "subjects",
        "data",
        "transfers",
        "erasure_within",
    )
    limits = tuple(record.time_limits[0]._fields) if record.time_limits else ()
    last = ("recipients", "measures", "policy", "policy_digest", "run_by", "history")
    writer.writerow([*shared, *limits, *last])
    recipients = "; ".join(f"{item.reader} reads {item.owner} ({item.by})" for item in record.recipients)
    for limit in record.time_limits:
        cells = [*(getattr(record, name) for name in shared), *limit, recipients, " ".join(record.measures)]
        writer.writerow(
            [
                _cell(cell)
                for cell in (
                    *(*cells, record.policy, record.policy_digest),
                    *("; ".join(record.run_by), record.history),
                )
            ]
        )
    return text.getvalue().encode()


def page_of(record: ProcessingRecord) -> Page:
    """The record as a page."""
    facts = [
        ("controller (30(1)(a))", record.controller),
        ("contact", record.contact),
        ("data-protection officer", record.officer),
        ("purposes (b)", record.purposes),
        ("data subjects (c)", record.subjects),
        ("personal data (c)", record.data),
        ("transfers (e)", record.transfers),
        ("erasure on request within", record.erasure_within),
        ("policy", f"{record.policy}, digest {record.policy_digest}"),
        ("run by", ", ".join(record.run_by) or "no worker at work, by the ledger"),
        (
            "evidence",
            f"{count(record.covered)} of {count(record.due)} units due ended in time with evidence "
            f"({percent(record.covered, record.due)})",
        ),
    ]
    limits = [tuple(item) for item in record.time_limits]
    recipients = [tuple(item) for item in record.recipients]
    return Page(
        "Record of processing activities",
        f"GDPR 30(1). {record.activity}. {record.history}",
        (),
        (
            Section("Controller and processing", (Facts(facts),)),
            Section(
                "Time limits (f)",
                (
                    Table(
                        (
                            *("class", "after last use", "after birth", "running at most"),
                            *("overwritten within", "read back", "where"),
                        ),
                        limits,
                        left=7,
                    ),
                ),
            ),
            Section(
                "Recipients (d)",
                (
                    Table(("owner", "reader", "by", "up to", "reason"), recipients, left=5)
                    if recipients
                    else Items(("None: no grant or segment opens one tenant's blocks to another.",)),
                ),
            ),
            Section("Technical and organisational measures (g)", (Items(record.measures),)),
        ),
        "kvcustody. Time limits and measures are those of the policy; what the controller states is theirs.",
    )


def _html(record: ProcessingRecord) -> bytes:
    return render_html(page_of(record))


def _pdf(record: ProcessingRecord) -> bytes:
    return render_pdf(page_of(record))


def _cell(text: str) -> str:
    return "'" + text if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


_MAKERS: dict[str, Callable[[ProcessingRecord], bytes]] = {
    "json": to_json,
    "csv": to_csv,
    "html": _html,
    "pdf": _pdf,
}
