"""Recompute one sub-log from its leaves: hashes, nodes, sealed heads, columns, projections and figures.

Where retention dropped leaves, their hashes stand for them; for a tile that it dropped whole, the tile's root does. The
levels above are computed from those. A sealed head that ends inside such a tile cannot be compared here; the root log
still holds it. Leaves may be missing only where a purge is recorded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, compress, repeat
from operator import itemgetter
from typing import Any, NamedTuple

from sqlalchemy import Connection, Row, func, select

from kvcustody.audit.kinds import SYSTEM
from kvcustody.audit.leaf.batch import LeafBatch, read_leaves
from kvcustody.audit.leaf.canonical_leaf import Leaf, canonical, parse
from kvcustody.audit.leaf.leaf_schema import SIGNED_ORDERS
from kvcustody.audit.leaf.merkle import (
    EMPTY,
    HALF,
    HALF_HEIGHT,
    HASH_BYTES,
    Grown,
    TreeHead,
    leaf_hashes,
)
from kvcustody.audit.project import Figures, IncarnationRow, count_events, project
from kvcustody.audit.store.database.dialect import dialect_of
from kvcustody.audit.store.database.signed_orders import SignedOrders, orders_of
from kvcustody.audit.store.schema.leaf_tables import retention_purges
from kvcustody.audit.store.schema.ledger import events, incarnations, metadata
from kvcustody.audit.store.schema.schema_changes import schema_changes
from kvcustody.audit.store.schema.trees import tree_nodes
from kvcustody.audit.tlog.proofs import TILE_WIDTH
from kvcustody.audit.verify.ledger.figure_rows import wrong_figures
from kvcustody.audit.verify.ledger.life_rows import LifeRows
from kvcustody.audit.verify.ledger.row_differences import Projected, differences
from kvcustody.errors import CustodyError

_AT_ONCE = 2048
_COLUMNS = ("sequence", "part", "parts", "kind", "outage", "at_us")  # of `events`, each also in the leaf
_UNREADABLE = (CustodyError, LookupError, TypeError, ValueError, ArithmeticError, AttributeError)
_columns_of = itemgetter(*map(events.columns.keys().index, _COLUMNS))


class FsckFinding(NamedTuple):
    """A violation, in the leaves `idx` to `last` of a log (None: in no leaf).

    `event` is `incarnation/sequence` of the leaf where one is named exactly and readable, else empty.
    """

    log: str
    idx: int | None
    last: int | None
    event: str
    what: str

    def __str__(self) -> str:
        place = (
            ""
            if self.idx is None
            else f" leaf {self.idx}"
            if self.idx == self.last
            else f" leaves {self.idx}-{self.last}"
        )
        event = f" (event {self.event})" if self.event else ""
        return f"{self.log}{place}{event}: {self.what}"


class LogCheck:
    """Checks one log: `leaves` first, then `finish`."""

    def __init__(
        self,
        connection: Connection,
        log: int,
        name: str,
        seals: Sequence[TreeHead],
        tail: Sequence[tuple[int, int]],
    ) -> None:
        """`tail`: sizes at which commits left the log since its last seal, with the times of their newest leaves."""
        self._connection = connection
        self._log = log
        self._name = name
        self._seals = list(seals)
        self._tail = list(tail)
        self._frontier = EMPTY
        self._grown: list[Grown] = []
        self._broken = False  # the tree: what follows a bad seal says nothing new
        self._lives = {
            row.uuid: IncarnationRow(row.id, row.offset_us)
            for row in connection.execute(select(incarnations.c.uuid, incarnations.c.id, incarnations.c.offset_us))
        }
        self._ids = {life.id: uuid for uuid, life in self._lives.items()}
        self._life_rows = LifeRows(connection)
        self._newest_us: int | None = 0  # since the last seal; None: not known, their content is gone
        self.sealed_us: dict[tuple[int, int], int | None] = {}  # the newest leaf of each seal, by log and size
        self._figures = Figures()
        self._unread = False  # a leaf could not be counted
        self.unproved: list[str] = []
        self.size = 0
        below = select(func.max(retention_purges.c.below)).where(retention_purges.c.of_log == name)
        self._dropped_below = int(connection.scalar(below) or 0)  # as far as a purge is on record
        self._dropped_tiles: list[range] = []
        self._purged_end = 0
        self.purged = 0  # leaves without content
        self.segmented = 0  # of those, leaves that stand by the roots of their tiles
        self.unsealed = 0
        self.problems: list[FsckFinding] = []
        self.orders: list[FsckFinding] = []  # sound leaves that nobody follows (`signed_orders`)
        self._signed_orders = orders_of(connection)
        self._besides = {
            metadata.tables[row.of_table]: frozenset(row.added.split())
            for row in connection.execute(select(schema_changes))
            if row.of_table in metadata.tables
        }

    def leaves(self) -> Iterator[int]:
        """Check every leaf and everything derived from it; yields the number done."""
        while True:
            rows = self._read()
            if not rows:
                if not self._take_dropped_tiles():
                    return
                yield self.size
                continue
            hashes = self._hashes(rows)
            if hashes is None:
                return
            self._grow(hashes)
            self._note_times(rows)
            self._check_rows(rows)
            yield self.size

    def finish(self, size: int, frontier: bytes) -> None:
        """Compare the end of the log with its recorded size and head."""
        last = max((seal.size for seal in self._seals), default=0)
        if self.size != size:
            self._say(
                min(self.size, size),
                max(self.size, size) - 1,
                f"the log says that it has `{size}` leaves, and has `{self.size}`",
            )
        elif self.size < last:
            self._say(self.size, last - 1, f"`{last}` leaves are sealed, and `{self.size}` are there")
        else:
            if not self._broken and frontier != self._frontier.to_bytes():
                self._say(None, None, "the frontier does not match the leaves")
            self._check_tail(last)
        beyond = select(events.c.idx).where(events.c.log == self._log, events.c.idx >= self.size)
        found = self._connection.scalar(beyond.order_by(events.c.idx).limit(1))
        if found is not None:
            self._say(self.size, int(found) - 1, "leaves are missing before later ones")
        if dialect_of(self._connection).roles:
            self._check_names()
        if self._name == SYSTEM:
            self.problems += [FsckFinding(SYSTEM, None, None, "", what) for what in self._life_rows.wrong()]
            if self._life_rows.unproved:
                self.unproved.append(
                    f"{self._life_rows.unproved} processes in `incarnations` announced no memory and have not "
                    "ended: no leaf has their names"
                )
        if not self._unread:
            for what in wrong_figures(self._connection, self._log, self._figures):
                self._say(None, None, what)
        self.problems += check_node_rows(
            self._connection,
            self._log,
            self._name,
            self.size,
            kept=self.purged - self.segmented,
            dropped=self._dropped_tiles,
            broken=self._broken,
        )
        if self.purged and self._dropped_below < self._purged_end:
            what = f"leaves are gone, and no purge on record is of any from `{self._dropped_below}` on"
            self._say(self._dropped_below, self._purged_end - 1, what)

    def _check_tail(self, sealed: int) -> None:
        """What no checkpoint covers yet, and what `unsealed_heads` says of it."""
        self.unsealed = self.size - sealed
        sizes = [size for size, _ in self._tail]
        if (sizes[-1:] or [sealed]) != [self.size] or not all(sealed < size <= self.size for size in sizes):
            what = f"`{sealed}` of `{self.size}` leaves are sealed, and `unsealed_heads` differs"
            self._say(min(sealed, self.size - 1), self.size - 1, what)
            return
        for size, newest_us in self._tail:
            if self.sealed_us.get((self._log, size)) != newest_us:
                self._say(size - 1, size - 1, f"the time in `unsealed_heads` for the size `{size}` is of no leaf")

    def _check_names(self) -> None:
        """No two leaves of one name; elsewhere an index sees to it."""
        name = (events.c.incarnation, events.c.sequence, events.c.part)
        twice = select(*name, func.max(events.c.idx)).where(events.c.log == self._log).group_by(*name)
        for life, sequence, _, idx in self._connection.execute(twice.having(func.count() > 1)):
            event = f"{self._ids.get(life, life)}/{sequence}"
            self.problems.append(FsckFinding(self._name, idx, idx, event, "another leaf has the same name"))

    # -- leaves and tree ------------------------------------------------------------------------------------

    def _read(self) -> list[tuple[int, Row[Any] | None, bytes | None]]:
        """Return the next places: (idx, row, None), or (idx, None, hash) where retention only kept the hash."""
        start, end = self.size, self.size + _AT_ONCE
        query = select(events).where(events.c.log == self._log, events.c.idx >= start, events.c.idx < end)
        rows = self._connection.execute(query).all()
        rows_by_place = {row.idx: row for row in rows}
        if len(rows_by_place) < len(rows):  # the keys of a partitioned table let two of different times through
            for idx, count in Counter(row.idx for row in rows).items():
                for _ in range(count - 1):
                    self._say(idx, idx, "there is more than one leaf at this place")
        table = tree_nodes
        query = select(table.c.idx, table.c.hash).where(
            table.c.log == self._log, table.c.level == 0, table.c.idx >= start, table.c.idx < end
        )
        stood_for = {row.idx: as_bytes(row.hash) for row in self._connection.execute(query)}
        leaves: list[tuple[int, Row[Any] | None, bytes | None]] = []
        for idx in range(start, end):
            row, hash_ = rows_by_place.get(idx), stood_for.get(idx)
            if row is None and hash_ is None:
                break
            leaves.append((idx, row, None if row is not None else hash_))
        return leaves

    def _hashes(self, rows: list[tuple[int, Row[Any] | None, bytes | None]]) -> list[bytes] | None:
        made = iter(leaf_hashes(as_bytes(row.leaf) for _, row, _ in rows if row is not None))
        hashes = [hash_ if hash_ is not None else next(made) for _, _, hash_ in rows]
        gone = [idx for idx, _, hash_ in rows if hash_ is not None]
        self.purged += len(gone)
        self._purged_end = max(self._purged_end, gone[-1] + 1) if gone else self._purged_end
        self.size += len(rows)
        if {*map(len, hashes)} != {HASH_BYTES}:
            self._say(rows[0][0], rows[-1][0], "a kept hash is not 32 bytes long")
            return None
        return hashes

    def _take_dropped_tiles(self) -> bool:
        """Go on by the roots of whole tiles whose leaves retention dropped; False where there is none here."""
        start = self.size // TILE_WIDTH
        end = min(self._standing(), self._dropped_below) // TILE_WIDTH
        if self.size % TILE_WIDTH or start >= end:
            return False
        table = tree_nodes
        query = select(table.c.idx, table.c.hash).where(
            table.c.log == self._log, table.c.level == 1, table.c.idx >= start, table.c.idx < end
        )
        roots: list[bytes] = []
        for row in self._connection.execute(query.order_by(table.c.idx).limit(_AT_ONCE)):
            root = as_bytes(row.hash)
            if row.idx != start + len(roots) or len(root) != HASH_BYTES:
                break
            roots.append(root)
        if not roots:
            return False
        tiles = range(start, start + len(roots))
        self._dropped_tiles.append(tiles)
        self.size = self._purged_end = tiles.stop * TILE_WIDTH
        self.purged += len(tiles) * TILE_WIDTH
        self.segmented += len(tiles) * TILE_WIDTH
        self._newest_us = None
        self._grow(roots, TILE_WIDTH)
        return True

    def _standing(self) -> int:
        """Return the next existing leaf or own hash; without one, the end of the sealed part."""
        first_places: list[int] = []
        for table, where in ((events, ()), (tree_nodes, (tree_nodes.c.level == 0,))):
            column = table.c.idx
            query = select(func.min(column)).where(table.c.log == self._log, column >= self.size, *where)
            idx = self._connection.scalar(query)
            first_places += [] if idx is None else [int(idx)]
        return min(first_places, default=max((seal.size for seal in self._seals), default=0))

    def _grow(self, hashes: list[bytes], width: int = 1) -> None:
        """Extend the tree seal by seal, and compare each sealed head; each hash is over so many leaves."""
        start = self._frontier.size
        end = start + width * len(hashes)
        self._grown = []
        for seal in [seal for seal in self._seals if start < seal.size <= end and not seal.size % width]:
            before = self._frontier.size
            self._extend(hashes[(before - start) // width : (seal.size - start) // width], width)
            if not self._broken and self._frontier.root() != seal.root:
                self._broken = True
                what = (
                    "the leaf differs from the sealed one"
                    if seal.size - before == 1
                    else "one of these differs from what was sealed"
                )
                self._say(before, seal.size - 1, what)
        self._extend(hashes[(self._frontier.size - start) // width :], width)
        self.problems += check_nodes(self._connection, self._log, self._name, self._grown)

    def _note_times(self, rows: list[tuple[int, Row[Any] | None, bytes | None]]) -> None:
        """The time of the newest leaf under each seal, and under each commit that is not sealed yet."""
        first, start = rows[0][0], 0
        sizes = sorted({*(seal.size for seal in self._seals), *(size for size, _ in self._tail)})
        for size in [size for size in sizes if first < size <= first + len(rows)]:
            self._newest_us = _newest(self._newest_us, rows[start : size - first])
            self.sealed_us[self._log, size] = self._newest_us
            self._newest_us, start = 0, size - first
        self._newest_us = _newest(self._newest_us, rows[start:])

    def _extend(self, hashes: list[bytes], width: int) -> None:
        extend = self._frontier.extend if width == 1 else self._frontier.extend_tiles
        grown: Sequence[Grown]
        self._frontier, grown = extend(hashes, halves=True)
        if not self._broken:
            self._grown += grown

    # -- columns and projections ----------------------------------------------------------------------------

    def _check_rows(self, rows: list[tuple[int, Row[Any] | None, bytes | None]]) -> None:
        if not self._all_sound([row for _, row, _ in rows if row is not None]):
            self._check_each(rows)

    def _all_sound(self, rows: Sequence[Row[Any]]) -> bool:
        """Check a window as a whole; False where anything is wrong, or unknown here: then each leaf is looked at."""
        if not rows:
            return True
        data = [as_bytes(row.leaf) for row in rows]
        try:
            batch = read_leaves(data, canonical=True, hashed=False)
            if not self._as_stored(batch, rows):
                return False
            places = [row.idx for row in rows]
            expected = self._projected(batch, places)
        except _UNREADABLE:
            return False
        count_events(batch, [self._log] * len(rows), self._figures)
        if self._name == SYSTEM:
            self._life_rows.take(parse(each).body for each in data)
        if self._signed_orders is not None:
            signed = [kind in SIGNED_ORDERS for kind in batch.kinds]
            orders = compress(zip(places, data, strict=True), signed)
            self._check_orders(self._signed_orders, [(idx, parse(each)) for idx, each in orders])
        self._compare(range(places[0], places[-1] + 1), expected, dict(zip(places, data, strict=True)))
        return True

    def _as_stored(self, batch: LeafBatch, rows: Sequence[Row[Any]]) -> bool:
        """Return whether each row matches its leaf; `_differing` compares leaf by leaf."""
        said = zip(batch.sequences, batch.parts, batch.of_parts, batch.kinds, batch.outages, batch.at_us, strict=True)
        if list(said) != list(map(_columns_of, rows)) or set(batch.logs) != {self._name}:
            return False
        lives = list(map(self._lives.get, batch.incarnations))
        if [life and life.id for life in lives] != [row.incarnation for row in rows]:
            return False
        for group in batch.groups:
            moments, items = group.columns["boot_us"], group.columns.get("item") or repeat(0)
            for place, boot_us, item in zip(group.places, moments, items, strict=False):
                life = lives[place]
                if not item and (life is None or batch.at_us[place] - boot_us != life.offset_us):
                    return False
        return True

    def _check_each(self, rows: list[tuple[int, Row[Any] | None, bytes | None]]) -> None:
        sound: list[tuple[int, Leaf]] = []
        for _, row, _ in rows:
            if row is not None:
                leaf = self._leaf(row)
                if leaf is not None:
                    sound.append((row.idx, leaf))
        if self._name == SYSTEM:
            self._life_rows.take(leaf.body for _, leaf in sound)
        if self._signed_orders is not None:
            self._check_orders(self._signed_orders, sound)
        if sound:
            self._check_projections(rows[0][0], rows[-1][0], sound)

    def _check_orders(self, orders: SignedOrders, sound: Iterable[tuple[int, Leaf]]) -> None:
        for idx, leaf in sound:
            refused = orders.refusal(leaf.data) if leaf.body["kind"] in SIGNED_ORDERS else None
            if refused is not None:
                event = f"{leaf.body['incarnation']}/{leaf.body['sequence']}"
                what = f"nobody follows this order (`{refused.kind}`): {refused.why}"
                self.orders.append(FsckFinding(self._name, idx, idx, event, what))

    def _leaf(self, row: Row[Any]) -> Leaf | None:
        """Return the leaf, if it is valid and its row matches it."""
        wrong = ""
        try:
            leaf = parse(as_bytes(row.leaf))
            if canonical(dict(leaf.body)) != leaf.data:
                wrong = "the bytes are not in canonical form"
            else:
                wrong = ", ".join(self._differing(leaf, row))
                wrong = wrong and f"its columns contradict its bytes: {wrong}"
        except (CustodyError, KeyError, TypeError, ValueError, RecursionError):
            wrong = "the bytes are not a leaf"
        if not wrong:
            return leaf
        event = f"{self._ids.get(row.incarnation, row.incarnation)}/{row.sequence}"
        self.problems.append(FsckFinding(self._name, row.idx, row.idx, event, wrong))
        self._unread = True
        return None

    def _differing(self, leaf: Leaf, row: Row[Any]) -> Iterator[str]:
        for name, stored in zip(_COLUMNS, _columns_of(row), strict=True):
            said = leaf.body[name]
            is_same = said.__class__ is stored.__class__ and said == stored
            if not is_same and str(said) != str(stored):
                yield name
        if leaf.log != self._name:
            yield "log"
        life = self._lives.get(leaf.body["incarnation"])
        if life is None or life.id != row.incarnation:
            yield "incarnation"
        elif int(leaf.body["at_us"]) - int(leaf.body["boot_us"]) != life.offset_us:
            yield "`offset_us` of its process in `incarnations`"

    def _check_projections(self, first: int, last: int, sound: list[tuple[int, Leaf]]) -> None:
        try:
            expected = self._derive(sound)
        except _UNREADABLE as problem:
            if len(sound) > 1:  # one of them; find out which
                middle = len(sound) // 2
                self._check_projections(first, sound[middle - 1][0], sound[:middle])
                self._check_projections(sound[middle][0], last, sound[middle:])
            else:
                idx, leaf = sound[0]
                self._unread = True
                self._named(idx, leaf, f"nothing can be derived from it: {type(problem).__name__}")
            return
        self._compare(range(first, last + 1), expected, {idx: leaf.data for idx, leaf in sound})

    def _compare(self, places: range, expected: Projected, leaves: Mapping[int, bytes]) -> None:
        for row in differences(self._connection, self._log, places, expected, besides=self._besides):
            if row.idx in leaves:
                what = "is missing" if row.is_missing else "differs from the leaf"
                of = f" of item {row.item}" if row.item else ""
                self._named(row.idx, parse(leaves[row.idx]), f"its row{of} in `{row.table.name}` {what}")

    def _derive(self, sound: list[tuple[int, Leaf]]) -> Projected:
        batch = read_leaves([leaf.data for _, leaf in sound], hashed=False)
        made = self._projected(batch, [idx for idx, _ in sound])
        count_events(batch, [self._log] * len(sound), self._figures)
        return made

    def _projected(self, batch: LeafBatch, places: Sequence[int]) -> Projected:
        return project(batch, [self._log] * len(places), places, self._lives.__getitem__)

    def _named(self, idx: int, leaf: Leaf, what: str) -> None:
        event = f"{leaf.body['incarnation']}/{leaf.body['sequence']}"
        self.problems.append(FsckFinding(self._name, idx, idx, event, what))

    def _say(self, idx: int | None, last: int | None, what: str) -> None:
        self.problems.append(FsckFinding(self._name, idx, last, "", what))


def as_bytes(value: Any) -> bytes:
    """Return a stored value as bytes, whatever a SQLite column contains."""
    return bytes(value) if isinstance(value, (bytes, bytearray, memoryview)) else str(value).encode()


def _newest(before: int | None, rows: list[tuple[int, Row[Any] | None, bytes | None]]) -> int | None:
    """Return the latest time of leaves, and of `before`; None if one has lost its content."""
    if before is None or not rows:
        return before
    times = [row.at_us for _, row, _ in rows if row is not None]
    return max(before, *times) if len(times) == len(rows) else None


def check_node_rows(
    connection: Connection,
    log: int,
    name: str,
    size: int,
    *,
    kept: int = 0,
    dropped: Sequence[range] = (),
    broken: bool,
) -> list[FsckFinding]:
    """Check the number of nodes at each level for a log of this size; `kept` are of level 0.

    A tree that grew before there were half levels has them only from some node on. From there it has each of them,
    except those inside `dropped` tiles.
    """
    problems = []
    column = tree_nodes.c
    inside = TILE_WIDTH >> HALF_HEIGHT
    query = select(column.level, func.count(), func.min(column.idx), func.max(column.idx))
    for level, count, first, last in connection.execute(
        query.where(column.log == log).group_by(column.level).order_by(column.level)
    ):
        due = kept if level == 0 else size // Grown(level, 0, []).width
        begun = first if level >= HALF else 0
        final = due - 1
        for tiles in reversed(dropped) if level == HALF else ():
            absent = range(max(first, inside * tiles.start), inside * tiles.stop)
            final = inside * tiles.start - 1 if final in absent else final
            begun += len(absent)
        if first < 0:
            what = f"`tree_nodes` has a node of level `{level}` at `{first}`, which is not a place of the tree"
        elif level == 0 and count != due:
            what = f"`tree_nodes` keeps `{count}` hashes of leaves, and the content of `{due}` is gone"
        elif level and not broken and (count != due - begun or last != final):
            what = f"`tree_nodes` has `{count}` nodes of level `{level}`, and the leaves give `{due - begun}`"
        else:
            continue
        problems.append(FsckFinding(name, None, None, "", what))
    return problems


def check_nodes(connection: Connection, log: int, name: str, grown: Iterable[Grown]) -> list[FsckFinding]:
    """Compare stored nodes with computed ones, level by level; a differing node's range is the leaves under it.

    A half level that is absent costs a proof time and nothing else; a wrong one is reported.
    """
    problems = []
    table = tree_nodes
    levels: dict[int, list[Grown]] = {}
    for each in grown:
        levels.setdefault(each.level, []).append(each)
    for level, parts in levels.items():
        first, last, width = parts[0].first, parts[-1].first + len(parts[-1].hashes), parts[0].width
        query = select(table.c.idx, table.c.hash).where(
            table.c.log == log, table.c.level == level, table.c.idx >= first, table.c.idx < last
        )
        stored = {row.idx: as_bytes(row.hash) for row in connection.execute(query)}
        for idx, node in enumerate(chain.from_iterable(part.hashes for part in parts), first):
            if stored.get(idx, node if level >= HALF else None) != node:
                what = f"node `{level}/{idx}` over these does not match them"
                problems.append(FsckFinding(name, idx * width, (idx + 1) * width - 1, "", what))
    return problems
