"""Refused identities in the ledger: the place, the reasons, and the number of sources."""

from __future__ import annotations

from typing import NamedTuple

import orjson
from sqlalchemy import Connection, select

from kvcustody.audit.kinds import SYSTEM
from kvcustody.audit.store.schema.all_tables import has_leaf
from kvcustody.audit.store.schema.ledger import events, logs

_KIND = "attempts-refused"
_LEAVES_MAX = 20_000


class RefusedIdentities(NamedTuple):
    """Refusals at one place for one reason; `sources` are counted up to each window's bound."""

    place: str
    of_worker: str
    reason: str
    attempts: int
    sources: int
    last_us: int


def refused_identities(connection: Connection, since_us: int) -> list[RefusedIdentities]:
    """Return every place and reason with a refusal since then (UTC), most attempts first, from the newest leaves."""
    query = (
        select(events.c.leaf)
        .join(logs, logs.c.id == events.c.log)
        .where(logs.c.name == SYSTEM, events.c.kind == _KIND, events.c.at_us >= since_us, has_leaf(events))
        .order_by(events.c.idx.desc())
        .limit(_LEAVES_MAX)
    )
    sums: dict[tuple[str, str, str], tuple[int, set[str], int]] = {}
    for leaf in connection.scalars(query):
        body = orjson.loads(bytes(leaf))
        key = (body["place"], body["of_worker"], body["reason"])
        attempts, sources, last_us = sums.get(key, (0, set(), 0))
        sources.add(body["source"])
        sums[key] = (attempts + int(body["attempts"]), sources, max(last_us, int(body["at_us"])))
    found = [
        RefusedIdentities(*key, attempts, len(sources), last_us) for key, (attempts, sources, last_us) in sums.items()
    ]
    return sorted(found, key=lambda one: (-one.attempts, one))
