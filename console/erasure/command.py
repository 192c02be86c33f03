"""The commands of `kvcustody erasure`."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import orjson
import typer

from kvcustody.audit.evidence.erasure.requests_and_answers import (
    names,
    status,
)
from kvcustody.audit.evidence.processes.marked_processes import history
from kvcustody.audit.reports.document import Document
from kvcustody.audit.reports.erasure.certificate import SelectorOpening, issue, new_opening
from kvcustody.audit.tlog.proofs import ProofError
from kvcustody.audit.tlog.signed_note import parse_vkey
from kvcustody.audit.tlog.signing_key import SigningKey, read_signing_key
from kvcustody.audit.verify.documents.certificate_rules import CertificateRules
from kvcustody.audit.verify.documents.verify import verify as verify_document
from kvcustody.clock import SystemClock
from kvcustody.console.api.client import asking, call, done
from kvcustody.console.api.group import OperationGroup
from kvcustody.console.clock import deadline_us
from kvcustody.console.command import (
    EXIT_ERROR,
    Json,
    Yes,
    confirm,
    print_json,
    say,
    tell_history,
)
from kvcustody.console.erasure.print_erasures import print_status
from kvcustody.console.opening import key_texts, reading, subject_store, writing
from kvcustody.console.options import (
    DEFAULT,
    ActSource,
    Keys,
    Ledger,
    NamesOfSubjects,
    ServiceSource,
    SubjectStore,
)
from kvcustody.console.render.document_forms import render
from kvcustody.errors import ConfigError, LedgerError
from kvcustody.files import evidence_mode, write_file
from kvcustody.governance.erasure.selector import Selector, selector_from
from kvcustody.governance.keys.checkpoint_signing_key import sign_ledger
from kvcustody.governance.release.order_signing import read_signed_orders
from kvcustody.governance.service.operations.parameter_groups import ParameterGroup, grouped

app = typer.Typer(
    cls=OperationGroup,
    no_args_is_help=True,
    help="Erase everything held of a tenant, subject, session, domain or model, and prove it.",
    epilog="docs/concepts/erasure.md describes its scope, what may lawfully remain, and the certificate.",
)
_Id = Annotated[str, typer.Argument(help="The erasure's id, as `request` printed it.", metavar="ERASURE")]


@dataclass(frozen=True, kw_only=True)
class SelectorOptions(ParameterGroup):
    """The data to erase."""

    tenant: Annotated[str | None, typer.Option(help="Whose data.")] = None
    subject: Annotated[str | None, typer.Option(help="Only this subject; needs the tenant.")] = None
    session: Annotated[str | None, typer.Option(help="Only this session; needs the tenant.")] = None
    model: Annotated[str | None, typer.Option(help="A model's digest, in hex.")] = None
    classification: Annotated[str | None, typer.Option(help="Domains of this classification.")] = None
    segment: Annotated[str | None, typer.Option(help="The domain of this declared segment.")] = None
    key_epoch: Annotated[int | None, typer.Option(help="Domains of this key epoch.")] = None
    label: Annotated[list[str] | None, typer.Option(help="Domains with this label, such as `region=eu`.")] = None


@app.command(
    epilog="Examples:\n\n    kvcustody erasure request --tenant acme --subject ada\n\n"
    "    kvcustody erasure request --tenant acme --classification confidential --yes --json"
)
@grouped
def request(
    *,
    what: SelectorOptions,
    deadline_seconds: Annotated[
        int, typer.Option(min=1, max=30 * 86_400, help="Seconds until the deadline: 30 days at most.")
    ] = 3600,
    subject_names: NamesOfSubjects = None,
    source: ActSource,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Put an erasure on record; every worker of the ledger takes it up within its `erasure_poll_ms`.

    It returns once the request is durable. What was created before that moment is covered. It is refused while a case
    restricts the processing of anybody whom it covers.
    An erasure that names neither a subject nor a session asks for the name once more, or for `--yes`.
    """
    if what.subject is None and what.session is None:
        confirm(
            f"everything of `{what.tenant}`" if what.tenant else "everything of every tenant",
            what.tenant or "every tenant",
            yes=yes,
        )
    stated = {field.name: getattr(what, field.name) for field in fields(what)}
    labels = dict(_labels(stated.pop("label") or []))
    requested = done(
        "requestErasure",
        source,
        {"subject_names": subject_names},
        **stated,
        labels=labels,
        deadline_seconds=deadline_seconds,
    )
    if as_json:
        print_json(requested)
    else:
        say(
            f"requested: {requested['erasure']} ({requested['selector']}); "
            f"see `kvcustody erasure status {requested['erasure']}`"
        )


