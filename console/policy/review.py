"""`kvcustody policy diff`, `check-no-new-access` and `prove`: a reviewer's questions before a release."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import orjson
import typer

from kvcustody.console.command import Json, make_table, print_json, progress_bar, say, stdout
from kvcustody.console.policy.validate import EXIT_NO, File
from kvcustody.errors import PolicyError
from kvcustody.files import READABLE, write_file
from kvcustody.plurals import several
from kvcustody.policies.document.problems import did_you_mean, quote
from kvcustody.policies.table.decision_table import DecisionTable
from kvcustody.policies.workbench.diff.model import CellChange, PolicyDiff, WidenedAccess
from kvcustody.policies.workbench.diff.semantic_diff import diff
from kvcustody.policies.workbench.prove.model import Proof
from kvcustody.policies.workbench.prove.prove import Never, prove
from kvcustody.policies.workbench.request import instant
from kvcustody.policies.workbench.validate import load_table

ROWS_MAX = 40
Old = Annotated[Path, typer.Argument(help="The policy in force.", metavar="OLD")]
New = Annotated[Path, typer.Argument(help="The policy under review.", metavar="NEW")]
Revoked = Annotated[
    list[str] | None,
    typer.Option("--revoked", help="A grant, segment or group id that stays revoked; repeatable."),
]


def add_to(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command(name="diff", epilog=_DIFF)(diff_command)
    app.command(name="check-no-new-access", epilog=_CHECK)(check_command)
    app.command(name="prove", epilog=_PROVE)(prove_command)


_DIFF = "Example:\n\n    kvcustody policy diff active.yaml policy.yaml --json"


def diff_command(old: Old, new: New, *, revoked: Revoked = None, as_json: Json = False) -> None:
    """What a new policy decides differently: cells, openings, obligations; never how it is written.

    The verdict is equivalent, narrower, wider or incomparable (some of both). `~unlisted-1` stands for every tenant
    that no policy lists. Exit 0 whatever the verdict: `check-no-new-access` is the gate.
    """
    found = _diff(old, new, revoked)
    if as_json:
        print_json(found.data())
    else:
        print_diff(found)


_CHECK = "Example:\n\n    kvcustody policy check-no-new-access active.yaml policy.yaml || echo 'needs an approver'"


def check_command(old: Old, new: New, *, revoked: Revoked = None, as_json: Json = False) -> None:
    """A gate for CI: exit 0 when the new policy opens, shares and keeps nothing more than the old one, else 1."""
    difference = _diff(old, new, revoked)
    if as_json:
        print_json({"new_access": difference.widens, "verdict": difference.verdict.value, **difference.widening()})
    elif difference.widens:
        print_diff(difference)
    else:
        say(f"no new access: the new policy is {difference.verdict}")
    if difference.widens:
        raise typer.Exit(EXIT_NO)


def _diff(old: Path, new: Path, revoked: list[str] | None) -> PolicyDiff:
    tombstones = frozenset(revoked or ())
    return diff(load_table(old, revoked=tombstones), load_table(new, revoked=tombstones))


def print_diff(difference: PolicyDiff) -> None:
    """Print a difference as tables, and the digest of what it widens."""
    out = stdout()
    say(f"verdict: {difference.verdict}")
    for title, entries in (("opens", difference.openings), ("closes", difference.closings)):
        _print_openings(title, entries)
    cells = _grouped(difference.cells)
    if cells:
        table = make_table("decisions", "change", "action", "reader", "owner", "classification", "scope", "via", "when",
                           "named", left=9)  # fmt: skip
        for row in cells[:ROWS_MAX]:
            table.add_row(*row)
        out.print(table)
        if len(cells) > ROWS_MAX:
            say(f"{several(len(cells) - ROWS_MAX, 'more row')}; --json gives every cell")
    if difference.duties:
        table = make_table("obligations", "tenant", "of", "field", "before", "after", "is", left=6)
        for duty in difference.duties[:ROWS_MAX]:
            table.add_row(*(str(value) for value in duty[:5]), duty.data()["direction"])
        out.print(table)
        if len(difference.duties) > ROWS_MAX:
            say(f"{several(len(difference.duties) - ROWS_MAX, 'more row')}; --json gives every one")
    if difference.settings:
        table = make_table("settings (no access changes)", "of", "field", "before", "after", left=4)
        for setting in difference.settings[:ROWS_MAX]:
            table.add_row(*setting)
        out.print(table)
    say(f"widening digest: {difference.cells_digest}" if difference.widens else "nothing widens")


def _print_openings(title: str, entries: tuple[WidenedAccess, ...]) -> None:
    for entry in entries:
        levels = ", ".join(entry.classifications)
        consent = "; its owner has to consent" if title == "opens" and entry.crosses else ""
        period = f"{instant(entry.start_us)} until {instant(entry.end_us)}"
        labels = f", across labels {', '.join(entry.labels)}" if entry.labels else ""
        say(
            f"{title}: {entry.via.name.lower()} {entry.id}: {entry.reader} reads {entry.owner}'s {levels}, "
            f"{period}{labels}{consent}{f'; opens nothing: {entry.without_effect}' if entry.without_effect else ''}"
        )


def _grouped(cells: tuple[CellChange, ...]) -> list[tuple[str, ...]]:
    """Return rows for people: cells that differ only in classification and scope share one."""
    rows: dict[tuple[object, ...], tuple[list[str], list[str], CellChange]] = {}
    for cell in cells:
        key = (cell.opens, cell.action, cell.reader, cell.owner, cell.via, cell.start_us, cell.end_us)
        named = cell.after.reasons if cell.opens else cell.before.reasons
        levels, scopes, _ = rows.setdefault((*key, named), ([], [], cell))
        if cell.classification not in levels:
            levels.append(cell.classification)
        if cell.scope.name.lower() not in scopes:
            scopes.append(cell.scope.name.lower())
    return [
        (
            "opens" if cell.opens else "closes",
            cell.action.name.lower(),
            cell.reader,
            cell.owner,
            ", ".join(levels),
            ", ".join(scopes),
            cell.via.name.lower(),
            f"{instant(cell.start_us)} .. {instant(cell.end_us)}",
            ", ".join((cell.after if cell.opens else cell.before).reasons),
        )
        for levels, scopes, cell in rows.values()
    ]


_PROVE = (
    "Examples:\n\n    kvcustody policy prove policy.yaml\n\n"
    "    kvcustody policy prove policy.yaml --out proof.json --never globex:acme"
)
Out = Annotated[Path | None, typer.Option("--out", help="Write the proof here (proof.json).")]
NeverPairs = Annotated[
    list[str] | None,
    typer.Option("--never", help="READER:OWNER that must never be permitted; `*` is everybody; repeatable."),
]


def prove_command(
    file: File,
    *,
    out: Out = None,
    never: NeverPairs = None,
    revoked: Revoked = None,
    as_json: Json = False,
) -> None:
    """Prove that nothing crosses a tenant boundary without a named grant or segment.

    The compiled policy is asked everything that it can tell apart: every listed tenant and two that are not, every
    action, classification, scope and way, at both sides of every date. A property that does not hold is shown with a
    request that breaks it. Exit 0: all hold; 1: one does not.
    """
    table = load_table(file, revoked=frozenset(revoked or ()))
    with progress_bar() as bar:
        task = bar.add_task("proving", total=None)
        proof = prove(
            table,
            never=[_never(text, table) for text in never or ()],
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    if out is not None:
        _write(out, proof)
    if as_json:
        print_json(proof.data())
    else:
        _print_proof(proof, out)
    if not proof.holds:
        raise typer.Exit(EXIT_NO)


def _never(text: str, table: DecisionTable) -> Never:
    reader, separator, owner = text.partition(":")
    if not separator or not reader or not owner:
        raise PolicyError(f"`--never` {quote(text)} is not READER:OWNER; write `globex:acme`, or `*:acme`")
    known = [tenant.id for tenant in table.policy.tenants]
    policy = table.policy
    never = Never(None if reader == "*" else policy.named(reader), None if owner == "*" else policy.named(owner))
    for name in (never.reader, never.owner):
        if name is not None and name not in known:
            hint = did_you_mean(name, known) or f"it has {', '.join(map(quote, known[:8])) or 'none'}"
            raise PolicyError(f"`--never` {quote(text)}: the policy has no tenant {quote(name)}; {hint}")
    return never


def _write(out: Path, proof: Proof) -> None:
    try:
        data = orjson.dumps(proof.data(), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
        write_file(out, data, mode=READABLE)
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise PolicyError(f"proof `{out}` cannot be written: {reason}", path=out) from error


def _print_proof(proof: Proof, out: Path | None) -> None:
    table = make_table(f"{proof.policy} {proof.digest}", "property", "says", "holds", "cells", "permits", left=3)
    for found in proof.properties:
        table.add_row(found.id, found.title, "yes" if found.holds else "NO", f"{found.cells:,}", f"{found.permits:,}")
    stdout().print(table)
    for found in proof.broken:
        assert found.counterexample is not None
        say(f"{found.id}: {found.counterexample.text} ({found.broken} in all)")
    for name, why in proof.without_effect:
        say(f"{name} is permitted and opens nothing: {why}")
    searched = proof.searched
    say(
        f"{'holds' if proof.holds else 'DOES NOT HOLD'}: {several(searched.cells, 'cell')} over "
        f"{several(searched.tenants, 'tenant')} and "
        f"{searched.fresh} fresh ones, {searched.instants} instants" + (f"; written to {out}" if out else "")
    )
