"""`kvcustody up`: a signed ledger, the service with its console, and a worker that serves, in one command."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from kvcustody.console.command import Json, print_json, say
from kvcustody.console.up.plane import HOST, RunningPlane, check_modules, check_port, folder_of, open_plane
from kvcustody.console.up.running import READY_SECONDS, Progress, signals, stay, wait_for
from kvcustody.errors import ConfigError, CustodyError
from kvcustody.governance.observability.logs import configure
from kvcustody.plurals import several

if TYPE_CHECKING:
    from kvcustody.console.up.vllm_worker import VllmWorker
    from kvcustody.lab.traffic.simulated_worker import SimulatedWorker

EPILOG = """
Examples:

    kvcustody up

    kvcustody up --folder demo --port 8080

    kvcustody up --tour

    kvcustody up --seconds 60 --json

    kvcustody up --engine vllm --engine-python /opt/vllm/bin/python

`--tour` prints what to look at first. Nothing here needs a GPU, the network, or a model that is downloaded.
docs/tutorials/first-ten-minutes.md says what runs, and what is left.
"""
_ENGINE_SECONDS = 660.0


class ServingEngine(StrEnum):
    """The engine that serves the tenants of this `up`."""

    SIMULATED = "simulated"
    VLLM = "vllm"


class _Up(NamedTuple):
    plane: RunningPlane
    worker: SimulatedWorker | VllmWorker
    said: Progress


def up(
    folder: Annotated[
        Path | None,
        typer.Option(help="Keep ledger and keys here for the next start; default: they are deleted on exit."),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Port on 127.0.0.1; 0: any free port.")] = 0,
    tenants: Annotated[
        int, typer.Option(min=1, max=64, help="Tenants with traffic: the policy's, then others up to this.")
    ] = 8,
    seed: Annotated[int, typer.Option(help="Draws the workload.")] = 1,
    engine: Annotated[
        ServingEngine,
        typer.Option(help="The engine: kvcustody's own pool, or a real vLLM with random weights."),
    ] = ServingEngine.SIMULATED,
    engine_python: Annotated[
        str,
        typer.Option(help="With --engine vllm: the Python with vLLM and kvcustody[vllm]; default: this one."),
    ] = "",
    seconds: Annotated[float | None, typer.Option(min=0.0, help="End after this time, for scripts and tests.")] = None,
    tour: Annotated[
        bool, typer.Option("--tour", help="Print five things to try, each with its command and its page.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Start a whole kvcustody on this machine: a signed ledger, the console, and a worker that serves tenants now.

    It prints the console's address and a link that signs you in: it works once, within a minute, on this machine
    alone; Enter prints another. The worker is kvcustody's own pool and Governor under generated traffic of the
    policy's tenants. Everything on the pages is what it does: decisions, custody, scrubs, erasures, and now and then
    a stalled engine or a hung device. Its leaves say `simulated`. Ctrl-C ends it in order. A tenant that you add to the
    policy has traffic within seconds. With `--engine vllm` a real governed vLLM serves instead, with a model of random
    weights: nothing is downloaded, and it takes a minute to start.
    """
    if engine_python and engine is not ServingEngine.VLLM:
        raise ConfigError("--engine-python is of --engine vllm")
    check_modules("torch", "fastapi", "uvicorn")
    check_port(port)
    if engine is ServingEngine.VLLM:
        check_engine(engine_python or sys.executable)
    configure("error", "console")
    stop = threading.Event()
    with signals(stop), ExitStack() as stack:
        try:
            running = _start(stack, stop, folder, port, tenants, seed, engine, engine_python)
        except KeyboardInterrupt:
            say("ending what was started", file=sys.stderr)
            raise
        _tell(running, as_json, tour=tour)
        stay(
            stop,
            seconds,
            has_ended=lambda: running.worker.ended,
            on_enter=running.plane.tell_link,
        )
        running.said("ending: the worker releases and scrubs what it holds")
    if running.worker.error is not None:
        raise (
            running.worker.error
            if isinstance(running.worker.error, CustodyError)
            else ConfigError(f"the worker ended: {type(running.worker.error).__name__}")
        )
    kept = f"; {running.plane.folder} is kept" if folder is not None else ""
    running.said(f"ended, {several(running.worker.requests, 'request')} served{kept}")


