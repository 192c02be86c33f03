"""Tables whose rows are functions of one leaf each, declared by the kinds of events (`audit.kinds.row`).

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
from kvcustody.audit.kinds.epoch_events import EpochRaised, EpochsTaken
from kvcustody.audit.kinds.ledger_events import GapRecorded, HitCounters
from kvcustody.audit.kinds.registry import KINDS
from kvcustody.audit.kinds.route_events import RouteFound, RouteSent
from kvcustody.audit.kinds.row import TRACES, Kept, LeafRow, RowColumn
from kvcustody.audit.leaf.leaf_schema import SCHEMAS, LeafSchema
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
    """Return the span of a leaf in its log, as the index of subjects has it (`by_subject`)."""
    return idx // literal_column(str(SPAN_LEAVES), Integer)


def table_of(row: LeafRow | None) -> Table:
    """Return the table of a row that kinds declare."""
    assert row is not None
    kinds = [kind for kind in KINDS if kind.row is not None and kind.row.table == row.table]
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


residencies = table_of(ResidencyOpened.row)
attachments = table_of(BlocksAttached.row)
releases = table_of(ResidencyReleased.row)
custody_ends = table_of(CustodyEnded.row)
receipts = table_of(ReceiptRecorded.row)
decisions = table_of(DecisionRecorded.row)
hit_counters = table_of(HitCounters.row)
erasures = table_of(ErasureRequested.row)
erasure_effects = table_of(ErasureApplied.row)
erasure_remains = table_of(ErasureRemaining.row)
erasure_rereads = table_of(ErasureReread.row)
erasure_results = table_of(ErasureCompleted.row)
orphan_scans = table_of(OrphanScanned.row)
orphan_findings = table_of(OrphanFound.row)
outages = table_of(GapRecorded.row)
copy_steps = table_of(CopiesStored.row)
transfer_decisions = table_of(TransferDecided.row)
cases = table_of(CaseOpened.row)
case_steps = table_of(CaseStepped.row)
policy_revisions = table_of(PolicyActivated.row)
retention_purges = table_of(RetentionPurged.row)
legal_holds = table_of(LegalHoldChanged.row)
epoch_raises = table_of(EpochRaised.row)
epochs_taken = table_of(EpochsTaken.row)
routes_sent = table_of(RouteSent.row)
routes_found = table_of(RouteFound.row)
event_traces = table_of(TRACES)
Index("ix_residencies_log_subject", residencies.c.log, span_of(residencies.c.idx), residencies.c.subject)
