"""`kvcustody policy propose … history`: the steps of a release, each one call to the release desk.

Each prints its review, proposal or history as data (`--json`) or in lines.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcustody.console.command import make_table, print_json, printable, progress_bar, say, stdout
from kvcustody.console.options import OldestFirst
from kvcustody.console.policy import release_keys
from kvcustody.console.policy.release_options import (
    At,
    Note,
    Reason,
    Revision,
    SigningKey,
    acts_as_owner,
    read_document,
    signer_of,
    trust_file,
)
from kvcustody.console.policy.review import print_diff
from kvcustody.console.policy.validate import File
from kvcustody.errors import ConfigError
from kvcustody.governance.decisions.staged_table import Stage
from kvcustody.governance.release.activation_gates import Review
from kvcustody.governance.release.record import read_stage
from kvcustody.governance.release.replay_records import Proposal, ReleaseState
from kvcustody.governance.service.operations.parameter_groups import grouped
from kvcustody.policies.workbench.request import instant
from kvcustody.times import moment_us, readable

_Days = Annotated[int, typer.Option("--days", help="How long the revision is valid.", min=1, max=3650)]


def add_to(app: typer.Typer) -> None:
    """Add this module's commands, and those about keys and bundles."""
    release_keys.add_to(app)
    app.command(name="propose", epilog=_PROPOSE)(propose)
    app.command(name="review", epilog=_REVIEW)(review)
    app.command(name="approve", epilog=_APPROVE)(approve)
    app.command(name="consent", epilog=_CONSENT)(consent)
    app.command(name="activate", epilog=_ACTIVATE)(activate)
    app.command(name="rollback", epilog=_ROLLBACK)(rollback)
    app.command(name="revoke", epilog=_REVOKE)(revoke)
    app.command(name="break-glass", epilog=_BREAK)(break_glass)
    app.command(name="history", epilog=_HISTORY)(history)


def print_revision(answer: dict[str, Any]) -> None:
    """Print a revision: its facts, then its document as it was proposed."""
    from kvcustody.console.api.api_commands import show

    show({name: value for name, value in answer.items() if name != "document"})
    say("")
    for line in answer["document"].splitlines():
        say(printable(line))


_PROPOSE = 'Example:\n\n    kvcustody policy propose policy.yaml --signing-key ada.key --note "labs may read acme"'


@grouped
def propose(
    file: File,
    *,
    signing_key: SigningKey,
    note: Note,
    days: _Days = 365,
    at: At,
) -> None:
    """Propose a policy as the next revision, signed by its author. Nothing takes effect."""
    with at.desk() as desk:
        made = desk.propose(
            read_document(file), signer_of(signing_key), note=note, seconds=days * 86_400, file=str(file)
        )
    show_proposal(made, at.as_json)


_REVIEW = "Example:\n\n    kvcustody policy review 3"


@grouped
def review(
    revision: Revision,
    *,
    at: At,
) -> None:
    """What a revision would change against the active one, its proof, and whose consent it lacks."""
    with at.desk() as desk, _waiting("proving"):
        found = desk.review(revision)
    if at.as_json:
        print_json(review_data(found))
        return
    print_diff(found.change)
    show_review(found)


_APPROVE = "Example:\n\n    kvcustody policy approve 3 --signing-key grace.key --cells sha256:…"


@grouped
def approve(
    revision: Revision,
    *,
    signing_key: SigningKey,
    cells: Annotated[
        str, typer.Option("--cells", help="The widening digest that `review` showed; needed where it widens.")
    ] = "",
    at: At,
) -> None:
    """Sign somebody else's proposal, against what is active now and with exactly the widening that was reviewed."""
    with at.desk() as desk, _waiting("proving"):
        found = desk.approve(revision, signer_of(signing_key), cells=cells)
    if at.as_json:
        print_json(review_data(found))
    else:
        say(f"approved: revision {revision}, {found.change.verdict}")
        show_review(found)


_CONSENT = "Example:\n\n    kvcustody policy consent 3 labs-reads-acme --signing-key acme.key"


@grouped
def consent(
    revision: Revision,
    source: Annotated[str, typer.Argument(help="A grant's or segment's id.", metavar="ID")],
    *,
    signing_key: SigningKey,
    at: At,
) -> None:
    """The owner's consent to what a revision opens of its blocks, and to nothing else."""
    if at.remote.server is not None:  # an owner sees what waits for the own tenant's consent, and nothing else
        with at.owner_consents() as consents:
            consent_data = consents.consent(revision, source, signer_of(signing_key))
    else:
        with at.desk() as desk:
            consent_data = [opening.data() for opening in desk.consent(revision, source, signer_of(signing_key))]
    if at.as_json:
        print_json(consent_data)
    for opening in () if at.as_json else consent_data:
        levels = ", ".join(opening["classifications"])
        say(
            f"consented: {opening['reader']} reads {opening['owner']}'s {levels} through {opening['id']}, "
            f"{opening['from']} until {opening['until']}"
        )