def _start(
    stack: ExitStack,
    stop: threading.Event,
    folder: Path | None,
    port: int,
    tenants: int,
    seed: int,
    engine: ServingEngine,
    engine_python: str,
) -> _Up:
    """Open everything in order; `stack` closes it in reverse.

    Raises:
        KeyboardInterrupt: a stop was requested.
    """
    progress = Progress()
    progress("importing")
    from kvcustody.console.up.place import claimed, free_port, worker_settings
    from kvcustody.console.up.vllm_worker import VllmWorker
    from kvcustody.lab.traffic.office import VLLM, WORKER, Office
    from kvcustody.lab.traffic.simulated_worker import SimulatedWorker, lively
    from kvcustody.lab.traffic.traffic_tenants import TrafficTenants

    place = folder_of(stack, folder, "up")
    spec = lively(tenants, seed)
    with claimed(place), ExitStack() as opened:
        plane = open_plane(opened, stop, progress, place, port, spec)
        name = VLLM if engine is ServingEngine.VLLM else WORKER
        traffic = TrafficTenants(plane.policy, spec)
        office = Office(plane.service, spec, traffic.name, name)
        of_worker = worker_settings(plane.folder, plane.listen, name)
        worker: SimulatedWorker | VllmWorker
        if engine is ServingEngine.VLLM:
            home = plane.folder / "worker"
            worker = VllmWorker(
                of_worker, home, spec, traffic, lambda: plane.policy, port=free_port(HOST), python=engine_python
            )
            progress("starting vLLM with a model of random weights; it takes a minute")
        else:
            worker = SimulatedWorker(of_worker, spec, traffic, stalls=office.stalls)
            progress("opening the worker: its blocks are zeroed, its policy is recorded")
        opened.callback(worker.stop)
        worker.start()
        wait_for(
            worker.serving,
            stop,
            "the worker",
            _ENGINE_SECONDS if engine is ServingEngine.VLLM else READY_SECONDS,
        )
        if worker.error is not None:
            raise worker.error
        office.start()
        opened.callback(office.stop)
        progress("serving tenants")
        stack.push(opened.pop_all())
    return _Up(plane, worker, progress)


def check_engine(python: str) -> None:
    """Refuse to start where this Python lacks vLLM or kvcustody.

    Raises:
        ConfigError: names the Python and what to install.
    """
    from kvcustody.lab.fleet.router_programs import missing_modules

    try:
        missing = missing_modules(python, ("vllm", "kvcustody"))
    except (OSError, subprocess.SubprocessError):
        raise ConfigError(f"--engine-python: `{python}` does not run as a Python", path=python) from None
    if missing:
        raise ConfigError(
            f"--engine vllm: `{python}` lacks {' and '.join(missing)}; install vLLM and `kvcustody[vllm]` there, "
            "or name another Python with --engine-python",
            path=python,
        )


def tour_of() -> list[tuple[str, str, str]]:
    """Return five things to try: what each shows, its command (see `RunningPlane.environment`), and its page."""
    return [
        ("what workers hold and find, live", "kvcustody top", "/console/custody"),
        ("each event as it happens", "kvcustody audit tail --follow", "/console/audit"),
        ("who was denied reuse, and by which rule", "kvcustody custody denials", "/console/decisions"),
        ("erasures with their deadlines; one is missed on purpose", "kvcustody erasure list", "/console/erasures"),
        ("whether anybody changed the ledger", "kvcustody audit fsck", "/console/reports"),
    ]


def _tell(running: _Up, as_json: bool, *, tour: bool) -> None:
    """Print the addresses and how to sign in; with `tour`, what to try."""
    environment = running.plane.write_environment()
    if as_json:
        more = [{"shows": shows, "command": command, "page": page} for shows, command, page in tour_of()]
        print_json(running.plane.as_json() | ({"tour": more} if tour else {}))
        sys.stdout.flush()
        return
    plane = running.plane
    plane.tell()
    say(f"ledger    {running.plane.ledger}")
    say(f"keys      {running.plane.folder / 'keys'}   (who has which: docs/tutorials/first-ten-minutes.md)")
    say(f"commands  . {environment}   (once in another terminal)")
    if tour:
        for number, (shows, command, page) in enumerate(tour_of(), 1):
            say(f"\n{number}. {shows}\n   {command}\n   {running.plane.url}{page}")
    say("\nto add a person, or somebody who acts for a tenant (it prints a key that signs in):")
    for command in (plane.adds("NAME", "auditor"), plane.adds("NAME", "tenant-admin", "TENANT")):
        say(f"   {command.replace(str(plane.folder), '$UP')}")
    say("Ctrl-C ends it.", flush=True)
