"""`kvcustody simulate`: a fleet's expected cache hits, modelled faster than real time."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from kvcustody.console.command import Json, print_json, stdout
from kvcustody.errors import ConfigError
from kvcustody.lab.fleet.fleet_study import FleetWorkload, StudyRow, problems_of, study, write_page
from kvcustody.lab.fleet.open_router import MODEL, ROUTER_NAMES, router_opener
from kvcustody.lab.replay.traces.readers import READERS, open_trace
from kvcustody.lab.replay.workload.generator import WorkloadSpec, generate

app = typer.Typer(
    no_args_is_help=True,
    help="A fleet's expected cache hits, modelled faster than real time.",
    epilog="docs/how-to/fleet/simulate.md describes the model.",
)
EPILOG = """
Examples:

    kvcustody simulate fleet

    kvcustody simulate fleet --router smg --programs .venv-smg/bin --workers 8

    kvcustody simulate fleet conversation_trace.jsonl --workers 8 --workers 64 --html fleet.html

Exit code 1: one tenant finds less than 0.97 of what it finds without doors, tenants find less than 0.95 of what an
oracle does, or doors differ by more than 0.01.
"""
_WORKERS = (8, 64)


@app.callback()
def _simulate() -> None:
    """Keep `fleet` a command of its own in the group."""


@app.command(epilog=EPILOG)
def fleet(
    trace: Annotated[
        Path | None, typer.Argument(help="A recorded trace, plain or gzip; none: a generated workload.")
    ] = None,
    *,
    trace_format: Annotated[
        str | None,
        typer.Option(
            help=f"The trace's format, where it is not recognised: {', '.join(READERS)}.",
            autocompletion=lambda: list(READERS),
        ),
    ] = None,
    workers: Annotated[
        list[int] | None,
        typer.Option(min=1, max=512, help="Number of workers; may be repeated. Each gets the same load."),
    ] = None,
    blocks: Annotated[int, typer.Option(min=16, help="Blocks of each worker's cache.")] = 20_000,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first requests.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the workload, tenants and erasures.")] = 1,
    router: Annotated[
        str,
        typer.Option(
            help=f"{', '.join(ROUTER_NAMES)}: the model, or a router's own code over workers of this process.",
            autocompletion=lambda: list(ROUTER_NAMES),
        ),
    ] = MODEL,
    programs: Annotated[
        list[Path] | None,
        typer.Option(help="A folder with the router's program; of Dynamo its environment's `bin`."),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write tables and charts as a page.")] = None,
    as_json: Json = False,
) -> None:
    """Run a workload through modelled doors, a router and modelled workers' caches, and say what each thing costs.

    It varies tenants (nobody kept apart, 1, 8, 128), doors (1, 2, 4), erasures a day (0, 100, 1,000) and workers. Names
    and erase epochs are the product's own; caches and times are models, and so is the router without `--router`
    (docs/how-to/fleet/simulate.md).
    """
    if router not in ROUTER_NAMES:
        raise ConfigError(f"--router `{router}` is none of: {', '.join(ROUTER_NAMES)}")
    workload = _workload(trace, trace_format, limit, seed)
    sizes = workers or [*_WORKERS]
    with tempfile.TemporaryDirectory(prefix="kvcustody-simulate-") as logs:
        rows = study(
            workload,
            sizes,
            per_copy=min(sizes),
            seed=seed,
            blocks_max=blocks,
            open_router=router_opener(router, programs or (), Path(logs)),
        )
    problems = problems_of(rows)
    if html is not None:
        write_page(html, workload, rows)
    if as_json:
        print_json(
            {
                "workload": workload.name,
                "router": router,
                "requests": len(workload.requests),
                "rows": [row.as_json() for row in rows],
                "problems": problems,
            }
        )
    else:
        _print(workload, rows, problems)
    raise typer.Exit(1 if problems else 0)


def _workload(trace: Path | None, trace_format: str | None, limit: int | None, seed: int) -> FleetWorkload:
    if trace is None:
        if trace_format is not None:
            raise ConfigError(f"--trace-format `{trace_format}` reads a file: name the trace, or leave it out")
        spec = WorkloadSpec(seed=seed, conversations=1500)
        return FleetWorkload("Generated workload", generate(spec).requests[:limit], spec.block_tokens)
    opened = open_trace(trace, trace_format)
    requests = [request for request, _ in zip(opened, range(limit or 1 << 62), strict=False)]
    if not requests:
        raise ConfigError(f"trace `{trace}`: has no requests")
    return FleetWorkload(trace.name.partition(".")[0], requests, opened.block_tokens)


def _print(workload: FleetWorkload, rows: list[StudyRow], problems: list[str]) -> None:
    console = stdout()
    console.print(f"{workload.name}: {len(workload.requests):,} requests, blocks of {workload.block_tokens} tokens")
    part = ""
    for row in rows:
        if row.part != part:
            part = row.part
            console.print(f"[bold]{part}[/]")
        found = row.outcome
        console.print(
            f"  {row.name:14} found {found.found_share:6.1%}, {found.to_oracle:.3f} of the oracle's, "
            f"first token {found.ttft_p50_ms:,.0f} / {found.ttft_p99_ms:,.0f} ms, imbalance {found.imbalance:.2f}"
        )
    for problem in problems:
        console.print(f"[red]{problem}[/]")
