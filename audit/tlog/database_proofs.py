"""Proofs from the ledger's stored hashes: heads, paths and checkpoints, current or as of an earlier checkpoint.

1. A proof is made only from stored hashes, except for the leaves beside its own. At most 32 of those are hashed again,
   or 512 if a ledger has no half levels (rule 3 of `trees`). The database's content is not checked here: the receiver
   of a proof checks the proof, and `fsck` checks the database.
2. `as_of` is the size of a root checkpoint. What it covers never changes: the same question gives the same answer.
3. A proof that ends in a signature needs a checkpoint that was signed. Sealing and signing run after the commits. So
   the newest leaves become provable within about the sum of both intervals after their commit, or sooner on request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sqlalchemy import Connection, func, select

from kvcustody.audit.leaf.merkle import EMPTY_ROOT, HALF_HEIGHT, TreeHead
from kvcustody.audit.store.database.dialect import fetch_all
from kvcustody.audit.store.schema.ledger import logs
from kvcustody.audit.store.schema.trees import checkpoints, root_leaves
from kvcustody.audit.tlog.database_tiles import (
    DroppedTileError,
    HalfTiles,
    LogTiles,
    RootTiles,
    StoredTiles,
    read_ahead,
)
from kvcustody.audit.tlog.proofs import (
    TILE_WIDTH,
    ProofError,
    TileSource,
    consistency_proof,
    inclusion_proof,
    inclusion_tiles,
)
from kvcustody.audit.tlog.root_log import HeadProof, LeafProof, RootLeafOpening

SIGN = "a service or engine with this ledger open seals and signs every few seconds, `kvcustody audit sign` immediately"


class StoredCheckpoint(NamedTuple):
    """The root log after one seal; `at_us` is the latest time among the leaves that it added."""

    size: int
    root: bytes
    at_us: int

    @property
    def head(self) -> TreeHead:
        """Size and root."""
        return TreeHead(self.size, self.root)


class SignedNote(NamedTuple):
    """A checkpoint from the signer: a C2SP note. `at_us` is when it was signed."""

    size: int
    note: bytes
    at_us: int


class LogHead(NamedTuple):
    """A sub-log and its head."""

    name: str
    head: TreeHead


class LedgerProofs:
    """Reads proofs through one connection; caches only the ids of logs."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._ids: dict[str, int] = {}

    # -- heads and checkpoints ------------------------------------------------------------------------------

    def logs(self, *, as_of: int | None = None) -> list[LogHead]:
        """Return every sub-log that has leaves, in name order, with its head."""
        names = {row.id: row.name for row in self._connection.execute(select(logs.c.id, logs.c.name))}
        newest = select(root_leaves.c.log, func.max(root_leaves.c.size).label("size"))
        if as_of is not None:
            newest = newest.where(root_leaves.c.idx < self.checkpoint(as_of).size)
        last = newest.group_by(root_leaves.c.log).subquery()
        query = select(root_leaves.c.log, root_leaves.c.size, root_leaves.c.root).join(
            last, (root_leaves.c.log == last.c.log) & (root_leaves.c.size == last.c.size)
        )
        found = [
            LogHead(names.get(row.log, f"log {row.log}"), TreeHead(row.size, bytes(row.root)))
            for row in self._connection.execute(query)
        ]
        return sorted(found)

    def sizes(self, as_of: int | None = None) -> dict[str, int]:
        """Return how many leaves of every sub-log a checkpoint covers, without empty logs."""
        return {log.name: log.head.size for log in self.logs(as_of=as_of)}

    def head(self, log: str, *, as_of: int | None = None) -> TreeHead:
        """Return the head of a sub-log, empty if a checkpoint covers none of it; raises `ProofError` for an unknown
        log.
        """
        opened = self._newest_leaf(log, None if as_of is None else self.checkpoint(as_of).size)
        return TreeHead(0, EMPTY_ROOT) if opened is None else opened[1].head

    def checkpoint(self, as_of: int | None = None) -> StoredCheckpoint:
        """Return the newest checkpoint, or the one of this root log size; raises `ProofError` if there is none."""
        query = select(checkpoints.c.size, checkpoints.c.root, checkpoints.c.at_us)
        if as_of is not None:
            query = query.where(checkpoints.c.size == as_of)
        row = self._connection.execute(query.order_by(checkpoints.c.size.desc()).limit(1)).first()
        if row is None:
            what = (
                "no checkpoint yet: nothing was recorded or sealed"
                if as_of is None
                else f"no checkpoint of `{as_of}` root leaves"
            )
            raise ProofError(f"the ledger has {what}", as_of=as_of)
        return StoredCheckpoint(row.size, bytes(row.root), row.at_us)

    def signed_or_none(self, size: int | None = None) -> SignedNote | None:
        """Return the newest signed checkpoint, or the first that covers `size` root leaves; None if there is none."""
        asked = (_NEWEST_NOTE, ()) if size is None else (_FIRST_NOTE, (size,))
        rows = fetch_all(self._connection, *asked)
        return SignedNote(rows[0][0], bytes(rows[0][1]), rows[0][2]) if rows else None

    def signed(self, size: int | None = None) -> SignedNote:
        """Return `signed_or_none`; raises `ProofError` if it is None (rule 3)."""
        note = self.signed_or_none(size)
        if note is None:
            newest = self.checkpoint().size
            if size is not None and size > newest:
                raise ProofError(f"the root log has `{newest}` leaves, not `{size}`", size=size)
            raise ProofError(f"no signed checkpoint covers this yet; {SIGN}")
        return note

    # -- leaves and paths -----------------------------------------------------------------------------------

    def leaf(self, log: str, idx: int) -> bytes:
        """Return the bytes of a leaf; raises `ProofError` if they are missing."""
        rows = fetch_all(self._connection, _LEAF, (self._id(log), idx))
        if not rows:
            raise ProofError(f"log `{log}` holds no leaf `{idx}`", log=log, idx=idx)
        return bytes(rows[0][0])

    def tiles(self, log: str | None) -> TileSource:
        """Return the stored hashes of a sub-log, or of the root log (None), in the specification's tiles."""
        return self._stored(log)

    def consistency(self, log: str, old_size: int, size: int) -> list[bytes]:
        """Return the path that proves that a sub-log of `size` leaves extends the one of `old_size`.

        Raises `ProofError` also for a size that ends inside a tile whose leaves retention dropped.
        """
        self._covered(log, size)
        try:
            return consistency_proof(self._halves(log), old_size, size, HALF_HEIGHT)
        except DroppedTileError as problem:
            inside = [each for each in (old_size, size) if each < problem.begins and each % TILE_WIDTH]
            what = f"the tree of `{inside[0]}` leaves cannot be made again: {problem.message}"
            raise ProofError(what, log=log, size=inside[0], begins=problem.begins) from None

    def root_consistency(self, old_size: int, size: int) -> list[bytes]:
        """Return the consistency path of the root log, for witnesses and readers with an older checkpoint."""
        newest = self.checkpoint().size
        if size > newest:
            raise ProofError(f"the root log has `{newest}` leaves, not `{size}`", size=size)
        return consistency_proof(self._halves(None), old_size, size, HALF_HEIGHT)

    def head_proof(self, log: str, *, as_of: int | None = None) -> HeadProof:
        """Return the proof of a sub-log's head under a signed checkpoint: the newest, or the one of this size."""
        idx, opening, note = self._noted(log, as_of)
        return HeadProof(opening, idx, tuple(_inclusion(self._halves(None), idx, note.size)), note.note)

    def newest_openings(self, size: int) -> dict[str, tuple[int, RootLeafOpening]]:
        """Return by name the newest root leaf of every sub-log among the first `size`: its place and opening."""
        rows = fetch_all(self._connection, _NEWEST_OPENINGS, (size,))
        return {row[1]: (row[0], _opening(row)) for row in rows}

    def inclusion(self, log: str, idx: int, *, as_of: int | None = None) -> LeafProof:
        """Return the proof that a leaf is at `idx` of a sub-log under a signed checkpoint; raises `ProofError` (rule
        3).
        """
        return self._inclusion(log, idx, as_of)[0]

    def proven(self, log: str, idx: int, *, as_of: int | None = None) -> tuple[bytes, LeafProof]:
        """Return a leaf and its `inclusion`, read together; raises `ProofError` also if the leaf is missing."""
        proof, leaf = self._inclusion(log, idx, as_of)
        return (self.leaf(log, idx) if leaf is None else leaf), proof

    def inclusions_under(self, head: HeadProof, places: Sequence[int]) -> list[LeafProof]:
        """Return the inclusion proofs of many leaves of one log, under its head's proof, with few queries."""
        opening = head.opening
        tiles, size = self._halves(opening.name), opening.head.size
        proofs = []
        for start in range(0, len(places), _PROOFS_AT_ONCE):
            some = places[start : start + _PROOFS_AT_ONCE]
            wanted = {tile for idx in some for tile in inclusion_tiles(idx, size, HALF_HEIGHT)}
            read_ahead(tiles.path(sorted(wanted)))
            kept = _KeptTiles({tile: tiles.tile(*tile) for tile in wanted})
            proofs += [LeafProof(idx, tuple(inclusion_proof(kept, idx, size, HALF_HEIGHT)), head) for idx in some]
        return proofs

    def openings(self, first: int, last: int) -> list[RootLeafOpening]:
        """Return the openings of the root leaves `first` up to but not including `last`."""
        query = _OPENINGS + "WHERE r.idx >= ? AND r.idx < ? ORDER BY r.idx"
        return [_opening(row) for row in fetch_all(self._connection, query, (first, last))]

    # -- helpers --------------------------------------------------------------------------------------------

    def _stored(self, log: str | None) -> StoredTiles:
        return RootTiles(self._connection) if log is None else LogTiles(self._connection, self._id(log))

    def _halves(self, log: str | None) -> HalfTiles:
        return HalfTiles(self._stored(log))

    def _inclusion(self, log: str, idx: int, as_of: int | None) -> tuple[LeafProof, bytes | None]:
        """Return the proof of a leaf, and the leaf if it was read for that."""
        root_idx, opening, note = self._noted(log, as_of)
        if idx >= opening.head.size:
            self.leaf(log, idx)  # one that is nowhere is named as that, not as one that is not covered yet
            raise ProofError(f"leaf `{idx}` of `{log}` is not under a signed checkpoint yet; {SIGN}", idx=idx)
        leaves, nodes = LogTiles(self._connection, self._id(log)), RootTiles(self._connection)
        of_log, of_root = HalfTiles(leaves), HalfTiles(nodes)
        read_ahead(
            of_log.path(inclusion_tiles(idx, opening.head.size, HALF_HEIGHT)),
            of_root.path(inclusion_tiles(root_idx, note.size, HALF_HEIGHT)),
        )
        path = inclusion_proof(of_log, idx, opening.head.size, HALF_HEIGHT)
        above = inclusion_proof(of_root, root_idx, note.size, HALF_HEIGHT)
        head = HeadProof(opening, root_idx, tuple(above), note.note)
        return LeafProof(idx, tuple(path), head), leaves.leaves.get(idx)

    def _noted(self, log: str, as_of: int | None) -> tuple[int, RootLeafOpening, SignedNote]:
        """Return a sub-log's newest root leaf under a signed checkpoint, its opening, and the checkpoint."""
        asked = (_NEWEST_NOTED, (log,)) if as_of is None else (_FIRST_NOTED, (as_of, log))
        rows = fetch_all(self._connection, *asked)
        if not rows:
            self._id(log)
            self.signed(as_of)
        size, note, at_us, of_log, *opened = rows[0]
        if as_of is not None and size != as_of:
            problem = f"the checkpoint of `{as_of}` was never signed: ask for the next signed one, of `{size}`"
            raise ProofError(problem, as_of=as_of, next=size)
        if opened[0] is None:
            self._id(log)
            problem = f"the signed checkpoint of `{size}` covers nothing of log `{log}`"
            raise ProofError(problem if as_of is not None else f"{problem} yet; {SIGN}", log=log)
        self._ids[log] = of_log
        return opened[0], _opening(opened), SignedNote(size, bytes(note), at_us)

    def _newest_leaf(self, log: str, below: int | None) -> tuple[int, RootLeafOpening] | None:
        """Return the last root leaf of a sub-log, among the first `below`."""
        query = _OPENINGS + "WHERE r.log = ? AND r.idx < ? ORDER BY r.size DESC LIMIT 1"
        rows = fetch_all(self._connection, query, (self._id(log), _ANY_IDX if below is None else below))
        return (rows[0][0], _opening(rows[0])) if rows else None

    def _covered(self, log: str, size: int) -> None:
        held = self._connection.scalar(select(logs.c.size).where(logs.c.id == self._id(log))) or 0
        if size > held:
            raise ProofError(f"log `{log}` has `{held}` leaves, not `{size}`", log=log, size=size)

    def _id(self, log: str) -> int:
        log_id = self._ids.get(log)
        if log_id is None:
            rows = fetch_all(self._connection, _LOG, (log,))
            if not rows:
                raise ProofError(f"the ledger has no log `{log}`", log=log)
            log_id = int(rows[0][0])
            self._ids[log] = log_id
        return log_id


