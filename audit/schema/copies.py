"""Tables of copies off the device, projected from their leaves (audit.schema, rule 2 of `ledger`).

A row of `copy_steps` is of one leaf, which lists the copies: how many they are, and between which numbers (`low`,
`high`), so that who asks for some copies reads few leaves.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Index, Integer, PrimaryKeyConstraint, String, Table, Text, text

from kvcustody.audit.schema.ledger import metadata, of_leaves


def _number(name: str) -> Column[int]:
    return Column(name, BigInteger, nullable=False)


def _text(name: str, *, null: bool = False) -> Column[str]:
    return Column(name, Text, nullable=null)


copy_steps = Table(
    "copy_steps",
    metadata,
    Column("log", Integer, nullable=False),
    _number("idx"),
    Column("incarnation", Integer, nullable=False),
    Column("step", String(32), nullable=False),  # the kind of the leaf
    _text("tier"),
    _text("tenant", null=True),
    _text("classification"),
    _text("cause"),
    _text("erasure"),
    _number("copies"),
    _number("numbers"),  # their sum: two sides are compared by it, and no leaf is read
    _number("blocks"),
    _number("bytes"),
    _number("low"),
    _number("high"),
    _number("at_us"),
    PrimaryKeyConstraint("log", "idx"),
    Index("ix_copy_steps_incarnation", "incarnation", "tier", "step", "low"),
    Index("ix_copy_steps_erasure", "erasure"),
    info=of_leaves("copies-stored", "copies-ended", "copies-destroyed"),
)

transfer_decisions = Table(
    "transfer_decisions",
    metadata,
    Column("log", Integer, nullable=False),
    _number("idx"),
    Column("incarnation", Integer, nullable=False),
    _text("action"),
    _text("tier"),
    _text("tenant"),
    _number("residency"),
    _number("blocks"),
    _number("bytes"),
    _number("transfer_us"),
    _number("recompute_us"),
    _text("choice"),
    _text("outcome"),
    _number("actual_us"),
    _text("reason"),
    _number("at_us"),
    Column("part_blocks", BigInteger, nullable=False, server_default="0"),
    Column("latency_class", Text, nullable=False, server_default=text("''")),
    PrimaryKeyConstraint("log", "idx"),
    Index("ix_transfer_decisions_residency", "incarnation", "residency"),
    Index("ix_transfer_decisions_at", "at_us", "log", "idx"),  # pages, newest first
    info=of_leaves("transfer-decided"),
)
