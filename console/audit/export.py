"""`kvcustody audit export` and `verify`, for an export or for one leaf with its proof (`audit prove --out`)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcustody.audit.evidence.processes.marked_processes import history
from kvcustody.audit.exports.export_writer import ExportSelection, pinned_size, write_export
from kvcustody.audit.exports.file_formats import LeafFormat
from kvcustody.audit.exports.ledger_source import LedgerSource
from kvcustody.audit.tlog.proofs import ProofError
from kvcustody.audit.tlog.signed_note import NoteError
from kvcustody.audit.tlog.witness.rfc3161_timestamp import TimestampAuthority
from kvcustody.audit.tlog.witness.status import newest_witnessed
from kvcustody.audit.verify.verify_export import (
    ExportVerdict,
    KeptHead,
    Progress,
    parse_kept_head,
    verify_export,
    verify_leaf,
)
from kvcustody.console.audit.on_record import Unrecorded, record_taken
from kvcustody.console.audit.tiles import check_tiles, is_tiles, show_tiles
from kvcustody.console.command import Json, make_table, print_json, progress_bar, say, stdout, tell_history
from kvcustody.console.opening import key_texts, reading
from kvcustody.console.options import DEFAULT, Keys, Ledger, Witnesses, moment_us
from kvcustody.errors import ConfigError
from kvcustody.plurals import several
from kvcustody.times import readable

EXIT_NOT_SOUND = 1


def export(
    folder: Annotated[Path, typer.Argument(help="The folder to create; it must not exist.")],
    ledger: Ledger = DEFAULT,
    form: Annotated[LeafFormat, typer.Option("--format", help="The format of the leaves.")] = LeafFormat.NDJSON,
    log: Annotated[
        list[str] | None, typer.Option(help="Only this log (`system`, `tenant/NAME`); may be given again.")
    ] = None,
    since: Annotated[str | None, typer.Option(help="Only leaves from this time on (ISO 8601, UTC).")] = None,
    until: Annotated[str | None, typer.Option(help="Only leaves before this time.")] = None,
    as_of: Annotated[int | None, typer.Option(help="A signed checkpoint, by its root leaves.")] = None,
    witnessed: Annotated[
        bool, typer.Option("--witnessed", help="The newest checkpoint that a witness signed.")
    ] = False,
    unrecorded: Unrecorded = False,
    *,
    as_json: Json = False,
) -> None:
    """Write leaves with everything that is needed to check them offline, and the program that does it.

    That it is made is put on record first (`access`).

    The export is of one signed checkpoint. One that was interrupted goes on where it was when it is asked for again.
    """
    selection = ExportSelection(tuple(sorted(log or ())), moment_us(since, "--since"), moment_us(until, "--until"))
    record_taken(ledger, "audit export", unrecorded=unrecorded)
    with reading(ledger) as engine, progress_bar() as bar:
        size = as_of if as_of is not None else pinned_size(folder)
        if size is None and witnessed:
            with engine.connect() as connection:
                size = newest_witnessed(connection)
            if size is None:
                raise ConfigError("--witnessed: no witness has signed a checkpoint of this ledger yet")
        written = write_export(
            folder,
            LedgerSource(engine, as_of=size),
            selection,
            form=form,
            made_at_us=time.time_ns() // 1000,
            progress=_progress(bar),
        )
    if as_json:
        logs = {each.name: {"first": each.range.first, "end": each.range.end} for each in written.logs}
        facts: dict[str, Any] = {"folder": str(folder), "origin": written.origin, "checkpoint": written.root.size}
        print_json(
            facts | {"leaves": written.leaves, "whole": written.openings, "logs": logs, "witnesses": written.witnesses}
        )
        return
    table = make_table(
        f"{several(written.leaves, 'leaf')} of {written.origin}, checkpoint {written.root.size}",
        "log",
        "from",
        "to",
        "of",
    )
    for each in written.logs:
        table.add_row(each.name, str(each.range.first), str(each.range.end), str(each.head.size))
    stdout().print(table)
    say(f"exported: {folder}; check it with `kvcustody audit verify {folder} --key …`")


def verify(
    folder: Annotated[Path, typer.Argument(help="The export, or the `.proof` of one leaf (`audit prove`).")],
    key: Keys,
    witness: Witnesses = [],  # noqa: B006 - typer reads it
    witnesses_min: Annotated[
        int | None, typer.Option(help="How many of the witnesses must have signed (default: all).")
    ] = None,
    head: Annotated[
        list[str] | None, typer.Option(help="A head that you kept, as `LOG SIZE ROOT`; may be given again.")
    ] = None,
    tsa_certificate: Annotated[
        Path | None,
        typer.Option(help="The certificate (PEM) of a timestamp authority that must have stamped this."),
    ] = None,
    tsa_roots: Annotated[Path | None, typer.Option(help="The roots that it must lead to (PEM).")] = None,
    *,
    as_json: Json = False,
) -> None:
    """Check an export offline, by public keys that you got from somebody you trust. Needs no ledger and no network.

    Keys that yours handed over to (`audit rotate-key`) are followed, where the ledger has it on record.
    Exit status 0: sound. 1: not sound, and why. What the verdict does not show is printed with it.
    """
    witnesses = key_texts(witness)
    threshold = len(witnesses) if witnesses_min is None else witnesses_min
    kept = [_kept(text) for text in head or ()]
    if is_leaf_proof(folder):
        if kept or tsa_certificate or tsa_roots:
            raise ConfigError("--head and --tsa-… are for exports of leaves; this is the proof of one leaf")
        sound = check_leaf_proof(folder, key_texts(key), witnesses, threshold, as_json=as_json)
        raise typer.Exit(0 if sound else EXIT_NOT_SOUND)
    if is_tiles(folder):
        if kept or tsa_certificate or tsa_roots:
            raise ConfigError("--head and --tsa-… are for exports of leaves; this is a folder of tiles")
        report = check_tiles(folder, key_texts(key), witnesses, threshold)
        show_tiles(report, as_json=as_json)
        raise typer.Exit(0 if report.ok else EXIT_NOT_SOUND)
    authorities = _authorities(tsa_certificate, tsa_roots)
    began = time.monotonic()
    with progress_bar() as bar:
        verdict = verify_export(
            folder,
            key_texts(key),
            witnesses=witnesses,
            witness_threshold=threshold,
            kept=kept,
            authorities=authorities,
            progress=_progress(bar),
        )
    if verdict.marked:
        tell_history(history(verdict.marked), [one._asdict() for one in verdict.marked])
    if as_json:
        print_json(_facts(verdict))
    else:
        _print(verdict, time.monotonic() - began)
    if not verdict.ok:
        raise typer.Exit(EXIT_NOT_SOUND)


def _facts(verdict: ExportVerdict) -> dict[str, Any]:
    logs = [
        {"name": log.name, "size": log.size, "first": log.first, "end": log.end, "kinds": dict(log.kinds),
         "first_us": log.first_us, "last_us": log.last_us}
        for log in verdict.logs
    ]  # fmt: skip
    witnesses = {line.key.name: line.at_seconds for line in verdict.signed.witnesses} if verdict.signed else {}
    return {
        "sound": verdict.ok,
        "origin": verdict.origin,
        "checkpoint": verdict.root.size,
        "leaves": verdict.leaves,
        "whole": verdict.whole,
        "witnesses": witnesses,
        "handovers": verdict.handovers,
        "breaks": [{"lost": what.lost.size, "base": what.base.size} for what in verdict.breaks],
        "timestamps": [stamp._asdict() for stamp in verdict.stamps],
        "problems": verdict.problems,
        "not_shown": verdict.limits,
        "logs": logs,
    }


def _print(verdict: ExportVerdict, seconds: float) -> None:
    table = make_table(
        f"{verdict.origin}, checkpoint {verdict.root.size}", "log", "first", "last", "from", "to", "of", left=3
    )
    for log in verdict.logs:
        table.add_row(
            log.name,
            readable(log.first_us),
            readable(log.last_us),
            str(log.first),
            str(log.end),
            str(log.size),
        )
    stdout().print(table)
    for problem in verdict.problems:
        say(f"not sound: {problem}")
    if verdict.ok:
        say(f"sound: {several(verdict.leaves, 'leaf')} are as the ledger's key signed them ({seconds:.1f} s)")
    for line in verdict.signed.witnesses if verdict.signed else ():
        say(f"witness {line.key.name} signed at {readable(line.at_seconds * 1_000_000)} UTC")
    for stamp in verdict.stamps:
        say(f"{stamp.authority} saw the checkpoint of {stamp.size} at {readable(stamp.at_us)} UTC")
    if verdict.handovers:
        say(f"{verdict.handovers} handovers of the signing key are on record")
    for what in verdict.breaks:
        say(
            f"the log broke: a signed checkpoint of {what.lost.size} root leaves was lost, and signing went on from "
            f"{what.base.size}, as its key states"
        )
    say("not shown:")
    for limit in verdict.limits:
        say(f"  - {limit}")


def _authorities(certificate: Path | None, roots: Path | None) -> list[TimestampAuthority]:
    if (certificate is None) != (roots is None):
        raise ConfigError("--tsa-certificate and --tsa-roots go together")
    if certificate is None or roots is None:
        return []
    return [TimestampAuthority.load(certificate.stem, "", certificate, roots)]


def _kept(text: str) -> KeptHead:
    try:
        return parse_kept_head(text)
    except NoteError as problem:
        raise ConfigError(f"--head {problem.message}, as `audit prove` and exports show it") from None


def _progress(bar: Any) -> Progress:
    tasks: dict[str, Any] = {}

    def show(log: str, done: int, total: int) -> None:
        if log not in tasks:
            tasks[log] = bar.add_task(log, total=total)
        bar.update(tasks[log], completed=done)

    return show


_NOT_SHOWN = (
    "the log's other leaves, and whether its head is the newest: this is only one leaf",
    "whether its process was a production engine: see `origin` in the leaf of the process's start",
    "what a key signed that yours handed over to: give the key of that time, or check an export",
)


def is_leaf_proof(path: Path) -> bool:
    """Return True for a leaf's proof; any other input is a folder."""
    return path.suffix == ".proof" and path.is_file()