def _labels(given: list[str]) -> tuple[tuple[str, str], ...]:
    labels = []
    for text in given:
        name, found, value = text.partition("=")
        if not (name and found and value):
            raise ConfigError(f"label `{text}` is not `name=value`")
        labels.append((name, value))
    return tuple(sorted(labels))


@app.command(
    name="status",
    epilog="Examples:\n\n    kvcustody erasure status 3f2a…\n\n"
    "    kvcustody erasure status 3f2a… --wait-seconds 60 --json",
)
@grouped
def show_status(
    erasure: _Id,
    *,
    wait_seconds: Annotated[int, typer.Option(min=0, help="Wait up to this time for completion.")] = 0,
    source: ServiceSource,
    as_json: Json = False,
) -> None:
    """Which workers have answered, what each did, what stays and why, and who has not answered."""
    until = time.monotonic() + wait_seconds
    with asking(source, "getErasure") as asker:
        while True:
            state = orjson.loads(call(asker, "getErasure", {"erasure": erasure}).body)
            if state["outcome"] == "complete" or time.monotonic() >= until:
                break
            time.sleep(0.25)
    if as_json:
        print_json(state)
    else:
        print_status(state)


@app.command(
    epilog="Example: `kvcustody erasure certificate 3f2a… --signing-key kvcustody-signing.key --out certificate.json "
    "--html certificate.html --opening opening.json`"
)
def certificate(
    erasure: _Id,
    *,
    signing_key: Annotated[Path, typer.Option(help="The ledger's signing key file.")],
    out: Annotated[Path, typer.Option(help="The file for the certificate; an existing one is replaced.")],
    html: Annotated[Path | None, typer.Option(help="The file for its HTML page.")] = None,
    opening: Annotated[
        Path | None, typer.Option(help="The file for the requester's opening, which names the selector.")
    ] = None,
    ledger: Ledger = DEFAULT,
    subject_keys: SubjectStore = None,
    as_json: Json = False,
) -> None:
    """Issue the certificate of an erasure as it stands: figures, proofs, what remains and why, under one signature.

    Issue it again when a partial erasure has become complete. Where nobody signs the ledger, its newest checkpoint is
    signed first. The opening names the subject: keep it from others.
    """
    key = read_signing_key(signing_key)
    with (
        subject_store(subject_keys, ledger) as keys,
        reading(ledger) as engine,
        engine.connect() as connection,
    ):
        now_us = deadline_us()
        asked = status(connection, erasure, now_us).request
        known = names(connection, asked, keys)
        parts = selector_from(asked.detail) if asked.detail not in ("", "{}") else Selector()
        selector = parts._replace(
            tenant=asked.tenant,
            subject=known.subject if known is not None else asked.subject,
            session=known.session if known is not None else asked.session,
        )
        opens = new_opening(selector.text())
    document = _issued(ledger, erasure, key, signing_key, opens)
    _write(out, document.to_bytes())
    if html is not None:
        _write(html, render(document, "html"))
    if opening is not None:
        _write(opening, json.dumps(opens._asdict()).encode())
    body = document.facts
    if as_json:
        print_json({"erasure": erasure, "outcome": body["outcome"], "figures": body["figures"], "path": str(out)})
    else:
        say(f"{body['outcome']}: {out}, {body['figures']['destroyed']} of {body['figures']['units']} blocks destroyed")


