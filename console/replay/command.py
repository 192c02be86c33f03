"""`kvcustody replay`: a multi-tenant workload through the Governor, on real tensors."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError

from kvcustody.audit.kinds import GENERATED
from kvcustody.audit.store.database.database_place import SqliteFile, database_place
from kvcustody.console.command import EXIT_INTERRUPTED, Json, interruptible, print_json, progress_bar, stdout
from kvcustody.console.replay.printing import print_comparison, print_golden, print_report
from kvcustody.errors import ConfigError
from kvcustody.governance.service.operations.parameter_groups import ParameterGroup, grouped
from kvcustody.governance.settings import is_ledger_of, load_settings
from kvcustody.lab.replay.options import EnvironmentOptions, RunnerOptions, read_policy
from kvcustody.lab.replay.report import ReplayReport
from kvcustody.lab.replay.run import golden_check as golden
from kvcustody.lab.replay.run.workload_from_options import (
    FORMATS,
    Choice,
    block_tokens_of,
    load_workload,
)
from kvcustody.lab.replay.summary import check_page, write_summary
from kvcustody.lab.replay.tier_row import TierRow
from kvcustody.lab.replay.workload.labels import Unit
from kvcustody.lab.replay.workload.scenarios import SCENARIOS

EPILOG = """
Examples:

    kvcustody replay

    kvcustody replay --policy single-org --tenants 1 --seed 7 --json

    kvcustody replay conversation_trace.jsonl --trace-format mooncake --tenants 32 --pool-blocks 16000

    kvcustody replay agentic_v6_dev.jsonl.gz --trace-format agentic --unit lineage --limit 1000

    kvcustody replay --trace-format thrash

    kvcustody replay --compare-tiers

    kvcustody replay --golden
