"""`kvcustody showback`: each tenant's use of the cache in a period, and its savings from reuse, as a bill."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvcustody.audit.evidence.query.showback import ShowbackRow
from kvcustody.audit.exports.csv_table import csv_text
from kvcustody.console.api.client import done
from kvcustody.console.command import Json, make_table, print_json, say, stdout
from kvcustody.console.options import PeriodEnd, ServiceSource, period_us
from kvcustody.console.routes.print_routes import percent
from kvcustody.governance.observability.serving_summary import seconds_text
from kvcustody.governance.service.operations.parameter_groups import grouped
from kvcustody.times import readable

EPILOG = "Example: `kvcustody showback --since 2026-11-01 --until 2026-12-01 --csv > november.csv`"
_COLUMNS = (*ShowbackRow._fields, "routed_requests", "routed_tokens", "routed_found_tokens")


@grouped
def bill(
    *,
    since: Annotated[str, typer.Option(help="From this UTC date or time on.")],
    until: PeriodEnd = None,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant.")] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="CSV on stdout, one row per tenant.")] = False,
    source: ServiceSource,
    as_json: Json = False,
) -> None:
    """Block-seconds held, prefill seconds saved, taken from others and given to them, by tenant.

    Seconds are by the cost that each worker measured of its own prefills; they stay empty for tenants of a worker that
    has told none. docs/how-to/audit/bill-tenants.md defines every column.
    """
    since_us, until_us = period_us(since, until)
    found = done("getShowback", source, since=since_us, until=until_us, tenant=tenant)
    if as_json:
        print_json(found)
    else:
        _print([{name: row[name] for name in _COLUMNS} for row in found["items"]], since_us, until_us, as_csv)


def _print(rows: list[dict[str, Any]], since_us: int, until_us: int, as_csv: bool) -> None:
    if as_csv:
        text = csv_text([_COLUMNS, *([row[name] for name in _COLUMNS] for row in rows)])
        say(text.replace("\r\n", "\n"), end="")
        return
    table = make_table(
        f"{readable(since_us)} to {readable(until_us)}",
        *("tenant", "block-seconds", "mean blocks", "own hits", "taken", "given"),
        *("saved", "by others", "for others", "locality"),
        left=1,
    )
    for row in rows:
        table.add_row(
            row["tenant"],
            f"{row['block_seconds']:,.0f}",
            f"{row['blocks_mean']:,.1f}",
            *(f"{row[name]:,}" for name in ("own_hit_blocks", "taken_hit_blocks", "given_hit_blocks")),
            *(seconds_text(row[name]) for name in ("saved_seconds", "taken_seconds", "given_seconds")),
            percent(row["routed_found_tokens"] / row["routed_tokens"] if row["routed_tokens"] else None),
        )
    stdout().print(table, markup=False)
