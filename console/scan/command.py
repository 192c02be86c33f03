"""The commands of `kvcustody scan`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer

from kvcustody.audit.evidence.query.orphans import dead_incarnations, gap_cause, new_gaps
from kvcustody.audit.write.event_writer import EventWriter
from kvcustody.clock import SystemClock
from kvcustody.console.api.client import asking, call
from kvcustody.console.api.group import OperationGroup
from kvcustody.console.command import Json, make_table, print_json, say, stdout
from kvcustody.console.opening import reading, subject_store, writing
from kvcustody.console.options import (
    DEFAULT,
    ActSource,
    Ledger,
    NamesOfSubjects,
    SubjectNames,
    SubjectStore,
)
from kvcustody.governance.service.operations.parameter_groups import grouped

_LOOK_SECONDS = 0.5
app = typer.Typer(
    cls=OperationGroup,
    no_args_is_help=True,
    help="Orphans: custody about which two sources disagree.",
    epilog="A worker scans its own memory while it serves; docs/how-to/audit/find-orphans.md has the fifteen classes.",
)


@app.command(epilog="Example: `kvcustody scan ledger --json`")
def ledger(*, ledger: Ledger = DEFAULT, as_json: Json = False) -> None:
    """What the ledger says against itself: processes that ended without a word, and gaps that nothing explains."""
    with reading(ledger) as engine, engine.connect() as connection:
        rows = [
            {"orphan": "dead incarnation", "owner": one.worker, "cause": f"process {one.incarnation}"}
            for one in dead_incarnations(connection)
        ]
        rows += [{"orphan": "ledger gap", "owner": "", "cause": gap_cause(gap)} for gap in new_gaps(connection)]
    _show(rows, ("orphan", "owner", "cause"), as_json)


@app.command(name="close-dead", epilog="Example: `kvcustody scan close-dead worker-0 --spill kvcustody.spill`")
def close_dead(
    worker: Annotated[str, typer.Argument(help="The worker's name.", metavar="WORKER")],
    *,
    spill: Annotated[Path, typer.Option(help="The worker's spill folder; its lock shows whether the worker runs.")],
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
    source: ActSource,
    deadline_seconds: Annotated[
        int, typer.Option(min=1, max=7 * 86_400, help="By when, else the worker is `unreachable`.")
    ] = 3600,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the outcome; exit 1 unless it is a scan.")] = False,
    as_json: Json = False,
) -> None:
    """Ask a worker of a control plane to scan all of its memory, and to repair and record what it finds.

    It does so at its next pull. The order that waits for it already is given again.
    """
    with asking(source, "orderScan") as asker:
        asked = {"worker": worker, "deadline_seconds": deadline_seconds}
        order = orjson.loads(call(asker, "orderScan", asked, key=source.key).body)
        while wait and order["outcome"] in ("waiting", "taken"):
            time.sleep(_LOOK_SECONDS)
            order = orjson.loads(call(asker, "getScanOrder", {"order": order["order"]}).body)
        findings = []
        if order["outcome"] == "scanned":
            place = {name: order[name] for name in ("incarnation", "scan")}
            findings = orjson.loads(call(asker, "getScan", place).body)["findings"]
    if as_json:
        print_json(order | {"found": findings})
    else:
        say(f"order {order['order']}: {order['outcome']} {order['reason'] or ''}".rstrip())
        if order["outcome"] == "scanned":
            _show(findings, ("orphan", "tenant", "cause", "action", "outcome", "blocks"), as_json)
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
