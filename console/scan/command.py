"""The commands of `kvcustody scan`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from kvcustody.audit.evidence.query.custody import findings
from kvcustody.audit.evidence.query.known_names import known_tenant
from kvcustody.audit.evidence.query.orphans import dead_incarnations, gap_cause, new_gaps
from kvcustody.audit.write.event_writer import EventWriter
from kvcustody.clock import SystemClock
from kvcustody.console.api.print_answer import one_segment
from kvcustody.console.command import Json, make_table, print_json, say, stdout
from kvcustody.console.opening import connect, reading, subject_store, writing
from kvcustody.console.options import (
    DEFAULT,
    ControlPlane,
    Ledger,
    NamesOfSubjects,
    OldestFirst,
    SubjectNames,
    SubjectStore,
)
from kvcustody.errors import ConfigError
from kvcustody.governance.service.operations.parameter_groups import grouped

_LOOK_SECONDS = 0.5
app = typer.Typer(
    no_args_is_help=True,
    help="Orphans: custody that two sources disagree about.",
    epilog="A worker scans its own memory while it serves; docs/audit/deletion.md#orphans has the fifteen classes.",
)


@app.command(epilog="Example: `kvcustody scan ledger --json`")
def ledger(*, ledger: Ledger = DEFAULT, as_json: Json = False) -> None:
    """What the ledger says against itself: processes that ended without a word, and gaps that nothing explains."""
    with reading(ledger) as engine, engine.connect() as connection:
        rows = [
            {"orphan": "dead incarnation", "owner": one.worker, "cause": f"process {one.incarnation}"}
            for one in dead_incarnations(connection)
        ]
        rows += [
            {"orphan": "ledger gap", "owner": "", "cause": gap_cause(gap)} for gap in new_gaps(connection)
        ]
    _show(rows, ("orphan", "owner", "cause"), as_json)


@app.command(name="findings", epilog="Example: `kvcustody scan findings --tenant acme --json`")
def show_findings(
    *,
    tenant: Annotated[str | None, typer.Option(help="Of this tenant alone.")] = None,
    oldest_first: OldestFirst = False,
    ledger: Ledger = DEFAULT,
    as_json: Json = False,
) -> None:
    """Everything that scans have found and what became of it, newest first."""
    with reading(ledger) as engine, engine.connect() as connection:
        tenant = known_tenant(connection, tenant)
        rows = [one._asdict() for one in findings(connection, tenant=tenant)]
    rows = rows if oldest_first else rows[::-1]
    _show(rows, ("orphan", "tenant", "cause", "action", "outcome", "blocks"), as_json)


@app.command(
    name="close-dead", epilog="Example: `kvcustody scan close-dead worker-0 --spill kvcustody.spill`"
)
def close_dead(
    worker: Annotated[str, typer.Argument(help="The worker's name.", metavar="WORKER")],
    *,
    spill: Annotated[Path, typer.Option(help="The worker's spill folder; its lock says whether it runs.")],
    ledger: Ledger = DEFAULT,
    subject_keys: SubjectStore = None,
    subject_names: NamesOfSubjects = SubjectNames.SEALED,
    as_json: Json = False,
) -> None:
    """Close what a worker's dead processes held, as unproven; refused while a process of that name runs.

    A worker that starts again does the same by itself. Events that its spill still holds are added first.
    """
    clock = SystemClock()
    clear = subject_names is SubjectNames.CLEAR and subject_keys is None
    with subject_store(subject_keys, ledger) as keys, writing(ledger) as engine:
        with EventWriter(
            engine,
            worker=worker,
            clock=clock,
            spill_directory=spill,
            subject_keys=None if clear else keys,
            clear_names=clear,
        ):
            pass  # opening it closes them
        with engine.connect() as connection:
            left = [one.incarnation for one in dead_incarnations(connection) if one.worker == worker]
    if as_json:
        print_json({"worker": worker, "left": left})
    else:
        say(f"closed: nothing of `{worker}` is open" if not left else f"open: {', '.join(left)}")


@app.command(
    name="worker",
    epilog="Example: `kvcustody scan worker gpu-0 --server https://kv.example:8443 --api-key-file olive.key --wait`",
)
@grouped
def ask_worker(
    worker: Annotated[str, typer.Argument(help="The worker's name.", metavar="WORKER")],
    *,
    plane: ControlPlane,
    deadline_seconds: Annotated[
        int, typer.Option(min=1, max=7 * 86_400, help="By when, else the worker is `unreachable`.")
    ] = 3600,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait for the outcome; exit 1 unless it is a scan.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Ask a worker of a control plane to scan all of its memory, and to repair and record what it finds.

    It does so at its next pull. The order that waits for it already is given again.
    """
    if plane.server is None:
        raise ConfigError("--server is needed: a worker is asked through its control plane")
    with connect(plane) as connection:
        place = f"/v1/workers/{quote(one_segment(worker), safe='')}/scans"
        order = connection.post(place, {"deadline_seconds": deadline_seconds})
        while wait and order["outcome"] in ("waiting", "taken"):
            time.sleep(_LOOK_SECONDS)
            order = connection.get(f"/v1/orphans/orders/{order['order']}")
        found = []
        if order["outcome"] == "scanned":
            shown = connection.get(f"/v1/orphans/scans/{order['incarnation']}/{order['scan']}")
            found = shown["findings"]
    if as_json:
        print_json(order | {"found": found})
    else:
        say(f"order {order['order']}: {order['outcome']} {order['reason'] or ''}".rstrip())
        if order["outcome"] == "scanned":
            _show(found, ("orphan", "tenant", "cause", "action", "outcome", "blocks"), as_json)
    if wait and order["outcome"] != "scanned":
        raise typer.Exit(1)


def _show(rows: list[dict[str, Any]], columns: tuple[str, ...], as_json: bool) -> None:
    if as_json:
        print_json(rows)
        return
    if not rows:
        say("nothing found")
        return
    table = make_table("", *columns, left=len(columns))
    for row in rows:
        table.add_row(*(str(row[name] if row[name] is not None else "") for name in columns))
    stdout().print(table)