"""

HOST_TIER_BYTES = 512 << 20  # of a comparison, where nothing else is said
_POOL_BLOCKS = {
    **{"mooncake": 16_000, "agentic": 64_000, "kv-cache-tester": 64_000},
    **{name: scenario.pool_blocks for name, scenario in SCENARIOS.items()},
}


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions(ParameterGroup):
    """Which requests are replayed, under which policy and as whom."""

    trace: Annotated[
        Path | None, typer.Argument(help="A recorded trace, plain or gzip; none: a generated workload.")
    ] = None
    trace_format: Annotated[
        str | None,
        typer.Option(help=f"What the trace is: {', '.join(FORMATS)}.", autocompletion=lambda: list(FORMATS)),
    ] = None
    policy: Annotated[
        str, typer.Option(help="A library policy (regulated-saas, single-org, public-api) or a YAML file.")
    ] = "regulated-saas"
    tenants: Annotated[int, typer.Option(help="How many tenants share the requests.")] = 8
    seed: Annotated[int, typer.Option(help="Draws the workload, or the labels of a trace.")] = 1
    unit: Annotated[str, typer.Option(help="What belongs to one tenant: session, lineage or project.")] = "session"
    skew: Annotated[
        Path | None, typer.Option(help="Client weights (a ServeGen summary); without it Zipf, exponent 1.1.")
    ] = None
    limit: Annotated[int | None, typer.Option(min=1, help="Replay only the first requests.")] = None

    def choice(self) -> Choice:
        """The workload that the options name; raises `ConfigError`."""
        return Choice(
            self.trace,
            self.trace_format,
            self.tenants,
            self.seed,
            read_unit(self.unit),
            self.skew,
            self.limit,
        )


@dataclass(frozen=True, kw_only=True)
class ReplayPool(ParameterGroup):
    """The pool that they are replayed on."""

    pool_blocks: Annotated[int | None, typer.Option(min=8, help="Blocks of the pool.")] = None
    block_tokens: Annotated[
        int | None, typer.Option(min=2, help="Tokens a block, for a generated workload; a trace has its own.")
    ] = None
    device: Annotated[str, typer.Option(help="Where the tensors live: cpu or cuda.")] = "cpu"


@dataclass(frozen=True, kw_only=True)
class ReplayRecord(ParameterGroup):
    """Where a replay is put on record."""

    ledger: Annotated[
        str,
        typer.Option(
            help="The ledger, an SQLite file by its path or URL; an existing one is appended to.",
            metavar="PATH|URL",
        ),
    ] = "kvcustody.db"
    html: Annotated[Path, typer.Option(help="The summary page to write.")] = Path("kvcustody-summary.html")
    signing_key: Annotated[
        Path | None,
        typer.Option(help="The key that signs the ledger; without it that of the settings, or one beside --ledger."),
    ] = None


@grouped
def replay(
    *,
    load: WorkloadOptions,
    pool: ReplayPool,
    to: ReplayRecord,
    host_tier: Annotated[
        str | None,
        typer.Option(help="A host tier of so many bytes for what is evicted, as 256MiB; without it: none."),
    ] = None,
    compare_tiers: Annotated[
        bool,
        typer.Option(
            "--compare-tiers",
            help="Instead: half of the pool, without a tier, with one, and with one and nobody isolated.",
        ),
    ] = False,
    show_golden: Annotated[
        bool, typer.Option("--golden", help="Compare recorded traces with their reference figures instead.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Replay a multi-tenant workload through the Governor and show what policy, isolation and deletion did.

    Without a trace, a multi-turn workload is generated from the seed (docs/reference/formats/workload.md), or one
    that a pool is too small or too coarse for: `--trace-format thrash`, `oom` or `fragmentation`. Every request is
    admitted under the policy, looks up its prefix, writes a pattern into real KV tensors, decodes and is
    released; blocks expire, are evicted and zeroed, and the evidence goes to the ledger.
    docs/how-to/operate/replay-a-trace.md explains every figure.
    """
    if show_golden:
        _golden(as_json, load.policy)
        return
    choice = load.choice()
    if compare_tiers:
        _compare(
            choice,
            load.policy,
            (pool.pool_blocks or pool_blocks_of(load.trace_format)) // 2,
            pool.block_tokens,
            host_tier,
            as_json,
        )
        return
    check_page(to.html)
    size = block_tokens_of(choice, pool.block_tokens)
    settings, file = load_settings(), _sqlite_file(to.ledger)
    options = EnvironmentOptions(
        policy=load.policy,
        pool_blocks=pool.pool_blocks or pool_blocks_of(load.trace_format),
        block_tokens=size,
        device=pool.device,
        database=file,
        signing_key=to.signing_key or (settings.signing_key_file if is_ledger_of(settings, file) else None),
        signing_key_kind=settings.signing_key_kind,
        ledger_origin=settings.ledger_origin,
        host_tier_bytes=read_bytes(host_tier),
    )
    run_job = import_job()
    workload = load_workload(choice, size, read_policy(load.policy).name)
    with replay_progress() as progress:
        advance = progress(workload.title, workload.requests)
        report = run_job(workload, options, RunnerOptions(seed=load.seed), progress=advance)
    if as_json:
        print_json(report.as_json())
    else:
        console = stdout()
        print_report(report, console)
        key = options.signing_key_file
        signed = f"signed with {key}" if key.exists() else "signed elsewhere"
        console.print(f"{report.seconds:.1f} s; ledger in {to.ledger}, {signed}, summary in {to.html}")
    write_summary(report, to.html)  # last: where the page cannot be written, the figures are printed already
    if isinstance(report.error, KeyboardInterrupt):
        raise typer.Exit(EXIT_INTERRUPTED)
    if report.error is not None:
        raise report.error


def _compare(
    choice: Choice, policy: str, blocks: int, block_tokens: int | None, host_tier: str | None, as_json: bool
) -> None:
    """Three replays of one workload whose ledgers are thrown away."""
    tier = read_bytes(host_tier) or HOST_TIER_BYTES
    rows = []
    for setup, under, size, as_one in (
        ("no tier", policy, 0, False),
        ("a host tier", policy, tier, False),
        ("a host tier, nobody isolated", "single-org", tier, True),
    ):
        with replayed_aside(choice, under, blocks, block_tokens, size, as_one=as_one) as (report, _):
            restored = sum(use.restored_blocks for use in report.tiers) * block_tokens_of(choice, block_tokens)
            totals = report.totals
            rows.append(TierRow(setup, totals.input_tokens, totals.hit_tokens - restored, restored))
    if as_json:
        print_json([{**row._asdict(), "prefill_avoided": row.prefill_avoided} for row in rows])
    else:
        print_comparison(rows, blocks, stdout())


