"""`kvcustody coverage`: the custody that was due to end, its evidence, and the same figures recomputed from leaves."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcustody.audit.evidence.copies.copy_coverage import CopyCoverage, copy_coverage
from kvcustody.audit.evidence.coverage.custody_units import CustodySelection, last_event_us
from kvcustody.audit.evidence.coverage.leaf_record import LeafRecord
from kvcustody.audit.evidence.coverage.recount_process import (
    Difference,
    RecountResult,
    copy_differences,
    differences,
    open_recount,
    recounted,
)
from kvcustody.audit.evidence.coverage.summary import CoverageRow, CoverageSummary, coverage
from kvcustody.audit.evidence.processes.enforcement import monitored_periods, qualification, unnamed
from kvcustody.audit.evidence.processes.marked_processes import history
from kvcustody.audit.evidence.query.known_names import known_tenant
from kvcustody.audit.exports.leaves_of_export import leaves_in_export
from kvcustody.audit.exports.manifest import MANIFEST, parse_manifest
from kvcustody.audit.store.database.gc_pause import gc_paused
from kvcustody.console.command import CustodyGroup, Json, make_table, print_json, say, stdout, tell_history
from kvcustody.console.opening import selection, snapshot, state_of
from kvcustody.console.options import DEFAULT, At, Class, Ledger, Model, Since, Tenant, Tier, Until
from kvcustody.console.render.number_format import percent
from kvcustody.errors import ConfigError
from kvcustody.plurals import several

EXIT_DIFFERENT = 1
RECOMPUTE = """Examples:

    kvcustody audit recompute --ledger kvcustody.db

    kvcustody audit recompute --export evidence-2026-03 --since 2026-03-01 --until 2026-04-01
