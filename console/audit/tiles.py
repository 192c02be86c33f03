"""`kvcustody audit tiles`: a log as C2SP tiles, and the check of a folder of tiles."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcustody.audit.exports.ledger_source import LedgerSource
from kvcustody.audit.exports.tile_export import export_tiles
from kvcustody.audit.verify.verify_tiles import ExportReport, verify_export
from kvcustody.console.command import Json, print_json, say
from kvcustody.console.opening import reading
from kvcustody.console.options import DEFAULT, Ledger
from kvcustody.plurals import several


def tiles(
    folder: Annotated[Path, typer.Argument(help="The folder to create; it must not exist.")],
    log: Annotated[str | None, typer.Option(help="This log (`system`, `tenant/NAME`); default: the root log.")] = None,
    ledger: Ledger = DEFAULT,
    as_of: Annotated[int | None, typer.Option(help="A signed checkpoint, by its root leaves.")] = None,
    *,
    as_json: Json = False,
) -> None:
    """Write a log as C2SP tiles (tlog-tiles), for readers that others wrote.

    The root log has the signed checkpoint beside its tiles, a sub-log the proof of its head; `audit verify` reads both.
    """
    with reading(ledger) as engine:
        head = export_tiles(folder, LedgerSource(engine, as_of=as_of), log)
    if as_json:
        print_json({"folder": str(folder), "log": log, "size": head.size, "root": head.root.hex()})
    else:
        say(f"exported: {several(head.size, 'leaf')} of {log or 'the root log'} as tiles in {folder}")


def is_tiles(folder: Path) -> bool:
    """Return True for a folder of tiles; an export of leaves has a manifest instead."""
    return (folder / "tile").is_dir() and not (folder / "manifest.json").exists()


def check_tiles(folder: Path, keys: Sequence[str], witnesses: Sequence[str], threshold: int) -> ExportReport:
    """Check every byte of a folder of tiles against the reader's keys."""
    return verify_export(folder, keys, witnesses=witnesses, witness_threshold=threshold)


def show_tiles(report: ExportReport, *, as_json: bool) -> None:
    """Print the verdict and its limits."""
    problems = [problem.text for problem in report.problems]
    if as_json:
        facts: dict[str, Any] = {"sound": report.ok, "log": report.name, "size": report.size}
        print_json(facts | {"leaves": report.leaves, "root": report.root.hex(), "problems": problems})
        return
    for text in problems:
        say(f"not sound: {text}")
    if report.ok:
        say(f"sound: {several(report.leaves, 'leaf')} of {report.name} are what the ledger's key signed")
    say("not shown: other logs, and whether this one has grown; give a witness's key to check that")
