"""Which objects a tier has: by name, in flat columns, at most 200 bytes each.

    index = TierIndex()
    index.add(name, IndexRow(...))
    at = index.find(name)                  # a row, or -1
    ends = index.ends_among(keys)          # which of a chain's keys may be the last of an object that is here
    rows = index.rows(index.column("due_us") <= now_us)

1. A look-up is a probe of one table of row numbers (linear probing, at most half full): its cost does not grow with
   what is there. Rows of the living are not moved.
2. `domain`, `subject` and `bucket` are small numbers that the owner of the index gives meaning to.
3. Each name costs a keyed digest. So a filter of counters over last keys first shows for which keys a name is worth
   making. It lets one in eight through in vain, and never denies a name that exists.
4. Times are UTC in microseconds.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

NAME_BYTES = 32
_EMPTY, _GONE = -1, -2
_ROWS_MIN = 1024
_COUNTERS = 4  # for each place of the table
_STAYS = 255  # a counter that came so far is not counted down
_LAST_BYTES, _KEY_WORDS = 4, 8  # of a 32-byte key the first word places it in the filter
_COLUMNS = (
    ("number", "q"),
    ("born_us", "q"),
    ("ceiling_us", "q"),
    ("due_us", "q"),
    ("sealed_due_us", "q"),
    ("size", "q"),
    ("depth", "I"),
    ("blocks", "I"),
    ("domain", "I"),
    ("subject", "I"),
    ("bucket", "I"),
    ("last", "I"),
    ("used", "q"),
    ("living", "B"),
)


class IndexRow(NamedTuple):
    """What is known of one object, in the order of the columns. Times are the tier's UTC, in microseconds.

    `number` 0: another worker's. `due_us` may become sooner than what was sealed with the object. `last` is of its last
    block's key (`last_of`).
    """

    number: int
    born_us: int
    ceiling_us: int
    due_us: int
    sealed_due_us: int
    size: int
    depth: int
    blocks: int
    domain: int
    subject: int
    bucket: int
    last: int = 0


def last_of(key: bytes) -> int:
    """What an index keeps of the key of an object's last block."""
    return int.from_bytes(key[:_LAST_BYTES], "little")


