"""A tree's stored hashes as tiles: rows of `tree_nodes`, and level 0 hashed from the tree's content.

1. What is not there, or not whole, is `TreeError`. What is there is not checked: who gets a proof checks it. Of a tile
   whose leaves retention dropped the root alone is there (`DroppedTileError`).
2. `read_ahead` has the hashes of paths at hand: one question for all upper levels, and one a tree for its leaves,
   asked together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from sqlalchemy import Connection

from kvcustody.audit.leaf.merkle import (
    HALF,
    HALF_HEIGHT,
    HASH_BYTES,
    TreeError,
    leaf_hashes,
    parents,
    split_hashes,
)
from kvcustody.audit.store.database.dialect import Question, dialect_of, fetch_all, fetch_pipelined
from kvcustody.audit.store.schema.trees import ROOT
from kvcustody.audit.tlog.proofs import TILE_WIDTH, ProofError
from kvcustody.audit.tlog.root_log import commitment

_Range = tuple[int, int, int]  # of a level: start and end
_Place = tuple[int, int, int]  # log, level, idx
_Leaves = Sequence[tuple[int, int]]  # start and end of ranges of level 0

# Statements as text: a proof asks several questions, and each would be made from its expression again. Leaves are asked
# for by every idx on PostgreSQL: a range would be planned anew each time, for each month of leaves.
_NODES = "SELECT log, level, idx, hash FROM tree_nodes WHERE log = ? AND level = ? AND idx >= ? AND idx < ?"
_IN_RANGE, _LISTED = "{0} >= ? AND {0} < ?", "{0} = ANY(?)"
_LEAVES = "SELECT idx, leaf FROM events WHERE log = ? AND "
_STORED = "SELECT idx, hash FROM tree_nodes WHERE level = 0 AND log = ? AND "
_OPENED = "SELECT r.idx, l.name, r.size, r.root, r.salt FROM root_leaves AS r JOIN logs AS l ON l.id = r.log WHERE "
_PURGED = """
SELECT l.name, l.size, (SELECT max(p.below) FROM retention_purges AS p WHERE p.of_log = l.name)
FROM logs AS l WHERE l.id = ?"""
_STANDING = """
SELECT min(idx) FROM events WHERE log = ? AND idx >= ?
UNION ALL SELECT min(idx) FROM tree_nodes WHERE level = 0 AND log = ? AND idx >= ?"""


class DroppedTileError(ProofError):
    """A proof needs hashes inside a tile whose leaves retention dropped; only its root is stored.

    `log` by name; `first` is the tile's first leaf, `begins` the leaf from which on places can be proved.
    """

    def __init__(self, log: str, first: int, begins: int) -> None:
        super().__init__(
            f"retention dropped leaves `{first}` to `{first + TILE_WIDTH - 1}` of log `{log}` and kept their root"
            f" alone: ask for leaves from `{begins}` on, for sizes from there on, or multiples of {TILE_WIDTH}",
            log=log,
            first=first,
            begins=begins,
        )
        self.begins = begins


def read_ahead(*paths: tuple[StoredTiles, Sequence[_Range]]) -> None:
    """Prefetch the hashes of these ranges for `StoredTiles.stored` (rule 2)."""
    nodes = [(tiles.log, level, start, end) for tiles, ranges in paths for level, start, end in ranges if level]
    leaves = [[(start, end) for level, start, end in ranges if not level] for _, ranges in paths]
    questions = [tiles.question(some) for (tiles, _), some in zip(paths, leaves, strict=True) if some]
    if nodes:
        questions.append((" UNION ALL ".join([_NODES] * len(nodes)), tuple(chain.from_iterable(nodes))))
    answers = fetch_pipelined(paths[0][0].connection, questions)
    rows = answers.pop() if nodes else ()
    found: dict[_Place, bytes] = {(log, level, idx): bytes(hash_) for log, level, idx, hash_ in rows}
    for (tiles, ranges), some in zip(paths, leaves, strict=True):
        tiles.keep(ranges, found, tiles.hashed(answers.pop(0), some) if some else {})


class StoredTiles(ABC):
    """Tiles whose upper levels are rows of `tree_nodes`."""

    def __init__(self, connection: Connection, log: int) -> None:
        self.connection = connection
        self.log = log
        self._ahead: dict[_Range, bytes] = {}

    def tile(self, level: int, index: int, width: int) -> bytes:
        """Return the first `width` hashes of a tile; raises `TreeError` if they are missing."""
        return self.row(level, index * TILE_WIDTH, index * TILE_WIDTH + width)

    def row(self, level: int, start: int, end: int) -> bytes:
        """Return the hashes [start, end) of a level; raises `TreeError` if they are missing."""
        hashes = self.stored(level, start, end)
        if len(hashes) != (end - start) * HASH_BYTES:
            raise self._incomplete(level, start // TILE_WIDTH)
        return hashes

    def stored(self, level: int, start: int, end: int) -> bytes:
        """Return the hashes of [start, end) that this level stores."""
        place = (level, start, end)
        if place not in self._ahead:
            read_ahead((self, [place]))
        return self._ahead.pop(place)

    def keep(self, ranges: Sequence[_Range], nodes: Mapping[_Place, bytes], leaves: Mapping[int, bytes]) -> None:
        """Keep these ranges for later: hashes of nodes by their place, of leaves by their idx."""
        for level, start, end in ranges:
            places = range(start, end)
            row = [nodes.get((self.log, level, idx)) if level else leaves.get(idx) for idx in places]
            self._ahead[(level, start, end)] = b"".join(filter(None, row))

    def _incomplete(self, level: int, index: int) -> TreeError:
        problem = f"tile `{level}/{index}` of log `{self.log}` is incomplete; run `kvcustody audit fsck`"
        return TreeError(problem, level=level, index=index)

    def _listed(self, statement: str, of: tuple[int, ...], name: str, ranges: _Leaves) -> Question:
        """What asks a statement where the column `name` is in these ranges; answers are in any order."""
        if not dialect_of(self.connection).arrays:
            each = " UNION ALL ".join([statement + _IN_RANGE.format(name)] * len(ranges))
            return each, tuple(chain.from_iterable((*of, *some) for some in ranges))
        every = [idx for start, end in ranges for idx in range(start, end)]
        return statement + _LISTED.format(name), (*of, every)

    @abstractmethod
    def question(self, ranges: _Leaves) -> Question:
        """Return the query for the leaves in these ranges."""

    @abstractmethod
    def hashed(self, rows: Sequence[Any], ranges: _Leaves) -> dict[int, bytes]:
        """Return the hashes of the leaves in these ranges by their idx, from that query's answer."""


