"""`kvcustody replay`: a multi-tenant workload through the Governor, on real tensors."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError
from rich.console import Console
from rich.text import Text

from kvcustody.audit.kinds import GENERATED
from kvcustody.audit.store.database.database_place import SqliteFile, database_place
from kvcustody.console.command import (
    EXIT_INTERRUPTED,
    Json,
    interruptible,
    make_table,
    print_json,
    progress_bar,
    stdout,
)
from kvcustody.errors import ConfigError
from kvcustody.governance.service.operations.parameter_groups import ParameterGroup, grouped
from kvcustody.governance.settings import is_ledger_of, load_settings
from kvcustody.governance.tiers.transfer_rates import TierUse
from kvcustody.lab.replay.options import EnvironmentOptions, RunnerOptions, read_policy
from kvcustody.lab.replay.report import ReplayReport, TenantResult, pressure_findings
from kvcustody.lab.replay.run import golden_check as golden
from kvcustody.lab.replay.run.golden_check import Row
from kvcustody.lab.replay.run.workload_from_options import (
    FORMATS,
    Choice,
    block_tokens_of,
    load_workload,
    read_columns,
)
from kvcustody.lab.replay.summary import (
    causes,
    check_page,
    percent,
    pressure_rows,
    spread_text,
    thrashing_text,
    write_summary,
)
from kvcustody.lab.replay.tier_row import TierRow
from kvcustody.lab.replay.workload.labels import Unit
from kvcustody.lab.replay.workload.scenarios import SCENARIOS

EPILOG = """
Examples:

    kvcustody replay

    kvcustody replay --policy single-org --tenants 1 --seed 7 --json

    kvcustody replay requests.jsonl --column tenant=customer_id --column subject=user

    kvcustody replay conversation_trace.jsonl --tenants 32 --pool-blocks 16000

    kvcustody replay agentic_v6_dev.jsonl.gz --unit lineage --limit 1000

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
    """The requests to replay, their policy and their tenants."""

    trace: Annotated[
        Path | None, typer.Argument(help="A recorded trace, plain or gzip; none: a generated workload.")
    ] = None
    trace_format: Annotated[
        str | None,
        typer.Option(
            help=f"What is replayed: {', '.join(FORMATS)}; a trace's own format is recognised.",
            autocompletion=lambda: list(FORMATS),
        ),
    ] = None
    policy: Annotated[
        str, typer.Option(help="A library policy (regulated-saas, single-org, public-api) or a YAML file.")
    ] = "regulated-saas"
    tenants: Annotated[int, typer.Option(help="How many tenants share the requests.")] = 8
    seed: Annotated[int, typer.Option(help="Seed of the workload, or of the labels of a trace.")] = 1
    unit: Annotated[str, typer.Option(help="What belongs to one tenant: session, lineage or project.")] = "session"
    skew: Annotated[
        Path | None, typer.Option(help="Client weights (a ServeGen summary); without it Zipf, exponent 1.1.")
    ] = None
    limit: Annotated[int | None, typer.Option(min=1, help="Replay only the first requests.")] = None
    column: Annotated[
        list[str] | None,
        typer.Option(
            help="The field that holds the tenant, session or subject, such as tenant=customer_id; may be repeated.",
            metavar="ROLE=FIELD",
        ),
    ] = None
    skip_wrong_rows: Annotated[
        bool, typer.Option("--skip-wrong-rows", help="Leave wrong rows out, and say how many, instead of refusing.")
    ] = False

    def choice(self) -> Choice:
        """Return the workload that the options name.

        Raises:
            ConfigError: an option is wrong.
        """
        return Choice(
            self.trace,
            self.trace_format,
            self.tenants,
            self.seed,
            read_unit(self.unit),
            self.skew,
            self.limit,
            columns=read_columns(self.column or ()),
            skip_wrong_rows=self.skip_wrong_rows,
        )


@dataclass(frozen=True, kw_only=True)
class ReplayPool(ParameterGroup):
    """The pool for the replay."""

    pool_blocks: Annotated[int | None, typer.Option(min=8, help="Blocks of the pool.")] = None
    block_tokens: Annotated[
        int | None, typer.Option(min=2, help="Tokens a block; a trace that publishes block ids has its own.")
    ] = None
    device: Annotated[str, typer.Option(help="Where the tensors live: cpu or cuda.")] = "cpu"


