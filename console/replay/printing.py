"""A replay's report on the terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

from kvcustody.console.command import make_table
from kvcustody.governance.tiers.transfer_rates import TierUse
from kvcustody.lab.replay.report import ReplayReport, pressure_findings
from kvcustody.lab.replay.run.golden_check import Row
from kvcustody.lab.replay.summary import causes, percent, pressure_rows, spread_text, thrashing_text
from kvcustody.lab.replay.tier_row import TierRow

LATE_BY_LOAD = "a replay skips idle time alone: on a busy machine scrubs come after `scrub.within`"


def print_report(report: ReplayReport, console: Console) -> None:
    """Tables by tenant, then custody, coverage and conservation."""
    rows = [*report.tenants, report.totals]
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
    """The same workload in a small pool, with and without a tier, and without isolation."""
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
    found = report.coverage
    table = make_table("Deletion coverage, from the ledger", "figure", "value", left=2)
    table.add_row("custody ended in time, with evidence", f"{percent(found.share)} of {found.due:,} due")
    table.add_row(
        "not covered",
        f"{found.late:,} late, {found.failed:,} failed, {found.missing:,} missing, "
        f"{found.unproven:,} unproven, {found.overdue:,} overdue; {found.disputed:,} disputed",
    )
    if found.late:
        table.add_row("late", LATE_BY_LOAD)
    levels = ", ".join(f"{size:,} {level}" for level, size in found.bytes_by_level if size)
    table.add_row("bytes destroyed, by verification", levels or "none")
    console.print(table)
    table = make_table("Conservation", "identity", "left", "right", "holds")
    for row in report.identities:
        holds = Text("yes", "green") if row.holds else Text("no", "bold red")
        table.add_row(row.name, f"{row.left:,}", f"{row.right:,}", holds)
    console.print(table)


def print_golden(rows: Iterable[Row], console: Console) -> None:
    """Reference figures beside the Governor's."""
    table = make_table("Recorded traces", "trace", "figure", "expected", "measured", "agrees", left=2)
    for row in rows:
        expected = "" if row.expected is None else f"{row.expected:,.{row.digits}f}"
        verdict: Text | str = ""
        if row.expected is not None:
            verdict = Text("yes", "green") if row.agrees else Text("no", "bold red")
        table.add_row(row.trace, row.figure, expected, f"{row.measured:,.{row.digits}f}", verdict)
    console.print(table)
