"""What a database keeps of a kind of leaf beside its bytes: its row and its figures, as plain data.

1. A column has the value of the leaf's key of the same name, and the type of that key. A column of a moment in UTC
   (`due_us`) is taken from the leaf's moment on its process's clock (`due_boot_us`).
2. `of` names another key of the leaf, or what a function of `audit.project` derives (`_blocks`). Derived columns state
   their type.
3. Every row begins with `log` and `idx`, the place of its leaf, and `item` where a leaf may hold several (`has_items`).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple


class Kept(Enum):
    """The way in which a database stores a column."""

    NUMBER = "an integer of 64 bits"
    SMALL = "an integer of 32 bits"
    TEXT = "a text"
    MAYBE_TEXT = "a text or nothing"
    NAME = "a text of at most 32 characters"
    FLAG = "true or false"


class RowColumn(NamedTuple):
    """A column that differs from the leaf's value of the same name and type, or that older ledgers fill with a
    default.
    """

    name: str
    of: str = ""
    kept: Kept | None = None
    default: str | None = None  # what rows from before the column have

    @property
    def source(self) -> str:
        """The leaf's key, or the derived column, from which it is taken."""
        return self.of or self.name


class LeafRow(NamedTuple):
    """The rows of one table that leaves of one kind, or of several kinds, have."""

    table: str
    columns: tuple[RowColumn, ...]
    indexes: Mapping[str, tuple[str, ...]]  # by what `ix_TABLE_` is followed by
    unique: tuple[str, ...] = ()
    has_items: bool = False
    month: str = ""  # the column of the leaf's time, where the table grows with traffic

    @property
    def key(self) -> tuple[str, ...]:
        """The columns that identify a row."""
        return ("log", "idx", "item") if self.has_items else ("log", "idx")


def in_table(
    table: str,
    *columns: str | RowColumn,
    indexes: Mapping[str, tuple[str, ...]] | None = None,
    unique: tuple[str, ...] = (),
    has_items: bool = False,
    month: str = "",
) -> LeafRow:
    """Return the row of a kind; a text among `columns` is the column of the leaf's key of that name."""
    named = tuple(RowColumn(column) if isinstance(column, str) else column for column in columns)
    return LeafRow(table, (ITEM, *named) if has_items else named, indexes or {}, unique, has_items, month)


class LeafFigures(NamedTuple):
    """The sums over leaves of a kind, besides their number."""

    by: str = ""  # the key whose values have figures of their own; empty: none
    sums: Mapping[str, str] = MappingProxyType({})  # by measure: a run list, for the blocks of the part, or another key


ITEM = RowColumn("item", kept=Kept.SMALL, default="0")  # which one of its leaf; 0: the leaf is no list
INCARNATION = RowColumn("incarnation", "_incarnation", Kept.SMALL)  # whose process the leaf is about
PART = RowColumn("part", kept=Kept.SMALL)
BLOCKS = RowColumn("blocks", "_blocks", Kept.NUMBER)  # of the leaf's own part
LOW, HIGH = (RowColumn(name, f"_{name}", Kept.NUMBER) for name in ("low", "high"))  # generations of its runs
LEAF_US = RowColumn("at_us", "_leaf_us", Kept.NUMBER)  # when the leaf is of; an item of it may be earlier
TRACES = in_table(
    "event_traces",
    RowColumn("trace", kept=Kept.NAME),
    "at_us",
    indexes={"trace": ("trace", "log", "at_us", "idx")},
    month="at_us",
)
"""The row by which a trace finds its leaves: of every kind, where the leaf carries a trace."""