@dataclass(frozen=True, kw_only=True)
class ReplayRecord(ParameterGroup):
    """Where a replay is recorded."""

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
        typer.Option(help="Size of a host tier for evicted blocks, such as 256MiB; default: none."),
    ] = None,
    compare_tiers: Annotated[
        bool,
        typer.Option(
            "--compare-tiers",
            help="Compare half of the pool without a tier, with one, and with one but no isolation.",
        ),
    ] = False,
    show_golden: Annotated[
        bool, typer.Option("--golden", help="Compare recorded traces with their reference figures instead.")
    ] = False,
    brief: Annotated[
        bool, typer.Option("--brief", help="Print the table by tenant and the answers; the page has everything.")
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
            (pool.pool_blocks or pool_blocks_of(choice.format_name)) // 2,
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
        pool_blocks=pool.pool_blocks or pool_blocks_of(choice.format_name),
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
        (print_brief if brief else print_report)(report, console)
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
    """Replay one workload three times, with throw-away ledgers."""
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
    """Return a size such as `256MiB` in bytes; 0 for none.

    Raises:
        ConfigError: it is no size.
    """
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
    """Yield a replay with a throw-away ledger, and that ledger; raises the error that ended the replay early.

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
            pool_blocks=pool_blocks or pool_blocks_of(choice.format_name),
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
    """Return the file of a replay's ledger.

    Raises:
        ConfigError: the ledger is on a server, which has no spill folder.
    """
    place = database_place(ledger)
    if not isinstance(place, SqliteFile):
        raise ConfigError("--ledger: a replay writes an SQLite file; give its path, or `sqlite:///PATH`")
    return place.path


def pool_blocks_of(format: str | None) -> int:
    """Return the default pool for a replay of this format."""
    return _POOL_BLOCKS.get(format or GENERATED, 8192)


def import_job() -> Callable[..., ReplayReport]:
    """Return the module that needs torch, which is an extra of the package."""
    try:
        from kvcustody.lab.replay.run.job import run_job
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"a replay needs `{error.name}`: pip install 'kvcustody[engine]'", missing=error.name
        ) from None
    return run_job


def _golden(as_json: bool, policy: str) -> None:
    """Print every reference figure of both recorded traces; exit with 1 where one differs."""
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
    """Yield a function that shows one progress bar at a time on stderr."""
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
    """Return the unit that belongs to one tenant.

    Raises:
        ConfigError: it is unknown.
    """
    units: dict[str, Unit] = {"session": "session", "lineage": "lineage", "project": "project"}
    if name not in units:
        raise ConfigError(f"--unit `{name}`: use session, lineage or project")
    return units[name]


# Printing a replay's report on the terminal.

LATE_BY_LOAD = "a replay skips only idle time: on a busy machine scrubs are later than `scrub.within`"


def print_report(report: ReplayReport, console: Console) -> None:
    """Print tables by tenant, then custody, coverage and conservation, then the answers."""
    rows = [*report.shown_tenants, report.totals]
    _print_tenants(report, rows, console)
    _print_details(report, rows, console)
    print_answers(report, console)


def print_brief(report: ReplayReport, console: Console) -> None:
    """Print the table by tenant and the answers."""
    _print_tenants(report, [*report.shown_tenants, report.totals], console)
    print_answers(report, console)


def _print_tenants(report: ReplayReport, rows: list[TenantResult], console: Console) -> None:
    table = make_table(
        report.title,
        *("tenant", "requests", "prompt tokens", "hit tokens", "prefill avoided", "shared hits"),
        *("first requests hit", "refused", "deferred", "blocks scrubbed"),
    )
    for row in rows:
        table.add_row(
            row.tenant,
            f"{row.requests:,}",
            f"{row.input_tokens:,}",
            f"{row.hit_tokens:,}",
            percent(row.prefill_avoided),
            f"{row.shared_hit_tokens:,}",
            f"{row.first_request_hits:,} of {row.first_requests:,}",
            f"{row.refused:,}",
            f"{row.deferred:,}",
            f"{row.scrubbed_blocks:,}",
        )
    console.print(table)


def _print_details(report: ReplayReport, rows: list[TenantResult], console: Console) -> None:
    """Print what was computed again, ended and denied, then custody, coverage and conservation."""
    again = [row for row in report.tenants if row.recomputed_blocks]
    if again:
        columns = ("blocks computed again", "may have", "would have kept them", "thrashing")
        table = make_table("Evicted before they were wanted again", "tenant", *columns)
        for row in again:
            blocks = (row.recomputed_blocks, row.room_blocks, report.advised_blocks(row))
            table.add_row(row.tenant, *(f"{count:,}" for count in blocks), thrashing_text(report, row))
        console.print(table)
    for finding in pressure_findings(report):
        console.print(Text(finding, "yellow"))
    ends = causes(report.totals.ended_blocks)
    rules = sorted(report.totals.denials)
    if ends:
        table = make_table("Blocks whose custody ended, by cause", "tenant", *ends)
        for row in rows:
            table.add_row(row.tenant, *(f"{row.ended_blocks[cause]:,}" for cause in ends))
        console.print(table)
    if rules:
        table = make_table("Denied reuse, by rule", "tenant", *rules)
        for row in rows:
            table.add_row(row.tenant, *(f"{row.denials[rule]:,}" for rule in rules))
        console.print(table)
    _print_custody(report, console)
    if report.tiers:
        _print_tiers(report.tiers, console)
    _print_proofs(report, console)
    console.print(f"This was a replay of {report.origin} traffic: the ledger says so of all that it recorded.")


def print_answers(report: ReplayReport, console: Console) -> None:
    """Print each question with its answer, and what the trace does not say."""
    if report.answers is not None:
        for question, answer in report.answers.rows():
            console.print(Text.assemble((f"{question}: ", "bold"), answer), soft_wrap=True)
    for remark in report.remarks:
        console.print(Text(remark, "yellow"), soft_wrap=True)


def _print_custody(report: ReplayReport, console: Console) -> None:
    table = make_table("Custody", "figure", "value", left=2)
    for name, ages in sorted(report.retention_age.items()):
        table.add_row(f"age at end, {name} (p50 / p99)", spread_text(ages))
    table.add_row("scrub lag, due to zeroed (p50 / p99)", spread_text(report.scrub_lag))
    table.add_row("residencies expired", f"{report.expired_residencies:,}")
    for reason, blocks in sorted(report.evicted_blocks.items()):
        table.add_row(f"blocks evicted, {reason}", f"{blocks:,}")
    for name, value in pressure_rows(report):
        table.add_row(name, value)
    table.add_row("non-zero bytes at hand-out", f"{report.residue_bytes:,} in {report.residue_checked_blocks:,} blocks")
    table.add_row("wrong tokens found", f"{report.wrong_tokens:,} in {report.read_tokens:,} read back")
    table.add_row("memory drift", f"{report.drift_blocks:,} blocks")
    console.print(table)


def _print_tiers(uses: list[TierUse], console: Console) -> None:
    columns = (
        "blocks stored",
        "blocks restored",
        "MiB/s out",
        "MiB/s back",
        "left alone",
        "error of predictions",
    )
    table = make_table("Tiers: what was evicted, sealed, and came back", "tier", *columns)
    for use in uses:
        table.add_row(
            use.tier,
            f"{use.stored_blocks:,}",
            f"{use.restored_blocks:,}",
            _rate(use.stored_bytes, use.store_us),
            _rate(use.restored_bytes, use.restore_us),
            f"{use.decided_against:,} times",
            "" if use.error is None else percent(use.error),
        )
    console.print(table)


def print_comparison(rows: Iterable[TierRow], blocks: int, console: Console) -> None:
    """Print the same workload in a small pool, with and without a tier, and without isolation."""
    columns = ("prompt tokens", "from the device", "from the host tier", "prefill avoided")
    table = make_table(f"The same workload, a pool of {blocks:,} blocks", "", *columns)
    for row in rows:
        table.add_row(
            row.setup,
            f"{row.input_tokens:,}",
            f"{row.device_tokens:,}",
            f"{row.host_tokens:,}",
            percent(row.prefill_avoided),
        )
    console.print(table)


def _rate(size: int, took_us: int) -> str:
    return f"{size / (1 << 20) / (took_us / 1e6):,.0f}" if took_us else ""


def _print_proofs(report: ReplayReport, console: Console) -> None:
    coverage = report.coverage
    table = make_table("Deletion coverage, from the ledger", "figure", "value", left=2)
    table.add_row("custody ended in time, with evidence", f"{percent(coverage.share)} of {coverage.due:,} due")
    table.add_row(
        "not covered",
        f"{coverage.late:,} late, {coverage.failed:,} failed, {coverage.missing:,} missing, "
        f"{coverage.unproven:,} unproven, {coverage.overdue:,} overdue; {coverage.disputed:,} disputed",
    )
    if coverage.late:
        table.add_row("late", LATE_BY_LOAD)
    levels = ", ".join(f"{size:,} {level}" for level, size in coverage.bytes_by_level if size)
    table.add_row("bytes destroyed, by verification", levels or "none")
    console.print(table)
    table = make_table("Conservation", "identity", "left", "right", "holds")
    for row in report.identities:
        holds = Text("yes", "green") if row.holds else Text("no", "bold red")
        table.add_row(row.name, f"{row.left:,}", f"{row.right:,}", holds)
    console.print(table)


def print_golden(rows: Iterable[Row], console: Console) -> None:
    """Print reference figures beside the Governor's."""
    table = make_table("Recorded traces", "trace", "figure", "expected", "measured", "agrees", left=2)
    for row in rows:
        expected = "" if row.expected is None else f"{row.expected:,.{row.digits}f}"
        verdict: Text | str = ""
        if row.expected is not None:
            verdict = Text("yes", "green") if row.agrees else Text("no", "bold red")
        table.add_row(row.trace, row.figure, expected, f"{row.measured:,.{row.digits}f}", verdict)
    console.print(table)
