"""Conservation: input equals output plus remainder, by independent counters.

1. Each identity compares the ledger's rows with the pool's or the device's own counters. Removing any one recording
   step (residency opened, released, custody end, receipt, one shard's receipt) breaks at least one of them.
2. Counts are of one live incarnation at a quiet moment: nothing submitted that is not yet in the ledger.
3. Of each tier the same: removing any one step of a copy (stored, ended, each piece of evidence) breaks one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from sqlalchemy import ColumnElement, Connection, Table, and_, func, select

from kvcustody.audit.evidence.copies.copy_rows import CopyTotals, copy_totals
from kvcustody.audit.evidence.query.evidence_columns import read, unit_keys
from kvcustody.audit.kinds import PROCESS_DEATH
from kvcustody.audit.store.schema.all_tables import has_leaf
from kvcustody.audit.store.schema.leaf_tables import custody_ends, receipts, releases, residencies
from kvcustody.audit.store.schema.ledger import incarnations
from kvcustody.errors import LedgerError


class TierCounts(NamedTuple):
    """A tier's own count of its copies since the process began; sizes are sealed bytes.

    A copy is living until its end is submitted, then waiting until its first evidence is (`destroyed`). `evidence`
    counts every piece, of which a copy may have two (its key destroyed, then unlinked).
    """

    tier: str
    stored: int
    ended: int
    destroyed: int
    evidence: int
    living: int
    waiting: int
    living_bytes: int
    waiting_bytes: int


class PoolCounts(NamedTuple):
    """The pool's own counts.

    A block counts once: in `live_blocks` until its CustodyEnded is submitted, then in `fenced`, `dirty` or
    `quarantined` until every shard's receipt is. Memory never in custody (generation 0) counts nowhere.
    """

    allocated_total: int  # how often the generation counter moved
    unreported: int  # blocks that open residencies were handed since admission: no leaf lists them yet
    live_blocks: int
    fenced: int
    dirty: int
    quarantined: int  # overwritten, and some shard did not verify
    scrubbed: tuple[int, ...]  # per shard, kept on the device, boot scrubs and repeats included
    open_residencies: int
    tiers: tuple[TierCounts, ...] = ()


class ConservationIdentity(NamedTuple):
    """One equation with both sides."""

    name: str
    left: int
    right: int

    @property
    def difference(self) -> int:
        """Left minus right: 0 if the equation holds."""
        return self.left - self.right


_FAILED = and_(receipts.c.result == "failed", receipts.c.high > 0)


def _of(table: Table, life: int) -> ColumnElement[bool]:
    return table.c.incarnation == life


def conservation(connection: Connection, incarnation: str, counts: PoolCounts) -> tuple[ConservationIdentity, ...]:
    """Return every identity of one incarnation."""
    life = connection.scalar(select(incarnations.c.id).where(incarnations.c.uuid == incarnation))
    if life is None:
        raise LedgerError(f"incarnation `{incarnation}` is not in the ledger", incarnation=incarnation)

    def number(table: Any, what: Any, *where: Any) -> int:
        return int(connection.scalar(select(what).where(_of(table, life), has_leaf(table), *where)) or 0)

    written = number(residencies, func.sum(residencies.c.written_blocks))
    written += number(releases, func.sum(releases.c.written_blocks))
    opened = number(residencies, func.count(), residencies.c.part == 1)
    released = number(releases, func.count(), releases.c.part == 1, releases.c.final)
    ends = func.sum(custody_ends.c.blocks)
    ended = number(custody_ends, ends)
    unproven = number(custody_ends, ends, custody_ends.c.cause == PROCESS_DEATH)
    pending = counts.fenced + counts.dirty
    bad = read(connection, receipts, (receipts.c.shard,), and_(_of(receipts, life), _FAILED))
    doubtful = len(np.unique(unit_keys(bad.pairs.pools, bad.pairs.generations)))
    identities = [
        ConservationIdentity(
            "allocated = written, as openings and releases list + not yet listed by open residencies",
            counts.allocated_total,
            written + counts.unreported,
        ),
        ConservationIdentity("allocated = custody ended + live", counts.allocated_total, ended + counts.live_blocks),
        ConservationIdentity("residencies opened = released + open", opened, released + counts.open_residencies),
        ConservationIdentity("blocks that failed to verify on any shard = quarantined", doubtful, counts.quarantined),
    ]
    scrubs = func.sum(receipts.c.blocks)
    for shard, counter in enumerate(counts.scrubbed):
        of_shard = receipts.c.shard == shard
        proved = number(receipts, scrubs, of_shard, receipts.c.result == "ok", receipts.c.high > 0)
        failed = number(receipts, scrubs, of_shard, _FAILED)
        every = number(receipts, scrubs, of_shard)
        identities.append(
            ConservationIdentity(
                f"custody ended = scrubbed on shard {shard} + failed there + pending + unproven",
                ended,
                proved + failed + pending + unproven,
            )
        )
        identities.append(ConservationIdentity(f"receipts of shard {shard} = its device's counter", every, counter))
    totals = copy_totals(connection, life)
    for tier in counts.tiers:
        identities += _of_tier(tier, totals.get(tier.tier, CopyTotals()))
    return tuple(identities)


def _of_tier(counts: TierCounts, totals: CopyTotals) -> list[ConservationIdentity]:
    """Every identity of one tier; what leaves say of it is `said`."""
    name = counts.tier
    sides = (
        (f"copies stored in {name} = the tier's counter", totals.stored, counts.stored),
        (f"copies stored in {name} = ended + living", totals.stored, totals.ended + counts.living),
        (f"copies ended in {name} = the tier's counter", totals.ended, counts.ended),
        (f"copies ended in {name} = destroyed + waiting", totals.ended, totals.destroyed + counts.waiting),
        (f"copies destroyed in {name} = the tier's counter", totals.destroyed, counts.destroyed),
        (f"pieces of evidence in {name} = the tier's counter", totals.evidence, counts.evidence),
        (
            f"bytes stored in {name} = bytes ended + bytes living",
            totals.stored_bytes,
            totals.ended_bytes + counts.living_bytes,
        ),
        (
            f"bytes ended in {name} = bytes destroyed + bytes waiting",
            totals.ended_bytes,
            totals.destroyed_bytes + counts.waiting_bytes,
        ),
    )
    return [ConservationIdentity(*side) for side in sides]
