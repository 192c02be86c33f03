"""Which of some blocks have a recorded end, found through the index of generations.

1. The row of a block's end names generations from `low` to `high`, and the index has `high`. Blocks of one request
   usually end together, so the row is found just above the block's own generation (`_NEAR`).
2. A block without such a row is looked for among the process's rows with the highest generations (`_NEWEST`). A block
   of those generations is known to have no end.
3. An older block may have an end in a row that reaches far beyond it. It is `unsearched`, and only a full read tells.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from sqlalchemy import Connection, and_, select

from kvcustody.audit.evidence.coverage.block_uses import unit_keys_of
from kvcustody.audit.evidence.coverage.custody_units import IncarnationLife
from kvcustody.audit.evidence.query.evidence_columns import GENERATION_MASK, Evidence, distinct, is_among, read
from kvcustody.audit.kinds.block_runs import Int64s
from kvcustody.audit.store.database.dialect import dialect_of
from kvcustody.audit.store.schema.leaf_tables import custody_ends

_COLUMNS = (custody_ends.c.tenant,)
_NEAR = 128  # generations above a block's own
_NEAR_MAX = 50_000  # generations that one search looks at
_NEWEST = 10_000  # rows


class RecordedEnds(NamedTuple):
    """The keys of blocks with a recorded end, in order, and of those that were not looked for everywhere (rule 3)."""

    ended: Int64s
    unsearched: Int64s


def recorded_ends(connection: Connection, life: IncarnationLife, keys: Int64s) -> RecordedEnds:
    """Return which of these blocks of a process ended, by their keys; the work does not grow with the ledger."""
    keys = distinct(keys)
    if not len(keys):
        return RecordedEnds(keys, keys)
    ended = _among(keys, _near(connection, life, distinct(keys & GENERATION_MASK)))
    left = keys[~is_among(keys, ended)]
    if not len(left):
        return RecordedEnds(ended, left)
    column = custody_ends.c
    highest = select(column.high).where(column.incarnation == life.id).order_by(column.high.desc())
    searched_from = 1 + int(connection.scalar(highest.offset(_NEWEST).limit(1)) or 0)
    is_searched = (left & GENERATION_MASK) >= searched_from
    searched = left[is_searched]
    if len(searched):
        lowest = max(searched_from, int((searched & GENERATION_MASK).min()))
        rows = and_(column.high >= lowest, column.low <= int((searched & GENERATION_MASK).max()))
        newest = read(connection, custody_ends, _COLUMNS, and_(column.incarnation == life.id, rows), ordered=False)
        ended = distinct(np.concatenate((ended, _among(searched, newest))))
    return RecordedEnds(ended, left[~is_searched])


def _near(connection: Connection, life: IncarnationLife, generations: Int64s) -> Evidence:
    """Return the rows that may name any of these generations and reach little beyond it (rule 1)."""
    begins = np.flatnonzero(np.diff(generations, prepend=-2 * _NEAR) > _NEAR)
    first, last = generations[begins], generations[np.append(begins[1:], len(generations)) - 1]
    sizes = np.cumsum((last - first + _NEAR)[::-1])[::-1]  # the newest come first
    windows = zip(first[sizes <= _NEAR_MAX].tolist(), last[sizes <= _NEAR_MAX].tolist(), strict=True)
    span = dialect_of(connection).spans(connection, [(life.id, low, high + _NEAR) for low, high in windows])
    column, of = custody_ends.c, span.c
    inside = and_(column.high >= of.first, column.high < of.below, column.low <= of.below - _NEAR)
    here = and_(column.incarnation == of.log, inside)
    return read(connection, custody_ends, _COLUMNS, here, ordered=False, within=span)


def _among(keys: Int64s, rows: Evidence) -> Int64s:
    """Return which of these blocks the rows name."""
    return keys[is_among(keys, distinct(unit_keys_of(rows)))]
