"""`kvcustody audit purge`, `hold`, `redact`: how long content is kept, and who can still be identified."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcustody.audit.evidence.query.issuers import named_tenant
from kvcustody.audit.evidence.query.known_names import known_tenant
from kvcustody.audit.keep.purge_and_legal_hold import (
    active_holds,
    lift_hold,
    place_hold,
    plan_purge,
    purge,
)
from kvcustody.audit.keep.streamed_purge import JOBS, PurgedPart, purge_to
from kvcustody.audit.keep.unlink_subject import unlink_subject
from kvcustody.console.command import Json, make_table, print_dated, print_json, progress_bar, say, stdout
from kvcustody.console.opening import key_texts, reading, subject_store, writing
from kvcustody.console.options import (
    DEFAULT,
    Ledger,
    NamesOfSubjects,
    OldestFirst,
    SubjectNames,
    SubjectStore,
    moment_us,
)
from kvcustody.errors import ConfigError
from kvcustody.governance.service.operations.parameter_groups import ParameterGroup, grouped
from kvcustody.plurals import several
from kvcustody.times import readable

_Actor = Annotated[str, typer.Option(help="Who does it, for the record.")]
_Reason = Annotated[str, typer.Option(help="Reason, for the record.")]


@dataclass(frozen=True, kw_only=True)
class AccountOptions(ParameterGroup):
    """Who is accountable for the act."""

    actor: Annotated[str, typer.Option(help="Who does it, for the record.")] = ""
    approver: Annotated[str, typer.Option(help="Who approved it; somebody else.")] = ""
    reason: Annotated[str, typer.Option(help="Reason, for the record.")] = "retention schedule"


@grouped
def drop(
    *,
    until: Annotated[str, typer.Option(help="Content from before this time (ISO 8601, UTC) is dropped.")],
    ledger: Ledger = DEFAULT,
    to: Annotated[
        Path | None,
        typer.Option(help="Export the content to this folder, verify it and drop it, in parts."),
    ] = None,
    exported: Annotated[
        Path | None, typer.Option("--export", help="An earlier, sound export of the content to drop.")
    ] = None,
    key: Annotated[list[str] | None, typer.Option("--key", help="Public key by which the export is verified.")] = None,
    who: AccountOptions,
    jobs: Annotated[int, typer.Option(min=1, help="Parts of --to beside each other, on PostgreSQL.")] = JOBS,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be dropped, and drop nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Drop old content of tenants' logs; proofs of what is left stay. Without --to or --export: show what would go.

    Legal holds win. What goes has to be in an export that verifies, and two people must answer for it. What --to was
    cut off in is finished by asking again with the same folder.
    """
    until_us = moment_us(until, "--until") or 0
    if to is not None and exported is not None:
        raise ConfigError("--to creates the export that --export names: give one of them")
    parts: tuple[PurgedPart, ...] = ()
    dropping = not dry_run and (to or exported) is not None
    if not dropping:
        with reading(ledger) as engine, engine.connect() as connection:
            plans = plan_purge(connection, until_us)
    else:
        if not who.actor:
            raise ConfigError("--actor is needed: the person who drops the content")
        keys = key_texts(key or [])
        with writing(ledger) as engine, progress_bar() as bar:
            tasks: dict[str, Any] = {}

            def show(what: str, done: int, total: int) -> None:
                if what not in tasks:
                    tasks[what] = bar.add_task(what, total=total)
                bar.update(tasks[what], completed=done)

            if exported is not None:
                plans = purge(
                    engine,
                    until_us,
                    exported,
                    keys,
                    actor=who.actor,
                    approver=who.approver,
                    reason=who.reason,
                    progress=show,
                )
            else:
                assert to is not None
                plans, parts = purge_to(
                    engine,
                    until_us,
                    to,
                    keys,
                    actor=who.actor,
                    approver=who.approver,
                    reason=who.reason,
                    jobs=jobs,
                    progress=show,
                )
    if as_json:
        found = {"dropped": dropping, "logs": [plan._asdict() for plan in plans]}
        print_json(found | ({"parts": [part._asdict() for part in parts]} if to is not None else {}))
        return
    table = make_table("dropped" if dropping else "would be dropped", "log", "stops at", "from", "below", left=2)
    for plan in plans:
        table.add_row(plan.log, plan.kept_by, str(plan.first), str(plan.below))
    stdout().print(table)
    for part in parts:
        say(f"{part.path}: {several(part.leaves, 'leaf')}, manifest {part.digest}")