"""

app = typer.Typer(
    cls=CustodyGroup,
    no_args_is_help=True,
    help="Deletion coverage: the share of due custody that ended in time, with evidence. "
    "docs/concepts/deletion-coverage.md has the definition.",
)


@app.command(
    epilog="Examples:\n\n    kvcustody coverage show\n\n"
    "    kvcustody coverage show --ledger kvcustody.db --since 2026-03-01 --until 2026-04-01 --tenant acme --json"
)
def show(
    *,
    ledger: Ledger = DEFAULT,
    since: Since = None,
    until: Until = None,
    tenant: Tenant = None,
    classification: Class = None,
    model: Model = None,
    tier: Tier = None,
    as_of: At = None,
    as_json: Json = False,
) -> None:
    """Coverage of a period, tenant, classification, model or tier, from the ledger's tables.

    A unit is one (block, generation, shard). Two figures, never mixed: custody that ended, and bytes that were
    destroyed, by the weakest verification among the shards. What was not read back is not called verified. Copies off
    the device are counted beside them, by tier.
    """
    chosen = selection(since, until, tenant, classification, model, tier)
    with snapshot(ledger) as connection:
        chosen = chosen._replace(tenant=known_tenant(connection, tenant))
        state = state_of(connection, as_of)
        figures = coverage(connection, **chosen._asdict(), as_of=state)
        copies = copy_coverage(connection, chosen, as_of=state)
        monitored = monitored_periods(connection, chosen.since_us or 0, chosen.until_us, chosen.tenant)
        qualified = qualification(monitored)
    if qualified:
        say(f"note: {qualified}", file=sys.stderr)
    if as_json:
        spans = [one._asdict() for one in unnamed(monitored)]
        body = {"selection": chosen._asdict(), **coverage_json(figures), "copies": _copies_json(copies)}
        print_json({**body, "monitored": spans})
    else:
        print_coverage(figures)
        _print_copies(copies)


def recompute(
    *,
    ledger: Ledger = DEFAULT,
    export: Annotated[
        Path | None, typer.Option(help="An export's folder instead of a ledger; nothing else is read.")
    ] = None,
    since: Since = None,
    until: Until = None,
    tenant: Tenant = None,
    classification: Class = None,
    model: Model = None,
    tier: Tier = None,
    as_of: At = None,
    as_json: Json = False,
) -> None:
    """Coverage once more, from the canonical leaves alone.

    It reads no column of the ledger, only leaf bytes. On a ledger, what `show` says by the tables is computed as well
    (of a large one side by side, in two processes) and compared figure by figure; exit code 1 says that they differ:
    a row says what no leaf does. Verify an export first (`kvcustody audit verify`): this command believes the leaves
    that it is given.
    """
    chosen = selection(since, until, tenant, classification, model, tier)
    compared: tuple[Difference, ...] | None = None
    if export is not None:
        if as_of is not None:
            raise ConfigError("an export is as of its own checkpoint: leave out `--as-of`")
        _tell_marked(export)
        with gc_paused():
            record = LeafRecord(leaves_in_export(export))
            again = recounted(record, chosen, record.last_us)
    else:
        with snapshot(ledger) as connection:
            chosen = chosen._replace(tenant=known_tenant(connection, tenant))
            state = state_of(connection, as_of)
            now_us = last_event_us(connection, state)
            with open_recount(connection, chosen, now_us, state) as beside:
                found = coverage(connection, **chosen._asdict(), as_of=state)
                copies = copy_coverage(connection, chosen, as_of=state)
                again = beside.answer()
            compared = differences(found, again.figures) + copy_differences(copies, again.copies)
    if as_json:
        print_json(_recount_json(chosen, again, compared))
    else:
        print_recount(again, compared)
    if compared:
        raise typer.Exit(EXIT_DIFFERENT)


def _tell_marked(export: Path) -> None:
    """Report history that the export marks as replayed or generated; `kvcustody audit verify` checks the mark by the
    leaves.
    """
    try:
        marked = parse_manifest((export / MANIFEST).read_bytes()).marked
    except OSError as problem:
        raise ConfigError(f"`{export}` is no export: {problem.strerror}", path=export) from None
    if marked:
        tell_history(history(marked), [one._asdict() for one in marked])


def coverage_json(found: CoverageSummary) -> dict[str, Any]:
    """Return rows, their total and the lags, as `--json` prints them."""
    lags = {name: getattr(found, name) for name in ("lag_us_p50", "lag_us_p99", "lag_us_max")}
    total = {**found.total._asdict(), "ended": found.total.ended, "coverage": round(found.total.coverage, 6)}
    return {"total": total, "rows": [row._asdict() for row in found.rows], **lags}


def _recount_json(
    chosen: CustodySelection, again: RecountResult, compared: tuple[Difference, ...] | None
) -> dict[str, Any]:
    figures = again.figures
    return {
        "selection": chosen._asdict(),
        "leaves": again.leaves,
        "as_of_us": again.as_of_us,
        "total": _figures(figures.total),
        "rows": [row._asdict() for row in figures.rows],
        "lag_us": {"50": figures.lag_us_p50, "99": figures.lag_us_p99, "100": figures.lag_us_max},
        "copies": _copies_json(again.copies),
        "unaccounted": again.missing._asdict(),
        "agrees": None if compared is None else not compared,
        "differences": [] if compared is None else [item._asdict() for item in compared],
    }


def _copies_json(copies: CopyCoverage) -> dict[str, Any]:
    rows = [{**row._asdict(), "coverage": round(row.coverage, 6)} for row in copies.rows]
    return {"rows": rows, "digest": copies.digest}


def _figures(row: CoverageRow) -> dict[str, int]:
    return dict(zip(row._fields[2:], row[2:], strict=True))


_COLUMNS = ("due", "covered", "late", "failed", "missing", "unproven", "overdue", "disputed")
_LEVELS = ("full", "sampled", "retired", "launched")


def print_coverage(found: CoverageSummary) -> None:
    """Print units by tenant and classification, bytes by level, and lags."""
    _units_and_bytes(found)
    lags = (found.lag_us_p50, found.lag_us_p99, found.lag_us_max)
    stdout().print(f"from due to destroyed: p50 {_ms(lags[0])}, p99 {_ms(lags[1])}, longest {_ms(lags[2])}")


def print_recount(again: RecountResult, compared: tuple[Difference, ...] | None) -> None:
    """Print the same tables from the leaves, unaccounted custody, and differences from the ledger's tables."""
    missing = again.missing
    _units_and_bytes(again.figures)
    _print_copies(again.copies)
    console = stdout()
    console.print(
        f"unaccounted: {missing.residencies:,} residencies without an opening, {missing.generations:,} generations "
        f"that no leaf lists as handed out, {missing.receipts:,} wiped without an end"
    )
    if compared is None:
        console.print(
            f"recomputed from {several(again.leaves, 'leaf')} of the export; there are no tables to compare with"
        )
    elif not compared:
        console.print(
            f"recomputed from {several(again.leaves, 'leaf')}: every figure of every row agrees with the tables"
        )
    else:
        table = make_table("tables and leaves differ", "tenant", "classification", "figure", "tables", "leaves", left=3)
        for item in compared:
            table.add_row(*item[:3], f"{item.tables:,}", f"{item.leaves:,}")
        console.print(table)


def _units_and_bytes(figures: CoverageSummary) -> None:
    table = make_table("units: (block, generation, shard)", "tenant", "classification", *_COLUMNS, "share", left=2)
    for row in (*figures.rows, figures.total._replace(tenant="all", classification="")):
        share = percent(row.covered, row.due)
        table.add_row(row.tenant, row.classification, *(f"{getattr(row, name):,}" for name in _COLUMNS), share)
    stdout().print(table)
    table = make_table("bytes destroyed, by the weakest verification of their shards", "level", "bytes")
    for level in _LEVELS:
        table.add_row(level, f"{getattr(figures.total, f'{level}_bytes'):,}")
    table.add_row("blocks read back in full", f"{figures.total.reread_blocks:,}")
    stdout().print(table)


_OF_COPIES = (
    *("due", "covered", "late", "open", "unproven", "disputed"),
    *("zeroed", "unlinked", "deleted", "key_destroyed"),
)


def _print_copies(copies: CopyCoverage) -> None:
    """Print copies by tier, where any was due."""
    if not copies.rows:
        return
    heads = (name.replace("_", " ") for name in _OF_COPIES)
    table = make_table("copies off the device", "tier", "tenant", "classification", *heads, "share", left=3)
    for row in (*copies.rows, *(row._replace(tenant="all", classification="") for row in copies.by_tier())):
        share = percent(row.covered, row.due)
        table.add_row(*row[:3], *(f"{getattr(row, name):,}" for name in _OF_COPIES), share)
    stdout().print(table)


def _ms(value_us: int) -> str:
    return f"{value_us / 1000:,.1f} ms"
