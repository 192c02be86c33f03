"""Scan orders: full scans that operators order from workers, taken at the next pull and answered by the recorded scan.

1. A worker has at most one order that waits: asking again gives that one.
2. An order that was not answered is handed to whichever process of its worker asks, until its deadline: it survives
   the end of that process and of this one. Past the deadline it is `unreachable`, and no process is given it any
   more; one that had it and answers late is still heard.
3. An answer names a scan that the ledger has; what it found is read there, and not taken from the worker's word.
"""

from __future__ import annotations

import threading
import uuid
from typing import Any, NamedTuple

from sqlalchemy import Connection, Engine, insert, select, tuple_, update

from kvcustody.audit.evidence.processes.work_periods import ends, life_leaves, work_periods
from kvcustody.audit.evidence.query.scans import scan_of
from kvcustody.audit.store.database.engine import WRITE
from kvcustody.audit.store.schema.service import service_scan_orders, service_workers
from kvcustody.audit.store.schema.stored_rows import StoredRow, stored_page, stored_row, stored_rows
from kvcustody.clock import MICROSECONDS, Clock
from kvcustody.governance.service.problem_details import ProblemError, not_found

_table = service_scan_orders.c


class ScanOrder(NamedTuple):
    """A scan that was ordered from a worker. Times are UTC µs.

    `outcome`: `waiting` for the worker's next pull, `taken` by it, `scanned`, `failed` (and `reason` says why), or
    `unreachable`: no answer by the deadline. A scan is named by `incarnation` and `scan`.
    """

    order: str
    worker: str
    actor: str
    at_us: int
    deadline_us: int
    outcome: str
    taken_us: int | None
    answered_us: int | None
    incarnation: str | None
    scan: int | None
    findings: int | None
    reason: str | None
    unread: str = ""  # what of its row cannot be read

    @property
    def is_open(self) -> bool:
        """Whether the outcome may still change by itself."""
        return self.outcome in ("waiting", "taken")


class ScanOrders:
    """The book of orders; thread-safe."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock
        self._lock = threading.Lock()

    def ask(self, worker: str, actor: str, deadline_seconds: int) -> ScanOrder:
        """Order a full scan from a worker, or return the waiting order (rule 1).

        Raises `not-found` for a worker that never was, `conflict` for one without a process that asks for orders.
        """
        now_us = self._clock.utc_us()
        with (
            self._lock,
            self._engine.connect().execution_options(**WRITE) as connection,
            connection.begin(),
        ):
            _check_runs(connection, worker)
            waits = self._open(connection, worker, now_us)
            if waits:
                return waits[0]
            order = uuid.uuid4().hex
            row = {
                "scan_order": order,
                "worker": worker,
                "actor": actor,
                "at_us": now_us,
                "deadline_us": now_us + deadline_seconds * MICROSECONDS,
            }
            connection.execute(insert(service_scan_orders).values(**row))
            return self._get(connection, order, now_us)

    def owed(self, worker: str) -> list[ScanOrder]:
        """Return a worker's open orders, oldest first; one that is returned for the first time counts as taken (rule
        2).
        """
        now_us = self._clock.utc_us()
        with self._engine.connect() as connection:
            orders = self._open(connection, worker, now_us)
        fresh = [order.order for order in orders if order.taken_us is None]
        if fresh:
            where = _table.scan_order.in_(fresh) & _table.taken_us.is_(None)
            with self._engine.connect().execution_options(**WRITE) as connection, connection.begin():
                connection.execute(update(service_scan_orders).where(where).values(taken_us=now_us))
        return orders

    def answer(self, worker: str, order: str, incarnation: str, *, scan: int | None, reason: str | None) -> ScanOrder:
        """Record the outcome of an order: the number of this incarnation's scan, or why there is none.

        The first answer stays. Raises `not-found` for another worker's order, `conflict` while the ledger has no such
        scan (rule 3).
        """
        now_us = self._clock.utc_us()
        with self._engine.connect().execution_options(**WRITE) as connection, connection.begin():
            known = self._find(connection, order, now_us)
            if known is None or known.worker != worker:
                raise not_found()
            if known.answered_us is not None:
                return known
            values: dict[str, Any] = {"answered_us": now_us, "incarnation": incarnation, "reason": reason}
            if scan is not None:
                found = scan_of(connection, incarnation, scan)
                if found is None:
                    raise ProblemError("conflict", "the ledger does not have this scan yet")
                values |= {"scan": scan, "findings": found[0].findings, "reason": None}
            connection.execute(update(service_scan_orders).where(_table.scan_order == order).values(**values))
            return self._get(connection, order, now_us)

    def get(self, order: str) -> ScanOrder:
        """Return one order; raises `not-found`."""
        with self._engine.connect() as connection:
            return self._get(connection, order, self._clock.utc_us())

    def listed(self, *, before: tuple[int, str] | None = None, limit: int = 100) -> tuple[list[ScanOrder], bool]:
        """Return orders, newest first, from before `before` (its `at_us` and `order`) on, and whether more follow.

        `limit`, and more where the order of the last could not be read.
        """
        query = select(service_scan_orders).order_by(_table.at_us.desc(), _table.scan_order.desc())
        if before is not None:
            query = query.where(tuple_(_table.at_us, _table.scan_order) < before)
        now_us = self._clock.utc_us()
        with self._engine.connect() as connection:
            page = stored_page(connection, query, (_table.at_us, _table.scan_order), limit)
        return [_order(row, now_us) for row in page.rows], page.more

    def _open(self, connection: Connection, worker: str, now_us: int) -> list[ScanOrder]:
        waits = (_table.worker == worker) & _table.answered_us.is_(None) & (_table.deadline_us > now_us)
        query = select(service_scan_orders).where(waits).order_by(_table.at_us, _table.scan_order)
        return [_order(row, now_us) for row in stored_rows(connection, query) if not row.unread]

    def _get(self, connection: Connection, order: str, now_us: int) -> ScanOrder:
        found = self._find(connection, order, now_us)
        if found is None:
            raise not_found()
        return found

    @staticmethod
    def _find(connection: Connection, order: str, now_us: int) -> ScanOrder | None:
        query = select(service_scan_orders).where(_table.scan_order == order)
        row = stored_row(connection, query)
        return None if row is None else _order(row, now_us)


def _check_runs(connection: Connection, worker: str) -> None:
    """A worker that keeps its ledger itself asks nobody for orders."""
    leaves = [leaf.body for leaf in life_leaves(connection)]
    asking = select(service_workers.c.incarnation).where(service_workers.c.worker == worker)
    registered = {row.incarnation for row in stored_rows(connection, asking)}
    if not registered and worker not in {period.worker for period in work_periods(leaves).values()}:
        raise not_found()
    if not registered - ends(leaves).keys():
        raise ProblemError("conflict", f"worker `{worker}` has no process that takes orders from this control plane")


def _order(row: StoredRow, now_us: int) -> ScanOrder:
    if row.answered_us is not None:
        outcome = "scanned" if row.scan is not None else "failed"
    elif now_us >= row.deadline_us:
        outcome = "unreachable"
    else:
        outcome = "waiting" if row.taken_us is None else "taken"
    return ScanOrder(
        row.scan_order,
        row.worker,
        row.actor,
        row.at_us,
        row.deadline_us,
        outcome,
        row.taken_us,
        row.answered_us,
        row.incarnation,
        row.scan,
        row.findings,
        row.reason,
        row.unread,
    )