class _KeptTiles(NamedTuple):
    """Tiles that were read."""

    held: dict[tuple[int, int, int], bytes]

    def tile(self, level: int, index: int, width: int) -> bytes:
        """One of them."""
        return self.held[level, index, width]


_PROOFS_AT_ONCE = 32  # SQLite takes 500 questions in one
# Statements as text: a proof asks several questions, and each would be made from its expression again.
_LOG = "SELECT id FROM logs WHERE name = ?"
_LEAF = "SELECT leaf FROM events WHERE log = ? AND idx = ?"
_NOTES = "SELECT size, note, at_us FROM signed_checkpoints "
_NEWEST_NOTE = _NOTES + "ORDER BY size DESC LIMIT 1"
_FIRST_NOTE = _NOTES + "WHERE size >= ? ORDER BY size LIMIT 1"
_OPENINGS = "SELECT r.idx, l.name, r.size, r.root, r.salt FROM root_leaves AS r JOIN logs AS l ON l.id = r.log "
_NEWEST_OF_EACH = "(SELECT max(b.idx) FROM root_leaves AS b WHERE b.idx < ? GROUP BY b.log)"
_NEWEST_OPENINGS = _OPENINGS + "WHERE r.idx IN " + _NEWEST_OF_EACH
_NOTED = """
SELECT n.size, n.note, n.at_us, l.id, r.idx, l.name, r.size, r.root, r.salt
FROM ({}) AS n LEFT JOIN logs AS l ON l.name = ? LEFT JOIN root_leaves AS r ON r.idx = (
    SELECT b.idx FROM root_leaves AS b WHERE b.log = l.id AND b.idx < n.size ORDER BY b.size DESC LIMIT 1
)"""
_NEWEST_NOTED, _FIRST_NOTED = _NOTED.format(_NEWEST_NOTE), _NOTED.format(_FIRST_NOTE)
_ANY_IDX = (1 << 63) - 1


def _opening(row: Any) -> RootLeafOpening:
    _, name, size, root, salt = row
    return RootLeafOpening(name, TreeHead(size, bytes(root)), bytes(salt))


def _inclusion(tiles: HalfTiles, idx: int, size: int) -> list[bytes]:
    """Return the path of a leaf, whose stored hashes are read with one query."""
    read_ahead(tiles.path(inclusion_tiles(idx, size, HALF_HEIGHT)))
    return inclusion_proof(tiles, idx, size, HALF_HEIGHT)
