"""Coverage on the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from kvcustody.audit.coverage.compare_recount import Difference
from kvcustody.audit.coverage.recompute import Recount, Unaccounted
from kvcustody.audit.coverage.summary import CoverageSummary
from kvcustody.console.command import make_table, stdout

_COLUMNS = ("due", "covered", "late", "failed", "missing", "unproven", "overdue", "disputed")
_LEVELS = ("full", "sampled", "retired", "launched")


def print_coverage(found: CoverageSummary) -> None:
    """Units by tenant and classification, bytes by level, lags."""
    rows: list[tuple[str, str, dict[str, Any]]] = [
        (row.tenant, row.classification, row._asdict()) for row in found.rows
    ]
    _units([*rows, ("all", "", found.total._asdict())])
    _bytes(found.total._asdict())
    lags = (found.lag_us_p50, found.lag_us_p99, found.lag_us_max)
    stdout().print(f"from due to destroyed: p50 {_ms(lags[0])}, p99 {_ms(lags[1])}, longest {_ms(lags[2])}")


def print_recount(again: Recount, missing: Unaccounted, compared: tuple[Difference, ...] | None) -> None:
    """The same tables from the leaves, what nothing accounts for, and where the tables say something else."""
    _units(
        [
            *((*who, asdict(row)) for who, row in sorted(again.rows.items())),
            ("all", "", asdict(again.total)),
        ]
    )
    _bytes(asdict(again.total))
    console = stdout()
    console.print(
        f"unaccounted: {missing.residencies:,} residencies without an opening, {missing.generations:,} generations "
        f"that no leaf lists as handed out, {missing.receipts:,} wiped without an end"
    )
    if compared is None:
        console.print(
            f"recomputed from {again.leaves:,} leaves of the export; there are no tables to compare with"
        )
    elif not compared:
        console.print(
            f"recomputed from {again.leaves:,} leaves: every figure of every row agrees with the tables"
        )
    else:
        table = make_table(
            "tables and leaves differ", "tenant", "classification", "figure", "tables", "leaves", left=3
        )
        for item in compared:
            table.add_row(*item[:3], f"{item.tables:,}", f"{item.leaves:,}")
        console.print(table)


def _units(rows: Iterable[tuple[str, str, dict[str, Any]]]) -> None:
    table = make_table(
        "units: (block, generation, shard)", "tenant", "classification", *_COLUMNS, "share", left=2
    )
    for tenant, classification, row in rows:
        share = f"{row['covered'] / row['due']:.2%}" if row["due"] else "-"
        table.add_row(tenant, classification, *(f"{row[name]:,}" for name in _COLUMNS), share)
    stdout().print(table)


def _bytes(row: dict[str, Any]) -> None:
    table = make_table("bytes destroyed, by the weakest verification of their shards", "level", "bytes")
    for level in _LEVELS:
        table.add_row(level, f"{row[f'{level}_bytes']:,}")
    table.add_row("blocks read back in full", f"{row['reread_blocks']:,}")
    stdout().print(table)


def _ms(value_us: int) -> str:
    return f"{value_us / 1000:,.1f} ms"
