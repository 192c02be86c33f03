"""`kvcustody audit ship`, `push` and `sink`: leaves for security monitoring."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import orjson
import typer
from sqlalchemy import Engine

from kvcustody.audit.evidence.query.events import EventRow
from kvcustody.audit.kinds import SinkChanged
from kvcustody.audit.siem.cursor_reader import (
    describe_losses,
    pull,
    read_positions,
    write_positions,
)
from kvcustody.audit.siem.delivery import DeliveryPump, Leaving
from kvcustody.audit.siem.formats import LeafShape, SiemFormat, open_shape
from kvcustody.audit.siem.sink import WebhookSink
from kvcustody.audit.siem.sink_folder import SinkFolder, find_troubles
from kvcustody.audit.tlog.ledger_identity import ledger_identity
from kvcustody.audit.write.record_operator_act import record_operator_act
from kvcustody.clock import SystemClock
from kvcustody.console.audit.on_record import Unrecorded, record_taken
from kvcustody.console.command import EXIT_NO, Json, following, print_dated, print_json, say
from kvcustody.console.opening import reading, writing
from kvcustody.console.options import DEFAULT, Ledger
from kvcustody.errors import ConfigError
from kvcustody.plurals import several


def _shapes() -> list[str]:
    return list(SiemFormat)


_Shape = Annotated[
    str,
    typer.Option(
        "--shape",
        metavar="[ocsf|cloudevents|leaf|plugin:NAME]",
        help="The format of leaves: a built-in one, or an extension's.",
        autocompletion=_shapes,
    ),
]
_Folder = Annotated[Path, typer.Argument(help="The sink's own folder: its position, and batches that were given up.")]
_Key = Annotated[
    Path,
    typer.Option("--signing-key", help="The file of the HMAC key that signs batches: at least 24 bytes."),
]
_Reason = Annotated[str, typer.Option(help="Reason, for the record.")]
_Actor = Annotated[str, typer.Option(help="Who does it, for the record.")]


def ship(
    positions: Annotated[Path, typer.Argument(help="The file that remembers where you were.")],
    ledger: Ledger = DEFAULT,
    shape: _Shape = SiemFormat.OCSF.value,
    batch: Annotated[
        int, typer.Option(min=1, max=10_000, help="Number of leaves after which the position is saved.")
    ] = 1000,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C.")] = False,
    unrecorded: Unrecorded = False,
) -> None:
    """Write new leaves to stdout, one JSON document a line, from where the position file left off.

    That leaves are taken out is on record first, once a run (`access`).

    At least once: a batch counts as taken when stdout took it. Drop doubles by the event's id, or in the shape `leaf`
    by the whole line.

    After a restore of the ledger, or a purge of leaves that were not written yet, stderr says so and the exit status
    is 1; with --follow when it ends.
    """
    recorded, lost = False, False
    with reading(ledger) as engine, following(lambda: lost):
        told_as = _shape(engine, shape)
        while True:
            before = read_positions(positions)
            with engine.connect() as connection:
                batch_read = pull(connection, before, limit=batch)
            for line in describe_losses(batch_read.positions.losses.since(before.losses)):
                lost = True
                say(line, file=sys.stderr)
            if batch_read.rows:
                if not recorded and _news(batch_read.rows, "audit ship"):
                    record_taken(ledger, "audit ship", unrecorded=unrecorded)
                    recorded = True
                sys.stdout.buffer.write(_lines(batch_read.rows, told_as))
                sys.stdout.buffer.flush()
                write_positions(positions, batch_read.positions)
                continue
            if batch_read.positions != before:
                write_positions(positions, batch_read.positions)
            if not follow:
                if lost:
                    raise typer.Exit(EXIT_NO)
                return
            time.sleep(0.5)


def push(
    folder: _Folder,
    url: Annotated[str, typer.Option(help="Where batches are posted: https, or http on loopback.")],
    signing_key: _Key,
    ledger: Ledger = DEFAULT,
    shape: _Shape = SiemFormat.CLOUDEVENTS.value,
    name: Annotated[str, typer.Option(help="The sink's name.")] = "webhook",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C.")] = False,
    unrecorded: Unrecorded = False,
    *,
    as_json: Json = False,
) -> None:
    """Post new leaves to a webhook, signed (Standard Webhooks, HMAC-SHA-256), at least once and in order.

    The exit status is 1 while batches are given up, and in a run that meets a restored ledger or a purge that took
    leaves first. With --follow stderr says so at once, and that the receiver fails; the exit status is then that of
    its end.
    """
    with reading(ledger) as engine:
        recorded = False

        def leaving(rows: Sequence[EventRow]) -> Sequence[EventRow]:
            nonlocal recorded
            if not recorded and _news(rows, "audit push"):
                record_taken(ledger, "audit push", unrecorded=unrecorded)
                recorded = True
            return rows

        pump = _pump(engine, folder, name, url, signing_key, _shape(engine, shape), leaving)
        before = pump.positions.losses
        if follow:
            _follow(pump)
        while pump.step():
            pass
    delivery = pump.status()
    if as_json:
        print_json(delivery._asdict())
    else:
        say(
            f"{delivery.name}: {several(delivery.delivered, 'leaf')} delivered, "
            f"{several(delivery.dead, 'batch')} given up"
        )
        for line in delivery.losses:
            say(line)
    if delivery.dead or pump.positions.losses != before:
        raise typer.Exit(EXIT_NO)


def _shape(engine: Engine, name: str) -> LeafShape:
    with engine.connect() as connection:
        return open_shape(name, ledger_identity(connection))


def _follow(pump: DeliveryPump) -> None:
    """Deliver until the user stops it; print a problem when it begins and when it changes."""
    before = pump.positions.losses
    lines_before: set[str] = set()
    pump.start()
    try:
        with following(lambda: bool(pump.status().dead) or pump.positions.losses != before):
            while True:
                time.sleep(1.0)
                found = pump.status()
                lines = {*found.losses, *([found.problem] if found.problem else [])}
                for line in sorted(lines - lines_before):
                    say(f"{found.name}: {line}", file=sys.stderr)
                lines_before = lines
    finally:
        pump.close()


sink = typer.Typer(no_args_is_help=True, help="Detach a sink, attach it again, show what was given up.")


@sink.command(epilog="Example: `kvcustody audit sink status ./webhook --json`")
def status(folder: _Folder, *, as_json: Json = False) -> None:
    """Show where a sink is, and what is wrong with it: the exit status is 1 while something is.

    That is a receiver that takes nothing for minutes, batches that were given up, logs that were read again after a
    restore, and leaves that a purge took first. `audit sink acknowledge` ends the last two.
    """
    files = SinkFolder(folder)
    dead, positions = files.reasons(), files.read_positions()
    shipping = files.status(folder.name, positions)
    places = {name: place.next for name, place in positions.places.items()}
    troubles = [trouble.text for trouble in find_troubles(shipping, SystemClock().utc_us())]
    if as_json:
        shown = {"failing_since_us": shipping.failing_since_us, "losses": shipping.losses, "troubles": troubles}
        print_dated({"attached": shipping.attached, "positions": places, "dead": dead, **shown})
    else:
        state = "attached" if shipping.attached else "detached"
        say(f"{state}; {several(sum(places.values()), 'leaf')} behind it")
        for reason in dead:
            say(f"given up: {reason}")
        for line in troubles:
            say(line)
    if troubles:
        raise typer.Exit(EXIT_NO)


@sink.command(epilog="Example: `kvcustody audit sink detach ./webhook --actor ops --reason 'collector is down'`")
def detach(
    folder: _Folder, actor: _Actor, reason: _Reason = "", ledger: Ledger = DEFAULT, *, as_json: Json = False
) -> None:
    """Give a sink nothing more. It is put on record in the ledger, not in the sink."""
    _change(folder, ledger, "detached", actor, reason, SinkFolder.detach, as_json)


@sink.command(epilog="Example: `kvcustody audit sink attach ./webhook --actor ops`")
def attach(
    folder: _Folder, actor: _Actor, reason: _Reason = "", ledger: Ledger = DEFAULT, *, as_json: Json = False
) -> None:
    """Go on where it was."""
    _change(folder, ledger, "attached", actor, reason, SinkFolder.attach, as_json)


@sink.command(epilog="Example: `kvcustody audit sink acknowledge ./webhook --actor ops --reason 'restored on 3 May'`")
def acknowledge(
    folder: _Folder, actor: _Actor, reason: _Reason = "", ledger: Ledger = DEFAULT, *, as_json: Json = False
) -> None:
    """Show no longer what a sink lost so far in restores and purges: somebody saw it."""
    _change(folder, ledger, "acknowledged", actor, reason, SinkFolder.acknowledge, as_json)


@sink.command(
    epilog="Example: `kvcustody audit sink retry ./webhook --url https://… --signing-key hook.key --actor ops`"
)
def retry(
    folder: _Folder,
    url: Annotated[str, typer.Option(help="Where batches are posted.")],
    signing_key: _Key,
    actor: _Actor,
    ledger: Ledger = DEFAULT,
    *,
    as_json: Json = False,
) -> None:
    """Send the batches again that were given up, oldest first."""
    with writing(ledger) as engine:
        pump = _pump(engine, folder, folder.name, url, signing_key, _shape(engine, SiemFormat.CLOUDEVENTS))
        record_operator_act(engine, lambda at_us: SinkChanged(at_us, folder.name, "retried", actor, ""))
        sent = pump.retry_dead()
    if as_json:
        print_json({"sink": folder.name, "sent_again": sent})
    else:
        say(f"sent again: {sent}")


def _change(
    folder: Path,
    ledger: str,
    action: str,
    actor: str,
    reason: str,
    act: Callable[[SinkFolder], None],
    as_json: bool,
) -> None:
    if not SinkFolder(folder).exists():
        raise ConfigError(f"`{folder}` is not a sink's folder; `kvcustody audit push` creates one")
    with writing(ledger) as engine:
        record_operator_act(engine, lambda at_us: SinkChanged(at_us, folder.name, action, actor, reason))
    act(SinkFolder(folder))
    if as_json:
        print_json({"sink": folder.name, "action": action})
    else:
        say(f"{action}: {folder.name}")


def _pump(
    engine: Engine,
    folder: Path,
    name: str,
    url: str,
    signing_key: Path,
    shape: LeafShape,
    leaving: Leaving = lambda rows: rows,
) -> DeliveryPump:
    try:
        key = signing_key.read_bytes().strip()
    except OSError as problem:
        raise ConfigError(f"--signing-key `{signing_key}`: {problem.strerror}") from None
    made = WebhookSink(name, url, key, content_type=shape.media_type)
    return DeliveryPump(engine, made, folder, _array_of(shape), leaving=leaving)


def _news(rows: Sequence[EventRow], operation: str) -> bool:
    """Return whether there is anything besides what earlier runs recorded about themselves."""
    return any(row.kind != "access" or row.body["operation"] != operation for row in rows)


def _array_of(shape: LeafShape) -> Callable[[Sequence[EventRow]], bytes]:
    def encode(rows: Sequence[EventRow]) -> bytes:
        return orjson.dumps([shape.shape(row) for row in rows])

    return encode


def _lines(rows: Sequence[EventRow], shape: LeafShape) -> bytes:
    return b"".join(orjson.dumps(shape.shape(row)) + b"\n" for row in rows)
