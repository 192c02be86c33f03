"""The commands of `kvcustody case`."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from kvcustody.audit.evidence.cases.case_record import StepKind, SubjectRight
from kvcustody.console.api.client import done
from kvcustody.console.api.group import OperationGroup
from kvcustody.console.case.letter import LETTER_FORMS, LETTER_KINDS, LetterDetails, write_letter
from kvcustody.console.command import Json, print_json, say
from kvcustody.console.files import read_file, read_words, write_files
from kvcustody.console.options import ActSource, NamesOfSubjects, ServiceSource, moment_us
from kvcustody.console.render.document_forms import render_all
from kvcustody.errors import ConfigError
from kvcustody.governance.service.operations.parameter_groups import grouped

app = typer.Typer(
    cls=OperationGroup,
    no_args_is_help=True,
    help="Subject requests as cases: receipt, identity, the deadline of one month, decision, letter.",
    epilog="docs/concepts/cases.md describes the deadline, the order of steps, and what a case shows.",
)
_Case = Annotated[str, typer.Argument(help="The case's id, as `open` printed it.", metavar="CASE")]


@app.command(
    name="open",
    epilog="Examples:\n\n    kvcustody case open --tenant acme --subject ada --right erasure --channel mail "
    "--received 2026-11-25T09:30:00+01:00 --zone Europe/Berlin --holidays holidays.txt --as dana\n\n"
    "    kvcustody case open --tenant acme --subject ada --right access --channel letter "
    "--server https://ledger.example:8443 --api-key-file dpo.key --json",
)
@grouped
def open_case(
    *,
    tenant: Annotated[str, typer.Option(help="The subject's tenant.")],
    subject: Annotated[str, typer.Option(help="The person, by the name that the tenant's identity provider uses.")],
    right: Annotated[SubjectRight, typer.Option(help="The right that they exercise.")],
    channel: Annotated[str, typer.Option(help="The channel: `mail`, `letter`, `telephone`; no address.")],
    received: Annotated[
        str | None, typer.Option(help="Time of receipt (ISO 8601; UTC without an offset); default: now.")
    ] = None,
    zone: Annotated[
        str | None, typer.Option(help="The controller's time zone, by its IANA name; default: the settings'.")
    ] = None,
    holidays: Annotated[
        str | None,
        typer.Option(help="The controller's public holidays: a file with one date per line.", metavar="FILE"),
    ] = None,
    subject_names: NamesOfSubjects = None,
    source: ActSource,
    as_json: Json = False,
) -> None:
    """Put a request of a person on record as a case. The answer is due in one month from receipt.

    A control plane has the zone and the holidays in its settings. The ledger knows the person by a pseudonym.
    """
    case = done(
        "openCase",
        source,
        {"case_zone": zone, "case_holidays_path": holidays, "subject_names": subject_names},
        tenant=tenant,
        subject=subject,
        right=right.value,
        channel=channel,
        received=moment_us(received, "--received"),
    )
    if as_json:
        print_json(case)
    else:
        say(f"opened: {case['case_id']}, to be answered by {case['due_day']}")


@app.command(
    epilog="Examples:\n\n    kvcustody case step 4f1c… identity --outcome confirmed --as dana\n\n"
    "    kvcustody case step 4f1c… extend --ground complexity --reason 'three systems' --as dana\n\n"
    "    kvcustody case step 4f1c… erasure --about 3f2a… --as dana\n\n"
    "    kvcustody case step 4f1c… answer --about letter --file letter.pdf --as dana"
)
@grouped
def step(
    case_id: _Case,
    kind: Annotated[StepKind, typer.Argument(help="What was done.", metavar="STEP")],
    *,
    outcome: Annotated[str, typer.Option(help="The outcome; a wrong one prints the list.")] = "",
    ground: Annotated[str, typer.Option(help="The legal ground in the GDPR, for example `17(3)(e)`.")] = "",
    about: Annotated[
        str,
        typer.Option(
            help="What the step refers to: an erasure's id, a recipient, a third party, or how an answer was sent."
        ),
    ] = "",
    reason: Annotated[str, typer.Option(help="Why, in words that name no person.")] = "",
    file: Annotated[
        Path | None, typer.Option(help="The letter or export that was given: its SHA-256 is recorded.")
    ] = None,
    subject_names: NamesOfSubjects = None,
    source: ActSource,
    as_json: Json = False,
) -> None:
    """Take a step of a case: identity, extension, exemption, restriction, third party, recipient, decision, answer.

    A step that may not follow, or that the ledger contradicts, is refused with the reason, and nothing is recorded.
    """
    digest = "" if file is None else hashlib.sha256(read_file(file)).hexdigest()
    case = done(
        "takeCaseStep",
        source,
        {"subject_names": subject_names},
        case=case_id,
        step=kind.value,
        outcome=outcome,
        ground=ground,
        about=about,
        reason=reason,
        digest=digest,
    )
    if as_json:
        print_json(case)
    else:
        say(f"{kind.value}: {case['case_id'][:12]} is {case['state']}, to be answered by {case['due_day']}")


@app.command(
    epilog="Examples:\n\n    kvcustody case letter 4f1c… --to 'Ada Lovelace' --from 'Example AG, Bonn' --out letter\n\n"
    "    kvcustody case letter 4f1c… --kind extension --to 'Ada Lovelace' --format text,pdf --template ours.txt"
)
@grouped
def letter(
    case_id: _Case,
    *,
    to: Annotated[str, typer.Option("--to", help="Name and address; they appear in the letter and are not stored.")],
    sender: Annotated[str, typer.Option("--from", help="Name and address of the sender.")] = "",
    kind: Annotated[str, typer.Option(help=f"One of: {', '.join(LETTER_KINDS)}.")] = "answer",
    date: Annotated[str | None, typer.Option(help="The letter's date; default: today (UTC).")] = None,
    template: Annotated[
        Path | None, typer.Option(help="Your own Jinja2 template, like `console/case/letter.txt`.")
    ] = None,
    format: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(LETTER_FORMS)}.")] = "text,html",
    out: Annotated[Path, typer.Option(help="The folder to write to.")] = Path("kvcustody-letter"),
    source: ServiceSource,
    as_json: Json = False,
) -> None:
    """Write the letter to the person: the answer, the extension or the question who they are.

    Record the one that was sent with `case step CASE answer --about letter --file letter.pdf`.
    """
    case = done("getCase", source, case=case_id)
    today = datetime.now(UTC).date().isoformat()
    own = "" if template is None else read_words(template)
    details = LetterDetails(kind, to, sender, date or today, own)
    forms = [name.strip() for name in format.split(",") if name.strip()]
    if not forms:
        raise ConfigError(f"a letter's forms are: {', '.join(LETTER_FORMS)}")
    files = render_all(write_letter(case, details), forms)
    write_files(out, files)
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in sorted(files.items())}
    if as_json:
        print_json({"folder": str(out), "files": digests})
        return
    for name, digest in digests.items():
        say(f"{out / name}: SHA-256 {digest}")
