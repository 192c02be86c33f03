"""The commands of `kvcustody prefixes`."""

from __future__ import annotations

from typing import Annotated

import typer

from kvcustody.audit.evidence.query.prefix_value import PrefixValue
from kvcustody.console.api.asking import asked
from kvcustody.console.command import Json, make_table, print_period, stdout
from kvcustody.console.options import LastDay, Source
from kvcustody.governance.observability.serving_summary import seconds_text
from kvcustody.governance.service.answers.showback import LIST_PREFIXES
from kvcustody.governance.service.operations.parameter_groups import grouped
from kvcustody.http_exchange import fact_of
from kvcustody.times import readable

app = typer.Typer(
    no_args_is_help=True,
    help="Which prefixes are worth keeping: what later requests reused of what one had written.",
    epilog="docs/audit/showback.md#prefixes says what a row is; no content is read or shown.",
)


@app.callback()
def prefixes() -> None:
    """Which prefixes are worth keeping: what later requests reused of what one had written."""


@app.command(epilog="Example: `kvcustody prefixes top --since 2026-11-01 --tenant acme --json`")
@grouped
def top(
    *,
    period: LastDay,
    tenant: Annotated[str | None, typer.Option(help="Of this tenant alone.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many, the worthiest.")] = 20,
    source: Source,
    as_json: Json = False,
) -> None:
    """The requests whose blocks saved later ones most: by tenant and classification, in prefill seconds.

    Seconds are by the cost that each worker measured of its own prefills; where none is told, blocks decide.
    """
    since_us, until_us = period.bounds_us()
    found = asked(LIST_PREFIXES, source, since=since_us, until=until_us, tenant=tenant, limit=limit)
    rows = [fact_of(PrefixValue, row) for row in found["items"]]
    if as_json:
        from kvcustody.governance.api.models.operations import Prefixes

        items = [row._asdict() for row in rows]
        print_period(Prefixes, "prefixes", since_us, until_us, items)
        return
    table = make_table(
        f"{readable(since_us)} to {readable(until_us)}",
        *(
            "written by",
            "tenant",
            "classification",
            "saved",
            "requests",
            "of others",
            "blocks",
            "attached",
            "last",
        ),
        left=3,
    )
    for row in rows:
        table.add_row(
            f"{row.incarnation[:12]}:{row.residency}",
            row.tenant,
            row.classification,
            seconds_text(row.saved_seconds),
            *(
                f"{number:,}"
                for number in (row.requests, row.foreign_requests, row.blocks, row.attached_blocks)
            ),
            readable(row.last_us),
        )
    stdout().print(table, markup=False)
