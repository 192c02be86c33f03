"""Tables of cases, projected from their leaves (audit.schema, rule 2 of `ledger`): a row a request, a row a step."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Index, Integer, PrimaryKeyConstraint, Table, Text

from kvcustody.audit.schema.ledger import metadata, of_leaves


def _text(name: str, *, null: bool = False) -> Column[str]:
    return Column(name, Text, nullable=null)


cases = Table(
    "cases",
    metadata,
    Column("log", Integer, nullable=False),
    Column("idx", BigInteger, nullable=False),
    _text("case_id"),
    _text("tenant"),
    _text("subject", null=True),
    _text("subject_right"),
    _text("channel"),
    Column("received_us", BigInteger, nullable=False),
    _text("zone"),
    _text("holidays"),  # ISO dates with a space between
    _text("actor"),
    Column("at_us", BigInteger, nullable=False),
    _text("ends", null=True),  # as `CaseDays.texts`, with a space between
    PrimaryKeyConstraint("log", "idx"),
    Index("ix_cases_case_id", "case_id"),
    info=of_leaves("case-opened"),
)

case_steps = Table(
    "case_steps",
    metadata,
    Column("log", Integer, nullable=False),
    Column("idx", BigInteger, nullable=False),
    _text("case_id"),
    _text("step"),
    _text("outcome"),
    _text("ground"),
    _text("about"),
    _text("reason"),
    _text("digest"),
    _text("actor"),
    Column("at_us", BigInteger, nullable=False),
    PrimaryKeyConstraint("log", "idx"),
    Index("ix_case_steps_case_id", "case_id"),
    info=of_leaves("case-step"),
)