class HalfTiles:
    """The same tree in tiles of 16 hashes: every other level is a half level."""

    def __init__(self, tiles: StoredTiles) -> None:
        self._tiles = tiles

    def path(self, tiles: Sequence[tuple[int, int, int]]) -> tuple[StoredTiles, list[_Range]]:
        """Return the argument of `read_ahead` for these tiles (level, index, width)."""
        places = ((*divmod(level, 2), index << HALF_HEIGHT, width) for level, index, width in tiles)
        return self._tiles, [(whole + HALF * half, start, start + width) for whole, half, start, width in places]

    def tile(self, level: int, index: int, width: int) -> bytes:
        """Return the first `width` hashes of a tile; missing half levels are hashed from the level below."""
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


class LogTiles(StoredTiles):
    """Level 0 is hashed from the leaves; stored hashes replace leaves of a tile that retention dropped."""

    def __init__(self, connection: Connection, log: int) -> None:
        super().__init__(connection, log)
        # Those that were read last, by idx: an export reads all, one tile at a time.
        self.leaves: dict[int, bytes] = {}

    def question(self, ranges: _Leaves) -> Question:
        """Return the query for the leaves in these ranges."""
        return self._listed(_LEAVES, (self.log,), "idx", ranges)

    def hashed(self, rows: Sequence[Any], ranges: _Leaves) -> dict[int, bytes]:
        """Return the leaves' hashes by idx."""
        read = {idx: bytes(leaf) for idx, leaf in rows}
        self.leaves = read
        found = dict(zip(read, leaf_hashes(read.values()), strict=True))
        if len(found) < sum(end - start for start, end in ranges):
            stored = fetch_all(self.connection, *self._listed(_STORED, (self.log,), "idx", ranges))
            found = {idx: bytes(hash_) for idx, hash_ in stored} | found
        return found

    def _incomplete(self, level: int, index: int) -> TreeError:
        """Where retention dropped every leaf of the tile and thinned it, what can be asked instead is said."""
        first, end = index * TILE_WIDTH, (index + 1) * TILE_WIDTH
        found = fetch_all(self.connection, _PURGED, (self.log,))
        if level or not found or end > (found[0][2] or 0):
            return super()._incomplete(level, index)
        name, size, _ = found[0]
        standing = [row[0] for row in fetch_all(self.connection, _STANDING, 2 * (self.log, first))]
        begins = min((idx for idx in standing if idx is not None), default=size)
        if begins < end:
            return super()._incomplete(level, index)
        return DroppedTileError(name, first, begins)


class RootTiles(StoredTiles):
    """Level 0 is hashed from the openings."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection, ROOT)

    def question(self, ranges: _Leaves) -> Question:
        """Return the query for the openings of the root leaves in these ranges."""
        return self._listed(_OPENED, (), "r.idx", ranges)

    def hashed(self, rows: Sequence[Any], ranges: _Leaves) -> dict[int, bytes]:
        """Return the hashes of their commitments by idx."""
        names = {name: name.encode() for name in {row[1] for row in rows}}
        made = (commitment(names[name], size, bytes(root), bytes(salt)) for _, name, size, root, salt in rows)
        return dict(zip((row[0] for row in rows), leaf_hashes(made), strict=True))
