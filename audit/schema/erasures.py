"""Tables of erasures in each process, projected from their leaves (audit.schema, rule 2 of `ledger`)."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Index, Integer, PrimaryKeyConstraint, Table, Text

from kvcustody.audit.schema.ledger import metadata, of_leaves


def _erasure_table(name: str, kind: str, *columns: Column[int] | Column[str]) -> Table:
    return Table(
        name,
        metadata,
        Column("log", Integer, nullable=False),
        Column("idx", BigInteger, nullable=False),
        Column("incarnation", Integer, nullable=False),
        Column("erasure", Text, nullable=False),
        *columns,
        Column("at_us", BigInteger, nullable=False),
        PrimaryKeyConstraint("log", "idx"),
        Index(f"ix_{name}_erasure", "erasure"),
        info=of_leaves(kind),
    )


def _number(name: str) -> Column[int]:
    return Column(name, BigInteger, nullable=False)


erasure_effects = _erasure_table(
    "erasure_effects",
    "erasure-applied",
    Column("part", Integer, nullable=False),
    _number("requests"),
    _number("finishing"),
    _number("residencies"),
    _number("blocks"),
    _number("low"),
    _number("high"),
)
erasure_remains = _erasure_table(
    "erasure_remains",
    "erasure-remaining",
    Column("part", Integer, nullable=False),
    Column("reason", Text, nullable=False),
    _number("blocks"),
    _number("low"),
    _number("high"),
)
erasure_rereads = _erasure_table(
    "erasure_rereads", "erasure-reread", _number("checked"), _number("changed"), _number("nonzero")
)