_ACTIVATE = (
    "Examples:\n\n    kvcustody policy activate 3 --signing-key grace.key --percent 10\n\n"
    "    kvcustody policy activate 3 --signing-key grace.key"
)


@grouped
def activate(
    revision: Revision,
    *,
    signing_key: SigningKey,
    tenants: Annotated[str, typer.Option("--tenants", help="Stage it: for these tenants, by commas.")] = "",
    percent: Annotated[str, typer.Option("--percent", help="Stage it: for this share of tenants, as 10 or 2.5.")] = "",
    at: At,
) -> None:
    """Put an approved revision into effect once isolation is proved: for everybody, or for a stage.

    While it is staged, whatever crosses between tenants needs both revisions.
    """
    stage = _stage(tenants, percent)
    with at.desk() as desk, _waiting("proving"):
        found = desk.activate(revision, signer_of(signing_key), stage=stage)
    if at.as_json:
        print_json(review_data(found) | {"stage": None if stage is None else str(stage)})
    else:
        say(f"{'active' if stage is None else f'staged for {stage}'}: revision {revision}")


_ROLLBACK = 'Example:\n\n    kvcustody policy rollback 2 --signing-key ada.key --note "labs lost their hits"'


@grouped
def rollback(
    revision: Revision,
    *,
    signing_key: SigningKey,
    note: Note,
    days: _Days = 365,
    at: At,
) -> None:
    """Propose what an earlier revision said as a new one, less what was revoked; it is approved like any other."""
    with at.desk() as desk:
        made = desk.rollback(revision, signer_of(signing_key), note=note, seconds=days * 86_400)
    show_proposal(made, at.as_json)


_REVOKE = (
    'Examples:\n\n    kvcustody policy revoke labs-reads-acme --signing-key acme.key --reason "evaluation is over"\n\n'
    "    kvcustody policy revoke labs-reads-acme --signing-key acme.key --reason leak --server https://kv.example "
    "--api-key-file acme-admin.key"
)


@grouped
def revoke(
    ids: Annotated[list[str], typer.Argument(help="Grants, segments or groups.", metavar="ID...")],
    *,
    signing_key: SigningKey,
    reason: Reason,
    at: At,
) -> None:
    """Take grants, segments or groups back for good: by an approver, their owner, or in an emergency."""
    signer = signer_of(signing_key)
    if at.remote.server is not None and acts_as_owner(
        trust_file(at.trust, at.store), signer
    ):  # who sees its own part of a release alone
        with at.owner_consents() as owner:
            revoked = owner.withdraw(ids, signer, reason=reason)
    else:
        with at.desk() as desk:
            revoked = desk.revoke(ids, signer, reason=reason)
    if at.as_json:
        print_json({"revoked": sorted(revoked)})
    else:
        say(f"revoked for good: {', '.join(ids)}")


_BREAK = (
    "Examples:\n\n    kvcustody policy break-glass --restore 2 --minutes 60 --signing-key brock.key "
    '--reason "revision 3 denies hr"\n\n    kvcustody policy break-glass --document closed.yaml --minutes 30 '
    '--signing-key brock.key --reason "leak suspected"'
)


@grouped
def break_glass(
    *,
    signing_key: SigningKey,
    reason: Reason,
    minutes: Annotated[int, typer.Option("--minutes", help="The time box.", min=1)],
    document: Annotated[
        Path | None, typer.Option("--document", help="A policy that only narrows the active one.")
    ] = None,
    restore: Annotated[int, typer.Option("--restore", help="A revision that was in effect.", min=0)] = 0,
    at: At,
) -> None:
    """One person's act in an emergency, on record, for a time: narrow the policy, or restore a proven revision.

    When the time is over nothing is reused, until a revision is released in the ordinary way.
    """
    text = None if document is None else read_document(document)
    with at.desk() as desk, _waiting("proving"):
        reviewed = desk.break_glass(
            signer_of(signing_key), reason=reason, seconds=minutes * 60, document=text, restores=restore
        )
    if at.as_json:
        print_json(review_data(reviewed))
    else:
        until = instant(reviewed.proposal.until_us)
        say(f"GLASS BROKEN: revision {reviewed.proposal.revision} is active until {until}; release a successor")


_HISTORY = "Example:\n\n    kvcustody policy history --json"


