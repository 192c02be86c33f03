"""Proofs from what the ledger has stored: heads, paths and checkpoints, now or as of an earlier checkpoint.

L1 A proof is made from stored hashes alone, except for the leaves beside its own: at most 32 are hashed again, and 512
where a ledger has no half levels (V3).
What the database holds is not checked here; whoever gets a proof checks it, and `fsck` checks the database.
L2 `as_of` is the size of a root checkpoint. What it covers never changes: the same question gives the same answer.
L3 A proof that ends in a signature needs a checkpoint that was signed. Signing runs behind the commits, so the
newest leaves are provable about as long after their commit as the signer's interval.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

from sqlalchemy import Connection, func, select

from kvcustody.audit.merkle import (
    EMPTY_ROOT,
    HALF,
    HALF_HEIGHT,
    HASH_BYTES,
    TreeError,
    TreeHead,
    leaf_hashes,
    parents,
    split_hashes,
)
from kvcustody.audit.proofs import (
    TILE_WIDTH,
    ProofError,
    Tiles,
    consistency_proof,
    inclusion_proof,
    inclusion_tiles,
)
from kvcustody.audit.root_log import HeadProof, LeafProof, Opening, commitment
from kvcustody.audit.schema import events, logs
from kvcustody.audit.tree_schema import ROOT, checkpoints, root_leaves, signed_checkpoints


class StoredCheckpoint(NamedTuple):
    """The root log as one commit left it; `at_us` is the latest time among that commit's leaves."""

    size: int
    root: bytes
    at_us: int

    @property
    def head(self) -> TreeHead:
        """Size and root."""
        return TreeHead(self.size, self.root)


class SignedNote(NamedTuple):
    """A checkpoint as the signer left it: a C2SP note. `at_us` is when it was signed."""

    size: int
    note: bytes
    at_us: int


class LogHead(NamedTuple):
    """A sub-log and its head."""

    name: str
    head: TreeHead


