"""Who holds what: the custody of every block, from its hand-out to its end, against the figures that pages show.

1. A block is its owner's: of the tenant that was handed it, or of the one that a `blocks-assigned` leaf names. Its end
   says the same tenant.
2. What a tenant holds by the figures (`read_figures.tenant_totals`) is what of its blocks has no end.
3. A process holds no more blocks than it has.
4. Of a process that ended and whose leaves retention dropped in part, or that lost leaves by a record of its writer,
   single blocks are not compared: hand-outs and ends lie in different leaves. It holds nothing.
5. While a process runs that lost leaves, nobody knows who holds what (`unknown_holdings`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
from sqlalchemy import Connection, select

from kvcustody.audit.counters.read_figures import tenant_totals, uneven_lives
from kvcustody.audit.coverage.block_uses import unit_keys_of
from kvcustody.audit.processes.sequence_gaps import dropped_spans, recorded_losses
from kvcustody.audit.query.evidence_columns import is_among, read, read_assignments, read_opened
from kvcustody.audit.schema.ledger import custody_ends, incarnations, releases, residencies
from kvcustody.plurals import several


def unknown_holdings(connection: Connection) -> list[str]:
    """Why it is not known who holds what; empty where it is."""
    return [
        f"who holds what: process `{life.uuid}` runs and lost leaves, as a gap on record says"
        for life in uneven_lives(connection)
        if life.is_running and life.has_losses
    ]


def wrong_holdings(connection: Connection, *, is_purged: bool) -> Iterator[str]:
    """Which blocks ended as another tenant's, and which tenants hold other than the figures say."""
    held: Counter[str] = Counter()
    losing = recorded_losses(connection)
    column = incarnations.c
    for life in connection.execute(select(column.id, column.uuid, column.blocks, column.end)):
        is_cut = is_purged and life.end is not None and bool(dropped_spans(connection, life.id))
        if life.uuid in losing or is_cut:
            continue
        of_life: Counter[str] = Counter()
        yield from _of_life(connection, life.id, life.uuid, of_life)
        if life.blocks is not None and of_life.total() > life.blocks:
            yield f"process `{life.uuid}` holds {of_life.total()} blocks, and has {life.blocks}"
        held.update(of_life)
    figures = {row.tenant: row.held_blocks for row in tenant_totals(connection)}
    for tenant in sorted(held.keys() | figures.keys()):
        blocks = figures.get(tenant, 0)
        if blocks is not None and held[tenant] != blocks:
            yield f"`counters` say that `{tenant}` holds {blocks} blocks, and the leaves {held[tenant]}"


def _of_life(connection: Connection, life: int, uuid: str, held: Counter[str]) -> Iterator[str]:
    opened, released, ended = residencies.c, releases.c, custody_ends.c
    _, handed = read_opened(connection, (opened.tenant,), opened.incarnation == life)
    grown = read(connection, releases, (released.tenant,), (released.incarnation == life) & released.written)
    ends = read(connection, custody_ends, (ended.tenant,), ended.incarnation == life)
    assigned = read_assignments(connection, life)
    names: dict[str, int] = {}
    parts = []
    for part in (handed, grown, ends):
        codes = np.array([names.setdefault(name, len(names)) for name in part.texts("tenant")], np.int64)
        parts.append((unit_keys_of(part), codes[part.owner]))
    parties = np.array([names.setdefault(name, len(names)) for name, _ in assigned.parties], np.int64)
    keys, owner = (np.concatenate(each) for each in zip(*parts[:2], strict=True))
    end_keys, end_owner = parts[2]
    place = assigned.of(keys)
    owner = np.where(place >= 0, parties[place], owner) if len(parties) else owner
    by_name = list(names)
    order = np.argsort(keys, kind="stable")
    keys, owner = keys[order], owner[order]
    if len(keys) and len(end_keys):
        at = np.minimum(np.searchsorted(keys, end_keys), len(keys) - 1)
        other = (keys[at] == end_keys) & (owner[at] != end_owner)
        pairs = Counter(zip(owner[at][other].tolist(), end_owner[other].tolist(), strict=True))
        for (of, by), blocks in sorted(pairs.items()):
            yield f"{several(blocks, 'block')} of `{by_name[of]}` ended as `{by_name[by]}`'s in process `{uuid}`"
    living = owner[~is_among(keys, np.sort(end_keys))]
    for number, blocks in zip(*np.unique(living, return_counts=True), strict=True):
        held[by_name[int(number)]] += int(blocks)