def _issued(ledger: str, erasure: str, key: SigningKey, path: Path, opens: SelectorOpening) -> Document:
    """Return the certificate; unsigned leaves of it are signed first where no process has the ledger open."""
    clock = SystemClock()
    try:
        with reading(ledger) as engine, engine.connect() as connection:
            return issue(connection, erasure, key, opens, now_us=deadline_us())
    except ProofError:
        with writing(ledger) as engine:
            sign_ledger(path, key.name, engine, clock, key.kind)
            with engine.connect() as connection:
                return issue(connection, erasure, key, opens, now_us=deadline_us())


def _write(path: Path, data: bytes) -> None:
    try:
        write_file(path, data, mode=evidence_mode())
    except OSError as error:
        raise ConfigError(f"`{path}` cannot be written: {error.strerror}", path=path) from None


@app.command(
    epilog="Example: `kvcustody erasure verify certificate.json --key ledger.vkey --opening opening.json --json`"
)
def verify(
    file: Annotated[Path, typer.Argument(help="The certificate.", metavar="CERTIFICATE")],
    *,
    key: Keys,
    opening: Annotated[Path | None, typer.Option(help="The opening that the requester has.")] = None,
    export: Annotated[
        Path | None,
        typer.Option(help="An export of the certificate's checkpoint: all of it is made again from the leaves."),
    ] = None,
    trust: Annotated[
        Path | None,
        typer.Option(help="A trust configuration: one of its keys with the role `orders` signed the request."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check a certificate offline: signature, every leaf's place in the ledger, and every figure from the leaves.

    It needs the file and the ledger's public key; with an export it is made again from every leaf. Exits 2 where
    anything is wrong.
    """
    opens = None
    try:
        data = file.read_bytes()
        if opening is not None:
            opens = SelectorOpening(**json.loads(opening.read_text("utf-8-sig")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"`{opening or file}` cannot be read: {error}") from None
    vkeys = key_texts(key)
    orders = read_signed_orders(trust, parse_vkey(vkeys[0]).name, None)
    check = verify_document(data, vkeys, [CertificateRules(opens)], source=export, orders=orders)
    if check.source_rejected and not check.problems:
        raise LedgerError(f"the certificate cannot be checked against export `{export}`: {check.source_rejected}")
    shown = check.shown
    figures = shown.get("figures")
    if shown.get("marked"):
        tell_history(history(shown["marked"]), [one._asdict() for one in shown["marked"]])
    if shown.get("monitored"):
        say(f"note: {shown['monitored']}", file=sys.stderr)
    if as_json:
        print_json(
            {
                "ok": check.ok,
                "erasure": shown.get("erasure", ""),
                "outcome": shown.get("outcome", ""),
                "opened": shown.get("opened", False),
                "figures": None if figures is None else figures.as_dict(),
                "problems": check.problems,
                "monitored": shown.get("monitored", ""),
                "unchecked": [{"path": one.path, "why": one.why} for one in check.unchecked],
            }
        )
    elif check.ok and figures is not None:
        say(
            f"ok: erasure {shown['erasure']} is {shown['outcome']}; {figures.destroyed} of {figures.units} "
            f"blocks destroyed, {sum(count for _, count in figures.kept)} kept for others"
        )
        for tier, copies in figures.copies:
            say(
                f"copies in `{tier}`: {copies.ended} ended, {copies.zeroed} zeroed, {copies.unlinked} unlinked, "
                f"{copies.deleted} deleted, {copies.key_destroyed} with a destroyed key, {copies.waiting} waiting"
            )
    else:
        for problem in check.problems:
            say(f"problem: {problem}")
    if not as_json:
        for one in check.unchecked:
            say(f"not checked: {one.path}: {one.why}")
    if not check.ok:
        raise typer.Exit(EXIT_ERROR)
