"""`kvcustody coverage`: what was due to end, what has evidence of it, and the same again from the leaves alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvcustody.audit.coverage.compare_recount import Difference, differences
from kvcustody.audit.coverage.custody_units import CustodySelection, last_event_us
from kvcustody.audit.coverage.recompute import (
    Chosen,
    Recount,
    Unaccounted,
    read_history,
    recount,
    unaccounted,
)
from kvcustody.audit.coverage.recompute.leaf_sources import leaves_in_export
from kvcustody.audit.coverage.recount_process import open_recount
from kvcustody.audit.coverage.summary import CoverageSummary, coverage
from kvcustody.audit.database.gc_pause import gc_paused
from kvcustody.console.command import CustodyGroup, Json, print_json
from kvcustody.console.coverage.printing import print_coverage, print_recount
from kvcustody.console.options_custody import (
    DEFAULT_DB,
    At,
    Class,
    Db,
    Model,
    Since,
    Tenant,
    Tier,
    Until,
    reading,
    selection,
    state_of,
)
from kvcustody.errors import ConfigError

EXIT_DIFFERENT = 1
RECOMPUTE = """Examples:

    kvcustody coverage recompute --db kvcustody.db

    kvcustody coverage recompute --export evidence-2026-03 --since 2026-03-01 --until 2026-04-01
"""

app = typer.Typer(
    cls=CustodyGroup,
    no_args_is_help=True,
    help="Deletion coverage: of all custody due to end, how much has evidence of its end, in time. "
    "docs/audit/coverage.md has the definition.",
)


@app.command(
    epilog="Examples:\n\n    kvcustody coverage show\n\n"
    "    kvcustody coverage show --db kvcustody.db --since 2026-03-01 --until 2026-04-01 --tenant acme --json"
)
def show(
    *,
    db: Db = DEFAULT_DB,
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
    destroyed, by the weakest verification among the shards. What was not read back is not called verified.
    """
    chosen = selection(since, until, tenant, classification, model, tier)
    with reading(db) as connection:
        found = coverage(connection, **chosen._asdict(), as_of=state_of(connection, as_of))
    if as_json:
        print_json({"selection": chosen._asdict(), **coverage_json(found)})
    else:
        print_coverage(found)


@app.command(epilog=RECOMPUTE)
def recompute(
    *,
    db: Db = DEFAULT_DB,
    export: Annotated[
        Path | None, typer.Option(help="An export's folder instead of a ledger: nothing else is read.")
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
    """Coverage once more, by a second implementation, from the canonical leaves alone.

    It reads no column of the ledger, only leaf bytes, and shares no code with `show`. On a ledger both are
    computed (of a large one side by side, in two processes) and compared figure by figure; exit code 1 says that
    they differ. Verify an export first (`kvcustody audit verify`): this command believes the leaves that it is given.
    """
    chosen = selection(since, until, tenant, classification, model, tier)
    compared: tuple[Difference, ...] | None = None
    if export is not None:
        if as_of is not None:
            raise ConfigError("an export is as of its own checkpoint: leave out `--as-of`")
        with gc_paused():
            history = read_history(leaves_in_export(export))
            again, missing = recount(history, Chosen(**chosen._asdict())), unaccounted(history)
    else:
        with reading(db) as connection:
            state = state_of(connection, as_of)
            now_us = last_event_us(connection, state)
            with open_recount(connection, Chosen(*chosen), now_us, state) as beside:
                found = coverage(connection, **chosen._asdict(), as_of=state)
                answer = beside.answer()
            again, missing, compared = answer.figures, answer.missing, differences(found, answer.figures)
    if as_json:
        print_json(_recount_json(chosen, again, missing, compared))
    else:
        print_recount(again, missing, compared)
    if compared:
        raise typer.Exit(EXIT_DIFFERENT)


def coverage_json(found: CoverageSummary) -> dict[str, Any]:
    """Rows, their total and the lags, as `--json` prints them."""
    lags = {name: getattr(found, name) for name in ("lag_us_p50", "lag_us_p99", "lag_us_max")}
    total = {**found.total._asdict(), "ended": found.total.ended, "coverage": round(found.total.coverage, 6)}
    return {"total": total, "rows": [row._asdict() for row in found.rows], **lags}


def _recount_json(
    chosen: CustodySelection, again: Recount, missing: Unaccounted, compared: tuple[Difference, ...] | None
) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "selection": chosen._asdict(),
        "leaves": again.leaves,
        "as_of_us": again.as_of_us,
        "total": asdict(again.total),
        "rows": [
            {"tenant": who[0], "classification": who[1], **asdict(row)}
            for who, row in sorted(again.rows.items())
        ],
        "lag_us": {str(percent): again.lag_us(percent) for percent in (50, 99, 100)},
        "unaccounted": missing._asdict(),
        "agrees": None if compared is None else not compared,
        "differences": [] if compared is None else [item._asdict() for item in compared],
    }
