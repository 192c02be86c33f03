"""Tables whose rows are functions of one leaf each, as the kinds of events declare them (`audit.kinds.row`).

A row is keyed by the place of its leaf, and only ever inserted. Which columns a table has, and of which leaves, is said
with the kind; here stands only how a database keeps them.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ColumnElement,
    Index,
    Integer,
    PrimaryKeyConstraint,
    String,
    Table,
    Text,
    UniqueConstraint,
    literal_column,
    text,
)
from sqlalchemy.types import TypeEngine

from kvcustody.audit.kinds.case_events import CaseOpened, CaseStepped
from kvcustody.audit.kinds.control_events import (
    DecisionRecorded,
    LegalHoldChanged,
    PolicyActivated,
    RetentionPurged,
)
from kvcustody.audit.kinds.copy_events import CopiesStored, TransferDecided
from kvcustody.audit.kinds.custody_events import (
    BlocksAttached,
    CustodyEnded,
    ErasureApplied,
    ErasureCompleted,
    ErasureRemaining,
    ErasureRequested,
    ErasureReread,
    OrphanFound,
    OrphanScanned,
    ReceiptRecorded,
    ResidencyOpened,
    ResidencyReleased,
)
from kvcustody.audit.kinds.event import Event
from kvcustody.audit.kinds.ledger_events import GapRecorded, HitCounters
from kvcustody.audit.kinds.row import TRACES, Kept, LeafRow, RowColumn
from kvcustody.audit.leaf.leaf_schema import KINDS_OF_ROW, SCHEMAS, LeafSchema
from kvcustody.audit.store.schema.ledger import metadata

SPAN_LEAVES = 1024
_KEPT: dict[Kept, TypeEngine[Any]] = {
    Kept.NUMBER: BigInteger(),
    Kept.SMALL: Integer(),
    Kept.TEXT: Text(),
    Kept.MAYBE_TEXT: Text(),
    Kept.NAME: String(32),
    Kept.FLAG: Boolean(),
}


def span_of(idx: ColumnElement[int]) -> ColumnElement[int]:
    """The span of its log that a leaf is in, written as the index of subjects has it (`by_subject`)."""
    return idx // literal_column(str(SPAN_LEAVES), Integer)


def _rows_of(kind: type[Event]) -> Table:
    """The table that a kind has rows in."""
    assert kind.row is not None
    return table_of(kind.row)


def table_of(row: LeafRow) -> Table:
    """The table of a row."""
    kinds = KINDS_OF_ROW.get(row.table, ())
    first = SCHEMAS[kinds[0]] if kinds else None
    return Table(
        row.table,
        metadata,
        Column("log", Integer, nullable=False),
        Column("idx", BigInteger, nullable=False),
        *(_column(column, first) for column in row.columns),
        PrimaryKeyConstraint(*row.key),
        *([UniqueConstraint(*row.unique)] if row.unique else []),
        *(Index(f"ix_{row.table}_{name}", *columns) for name, columns in row.indexes.items()),
        info={
            "row": row,
            "kinds": tuple(SCHEMAS[kind].name for kind in kinds),
            "acting": kinds[0].acting if kinds else "",
        },
    )


def _column(column: RowColumn, leaf: LeafSchema | None) -> Column[Any]:
    kept = column.kept or (Kept.NUMBER if leaf is None else leaf.kept_as(column.source))
    default = None if column.default is None else text(f"'{column.default}'")
    return Column(column.name, _KEPT[kept], nullable=kept is Kept.MAYBE_TEXT, server_default=default)


residencies = _rows_of(ResidencyOpened)
attachments = _rows_of(BlocksAttached)
releases = _rows_of(ResidencyReleased)
custody_ends = _rows_of(CustodyEnded)
receipts = _rows_of(ReceiptRecorded)
decisions = _rows_of(DecisionRecorded)
hit_counters = _rows_of(HitCounters)
erasures = _rows_of(ErasureRequested)
erasure_effects = _rows_of(ErasureApplied)
erasure_remains = _rows_of(ErasureRemaining)
erasure_rereads = _rows_of(ErasureReread)
erasure_results = _rows_of(ErasureCompleted)
orphan_scans = _rows_of(OrphanScanned)
orphan_findings = _rows_of(OrphanFound)
outages = _rows_of(GapRecorded)
copy_steps = _rows_of(CopiesStored)
transfer_decisions = _rows_of(TransferDecided)
cases = _rows_of(CaseOpened)
case_steps = _rows_of(CaseStepped)
policy_revisions = _rows_of(PolicyActivated)
retention_purges = _rows_of(RetentionPurged)
legal_holds = _rows_of(LegalHoldChanged)
event_traces = table_of(TRACES)
Index("ix_residencies_log_subject", residencies.c.log, span_of(residencies.c.idx), residencies.c.subject)
