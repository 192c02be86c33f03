"""Prints the prefixes that are most worth keeping."""

from __future__ import annotations

from typing import Any

from kvcustody.audit.evidence.query.prefix_value import PrefixValue
from kvcustody.console.command import make_table, stdout
from kvcustody.governance.observability.serving_summary import seconds_text
from kvcustody.http_exchange import fact_of
from kvcustody.times import readable


def print_prefixes(answer: dict[str, Any]) -> None:
    """Print the requests whose blocks saved the most prefill seconds, by tenant and classification.

    Seconds are by the cost that each worker measured of its own prefills; where none is told, blocks decide.
    """
    rows = [fact_of(PrefixValue, row) for row in answer["items"]]
    table = make_table(
        f"{readable(answer['since_us'])} to {readable(answer['until_us'])}",
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
            *(f"{number:,}" for number in (row.requests, row.foreign_requests, row.blocks, row.attached_blocks)),
            readable(row.last_us),
        )
    stdout().print(table, markup=False)
