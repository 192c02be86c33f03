"""What erasures covered, and when each was asked for: custody that one ended was due at its request.

1. The leaf of an effect lists what an erasure covers in one process; the request's leaf says when. No leaf of a
   residency is needed, so erasures by domain or model count, and those of people who go by several pseudonyms.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from sqlalchemy import Connection, and_, func, select

from kvcustody.audit.database.snapshot import AsOf, is_in
from kvcustody.audit.events.block_runs import Int64s
from kvcustody.audit.query.evidence_columns import read, unit_keys
from kvcustody.audit.schema.erasures import erasure_effects
from kvcustody.audit.schema.ledger import erasures


class ErasureDueTimes(NamedTuple):
    """Flat entries, one per (erasure, block) in one process: the unit, and when its end was asked for, in boot time."""

    keys: Int64s
    blocks: Int64s
    at: Int64s


def read_erasure_due_times(connection: Connection, life: Any, as_of: AsOf | None = None) -> ErasureDueTimes:
    """What the erasures of one incarnation covered; those whose request is not in the ledger are left out."""
    column = erasure_effects.c
    asked = (
        select(func.min(erasures.c.at_us))
        .where(erasures.c.erasure == column.erasure, is_in(as_of, erasures))
        .scalar_subquery()
    )
    here = and_(column.incarnation == life.id, asked.is_not(None), is_in(as_of, erasure_effects))
    found = read(connection, erasure_effects, (asked.label("asked_us"),), here, ordered=False)
    at = found.column("asked_us") - life.offset_us
    pairs = found.pairs
    return ErasureDueTimes(
        unit_keys(pairs.pools, pairs.generations), pairs.blocks, at[found.owner].astype(np.int64)
    )
