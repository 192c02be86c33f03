"""A ledger's database as the source of an export, pinned to one signed checkpoint.

1. Everything is read as of that checkpoint; what is written meanwhile does not show. Leaves are read in pages by
   (log, idx), so no transaction stays open over the whole export and memory does not grow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sqlalchemy import Connection, Engine, func, select

from kvcustody.audit.evidence.processes.marked_processes import Marked, marked_processes
from kvcustody.audit.evidence.processes.work_periods import life_leaves
from kvcustody.audit.exports.enclosures import HandoverProof, Stamp
from kvcustody.audit.exports.source import RootLeaf, SubLog
from kvcustody.audit.kinds import SYSTEM
from kvcustody.audit.store.schema.leaf_tables import retention_purges
from kvcustody.audit.store.schema.ledger import events, logs
from kvcustody.audit.store.schema.retention import timestamps
from kvcustody.audit.tlog.database_proofs import LedgerProofs
from kvcustody.audit.tlog.key_rotation import handover_leaves, parse_handover_leaf
from kvcustody.audit.tlog.proofs import TileSource
from kvcustody.audit.tlog.signed_note import parse_note
from kvcustody.audit.tlog.tiles import ExportError
from kvcustody.audit.tlog.witness.status import witnessed_note

_PAGE = 4096


class LedgerSource:
    """One signed checkpoint of a ledger: the newest, or the one of `as_of` root leaves."""

    def __init__(self, engine: Engine, *, as_of: int | None = None) -> None:
        self._engine = engine
        with engine.connect() as connection:
            signed = LedgerProofs(connection).signed(as_of)
            if as_of is not None and signed.size != as_of:
                raise ExportError(f"the checkpoint of `{as_of}` root leaves is not signed", as_of=as_of)
            self.size, self._note = signed.size, witnessed_note(connection, signed.size)
            query = select(logs.c.id, logs.c.name)
            self.ids: dict[str, int] = {row.name: row.id for row in connection.execute(query)}

    def connect(self) -> Connection:
        """Return a connection to the ledger, for the caller to close."""
        return self._engine.connect()

    @property
    def note(self) -> bytes:
        """The signed checkpoint."""
        return self._note

    def logs(self) -> Sequence[SubLog]:
        """Return every sub-log under the checkpoint, in name order."""
        with self._engine.connect() as connection:
            proofs = LedgerProofs(connection)
            return [
                SubLog(
                    found.name,
                    found.head,
                    proofs.head_proof(found.name, as_of=self.size),
                    self._purged_below(connection, found.name),
                )
                for found in proofs.logs(as_of=self.size)
            ]

    def tiles(self, name: str) -> TileSource:
        """Return the hashes of a sub-log."""
        return _Tiles(self._engine, name)

    def leaves(self, name: str, first: int, end: int) -> Iterator[bytes]:
        """Yield the leaves from `first` up to but without `end`, in order; raises `ExportError` if one is missing."""
        column, at = events.c, first
        while at < end:
            query = (
                select(column.idx, column.leaf)
                .where(column.log == self.ids[name], column.idx >= at, column.idx < min(end, at + _PAGE))
                .order_by(column.idx)
            )
            with self._engine.connect() as connection:
                rows = connection.execute(query).all()
            for row in rows:
                if row.idx != at:
                    break
                yield bytes(row.leaf)
                at += 1
            if not rows or row.idx >= at:
                raise ExportError(f"leaf `{at}` of `{name}` is missing; run `kvcustody audit fsck`", idx=at)

    def root_leaves(self) -> Iterator[RootLeaf]:
        """Yield every leaf of the root log under the checkpoint, in order."""
        for first in range(0, self.size, _PAGE):
            with self._engine.connect() as connection:
                openings = LedgerProofs(connection).openings(first, min(self.size, first + _PAGE))
            for opening in openings:
                yield RootLeaf(opening.commitment(), opening)

    def span(self, name: str, since_us: int | None, until_us: int | None) -> tuple[int, int]:
        """Return the shortest run of leaves that holds every leaf whose `at_us` is in [since, until)."""
        column = events.c
        query = select(func.min(column.idx), func.max(column.idx)).where(column.log == self.ids[name])
        if since_us is not None:
            query = query.where(column.at_us >= since_us)
        if until_us is not None:
            query = query.where(column.at_us < until_us)
        with self._engine.connect() as connection:
            low, high = connection.execute(query).one()
        return (0, 0) if low is None else (low, high + 1)

    def marked(self) -> Marked:
        """Return the processes that replayed or generated their records, as of the checkpoint."""
        with self._engine.connect() as connection:
            below = LedgerProofs(connection).sizes(self.size).get(SYSTEM, 0)
            return marked_processes(leaf.body for leaf in life_leaves(connection) if leaf.idx < below)

    def handovers(self) -> Sequence[HandoverProof]:
        """Return every handover of the signing key under the checkpoint, in order."""
        with self._engine.connect() as connection:
            proofs = LedgerProofs(connection)
            if SYSTEM not in self.ids:
                return ()
            below = proofs.head(SYSTEM, as_of=self.size).size
            return [
                HandoverProof(
                    leaf,
                    proofs.inclusion(SYSTEM, idx, as_of=self.size).to_bytes(),
                    tuple(proofs.root_consistency(parse_handover_leaf(leaf).head.size, self.size)),
                )
                for idx, leaf in handover_leaves(connection, below)
            ]

    def stamps(self) -> Sequence[Stamp]:
        """Return the newest timestamp of each authority, of this checkpoint or an earlier one."""
        newest = select(timestamps).where(timestamps.c.size <= self.size).order_by(timestamps.c.size)
        with self._engine.connect() as connection:
            proofs = LedgerProofs(connection)
            rows = {row.authority: row for row in connection.execute(newest)}
            return [
                Stamp(
                    name,
                    parse_note(proofs.signed(row.size).note).text.encode(),
                    bytes(row.token),
                    tuple(proofs.root_consistency(row.size, self.size)),
                )
                for name, row in sorted(rows.items())
            ]

    def _purged_below(self, connection: Connection, name: str) -> int:
        below = select(func.max(retention_purges.c.below)).where(retention_purges.c.of_log == name)
        first = select(func.min(events.c.idx)).where(events.c.log == self.ids[name])
        planned = connection.scalar(below)
        if planned is None:
            return 0  # a leaf that is missing all the same is a fault, and the export will say so
        kept = connection.scalar(first)
        return int(planned) if kept is None else min(int(planned), int(kept))


class _Tiles:
    """The tiles of a sub-log, read through connections of their own."""

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine = engine
        self._name = name

    def tile(self, level: int, index: int, width: int) -> bytes:
        """Return the first `width` hashes of a tile."""
        with self._engine.connect() as connection:
            return LedgerProofs(connection).tiles(self._name).tile(level, index, width)