class TierIndex:
    """Objects of one tier. Not thread-safe."""

    def __init__(self) -> None:
        self._names = bytearray()
        self._columns = {name: array(code) for name, code in _COLUMNS}
        named = self._columns
        self._due, self._domain = named["due_us"], named["domain"]
        self._depth, self._blocks = named["depth"], named["blocks"]
        self._table = array("i", [_EMPTY]) * (2 * _ROWS_MIN)
        self._ends = bytearray(_COUNTERS * len(self._table))
        self._filled = 0  # places of the table that are not empty
        self._free: list[int] = []
        self._rows = 0
        self._clock = 0
        self.size = 0  # bytes of all that is there

    def __len__(self) -> int:
        return self._rows - len(self._free)

    def find(self, name: bytes) -> int:
        """The row of `name`; -1 where it is not there."""
        table, mask = self._table, len(self._table) - 1
        at = int.from_bytes(name[:8], "little") & mask
        while (row := table[at]) != _EMPTY:
            if row >= 0 and self._names[NAME_BYTES * row : NAME_BYTES * row + NAME_BYTES] == name:
                return row
            at = (at + 1) & mask
        return -1

    def ends_among(self, keys: bytes) -> list[int]:
        """How many of these 32-byte keys each object may span that ends with one of them, in order (rule 3)."""
        lasts = np.frombuffer(keys, "<u4")[::_KEY_WORDS]
        ends = np.frombuffer(self._ends, np.uint8)
        return (np.flatnonzero(ends[lasts & np.uint32(len(ends) - 1)]) + 1).tolist()

    def may_end(self, key: bytes) -> bool:
        """Whether an object may be here that ends with the block of this key (rule 3)."""
        return self._ends[int.from_bytes(key[:_LAST_BYTES], "little") & (len(self._ends) - 1)] > 0

    def reaches(self, row: int, domain: int, depth: int, end: int, now_us: int) -> bool:
        """Whether an object of the domain that is not due goes from `depth`, or from before it, to `end`."""
        begin = self._depth[row]
        return (
            self._domain[row] == domain
            and begin <= depth
            and begin + self._blocks[row] == end
            and self._due[row] > now_us
        )

    def add(self, name: bytes, what: IndexRow) -> int:
        """A new object, which must not be there; returns its row."""
        if 2 * (self._filled + 1) > len(self._table):
            self._rebuild()
        row = self._free.pop() if self._free else self._grow()
        self._names[NAME_BYTES * row : NAME_BYTES * row + NAME_BYTES] = name
        self._clock += 1
        for column, value in zip(self._columns.values(), (*what, self._clock, 1), strict=True):
            column[row] = value
        self._place(name, row)
        self._count(what.last)
        self.size += what.size
        return row

    def row(self, row: int) -> IndexRow:
        """All that is known of a living row."""
        return IndexRow(*(self._columns[name][row] for name in IndexRow._fields))

    def note_use(self, row: int) -> None:
        """It was used: it is evicted after all that was not since."""
        self._clock += 1
        self._columns["used"][row] = self._clock

    def remove(self, row: int) -> None:
        """It is not there any more. Its name is overwritten."""
        name = self.name(row)
        table, mask = self._table, len(self._table) - 1
        at = int.from_bytes(name[:8], "little") & mask
        while table[at] != row:
            at = (at + 1) & mask
        table[at] = _GONE
        self._names[NAME_BYTES * row : NAME_BYTES * row + NAME_BYTES] = bytes(NAME_BYTES)
        self._columns["living"][row] = 0
        at = self._columns["last"][row] & (len(self._ends) - 1)
        if self._ends[at] != _STAYS:
            self._ends[at] -= 1
        self._columns["last"][row] = 0
        self.size -= self._columns["size"][row]
        self._free.append(row)

    def name(self, row: int) -> bytes:
        """The name of a row."""
        return bytes(self._names[NAME_BYTES * row : NAME_BYTES * row + NAME_BYTES])

    def value(self, column: str, row: int) -> int:
        """One value of a living row."""
        return int(self._columns[column][row])

    def shorten(self, row: int, due_us: int) -> None:
        """It is due sooner from now on."""
        self._columns["due_us"][row] = due_us

    def column(self, name: str) -> NDArray[np.int64]:
        """One column over all rows, living or not, copied."""
        return np.array(self._columns[name], dtype=np.int64)

    def rows(self, chosen: NDArray[np.bool_]) -> list[int]:
        """The living rows among `chosen`, a truth value for each row."""
        return [int(row) for row in np.flatnonzero(chosen & (self.column("living") > 0))]

    def least_used(self, count: int, among: NDArray[np.bool_] | None = None) -> list[int]:
        """So many living rows, of `among` where that is given, those first that were not used for longest."""
        living = self.column("living") > 0
        rows = np.flatnonzero(living if among is None else living & among)
        used = self.column("used")[rows]
        if count < len(rows):
            nearest = np.argpartition(used, count)[:count]
            rows, used = rows[nearest], used[nearest]
        return [int(row) for row in rows[np.argsort(used)]]

    def renumber(self, *columns: str, first: int | None = None) -> list[int]:
        """Give the values of these columns, which share a numbering, new numbers from 0 on; the old ones, in order.

        `first`: an old number that becomes 0, whether it is used or not.
        """
        rows = np.flatnonzero(self.column("living"))
        used = {int(value) for name in columns for value in np.unique(self.column(name)[rows])}
        old = [*([] if first is None else [first]), *sorted(used - {first})]
        new = {number: at for at, number in enumerate(old)}
        for name in columns:
            column = self._columns[name]
            for row in rows.tolist():
                column[row] = new[column[row]]
        return old

    def names(self) -> Iterator[tuple[bytes, int]]:
        """Every living name with its row."""
        for row in np.flatnonzero(self.column("living")).tolist():
            yield self.name(row), row

    def _place(self, name: bytes, row: int) -> None:
        table, mask = self._table, len(self._table) - 1
        at = int.from_bytes(name[:8], "little") & mask
        while table[at] >= 0:
            at = (at + 1) & mask
        self._filled += table[at] == _EMPTY
        table[at] = row

    def _count(self, last: int) -> None:
        at = last & (len(self._ends) - 1)
        if self._ends[at] != _STAYS:
            self._ends[at] += 1

    def _grow(self) -> int:
        row = self._rows
        if NAME_BYTES * row == len(self._names):
            more = max(_ROWS_MIN, row // 4)
            self._names += bytes(NAME_BYTES * more)
            for column in self._columns.values():
                column.frombytes(bytes(column.itemsize * more))
        self._rows += 1
        return row

    def _rebuild(self) -> None:
        places = 2 * _ROWS_MIN
        while places < 4 * (len(self) + 1):
            places *= 2
        self._table = array("i", [_EMPTY]) * places
        self._ends = bytearray(_COUNTERS * places)
        self._filled = 0
        for name, row in list(self.names()):
            self._place(name, row)
            self._count(self._columns["last"][row])
