"""`kvcustody policy simulate`: a new policy's effect on recorded requests or on a trace."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcustody.console.command import Json, make_table, print_json, progress_bar, say, stdout
from kvcustody.console.opening import reading
from kvcustody.console.options import GivenLedger
from kvcustody.console.policy.review import New, Old
from kvcustody.errors import ConfigError
from kvcustody.governance.decisions.replay_decisions import recorded_denials, recorded_requests
from kvcustody.governance.service.operations.parameter_groups import ParameterGroup, grouped
from kvcustody.lab.replay.options import EnvironmentOptions, RunnerOptions
from kvcustody.lab.replay.report import ReplayReport
from kvcustody.lab.replay.run.workload_from_options import Choice, block_tokens_of, load_workload
from kvcustody.plurals import several
from kvcustody.policies.workbench.simulate import Simulation, TenantChange, simulate
from kvcustody.policies.workbench.validate import load_table
from kvcustody.times import span

_EPILOG = (
    "Examples:\n\n    kvcustody policy simulate active.yaml policy.yaml --ledger kvcustody.db\n\n"
    "    kvcustody policy simulate active.yaml policy.yaml --trace conversation_trace.jsonl"
)


def add_to(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command(name="simulate", epilog=_EPILOG)(simulate_command)


Revision = Annotated[int | None, typer.Option("--revision", help="Only requests recorded under this revision.")]
BlockTokens = Annotated[int, typer.Option("--block-tokens", min=1, help="Tokens in a block of the ledger.")]
Trace = Annotated[Path | None, typer.Option("--trace", help="Replay this trace under both policies instead.")]
TraceFormat = Annotated[
    str | None, typer.Option("--trace-format", help="The trace's format, where it is not recognised.")
]
Generated = Annotated[bool, typer.Option("--generated", help="Replay a generated workload under both policies.")]
Tenants = Annotated[int, typer.Option("--tenants", min=1, help="Tenants in the replay.")]
Limit = Annotated[int | None, typer.Option("--limit", min=1, help="Replay only the first requests.")]


@dataclass(frozen=True, kw_only=True)
class RecordedOptions(ParameterGroup):
    """The recorded requests of a ledger."""

    ledger: GivenLedger = None
    revision: Revision = None
    block_tokens: BlockTokens = 16


@dataclass(frozen=True, kw_only=True)
class TrafficOptions(ParameterGroup):
    """The requests of a trace, or of a generated workload."""

    trace: Trace = None
    trace_format: TraceFormat = None
    generated: Generated = False
    tenants: Tenants = 8
    limit: Limit = None


@grouped
def simulate_command(
    *,
    old: Old,
    new: New,
    record: RecordedOptions,
    load: TrafficOptions,
    as_json: Json = False,
) -> None:
    """Say what a new policy would change, per tenant, in hits, tokens and retention.

    With --ledger, every recorded request is decided again: exact for what was hit, silent about what a wider policy
    would have hit. With --trace or --generated, the same requests run through a governor under each policy.
    """
    if sum((record.ledger is not None, load.trace is not None, load.generated)) != 1:
        raise ConfigError("give one of `--ledger`, `--trace` and `--generated`")
    if record.ledger is not None:
        found = _from_ledger(old, new, record.ledger, record.revision)
        if as_json:
            print_json({"tenants": [change.data(record.block_tokens) for change in found.tenants],
                        "unknown_levels": found.unknown_levels})  # fmt: skip
        else:
            _print(found, record.block_tokens)
        return
    choice = Choice(load.trace, load.trace_format, tenants=load.tenants, limit=load.limit)
    rows = compare_replays(*(_replay(policy, choice) for policy in (old, new)))
    if as_json:
        print_json({"tenants": rows})
    else:
        _print_rows(rows)


def _from_ledger(old: Path, new: Path, ledger: str, revision: int | None) -> Simulation:
    one, two = load_table(old), load_table(new)
    with reading(ledger) as engine, engine.connect() as connection, progress_bar() as bar:
        recorded = recorded_requests(connection, revision=revision)
        tracked = bar.track(recorded, description="deciding again", total=None)
        with engine.connect() as other:
            return simulate(one, two, tracked, list(recorded_denials(other)))


def _print(simulation: Simulation, block_tokens: int) -> None:
    table = make_table(
        "recorded requests, decided again",
        "tenant", "requests", "refused", "hit tokens", "lost tokens", "lost", "denied then", "kept idle: was", "is",
    )  # fmt: skip
    for change in simulation.tenants:
        row = change.data(block_tokens)
        share = _lost_share(change)
        was, is_now = (span(row[name] // 1_000 * 1_000) for name in ("mean_idle_before_us", "mean_idle_after_us"))
        table.add_row(
            change.tenant, f"{change.requests:,}", f"{change.refused:,}", f"{row['hit_tokens']:,}",
            f"{row['lost_tokens']:,}", share, f"{change.denied_requests:,}", was, is_now,
        )  # fmt: skip
    stdout().print(table)
    _print_tiers(simulation)
    causes: dict[str, int] = {}
    for change in simulation.tenants:
        for cause, blocks in change.lost_by.items():
            causes[cause] = causes.get(cause, 0) + blocks
    for cause, blocks in sorted(causes.items(), key=lambda entry: -entry[1]):
        say(f"lost by {cause}: {several(blocks * block_tokens, 'token')}")
    shortened = sum(change.shortened_blocks for change in simulation.tenants)
    if shortened:
        say(
            f"{several(shortened * block_tokens, 'token')} hit under a retention that gets shorter. The "
            "ledger does not record idle times before hits, so all may be lost. --trace or --generated "
            "measures it."
        )
    if simulation.unknown_levels:
        say(f"{several(simulation.unknown_levels, 'request')} with a classification that the new policy does not know")


def _lost_share(change: TenantChange) -> str:
    """Return the share of hits that would be lost, as a range where a shorter retention may lose more."""
    if not change.hit_blocks:
        return "-"
    least = f"{change.lost_blocks / change.hit_blocks:.1%}"
    if not change.shortened_blocks:
        return least
    return f"{least} to {(change.lost_blocks + change.shortened_blocks) / change.hit_blocks:.1%}"


def _print_tiers(found: Simulation) -> None:
    """Print only the changes: whose copies may be in which tier, and for how long."""
    table = make_table("copies off the device", "tenant", "tier", "requests: was", "is", "at most: was", "is", left=2)
    for change in found.tenants:
        for tier, counted in change.tiers.items():
            row = counted.data()
            times = row["mean_absolute_before_us"], row["mean_absolute_after_us"]
            counts = row["requests_before"], row["requests_after"]
            if counts[0] != counts[1] or times[0] != times[1]:
                said = (f"{count:,}" for count in counts)
                table.add_row(change.tenant, tier, *said, *(span(time // 1_000 * 1_000) for time in times))
    if table.row_count:
        stdout().print(table)


def _replay(policy: Path, choice: Choice) -> ReplayReport:
    try:
        from kvcustody.lab.replay.run.job import run_job
    except ModuleNotFoundError as error:
        message = f"a replay needs `{error.name}`: install kvcustody with the extra `engine`"
        raise ConfigError(message, missing=error.name) from None
    name = load_table(policy).policy.name
    size = block_tokens_of(choice, None)
    with tempfile.TemporaryDirectory(prefix="kvcustody-") as folder, progress_bar() as bar:
        options = EnvironmentOptions(policy=str(policy), block_tokens=size, database=Path(folder) / "ledger.db")
        workload = load_workload(choice, size, name)
        task = bar.add_task(f"under {name}", total=workload.requests)
        report = run_job(workload, options, RunnerOptions(), progress=lambda: bar.advance(task))
    if report.error is not None:
        raise report.error
    return report


def compare_replays(before: ReplayReport, after: ReplayReport) -> list[dict[str, Any]]:
    """Return each tenant's requests and hits under the two policies, the largest change in hit tokens first."""
    before_rows = {row.tenant: row for row in before.tenants}
    two = {row.tenant: row for row in after.tenants}
    rows: list[dict[str, Any]] = []
    for tenant in sorted(before_rows.keys() | two.keys()):
        row: dict[str, Any] = {"tenant": tenant}
        for field in ("requests", "refused", "input_tokens", "hit_tokens", "shared_hit_tokens"):
            for label, side in (("before", before_rows), ("after", two)):
                row[f"{field}_{label}"] = getattr(side[tenant], field) if tenant in side else 0
        rows.append(row)
    return sorted(rows, key=lambda row: -abs(row["hit_tokens_before"] - row["hit_tokens_after"]))


def _print_rows(rows: list[dict[str, Any]]) -> None:
    table = make_table(
        "the same requests under both policies",
        "tenant", "requests", "refused: was", "is", "hit tokens: was", "is", "through others: was", "is",
    )  # fmt: skip
    for row in rows:
        cells = [f"{row['requests_after']:,}"]
        for field in ("refused", "hit_tokens", "shared_hit_tokens"):
            cells += [f"{row[f'{field}_before']:,}", f"{row[f'{field}_after']:,}"]
        table.add_row(row["tenant"], *cells)
    stdout().print(table)
