"""`kvcustody doctor`: every check, each with a fix."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from kvcustody.audit.store.database.engine import open_store
from kvcustody.clock import SystemClock
from kvcustody.console.command import EXIT_NO, Json, make_table, print_json, say, stdout
from kvcustody.console.doctor import ledger, machine, service, worker  # noqa: F401 - each adds its checks
from kvcustody.console.doctor.findings import Diagnosis, Examined, State, examine
from kvcustody.console.opening import service_settings
from kvcustody.console.options import GivenLedger
from kvcustody.governance.settings import load_settings
from kvcustody.plurals import several

EPILOG = (
    "Examples:\n\n    kvcustody doctor --service /etc/kvcustody/service.yaml\n\n"
    "    kvcustody doctor --worker /etc/kvcustody/worker.yaml --json\n\n"
    "    kvcustody doctor --ledger kvcustody.db\n\n"
    "It changes nothing. Run it as the user that runs the process: modes and limits are that user's. It exits 1 where "
    "something is a problem."
)
_SHOWN = (State.PROBLEM, State.WARNING, State.OK, State.SKIPPED, State.OPTIONAL)
_READ_SECONDS = 5.0


def doctor(
    service: Annotated[  # noqa: F811 - the module of this name has done its work
        Path | None, typer.Option("--service", help="Settings of a control plane.", metavar="FILE")
    ] = None,
    worker: Annotated[  # noqa: F811
        Path | None, typer.Option("--worker", help="Settings of a worker.", metavar="FILE")
    ] = None,
    ledger: GivenLedger = None,  # noqa: F811
    as_json: Json = False,
) -> None:
    """Look for what would stop or weaken kvcustody on this machine, and say what to do about it.

    Settings are those of the files and of the environment. Without `--service` and `--worker` only the machine, the
    packages and the ledger are looked at.
    """
    of_service = None if service is None else service_settings(service, ledger)
    of_worker = None if worker is None else load_settings(worker)
    url = ledger
    if url is None and of_service is not None:
        url = of_service.database_url
    if url is None and of_worker is not None and not of_worker.control_plane:
        url = of_worker.database_url
    engine = None if url is None else open_store(url, read_only=True, timeout_seconds=_READ_SECONDS)
    try:
        findings = examine(Examined(of_service, of_worker, url, engine, SystemClock(), os.environ))
    finally:
        if engine is not None:
            engine.dispose()
    _show(findings, as_json=as_json)
    if any(each.state is State.PROBLEM for each in findings):
        raise typer.Exit(EXIT_NO)


def _show(findings: list[Diagnosis], *, as_json: bool) -> None:
    findings = sorted(findings, key=lambda each: _SHOWN.index(each.state))
    counts = {state: sum(each.state is state for each in findings) for state in _SHOWN}
    if as_json:
        print_json(
            {
                "counts": {state.value: number for state, number in counts.items()},
                "findings": [each._asdict() for each in findings],
            }
        )
        return
    title = f"{several(counts[State.PROBLEM], 'problem')}, {several(counts[State.WARNING], 'warning')}, "
    table = make_table(title + f"{counts[State.OK]} checks passed", "check", "", "what is so", "what to do", left=4)
    for each in findings:
        if each.state not in {State.SKIPPED, State.OPTIONAL}:
            table.add_row(each.check, each.state.value, each.text, each.remedy)
    stdout().print(table, markup=False)
    left_out: dict[str, list[str]] = {}
    for each in findings:
        if each.state is State.SKIPPED:
            left_out.setdefault(each.text, []).append(each.check)
    for why, names in left_out.items():
        say(f"not checked: {', '.join(dict.fromkeys(names))}: {why}")
    for each in findings:
        if each.state is State.OPTIONAL:
            say(f"not installed: {each.text}: {each.remedy}")