class LedgerProofs:
    """Reads proofs through one connection; holds nothing but the ids of logs."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._ids: dict[str, int] = {}

    # -- heads and checkpoints ------------------------------------------------------------------------------

    def logs(self, *, as_of: int | None = None) -> list[LogHead]:
        """Every sub-log that has leaves, in name order, with its head."""
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
        """How many leaves of every sub-log a checkpoint covers; logs without any are left out."""
        return {log.name: log.head.size for log in self.logs(as_of=as_of)}

    def head(self, log: str, *, as_of: int | None = None) -> TreeHead:
        """The head of a sub-log, empty where a checkpoint covers none of it; raises `ProofError` for no such log."""
        opened = self._newest_leaf(log, None if as_of is None else self.checkpoint(as_of).size)
        return TreeHead(0, EMPTY_ROOT) if opened is None else opened[1].head

    def checkpoint(self, as_of: int | None = None) -> StoredCheckpoint:
        """The newest checkpoint, or the one of this root log size; raises `ProofError` where there is none."""
        query = select(checkpoints.c.size, checkpoints.c.root, checkpoints.c.at_us)
        if as_of is not None:
            query = query.where(checkpoints.c.size == as_of)
        row = self._connection.execute(query.order_by(checkpoints.c.size.desc()).limit(1)).first()
        if row is None:
            what = "no checkpoint yet" if as_of is None else f"no checkpoint of `{as_of}` root leaves"
            raise ProofError(f"the ledger has {what}", as_of=as_of)
        return StoredCheckpoint(row.size, bytes(row.root), row.at_us)

    def signed_or_none(self, size: int | None = None) -> SignedNote | None:
        """The newest signed checkpoint, or the first one that covers `size` root leaves; None where there is none."""
        table = signed_checkpoints
        query = select(table.c.size, table.c.note, table.c.at_us)
        if size is None:
            query = query.order_by(table.c.size.desc())
        else:
            query = query.where(table.c.size >= size).order_by(table.c.size)
        row = self._connection.execute(query.limit(1)).first()
        return None if row is None else SignedNote(row.size, bytes(row.note), row.at_us)

    def signed(self, size: int | None = None) -> SignedNote:
        """`signed_or_none`; raises `ProofError` where there is none (L3)."""
        found = self.signed_or_none(size)
        if found is None:
            raise ProofError(
                "no checkpoint that covers this is signed yet; try again, or see the signer's status"
            )
        return found

    # -- leaves and paths -----------------------------------------------------------------------------------

    def leaf(self, log: str, idx: int) -> bytes:
        """The bytes of a leaf; raises `ProofError` where they are not there."""
        query = select(events.c.leaf).where(events.c.log == self._id(log), events.c.idx == idx)
        found = self._connection.scalar(query)
        if found is None:
            raise ProofError(f"log `{log}` holds no leaf `{idx}`", log=log, idx=idx)
        return bytes(found)

    def tiles(self, log: str | None) -> Tiles:
        """The stored hashes of a sub-log, or of the root log (None), in the tiles of the specification."""
        return self._stored(log)

    def consistency(self, log: str, old_size: int, size: int) -> list[bytes]:
        """The path that shows that a sub-log of `size` leaves extends the one of `old_size`."""
        self._covered(log, size)
        return consistency_proof(self._halves(log), old_size, size, HALF_HEIGHT)

    def root_consistency(self, old_size: int, size: int) -> list[bytes]:
        """The same for the root log: what a witness and a reader with an older checkpoint ask for."""
        newest = self.checkpoint().size
        if size > newest:
            raise ProofError(f"the root log has `{newest}` leaves, not `{size}`", size=size)
        return consistency_proof(self._halves(None), old_size, size, HALF_HEIGHT)

    def head_proof(self, log: str, *, as_of: int | None = None) -> HeadProof:
        """Shows a sub-log's head under a signed checkpoint: the newest, or the one of this size."""
        note = self._note(as_of)
        found = self._newest_leaf(log, note.size)
        if found is None:
            raise ProofError(f"the signed checkpoint of `{note.size}` covers nothing of log `{log}`", log=log)
        return self._under(*found, note)

    def inclusion(self, log: str, idx: int, *, as_of: int | None = None) -> LeafProof:
        """Shows that a leaf is at `idx` of a sub-log under a signed checkpoint; raises `ProofError` (L3)."""
        head = self.head_proof(log, as_of=as_of)
        return self.inclusion_under(head, idx)

    def inclusion_under(self, head: HeadProof, idx: int) -> LeafProof:
        """The same under the proof of the sub-log's head, which serves many leaves."""
        opening = head.opening
        path = _inclusion(self._halves(opening.name), idx, opening.head.size)
        return LeafProof(idx, tuple(path), head)

    def openings(self, first: int, last: int) -> list[Opening]:
        """What opens the root leaves `first` up to but not including `last`."""
        query = _OPENINGS.where(root_leaves.c.idx >= first, root_leaves.c.idx < last).order_by(
            root_leaves.c.idx
        )
        return [_opening(row) for row in self._connection.execute(query)]

    # -- helpers --------------------------------------------------------------------------------------------

    def _stored(self, log: str | None) -> _StoredTiles:
        return _RootTiles(self._connection) if log is None else _LogTiles(self._connection, self._id(log))

    def _halves(self, log: str | None) -> _HalfTiles:
        return _HalfTiles(self._stored(log))

    def _note(self, as_of: int | None) -> SignedNote:
        note = self.signed(as_of)
        if as_of is not None and note.size != as_of:
            problem = f"the checkpoint of `{as_of}` is not signed; the next signed one has `{note.size}`"
            raise ProofError(problem, as_of=as_of, next=note.size)
        return note

    def _under(self, idx: int, opening: Opening, note: SignedNote) -> HeadProof:
        path = _inclusion(self._halves(None), idx, note.size)
        return HeadProof(opening, idx, tuple(path), note.note)

    def _newest_leaf(self, log: str, below: int | None) -> tuple[int, Opening] | None:
        """The last root leaf of a sub-log, among the first `below`."""
        query = (
            _OPENINGS.where(root_leaves.c.log == self._id(log)).order_by(root_leaves.c.size.desc()).limit(1)
        )
        if below is not None:
            query = query.where(root_leaves.c.idx < below)
        row = self._connection.execute(query).first()
        return None if row is None else (row.idx, _opening(row))

    def _covered(self, log: str, size: int) -> None:
        held = self._connection.scalar(select(logs.c.size).where(logs.c.id == self._id(log))) or 0
        if size > held:
            raise ProofError(f"log `{log}` has `{held}` leaves, not `{size}`", log=log, size=size)

    def _id(self, log: str) -> int:
        found = self._ids.get(log)
        if found is None:
            found = self._connection.scalar(select(logs.c.id).where(logs.c.name == log))
            if found is None:
                raise ProofError(f"the ledger has no log `{log}`", log=log)
            self._ids[log] = found
        return found


_OPENINGS = select(
    root_leaves.c.idx, logs.c.name, root_leaves.c.size, root_leaves.c.root, root_leaves.c.salt
).join(logs, logs.c.id == root_leaves.c.log)


def _opening(row: Any) -> Opening:
    _, name, size, root, salt = row
    return Opening(name, TreeHead(size, bytes(root)), bytes(salt))


def _inclusion(tiles: _HalfTiles, idx: int, size: int) -> list[bytes]:
    """The path of a leaf, its stored hashes read with one question."""
    tiles.read_ahead(inclusion_tiles(idx, size, HALF_HEIGHT))
    return inclusion_proof(tiles, idx, size, HALF_HEIGHT)


# Statements as text: a proof asks several questions, and each would be made from its expression again.
_PLACES = "log = ? AND idx >= ? AND idx < ?"
_NODES = f"SELECT level, idx, hash FROM tree_nodes WHERE level = ? AND {_PLACES}"  # noqa: S608 - our own names
_STORED = f"SELECT idx, hash FROM tree_nodes WHERE level = 0 AND {_PLACES}"  # noqa: S608 - our own names
_LEAVES = f"SELECT idx, leaf FROM events WHERE {_PLACES}"  # noqa: S608 - our own names
_OPENED = (
    "SELECT r.idx, l.name, r.size, r.root, r.salt FROM root_leaves AS r JOIN logs AS l ON l.id = r.log"
    " WHERE r.idx >= ? AND r.idx < ?"
)
_Range = tuple[int, int, int]  # of a level: start and end


