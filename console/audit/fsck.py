"""`kvcustody audit fsck`: recomputes the whole ledger from its leaves."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from kvcustody.audit.store.database.private_copy import at_rest
from kvcustody.audit.tlog.root_sealer import OVERDUE_INTERVALS
from kvcustody.audit.tlog.signed_note import parse_vkey
from kvcustody.audit.verify.ledger.fsck_ledger import Progress, fsck
from kvcustody.console.command import Json, print_json, progress_bar, say
from kvcustody.console.opening import key_texts, reading
from kvcustody.console.options import DEFAULT, Ledger
from kvcustody.errors import ConfigError
from kvcustody.governance.settings import load_settings
from kvcustody.plurals import several

EXIT_NOT_SOUND = 1


def check(
    ledger: Ledger = DEFAULT,
    key: Annotated[
        list[str] | None,
        typer.Option("--key", help="A public key of the ledger, or a file: notes are verified by it."),
    ] = None,
    note: Annotated[
        list[Path] | None, typer.Option(help="A checkpoint that you kept elsewhere; may be given again.")
    ] = None,
    witness: Annotated[
        list[str] | None,
        typer.Option("--witness", help="A public key of a witness, or a file: its stored lines are verified."),
    ] = None,
    *,
    as_json: Json = False,
) -> None:
    """Compute trees, roots, checkpoints and derived rows again from the leaves, and name the first bad one.

    What no leaf proves is said (`not proved`). With KVCUSTODY_POLICY_TRUST, every order that nobody follows is named.

    A ledger whose end was cut off with all that sealed it is shorter and sound: give a note that you kept elsewhere.
    Exit status 1 when something is wrong.
    """
    keys = [parse_vkey(text) for text in key_texts(key or [])]
    witnesses = [parse_vkey(text) for text in key_texts(witness or [])]
    with (
        reading(ledger) as engine,
        at_rest(engine) as read,
        read.connect() as connection,
        progress_bar() as bar,
    ):
        task = bar.add_task("leaves", total=None)

        def show(log: str, done: int, total: int) -> None:
            bar.update(task, description=log, completed=done, total=total)

        progress: Progress = show
        report = fsck(
            connection,
            keys=keys,
            kept=[_read(path) for path in note or ()],
            witnesses=witnesses,
            progress=progress,
            overdue_before_us=_overdue_before_us(),
        )
    if as_json:
        facts = {
            name: getattr(report, name)
            for name in (
                "logs",
                "leaves",
                "unsealed",
                "purged",
                "segmented",
                "checkpoints",
                "signed",
                "verified",
                "unproved",
                "remarks",
            )
        }
        print_json(facts | {"sound": report.ok, "problems": [problem._asdict() for problem in report.problems]})
    else:
        for problem in report.problems:
            say(f"not sound: {problem}")
        verdict = "sound" if report.ok else f"{several(len(report.problems), 'problem')}"
        by_hash = f" ({report.purged} by their hashes alone" if report.purged else ""
        by_hash += f", {report.segmented} of them by the roots of their tiles" if report.segmented else ""
        by_hash += ")" if report.purged else ""
        say(f"{verdict}: {several(report.leaves, 'leaf')} of {several(report.logs, 'log')}{by_hash}")
        say(f"{report.checkpoints} checkpoints, {report.signed} signed, {report.verified} verified by your keys")
        if report.unsealed:
            say(f"under no checkpoint yet: {several(report.unsealed, 'leaf')}, as their logs' frontiers have them")
        for what in report.unproved:
            say(f"not proved: {what}")
        for what in report.remarks:
            say(f"note: {what}")
        if report.ok and not note:
            say(
                "not shown: whether the newest leaves were removed. Give --note with a checkpoint that you "
                "stored elsewhere."
            )
    if not report.ok:
        raise typer.Exit(EXIT_NOT_SOUND)


def _overdue_before_us() -> int:
    """Return the time (UTC µs) before which every committed leaf should be under a checkpoint now."""
    return time.time_ns() // 1000 - round(OVERDUE_INTERVALS * load_settings().root_interval_seconds * 1e6)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as problem:
        raise ConfigError(f"--note `{path}`: {problem.strerror}") from None
