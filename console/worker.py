"""The commands of `kvcustody worker`."""

from __future__ import annotations

import re
from functools import partial
from typing import Annotated, Any

import typer
from sqlalchemy import Connection

from kvcustody.audit.evidence.processes.open_processes import OpenProcess, last_heard_us, open_processes
from kvcustody.audit.kinds import DECLARED, WorkerClosingAsked
from kvcustody.audit.store.schema.ledger import incarnations, workers
from kvcustody.audit.tlog.root_sealer import seal_now
from kvcustody.audit.write.committer import closing_committer
from kvcustody.audit.write.crash_recovery import Closing, close_process
from kvcustody.audit.write.record_operator_act import record_operator_act
from kvcustody.clock import SystemClock
from kvcustody.console.api.group import OperationGroup
from kvcustody.console.command import Json, make_table, print_dated, print_json, say, stdout
from kvcustody.console.live.worker_status import open_runs
from kvcustody.console.opening import reading, writing
from kvcustody.console.options import DEFAULT, Ledger, OldestFirst
from kvcustody.errors import ConfigError
from kvcustody.governance.service.fleet.workers import LIVE_US, WorkerRun
from kvcustody.times import SECOND_US, readable

_RECORDER = "console:closing"
app = typer.Typer(
    cls=OperationGroup,
    no_args_is_help=True,
    help="Workers' processes in a ledger: list those that have not ended, and close dead ones.",
    epilog="docs/how-to/operate/handle-an-incident.md says when a process is closed automatically.",
)


@app.command(name="list", epilog="Example: `kvcustody worker list --json`")
def list_open(*, oldest_first: OldestFirst = False, ledger: Ledger = DEFAULT, as_json: Json = False) -> None:
    """Processes whose end is not on record, newest first: how each stands, when it was heard, its erase epochs.

    A purge stops at what they wrote.
    """
    now_us = SystemClock().utc_us()
    with reading(ledger) as engine, engine.connect() as connection:
        runs = {run.incarnation: run for run in open_runs(engine)}
        rows = [_row(connection, one, now_us) | _of_run(runs.get(one.uuid)) for one in open_processes(connection)]
    rows.sort(key=lambda row: row["started_us"], reverse=not oldest_first)
    if as_json:
        print_dated({"processes": rows})
        return
    table = make_table(
        f"{len(rows)} have not ended",
        *("worker", "state", "process", "since (UTC)", "heard (UTC)", "erase epochs"),
        left=6,
    )
    for row in rows:
        table.add_row(
            row["worker"],
            row["state"],
            row["incarnation"],
            readable(row["started_us"]),
            readable(row["heard_us"]),
            _epochs(row),
        )
    stdout().print(table, markup=False)


@app.command(
    epilog="Example: `kvcustody worker close gpu-7 --spill-lost --actor ops --approver dpo --reason 'host destroyed'`"
)
def close(
    target: Annotated[str, typer.Argument(help="A worker's name, or one process.", metavar="NAME|INCARNATION")],
    *,
    spill_lost: Annotated[bool, typer.Option("--spill-lost", help="The process's spill is lost.")] = False,
    actor: Annotated[str, typer.Option(help="Who does it, for the record.")],
    approver: Annotated[str, typer.Option(help="Who approved it; another person.")],
    reason: Annotated[str, typer.Option(help="Reason, for the record.")],
    ledger: Ledger = DEFAULT,
    as_json: Json = False,
) -> None:
    """Declare processes dead that do not come back: what they held is closed as unproven, as behind a crash.

    Refused for a process that was heard in the last minute. Where a control plane keeps the ledger, two operators say
    so there (`kvcustody worker declare-dead`); without anybody it closes who is silent for
    `worker_silence_days`.
    """
    if not spill_lost:
        raise ConfigError("--spill-lost is needed: closed custody and later spilled records would be counted twice")
    if not approver or actor == approver:
        raise ConfigError("a process is declared dead by two people: --approver is not the --actor")
    clock = SystemClock()
    closed: list[dict[str, Any]] = []
    with writing(ledger) as engine:
        with engine.connect() as connection:
            processes = _named(connection, target)
            now_us = clock.utc_us()
            silent = {one.uuid: (now_us - last_heard_us(connection, one, now_us)) // SECOND_US for one in processes}
        for uuid, seconds in silent.items():
            if seconds < LIVE_US // SECOND_US:
                raise ConfigError(f"process `{uuid}` was heard {seconds} s ago: it is at work")
        with closing_committer(engine, clock) as committer:
            for one in processes:
                asked = partial(WorkerClosingAsked, worker=one.worker, incarnation=one.uuid, actor=actor, reason=reason)
                record_operator_act(engine, asked, clock=clock)
                why = Closing(DECLARED, silent[one.uuid], 0, actor, approver, reason, spill_lost=True)
                done = close_process(committer, engine, clock, one.uuid, why, _RECORDER)
                closed.append({"worker": one.worker, "incarnation": one.uuid, "closed": done})
        seal_now(engine)
    if as_json:
        print_json({"processes": closed})
        return
    for each in closed:
        said = "closed" if each["closed"] else "not closed: it still submits leaves"
        say(f"{said}: {each['incarnation']} of {each['worker']}")


def _named(connection: Connection, target: str) -> list[OpenProcess]:
    """Return the open processes of a name, or the one with an id."""
    one = re.fullmatch(r"[0-9a-f]{32}", target)
    where = incarnations.c.uuid == target if one else workers.c.name == target
    found = open_processes(connection, where)
    if not found:
        raise ConfigError(f"no process of `{target}` is open; `kvcustody worker list` shows those that are")
    return found


def _of_run(run: WorkerRun | None) -> dict[str, Any]:
    """Return what a control plane knows about a process; nothing for one that registered nowhere."""
    run = run or WorkerRun("", "", 0, None, None, 0, False, 0, 0, {}, {}, {})
    epochs = ("epoch_version", "epoch_since_us", "epoch_behind_since_us")
    return {"state": run.state} | {name: getattr(run, name) for name in epochs}


def _epochs(row: dict[str, Any]) -> str:
    if row["epoch_version"] is None:
        return ""
    behind_us = row["epoch_behind_since_us"]
    said = f"{row['epoch_version']} since {readable(row['epoch_since_us'])}"
    return said if behind_us is None else f"{said}, behind since {readable(behind_us)}"


def _row(connection: Connection, process: OpenProcess, now_us: int) -> dict[str, Any]:
    return {
        "worker": process.worker,
        "incarnation": process.uuid,
        "started_us": process.started_us,
        "heard_us": last_heard_us(connection, process, now_us),
        "memory": process.memory,
    }