def read_bytes(text: str | None) -> int:
    """A size as `256MiB`; 0 for none. Raises `ConfigError`."""
    if text is None:
        return 0
    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        raise ConfigError(f"--host-tier `{text}`: write a size, as `256MiB`", host_tier=text) from None


@contextmanager
def replayed_aside(
    choice: Choice,
    policy: str,
    pool_blocks: int | None = None,
    block_tokens: int | None = None,
    host_tier_bytes: int = 0,
    *,
    as_one: bool = False,
) -> Iterator[tuple[ReplayReport, Path]]:
    """A replay whose ledger is thrown away afterwards, and that ledger; raises what ended the replay early.

    `as_one`: all its requests are one tenant's, of one classification.
    """
    run_job = import_job()
    size = block_tokens_of(choice, block_tokens)
    workload = load_workload(choice, size, read_policy(policy).name)
    if as_one:
        jobs = ((request, label._replace(tenant=0, classification="internal")) for request, label in workload.jobs)
        workload = replace(workload, jobs=jobs, tenants=1, house_prompt=None)
    with tempfile.TemporaryDirectory(prefix="kvcustody-replay-") as folder:
        options = EnvironmentOptions(
            policy=policy,
            pool_blocks=pool_blocks or pool_blocks_of(choice.format),
            block_tokens=size,
            database=Path(folder) / "ledger.db",
            host_tier_bytes=host_tier_bytes,
        )
        with replay_progress() as progress:
            advance = progress(workload.title, workload.requests)
            report = run_job(workload, options, RunnerOptions(seed=choice.seed), progress=advance)
        if report.error is not None:
            raise report.error
        yield report, options.database


def _sqlite_file(ledger: str) -> Path:
    """The file of a replay's ledger; raises `ConfigError` for a server, which keeps no spill folder beside itself."""
    place = database_place(ledger)
    if not isinstance(place, SqliteFile):
        raise ConfigError("--ledger: a replay writes an SQLite file; give its path, or `sqlite:///PATH`")
    return place.path


def pool_blocks_of(format: str | None) -> int:
    """The pool of a replay of this format, where none was asked for."""
    return _POOL_BLOCKS.get(format or GENERATED, 8192)


def import_job() -> Callable[..., ReplayReport]:
    """The part that needs torch, which is an extra of the package."""
    try:
        from kvcustody.lab.replay.run.job import run_job
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"a replay needs `{error.name}`: pip install 'kvcustody[engine]'", missing=error.name
        ) from None
    return run_job


def _golden(as_json: bool, policy: str) -> None:
    """Every reference figure of both recorded traces; exit code 1 where one differs."""
    folder = golden.find_traces()
    if folder is None:
        raise ConfigError("no recorded traces here; set KVCUSTODY_TRACES to the folder of golden_metrics.json")
    with replay_progress() as progress:
        rows = [
            row
            for trace in golden.TRACES
            for row in golden.golden_rows(folder, trace, beside=policy, progress=progress)
        ]
    if as_json:
        print_json([{**row._asdict(), "agrees": row.agrees} for row in rows])
    else:
        print_golden(rows, stdout())
    if not all(row.agrees for row in rows):
        raise typer.Exit(1)


@contextmanager
def replay_progress() -> Iterator[Callable[[str, int | None], Callable[[], None]]]:
    """One bar at a time on stderr."""
    with interruptible() as checkpoint, progress_bar() as bar:

        def start(name: str, steps: int | None) -> Callable[[], None]:
            for task in bar.task_ids:
                bar.remove_task(task)
            task = bar.add_task(name, total=steps)

            def advance() -> None:
                checkpoint()
                bar.advance(task)

            return advance

        yield start


def read_unit(name: str) -> Unit:
    """What belongs to one tenant; raises `ConfigError`."""
    units: dict[str, Unit] = {"session": "session", "lineage": "lineage", "project": "project"}
    if name not in units:
        raise ConfigError(f"--unit `{name}`: use session, lineage or project")
    return units[name]