hold = typer.Typer(no_args_is_help=True, help="Place, lift and list legal holds on ledger content.")


@hold.command(epilog="Example: `kvcustody audit hold place case-9 --tenant acme --actor counsel --reason 'case 9'`")
def place(
    name: Annotated[str, typer.Argument(help="The hold's name.")],
    actor: _Actor,
    reason: _Reason,
    tenant: Annotated[str | None, typer.Option(help="On this tenant (default: on everything).")] = None,
    subject: Annotated[str | None, typer.Option(help="Only on the records of this subject of the tenant.")] = None,
    ledger: Ledger = DEFAULT,
    subject_keys: SubjectStore = None,
    subject_names: NamesOfSubjects = SubjectNames.SEALED,
    *,
    as_json: Json = False,
) -> None:
    """Keep content whatever the schedule says. KV blocks end when they are due all the same.

    On a subject: its pseudonyms are not unlinked, and the content of its tenant's log stays, which is not divided.
    """
    clear = subject_names is SubjectNames.CLEAR and subject_keys is None
    with subject_store(subject_keys, ledger) as keys, writing(ledger) as engine:
        with engine.connect() as connection:
            tenant = known_tenant(connection, tenant)
        place_hold(
            engine,
            name,
            tenant,
            actor=actor,
            reason=reason,
            subject=subject,
            keys=None if clear else keys,
            clear_names=clear,
        )
    if as_json:
        print_json({"hold": name, "tenant": tenant, "subject": subject is not None, "placed": True})
    else:
        say(f"placed: {name} on {'a subject of ' if subject else ''}{tenant or 'everything'}")


@hold.command(epilog="Example: `kvcustody audit hold lift case-9 --actor counsel --reason closed`")
def lift(
    name: Annotated[str, typer.Argument(help="The hold's name.")],
    actor: _Actor,
    reason: _Reason,
    ledger: Ledger = DEFAULT,
    *,
    as_json: Json = False,
) -> None:
    """Lift a hold."""
    with writing(ledger) as engine:
        lift_hold(engine, name, actor=actor, reason=reason)
    if as_json:
        print_json({"hold": name, "placed": False})
    else:
        say(f"lifted: {name}")


@hold.command("list", epilog="Example: `kvcustody audit hold list --json`")
def list_holds(ledger: Ledger = DEFAULT, *, oldest_first: OldestFirst = False, as_json: Json = False) -> None:
    """List the holds that are active, newest first."""
    with reading(ledger) as engine, engine.connect() as connection:
        found = sorted(active_holds(connection), key=lambda each: each.at_us, reverse=not oldest_first)
    if as_json:
        print_dated({"holds": [each._asdict() for each in found]})
        return
    table = make_table(f"{len(found)} legal holds", "hold", "on", "since (UTC)", "by", "reason", left=5)
    for each in found:
        table.add_row(
            each.hold,
            f"{each.tenant or 'everything'}{f', subject {each.subject}' if each.subject else ''}",
            readable(each.at_us),
            each.actor,
            each.reason,
        )
    stdout().print(table, markup=False)


def redact(
    tenant: Annotated[str, typer.Argument(help="The subject's tenant.")],
    subject: Annotated[str, typer.Argument(help="The subject, as requests name it.")],
    actor: _Actor,
    reason: _Reason,
    ledger: Ledger = DEFAULT,
    keys: SubjectStore = None,
    *,
    as_json: Json = False,
) -> None:
    """Make a subject's pseudonyms mean nobody; every leaf and proof stays. Says what remains in which copies."""
    with subject_store(keys, ledger) as store, writing(ledger) as engine:
        with engine.connect() as connection:
            tenant = named_tenant(connection, tenant)
        found = unlink_subject(engine, tenant, subject, keys=store, actor=actor, reason=reason)
    if as_json:
        print_json(found._asdict())
        return
    say(f"unlinked: {several(found.pseudonyms, 'pseudonym')}, {several(found.keys, 'key')} destroyed")
    for line in found.remains:
        say(f"remains: {line}")
