"""The commands of `kvcustody case`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text
from sqlalchemy import Engine

from kvcustody.audit.evidence.cases.case_clock import read_holidays, working_calendar
from kvcustody.audit.evidence.cases.case_record import CaseState, CaseStep, StepKind, SubjectRight
from kvcustody.audit.evidence.cases.read_cases import read_case
from kvcustody.audit.evidence.query.known_names import known_tenant
from kvcustody.audit.evidence.subjects.subject_key_store import SubjectKeys
from kvcustody.audit.write.record_operator_act import recorder
from kvcustody.clock import SystemClock
from kvcustody.console.api.asking import asked, listed
from kvcustody.console.case.letter import LETTER_FORMS, LETTER_KINDS, LetterDetails, letter_files
from kvcustody.console.clock import deadline_us
from kvcustody.console.command import Json, make_table, print_answer, print_json, say, stdout
from kvcustody.console.files import read_file, read_words, write_files
from kvcustody.console.opening import control_plane, subject_store, writing
from kvcustody.console.options import ActSource, OldestFirst, Source, SubjectNames, SubjectSource, moment_us
from kvcustody.errors import ConfigError
from kvcustody.governance.api.models.privacy.cases import CaseModel, CasePage, CaseSummaryModel
from kvcustody.governance.cases.show_case import summary_of
from kvcustody.governance.cases.take_step import (
    WantedCase,
    check_actor,
    check_step,
    opened_event,
    step_event,
)
from kvcustody.governance.service.answers.cases import GET_CASE, LIST_CASES
from kvcustody.governance.service.operations.parameter_groups import grouped
from kvcustody.times import readable

app = typer.Typer(
    no_args_is_help=True,
    help="Requests of people about their data as cases: receipt, identity, the clock of one month, decision, letter.",
    epilog="docs/audit/cases.md says how the clock runs, what each step may follow, and what a case shows.",
)
_Case = Annotated[str, typer.Argument(help="The case's id, as `open` printed it.", metavar="CASE")]
_Actor = Annotated[
    str | None, typer.Option(help="Who acts: a principal of the ledger. With --server: whose key it is.")
]


@app.command(
    name="open",
    epilog="Examples:\n\n    kvcustody case open --tenant acme --subject ada --right erasure --channel mail "
    "--received 2026-11-25T09:30:00+01:00 --zone Europe/Berlin --holidays holidays.txt --actor dana\n\n"
    "    kvcustody case open --tenant acme --subject ada --right access --channel letter "
    "--server https://ledger.example:8443 --api-key-file dpo.key --json",
)
@grouped
def open_case(
    *,
    tenant: Annotated[str, typer.Option(help="Whose subject it is.")],
    subject: Annotated[str, typer.Option(help="The person, as the tenant's identity names them.")],
    right: Annotated[SubjectRight, typer.Option(help="What they ask for.")],
    channel: Annotated[str, typer.Option(help="How it came in: `mail`, `letter`, `telephone`; no address.")],
    received: Annotated[
        str | None, typer.Option(help="When it came in (ISO 8601; without an offset UTC); default: now.")
    ] = None,
    zone: Annotated[str, typer.Option(help="The controller's time zone, by its IANA name.")] = "UTC",
    holidays: Annotated[
        Path | None, typer.Option(help="The controller's public holidays: a file with a date a line.")
    ] = None,
    actor: _Actor = None,
    source: ActSource,
    as_json: Json = False,
) -> None:
    """Put a request of a person on record as a case. The answer is due in one month from receipt.

    A control plane has the zone and the holidays in its settings. The ledger knows the person by a pseudonym.
    """
    at_us = moment_us(received, "--received")
    if source.plane.server is not None:
        with control_plane(source) as plane:
            body = {"tenant": tenant, "subject": subject, "right": right.value, "channel": channel}
            made = plane.post("/v1/cases", body | {"received": at_us})
    else:
        texts = () if holidays is None else read_holidays(read_words(holidays))
        calendar = working_calendar(zone, texts)
        now_us = deadline_us()
        wanted = WantedCase(tenant, subject, right.value, channel, now_us if at_us is None else at_us)
        with _acting(source.ledger, actor, source.subject_keys, source.subject_names) as act:
            with act.engine.connect() as connection:
                wanted = wanted._replace(tenant=known_tenant(connection, tenant) or "")
            event = opened_event(0, wanted, act.actor, calendar, now_us)
            act.put(event)
            with act.engine.connect() as connection:
                made = summary_of(read_case(connection, event.case_id), now_us)._asdict()
    if as_json:
        print_answer(CaseSummaryModel, made)
    else:
        say(f"opened: {made['case_id']}, to be answered by {made['due_day']}")


class _Act:
    """An open ledger, and somebody who may act on it."""

    def __init__(
        self, engine: Engine, actor: str, keys: SubjectKeys | None, subject_names: SubjectNames
    ) -> None:
        self.engine, self.actor, self.keys = engine, actor, keys
        self._clear = subject_names is SubjectNames.CLEAR

    def put(self, event: Any) -> None:
        """Make an event durable, at this moment."""
        clock = SystemClock()
        keys = None if self._clear else self.keys
        with recorder(self.engine, clock, subject_keys=keys, clear_names=self._clear) as writer:
            writer.submit_durable(event._replace(at_us=clock.now_us()))


@contextmanager
def _acting(
    ledger: str, actor: str | None, subject_keys: str | None, subject_names: SubjectNames
) -> Iterator[_Act]:
    if actor is None:
        raise ConfigError("--actor is needed: every step names a principal of the ledger")
    with subject_store(subject_keys, ledger) as keys, writing(ledger) as engine:
        if keys is None and subject_names is not SubjectNames.CLEAR:
            raise ConfigError(
                "--subject-keys: there is no store of subject keys beside the ledger; name it, or give "
                "`--subject-names clear` where workers keep names in clear"
            )
        with engine.connect() as connection:
            check_actor(connection, actor, SystemClock().utc_us())
        yield _Act(engine, actor, keys, subject_names)


@app.command(
    epilog="Examples:\n\n    kvcustody case step 4f1c… identity --outcome confirmed --actor dana\n\n"
    "    kvcustody case step 4f1c… extend --ground complexity --reason 'three systems' --actor dana\n\n"
    "    kvcustody case step 4f1c… erasure --about 3f2a… --actor dana\n\n"
    "    kvcustody case step 4f1c… answer --about letter --file letter.pdf --actor dana"
)
@grouped
def step(
    case_id: _Case,
    kind: Annotated[StepKind, typer.Argument(help="What was done.", metavar="STEP")],
    *,
    outcome: Annotated[
        str, typer.Option(help="What it came to; a wrong one is answered with the list.")
    ] = "",
    ground: Annotated[str, typer.Option(help="The ground in the GDPR, as `17(3)(e)`.")] = "",
    about: Annotated[
        str, typer.Option(help="An erasure's id, a recipient, a third party, or how an answer was sent.")
    ] = "",
    reason: Annotated[str, typer.Option(help="Why, in words that name no person.")] = "",
    file: Annotated[
        Path | None, typer.Option(help="The letter or export that was given: its SHA-256 is recorded.")
    ] = None,
    actor: _Actor = None,
    source: ActSource,
    as_json: Json = False,
) -> None:
    """Take a step of a case: identity, extension, exemption, restriction, third party, recipient, decision, answer.

    A step that may not follow, or that the ledger contradicts, is refused with the reason, and nothing is recorded.
    """
    digest = "" if file is None else hashlib.sha256(read_file(file)).hexdigest()
    wanted = CaseStep(kind.value, outcome, ground, about, reason, digest)
    if source.plane.server is not None:
        with control_plane(source) as plane:
            asked = wanted._asdict()
            body = {name: asked[name] for name in ("step", "outcome", "ground", "about", "reason", "digest")}
            made = plane.post(f"/v1/cases/{case_id}/steps", body)
    else:
        with _acting(source.ledger, actor, source.subject_keys, source.subject_names) as act:
            with act.engine.connect() as connection:
                case = read_case(connection, case_id)
                taken = wanted._replace(actor=act.actor, at_us=deadline_us())
                check_step(connection, case, taken, keys=act.keys)
            act.put(step_event(0, case, taken))
            with act.engine.connect() as connection:
                after = read_case(connection, case_id)
            if after.steps[-1].void:  # somebody else was first
                raise ConfigError(f"step `{kind}`: {after.steps[-1].void}")
            made = summary_of(after, deadline_us())._asdict()
    if as_json:
        print_answer(CaseSummaryModel, made)
    else:
        say(f"{kind.value}: {made['case_id'][:12]} is {made['state']}, to be answered by {made['due_day']}")


@app.command(name="list", epilog="Example: `kvcustody case list --tenant acme --json`")
@grouped
def show_list(
    *,
    tenant: Annotated[str | None, typer.Option(help="Of this tenant alone.")] = None,
    oldest_first: OldestFirst = False,
    source: Source,
    as_json: Json = False,
) -> None:
    """Every case on record, newest first, and how it stands: `open`, `near`, `missed`, `answered` or `late`."""
    found = listed(LIST_CASES, source, tenant=tenant)
    found = found[::-1] if oldest_first else found
    if as_json:
        print_answer(CasePage, {"items": found})
        return
    if not found:
        say("no case is on record; `kvcustody case open` records a request of a person")
        return
    table = make_table("", "case", "asks for", "tenant", "received", "due", "state", "decided", left=7)
    for one in found:
        days = (one["received_day"], one["due_day"])
        table.add_row(
            one["case_id"],
            one["subject_right"],
            one["tenant"],
            *days,
            _marked(one["state"]),
            one["outcome"] or "no",
        )
    stdout().print(table)
    for one in found:
        if one["unread"]:
            say(f"case {one['case_id'][:12]}: {unread_text(one['unread'])}")


def unread_text(unread: str) -> str:
    """What is said of a case whose leaf could not be read whole."""
    return f"not read: {unread}; the days shown are the earliest that may count"


def _marked(state: str) -> Text:
    """The word, standing out where the clock was not kept, or is about to run out."""
    if state in (CaseState.MISSED, CaseState.LATE):
        return Text(state, "bold red")
    return Text(state, "yellow" if state == CaseState.NEAR else "")


@app.command(epilog="Example: `kvcustody case show 4f1c… --json`")
@grouped
def show(
    case_id: _Case,
    *,
    source: SubjectSource,
    as_json: Json = False,
) -> None:
    """One case: its clock, its steps, erasures, legal holds and recipients, and what is still to be done.

    Steps that count for nothing are shown with the reason, and so is what the ledger says against a decision.
    """
    found = asked(GET_CASE, source, case=case_id)
    if as_json:
        print_answer(CaseModel, found)
        return
    extended = f", extended from {found['first_due_day']}" if found["extended"] else ""
    say(f"{found['state']}: {found['subject_right']} for {found['tenant']}, due {found['due_day']}{extended}")
    if found["unread"]:
        say(unread_text(found["unread"]))
    say(
        f"received {found['received_day']} ({found['channel']}, {found['zone']}), decided: {found['outcome'] or 'no'}"
    )
    table = make_table("", "when (UTC)", "step", "outcome", "ground", "about", "by", "why", left=7)
    for one in found["steps"]:
        why = f"void: {one['void']}" if one["void"] else one["reason"]
        cells = (one["step"], one["outcome"], one["ground"], one["about"], one["actor"], why)
        table.add_row(readable(one["at_us"]), *cells)
    stdout().print(table, markup=False)
    for one in found["erasures"]:
        standing = f"not followed: {one['why']}" if one["why"] else one["state"]
        say(f"erasure {one['erasure']}: {standing}")
    for one in found["holds"]:
        on = "everything" if one["tenant"] is None else "this person" if one["subject"] else one["tenant"]
        say(f"legal hold {one['hold']} on {on}: {one['reason']}")
    for one in found["recipients"]:
        say(f"recipient {one['reader']} by {one['by']}, up to {one['at_most']}: {one['told'] or 'not told'}")
    for worker in found["followed_by"]:
        say(f"restriction followed by {worker}")
    for label, name in (("to do", "duties"), ("against it", "contradictions"), ("no principal", "strangers")):
        for text in found[name]:
            say(f"{label}: {text}")


@app.command(
    epilog="Examples:\n\n    kvcustody case letter 4f1c… --to 'Ada Lovelace' --from 'Example AG, Bonn' --out letter\n\n"
    "    kvcustody case letter 4f1c… --kind extension --to 'Ada Lovelace' --format text,pdf --template ours.txt"
)
@grouped
def letter(
    case_id: _Case,
    *,
    to: Annotated[
        str, typer.Option("--to", help="Name and address; they are in the letter, and kept nowhere.")
    ],
    sender: Annotated[str, typer.Option("--from", help="Who writes: name and address.")] = "",
    kind: Annotated[str, typer.Option(help=f"One of: {', '.join(LETTER_KINDS)}.")] = "answer",
    date: Annotated[str | None, typer.Option(help="The letter's date; default: today (UTC).")] = None,
    template: Annotated[
        Path | None, typer.Option(help="A Jinja2 template of your own, as `console/case/letter.txt`.")
    ] = None,
    format: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(LETTER_FORMS)}.")] = "text,html",
    out: Annotated[Path, typer.Option(help="The folder to write to.")] = Path("kvcustody-letter"),
    source: SubjectSource,
    as_json: Json = False,
) -> None:
    """Write the letter to the person: the answer, the extension or the question who they are.

    Record the one that was sent with `case step CASE answer --about letter --file letter.pdf`.
    """
    found = asked(GET_CASE, source, case=case_id)
    today = datetime.now(UTC).date().isoformat()
    own = "" if template is None else read_words(template)
    details = LetterDetails(kind, to, sender, date or today, own)
    forms = [name.strip() for name in format.split(",") if name.strip()]
    files = letter_files(found, details, forms)
    write_files(out, files)
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in sorted(files.items())}
    if as_json:
        print_json({"folder": str(out), "files": digests})
        return
    for name, digest in digests.items():
        say(f"{out / name}: SHA-256 {digest}")