def check_leaf_proof(
    path: Path, keys: Sequence[str], witnesses: Sequence[str], threshold: int, *, as_json: bool
) -> bool:
    """Check NAME.leaf by NAME.proof and print what they show; return whether they are sound."""
    facts: dict[str, Any] = {"sound": False, "problems": []}
    try:
        leaf, proof = path.with_suffix(".leaf").read_bytes(), path.read_bytes()
        sealed, idx = verify_leaf(leaf, proof, keys, witnesses=witnesses, witness_threshold=threshold)
    except OSError as problem:
        raise ConfigError(f"`{problem.filename}`: {problem.strerror}") from None
    except (NoteError, ProofError) as problem:
        facts["problems"].append(problem.message)
    else:
        head = sealed.signed.checkpoint
        lines = {line.key.name: line.at_seconds for line in sealed.signed.witnesses}
        facts |= {"sound": True, "log": sealed.name, "idx": idx, "size": sealed.head.size}
        facts |= {"origin": head.origin, "checkpoint": head.size, "witnesses": lines, "not_shown": _NOT_SHOWN}
    if as_json:
        print_json(facts)
    elif facts["sound"]:
        say(f"sound: leaf {idx} of {sealed.name} ({several(sealed.head.size, 'leaf')}), as `{head.origin}` signed it")
        for line in _NOT_SHOWN:
            say(f"not shown: {line}")
    else:
        say(f"not sound: {facts['problems'][0]}")
    return bool(facts["sound"])