@grouped
def history(
    *,
    oldest_first: OldestFirst = False,
    at: At,
) -> None:
    """Every step of the release, verified, newest first, and what is in effect."""
    with at.desk() as desk:
        state = desk.state()
    effect = at.in_effect(state)
    steps_data = history_data(state)
    steps_data["steps"] = steps_data["steps"] if oldest_first else steps_data["steps"][::-1]
    if at.as_json:
        print_json(steps_data | {"in_effect": effect})
        return
    table = make_table("steps", "step", "at (UTC)", "who", "what", "revision", "detail", left=6)
    for row in steps_data["steps"]:
        shown = row | {"at": readable(moment_us(row["at"]))}
        table.add_row(*(str(value) for value in shown.values()))
    stdout().print(table)
    staged = "" if state.staged is None else f"; revision {state.staged.revision} is staged for {state.stage}"
    revoked = f"; revoked: {', '.join(sorted(state.revoked))}" if state.revoked else ""
    say(f"active: revision {state.active_revision or 'none'}{staged}{revoked}")
    if state.active is not None and state.active.is_break_glass:
        say(f"THE GLASS IS BROKEN until {instant(state.active.until_us)}: {state.active.note}")
    for line in [] if effect is None else _running_lines(effect):
        say(line)


def _running_lines(effect: dict[str, Any]) -> Iterator[str]:
    """Yield what workers run, one line each; a release that no worker runs has no effect yet."""
    if not effect["at_work"] and not effect["unsaid"]:
        yield "in effect: nothing yet, because no worker runs; the next worker will run the active revision"
    for one in effect["items"] if effect["at_work"] else ():
        what = f"revision {one['revision']}" if one["source"] == "release" else "not of this release"
        stage = f", for {one['stage']}" if one["stage"] else ""
        yield f"in effect on {', '.join(one['workers'])}: {one['name']} ({what}{stage}), {one['digest']}"
    for worker in effect["unsaid"]:
        yield f"in effect on {worker}: its policy is not on record"
    for one in effect["monitoring"]:
        yield f"not enforced for everybody on {one['worker']} ({one['mode']}): `kvcustody policy enforcement` says more"


def _stage(tenants: str, percent: str) -> Stage | None:
    named = frozenset(name.strip() for name in tenants.split(",") if name.strip())
    try:
        share = Fraction(percent or "0") / 100
    except (ValueError, ZeroDivisionError):
        raise ConfigError(f"`--percent {percent}` is not a number") from None
    if not 0 <= share <= 1:
        raise ConfigError(f"`--percent {percent}` is not between 0 and 100")
    return Stage(named, share) if named or share else None


def _waiting(what: str) -> Any:
    bar = progress_bar()
    bar.add_task(what, total=None)
    return bar


def review_data(reviewed: Review) -> dict[str, Any]:
    """Return a review as JSON data."""
    return {
        "revision": reviewed.proposal.revision,
        "digest": reviewed.proposal.manifest.digest,
        "verdict": reviewed.change.verdict.value,
        "cells": reviewed.cells,
        "missing_consents": [opening.data() for opening in reviewed.missing],
        "proved": reviewed.proof.holds,
        "difference": reviewed.change.data(),
    }


def history_data(state: ReleaseState) -> dict[str, Any]:
    """Return a release as JSON data."""
    return {
        "audience": state.trust.audience,
        "active": state.active_revision,
        "staged": None if state.staged is None else state.staged.revision,
        "stage": None if state.stage is None else str(state.stage),
        "revoked": sorted(state.revoked),
        "glass_broken_until_us": state.active.until_us if state.active is not None else 0,
        "steps": [
            {
                "step": record.number,
                "at": instant(record.at_us),
                "who": record.actor,
                "what": record.action.value,
                "revision": int(record.body.get("revision", 0)),
                "detail": _detail(record.body),
            }
            for record in state.records
        ],
    }


def _detail(body: Any) -> str:
    if "ids" in body:
        return f"{', '.join(body['ids'])}: {body['reason']}"
    if "note" in body:
        return str(body["note"])
    if "what" in body:
        return f"{body['what']['owner']} lets {body['what']['reader']} read through {body['what']['id']}"
    if body.get("stage"):
        return f"staged for {read_stage(body['stage'])}"
    return str(body.get("verdict", ""))


def show_proposal(made: Proposal, as_json: bool) -> None:
    """Print a proposal in one line, or as JSON."""
    manifest = made.manifest
    if as_json:
        print_json({"manifest": manifest.form(), "id": manifest.id, "author": made.author})
    else:
        say(f"proposed: {manifest.name}, revision {manifest.revision}, {manifest.digest}")


def show_review(found: Review) -> None:
    """Print whether isolation is proved, and whose consent is missing."""
    say("isolation: proved" if found.proof.holds else "isolation: NOT PROVED; see `kvcustody policy prove`")
    for opening in found.missing:
        say(f"lacks the consent of {opening.owner} to {opening.id}")
