"""The table by which the leaves of a trace are found: one row for each leaf that carries one, and none for the others.

A projection of leaves. `at_us` is the leaf's, so that a page of a trace is read off the index in the order of
pages, however many leaves somebody puts under one trace.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Index, Integer, PrimaryKeyConstraint, String, Table

from kvcustody.audit.schema.ledger import metadata

event_traces = Table(
    "event_traces",
    metadata,
    Column("log", Integer, nullable=False),
    Column("idx", BigInteger, nullable=False),
    Column("trace", String(32), nullable=False),
    Column("at_us", BigInteger, nullable=False),
    PrimaryKeyConstraint("log", "idx"),
    Index("ix_event_traces_trace", "trace", "log", "at_us", "idx"),
)
