"""The longest time between a leaf and the signature that covers it: how long the newest leaves could change unseen.

1. A leaf is covered by the first signed checkpoint that has it. Leaves of processes that replay or generate history
   state times of their own, and are left out.
2. What is under the report's checkpoint and in its period counts; of one tenant, its own log.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from sqlalchemy import Connection, and_, case, func, select

from kvcustody.audit.kinds import log_of
from kvcustody.audit.reports.section import ReportFacts, ReportReading, Section
from kvcustody.audit.reports.sections.boundary import SECTION as BOUNDARY
from kvcustody.audit.store.schema.all_tables import has_leaf
from kvcustody.audit.store.schema.ledger import events, incarnations, logs
from kvcustody.audit.store.schema.trees import root_leaves, signed_checkpoints


class SignatureWindow(NamedTuple):
    """The longest window: the leaf's log, its time (UTC), and the signature's time. `longest_us` 0: no leaf counts."""

    longest_us: int
    log: str
    at_us: int
    signed_us: int


NO_WINDOW = SignatureWindow(0, "", 0, 0)


def signature_window(reading: ReportReading) -> SignatureWindow:
    """Return the longest window of the period, under the checkpoint."""
    connection, parameters = reading.connection, reading.asked
    column_of = signed_checkpoints.c
    query = select(column_of.size, column_of.at_us).where(column_of.size <= parameters.checkpoint)
    signed = connection.execute(query.order_by(column_of.size)).all()
    names = {row.id: row.name for row in connection.execute(select(logs.c.id, logs.c.name))}
    marked = {one.incarnation for one in reading.marked}
    lives = {row.id for row in connection.execute(select(incarnations)) if row.uuid in marked}
    longest = NO_WINDOW
    sizes = np.array([row.size for row in signed], np.int64)
    for log, size in reading.state.sizes.items():
        if not size or (parameters.tenant is not None and names[log] != log_of(parameters.tenant)):
            continue
        for first, end, place in _spans(connection, log, sizes):
            at_us = _earliest(connection, (log, first, end), reading.since_us, reading.until_us, lives)
            found = int(signed[place].at_us) - at_us if at_us is not None else 0
            if at_us is not None and found > longest.longest_us:
                longest = SignatureWindow(found, names[log], at_us, int(signed[place].at_us))
    return longest


def _spans(connection: Connection, log: int, sizes: np.ndarray) -> list[tuple[int, int, int]]:
    """(first, end, place of the signature) of the leaves that each signature was the first to cover."""
    query = select(root_leaves.c.idx, root_leaves.c.size).where(root_leaves.c.log == log).order_by(root_leaves.c.idx)
    heads = np.array([tuple(row) for row in connection.execute(query)], np.int64).reshape(-1, 2)
    if not len(heads) or not len(sizes):
        return []
    under = np.searchsorted(heads[:, 0], sizes, side="left")
    covered = np.where(under > 0, heads[np.maximum(under - 1, 0), 1], 0)
    made, before = [], 0
    for place, end in enumerate(covered.tolist()):
        if end > before:
            made.append((before, end, place))
            before = end
    return made


def _earliest(
    connection: Connection, span: tuple[int, int, int], since_us: int, until_us: int, marked: set[int]
) -> int | None:
    """When the earliest leaf of a span of a log that counts was written."""
    log, first, end = span
    column = events.c
    counts = [column.at_us >= since_us, column.at_us < until_us, has_leaf(events)]
    if marked:
        counts.append(column.incarnation.not_in(marked))
    if not first:  # the log's index by time ends soon after it began
        query = select(column.at_us).where(column.log == log, column.idx < end, *counts)
        found = connection.scalar(query.order_by(column.at_us).limit(1))
    else:  # its own order: an index by time would be walked from its beginning for every span
        here = (column.log == log, column.idx >= first, column.idx < end)
        found = connection.scalar(select(func.min(case((and_(*counts), column.at_us)))).where(*here))
    return None if found is None else int(found)


def _disagreements(report: ReportFacts) -> Iterator[str]:
    """Yield problems unless the signature that closed the window is of this checkpoint or earlier, and the leaf in the
    period.
    """
    window = report[SECTION]
    if window == NO_WINDOW:
        return
    if window.longest_us != window.signed_us - window.at_us or window.longest_us <= 0:
        yield "the longest window is not the time from its leaf to its signature"
    if window.signed_us > report[BOUNDARY].checkpoint.signed_us:
        yield "the longest window ends later than the report's checkpoint was signed"
    if not report.asked.since_us <= window.at_us < report.asked.until_us:
        yield "the longest window begins outside the period"
    if window.log not in {log.name for log in report[BOUNDARY].logs}:
        yield "the longest window is of a log that is not under the checkpoint"


SECTION: Section[SignatureWindow] = Section(
    "window",
    "Signature window",
    signature_window,
    order=22,
    about="the longest time between a leaf and the signature that covers it",
    part=None,
    printed_in="opinion",
    fields={"window": "the longest time between a leaf and its signature"},
    disagreements=_disagreements,
)
