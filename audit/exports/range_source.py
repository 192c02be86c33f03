"""Runs of leaves of many logs as the source of an export; the parts that they share are read once.

    shared = CheckpointContents(LedgerSource(engine))
    with shared.ranges(ranges) as source:
        write_export(folder, source, ExportSelection(ranges=ranges), made_at_us=..., resumable=False)

1. Leaves of neighbouring short runs are read together, so that a log of a few leaves costs no question of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count, takewhile

from sqlalchemy import Connection

from kvcustody.audit.evidence.processes.marked_processes import Marked
from kvcustody.audit.exports.enclosures import HandoverProof, Stamp
from kvcustody.audit.exports.export_writer import LeafRange
from kvcustody.audit.exports.ledger_source import LedgerSource
from kvcustody.audit.exports.source import RootLeaf, SubLog
from kvcustody.audit.store.database.dialect import dialect_of, fetch_binary
from kvcustody.audit.tlog.database_proofs import LedgerProofs
from kvcustody.audit.tlog.proofs import TileSource, inclusion_proof
from kvcustody.audit.tlog.root_log import HeadProof
from kvcustody.audit.tlog.tiles import ExportError

_PAGE = 4096
_ALL = (
    "SELECT e.log, e.idx, e.leaf FROM events AS e JOIN unnest(?::int4[], ?::int8[], ?::int8[])"
    " AS run (log, first, past) ON e.log = run.log AND e.idx >= run.first AND e.idx < run.past"
)
_ONE = "SELECT log, idx, leaf FROM events WHERE log = ? AND idx >= ? AND idx < ?"


class CheckpointContents:
    """The common content of every export under one signed checkpoint; threads may share it."""

    def __init__(self, source: LedgerSource) -> None:
        self._source = source
        self.size, self.note = source.size, source.note
        self.marked = source.marked()
        self.handovers, self.stamps = source.handovers(), source.stamps()
        self.ids = source.ids
        with source.connect() as connection:
            self.openings = LedgerProofs(connection).newest_openings(self.size)

    @contextmanager
    def ranges(self, ranges: Sequence[LeafRange]) -> Iterator[RangeSource]:
        """Yield the source of these runs, at most one of each log, read through one connection."""
        with self._source.connect() as connection:
            dialect_of(connection).look_up_by_index(connection)
            yield RangeSource(connection, self, ranges)


class RangeSource:
    """An `ExportSource` of some runs of leaves."""

    def __init__(self, connection: Connection, contents: CheckpointContents, ranges: Sequence[LeafRange]) -> None:
        self._connection = connection
        self._contents = contents
        self._ranges = sorted(ranges)
        self._at = {each.log: number for number, each in enumerate(self._ranges)}
        self._ahead: dict[str, list[bytes]] = {}
        self._proofs = LedgerProofs(connection)

    @property
    def note(self) -> bytes:
        """The signed checkpoint."""
        return self._contents.note

    def logs(self) -> Sequence[SubLog]:
        """Return the logs of these runs, in name order."""
        root = _KeptTiles(self._proofs.tiles(None))
        sub_logs = []
        for log, first, end in self._ranges:
            idx, opening = self._contents.openings[log]
            if end > opening.head.size:
                raise ExportError(f"leaf `{end - 1}` of `{log}` is under no signed checkpoint", log=log)
            path = tuple(inclusion_proof(root, idx, self._contents.size))
            sub_logs.append(SubLog(log, opening.head, HeadProof(opening, idx, path, self._contents.note), first))
        return sub_logs

    def tiles(self, name: str) -> TileSource:
        """Return the hashes of a sub-log."""
        return self._proofs.tiles(name)

    def leaves(self, name: str, first: int, end: int) -> Iterator[bytes]:
        """Yield the leaves from `first` up to but without `end`, in order; raises `ExportError` if one is missing."""
        if name not in self._ahead:
            self._read_ahead(name)
        kept = self._ahead.pop(name, [])
        at = first
        while at < end:
            page = kept or self._read([LeafRange(name, at, min(end, at + _PAGE))]).get(name, [])
            kept = []
            if not page:
                raise ExportError(f"leaf `{at}` of `{name}` is missing; run `kvcustody audit fsck`", idx=at)
            yield from page
            at += len(page)

    def root_leaves(self) -> Iterator[RootLeaf]:
        """Return nothing: this is no export of the whole ledger."""
        return iter(())

    def span(self, name: str, since_us: int | None, until_us: int | None) -> tuple[int, int]:
        """Return the run of this log."""
        return self._ranges[self._at[name]][1:]

    def marked(self) -> Marked:
        """Return the processes that replayed or generated their records, as of the checkpoint."""
        return self._contents.marked

    def handovers(self) -> Sequence[HandoverProof]:
        """Return every handover of the signing key under the checkpoint, in order."""
        return self._contents.handovers

    def stamps(self) -> Sequence[Stamp]:
        """Return the newest timestamp of each authority, of this checkpoint or an earlier one."""
        return self._contents.stamps

    def _read_ahead(self, name: str) -> None:
        """Have the leaves of this run and of those after it at hand, where they are short (rule 1)."""
        some: list[LeafRange] = []
        leaves = 0
        for each in self._ranges[self._at[name] :]:
            leaves += each.end - each.first
            if leaves > _PAGE:
                break
            some.append(each)
        self._ahead = self._read(some)

    def _read(self, ranges: Sequence[LeafRange]) -> dict[str, list[bytes]]:
        """Return the leaves of these runs, which must be complete."""
        spans = [(self._contents.ids[each.log], each.first, each.end) for each in ranges]
        if dialect_of(self._connection).arrays and spans:
            columns = tuple(list(column) for column in zip(*spans, strict=True))
            rows = list(fetch_binary(self._connection, _ALL, columns))
        else:
            rows = [row for run in spans for row in fetch_binary(self._connection, _ONE, run)]
        by_log: dict[int, dict[int, bytes]] = {}
        for log, idx, leaf in rows:
            by_log.setdefault(log, {})[idx] = bytes(leaf)
        found = {}
        for each, (log, first, _) in zip(ranges, spans, strict=True):
            there = by_log.get(log, {})
            found[each.log] = [there[idx] for idx in takewhile(there.__contains__, count(first))]
        return found


class _KeptTiles:
    """Tiles that are read once: neighbouring leaves of the root log have most of their paths in common."""

    def __init__(self, tiles: TileSource) -> None:
        self._tiles = tiles
        self._kept: dict[tuple[int, int, int], bytes] = {}

    def tile(self, level: int, index: int, width: int) -> bytes:
        """Return the first `width` hashes of a tile."""
        place = (level, index, width)
        if place not in self._kept:
            self._kept[place] = self._tiles.tile(level, index, width)
        return self._kept[place]