class _StoredTiles(ABC):
    """Tiles whose upper levels are rows of `tree_nodes`."""

    def __init__(self, connection: Connection, log: int) -> None:
        self._connection = connection
        self._log = log
        self._ahead: dict[_Range, bytes] = {}

    def tile(self, level: int, index: int, width: int) -> bytes:
        """The first `width` hashes of a tile; raises `TreeError` when they are not there."""
        return self.row(level, index * TILE_WIDTH, index * TILE_WIDTH + width)

    def row(self, level: int, start: int, end: int) -> bytes:
        """The hashes [start, end) of a level; raises `TreeError` when they are not there."""
        hashes = self.stored(level, start, end)
        if len(hashes) != (end - start) * HASH_BYTES:
            index = start // TILE_WIDTH
            raise TreeError(
                f"tile `{level}/{index}` of log `{self._log}` is incomplete; run `kvcustody audit fsck`",
                level=level,
                index=index,
            )
        return hashes

    def stored(self, level: int, start: int, end: int) -> bytes:
        """Those hashes of [start, end) that this level has."""
        place = (level, start, end)
        if place not in self._ahead:
            self.read_ahead([place])
        return self._ahead.pop(place)

    def read_ahead(self, ranges: Sequence[_Range]) -> None:
        """Have the hashes of these ranges at hand for `stored`: one question for leaves, one for all levels above."""
        leaves = [(start, end) for level, start, end in ranges if level == 0]
        nodes = [(level, self._log, start, end) for level, start, end in ranges if level]
        found: dict[tuple[int, int], bytes] = {
            (level, idx): bytes(hash_) for level, idx, hash_ in (self._rows(_NODES, nodes) if nodes else ())
        }
        if leaves:
            found |= {(0, idx): hash_ for idx, hash_ in self._leaf_hashes(leaves).items()}
        for level, start, end in ranges:
            row = (found.get((level, idx), b"") for idx in range(start, end))
            self._ahead[(level, start, end)] = b"".join(row)

    def _rows(self, statement: str, each: Sequence[tuple[int, ...]]) -> Sequence[Any]:
        """What a statement gives for each of these values, with one question; in any order."""
        whole = " UNION ALL ".join([statement] * len(each))
        marked = whole if self._connection.dialect.name == "sqlite" else whole.replace("?", "%s")
        return self._connection.exec_driver_sql(marked, tuple(chain.from_iterable(each))).all()

    @abstractmethod
    def _leaf_hashes(self, ranges: Sequence[tuple[int, int]]) -> dict[int, bytes]:
        """The hashes of the leaves in these ranges by their idx."""


class _HalfTiles:
    """The same tree in tiles of 16 hashes: every other level is a half level."""

    def __init__(self, tiles: _StoredTiles) -> None:
        self._tiles = tiles

    def read_ahead(self, tiles: Sequence[tuple[int, int, int]]) -> None:
        """Have these tiles (level, index, width) at hand."""
        places = ((*divmod(level, 2), index << HALF_HEIGHT, width) for level, index, width in tiles)
        self._tiles.read_ahead(
            [(whole + HALF * half, start, start + width) for whole, half, start, width in places]
        )

    def tile(self, level: int, index: int, width: int) -> bytes:
        """The first `width` hashes of a tile; what no half level holds is hashed from the level below."""
        whole, half = divmod(level, 2)
        start = index << HALF_HEIGHT
        end = start + width
        if not half:
            return self._tiles.row(whole, start, end)
        hashes = self._tiles.stored(HALF + whole, start, end)
        if len(hashes) == width * HASH_BYTES:
            return hashes
        below = split_hashes(self._tiles.row(whole, start << HALF_HEIGHT, end << HALF_HEIGHT))
        for _ in range(HALF_HEIGHT):
            below = parents(below)
        return b"".join(below)


class _LogTiles(_StoredTiles):
    """Level 0 is hashed from the leaves; where retention dropped some, their stored hashes stand for them."""

    def _leaf_hashes(self, ranges: Sequence[tuple[int, int]]) -> dict[int, bytes]:
        places = [(self._log, start, end) for start, end in ranges]
        rows = self._rows(_LEAVES, places)
        found = dict(zip((idx for idx, _ in rows), leaf_hashes(leaf for _, leaf in rows), strict=True))
        if len(found) < sum(end - start for start, end in ranges):
            found = {idx: bytes(hash_) for idx, hash_ in self._rows(_STORED, places)} | found
        return found


class _RootTiles(_StoredTiles):
    """Level 0 is hashed from the openings."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection, ROOT)

    def _leaf_hashes(self, ranges: Sequence[tuple[int, int]]) -> dict[int, bytes]:
        rows = self._rows(_OPENED, ranges)
        names = {name: name.encode() for name in {row[1] for row in rows}}
        made = (commitment(names[name], size, bytes(root), bytes(salt)) for _, name, size, root, salt in rows)
        return dict(zip((row[0] for row in rows), leaf_hashes(made), strict=True))
