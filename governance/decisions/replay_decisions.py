"""Requests from the ledger, to be decided again under another policy.

1. Rows are streamed in their order; nothing is read but what a decision needs, and no subject is named.
2. A residency whose record has several parts is one request, counted once.
3. A request that was monitored is left out: what it attached no policy permitted.
"""

from __future__ import annotations

from collections.abc import Iterator

import orjson
from sqlalchemy import Connection, select

from kvcustody.audit.evidence.counters.read_figures import denials_by_rule
from kvcustody.audit.kinds.registry import EARLIER
from kvcustody.audit.store.schema.all_tables import has_leaf, is_leaf_of
from kvcustody.audit.store.schema.leaf_tables import hit_counters, residencies
from kvcustody.audit.store.schema.ledger import events, tenants
from kvcustody.governance.monitoring.enforcement import MONITORED
from kvcustody.policies.workbench.simulate import Recorded, RecordedDenials


def recorded_requests(
    connection: Connection, *, since_us: int | None = None, revision: int | None = None
) -> Iterator[Recorded]:
    """Every recorded request, optionally from an instant (UTC) on, or of one policy revision."""
    query = (
        select(residencies, events.c.leaf)
        .select_from(residencies.join(events, is_leaf_of(residencies)))
        .where(residencies.c.part == 1)
        .order_by(residencies.c.opened_us, residencies.c.log, residencies.c.idx)
    )
    if since_us is not None:
        query = query.where(residencies.c.opened_us >= since_us)
    if revision is not None:
        query = query.where(residencies.c.revision == revision)
    for row in connection.execution_options(yield_per=1_000).execute(query):
        leaf = orjson.loads(row.leaf)
        reasons = tuple(leaf["reasons"])
        if MONITORED in reasons:
            continue
        yield Recorded(
            row.tenant,
            row.classification,
            row.opened_us,
            reasons,
            row.attached_blocks - leaf.get(EARLIER, 0),
            row.written_blocks,
        )


def recorded_denials(connection: Connection) -> Iterator[RecordedDenials]:
    """Every denial that was counted, by reader, owner and rule."""
    for found in denials_by_rule(connection):
        yield RecordedDenials(found.reader, found.owner, found.rule, found.requests)


def sources_in_use(connection: Connection) -> frozenset[str]:
    """The ids of grants and segments through which blocks were reused; a permit without reuse does not count."""
    counted = hit_counters.c
    query = (
        select(counted.rule).where(counted.effect == "permit", counted.blocks > 0, has_leaf(hit_counters)).distinct()
    )
    return frozenset(connection.scalars(query))


def tenants_seen(connection: Connection) -> frozenset[str]:
    """The tenants that the ledger has a log of."""
    return frozenset(connection.scalars(select(tenants.c.tenant)))
