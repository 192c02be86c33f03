"""Makes scheduled reports and delivers them: each once, across restarts and several services.

1. A report that is due is a row with its schedule and period as its key. The service that claims the row makes it, for
   as long as it renews its lease; a lease that ran out is taken over. What was due while no service ran is made at the
   first look, the newest `_CAUGHT_UP_MAX` of a schedule; what is older is listed as skipped.
2. A report is made as whoever made the schedule, by what they may see then. One who was disabled, or whose roles do not
   reach so far any more, has nothing made: the run fails and the schedule is paused, on record.
3. It is made as of a checkpoint that is kept, so that whoever takes over makes the same report, with the same digest.
4. That it was made, that it is about to be handed over, and what became of that is on record (class A). What a
   destination does not take is offered again, twice as late each time, `_TRIES_MAX` times; then it waits in the inbox
   for somebody who says `retry`. It is never dropped.
5. A machine's clock in doubt makes nothing due.
"""

from __future__ import annotations

import hashlib
import threading
from typing import Any, Protocol

import orjson
from sqlalchemy import Engine, and_, or_, select, update

from kvcustody.audit.kinds import Event, ReportDelivery, ScheduledReportMade
from kvcustody.audit.siem.sink import SinkError
from kvcustody.audit.store.database.dialect import dialect_of
from kvcustody.audit.store.database.engine import WRITE
from kvcustody.audit.store.schema.service import (
    service_report_deliveries,
    service_report_schedules,
    service_reports,
)
from kvcustody.audit.store.schema.stored_rows import StoredRow, stored_row, stored_rows
from kvcustody.errors import ConfigError, CustodyError
from kvcustody.governance.service.access.caller import Caller
from kvcustody.governance.service.access.principal_table import PrincipalRecord
from kvcustody.governance.service.access.principals import TOKEN, Principals
from kvcustody.governance.service.access.roles import Permission, Role
from kvcustody.governance.service.jobs import Job
from kvcustody.governance.service.problem_details import ProblemError
from kvcustody.governance.service.reports import ReportingService, report_parameters, start_report
from kvcustody.governance.service.schedules.calendar_periods import Period
from kvcustody.governance.service.schedules.open_destinations import (
    may_hand_over,
    may_receive,
    open_destinations,
)
from kvcustody.governance.service.schedules.parcel import Parcel
from kvcustody.governance.service.schedules.schedule_book import ACTIVE, Schedule, ScheduleBook
from kvcustody.governance.service.schedules.signed_verdicts import SignedVerdicts
from kvcustody.guarding_thread import GuardingThread
from kvcustody.logger import get_logger
from kvcustody.times import SECOND_US, iso

_log = get_logger(__name__)
_CAUGHT_UP_MAX = 12
_TRIES_MAX = 20
_MAKING_TRIES_MAX = 5
_LEASE_US = 600 * SECOND_US
_WAIT_US_MAX = 6 * 3600 * SECOND_US
_END_SECONDS = 15.0
_NO_LONGER = "the schedule's author may no longer make such reports"
_schedules, _reports, _deliveries = (
    service_report_schedules.c,
    service_reports.c,
    service_report_deliveries.c,
)


class ScheduledService(ReportingService, Protocol):
    """The parts of a service that a scheduler needs, besides those of reports."""

    @property
    def principals(self) -> Principals:
        """The book of principals."""

    @property
    def verdicts(self) -> SignedVerdicts:
        """Verdicts of reports."""

    def record(self, event: Event) -> None:
        """Make a class A event durable; raises `unavailable` where the ledger cannot record."""

    def export(self, caller: Caller) -> None:
        """Let a tenant's own people take leaves of its log out; raises `forbidden`."""


class ReportScheduler:
    """Looks for due reports on its own thread. Close it before the jobs and the ledger."""

    def __init__(self, service: ScheduledService, book: ScheduleBook) -> None:
        self._service = service
        self._engine: Engine = service.engine
        self._book = book
        self._owner = service.settings.name
        self._destinations = open_destinations(service.settings.report_destinations)
        self._turning = threading.Lock()
        self._stop = threading.Event()
        self._thread = GuardingThread(self._run, name="kvcustody-schedules")
        self._thread.start()

    def close(self) -> None:
        """Start nothing more; a second call changes nothing."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(_END_SECONDS)

    def turn(self) -> None:
        """Look once for due reports, finished reports, and waiting deliveries."""
        with self._turning:
            if not self._service.clock.in_doubt:  # rule 5
                self._plan()
            self._watch()
            self._begin()
            self._hand_over()

    def _run(self) -> None:
        while not self._stop.wait(self._service.settings.report_seconds):
            try:
                self.turn()
            except Exception:
                _log.error("schedules cannot be checked", exc_info=True)

    # -- what is due ------------------------------------------------------------------------------------------

    def _plan(self) -> None:
        now_us = self._service.clock.utc_us()
        for schedule in self._book.listed():
            if schedule.state != ACTIVE:
                continue
            try:
                due = list(schedule.calendar.periods(schedule.after_us, now_us))
            except ConfigError as error:  # a zone that this machine does not know, or no longer
                _log.error("schedule cannot be read", schedule=schedule.schedule, reason=error.message)
                continue
            if due:
                self._add(schedule, due, now_us)

    def _add(self, schedule: Schedule, due: list[Period], now_us: int) -> None:
        """Put periods on the list; whoever moves the schedule on does, and nobody else (rule 1)."""
        rows = [self._row(schedule, period, now_us) for period in due]
        for row in rows[:-_CAUGHT_UP_MAX]:
            row |= {"state": "skipped", "error": "too many periods were missed"}
        table = _schedules
        mine = and_(
            table.schedule == schedule.schedule,
            table.after_us == schedule.after_us,
            table.state == ACTIVE,
        )
        with self._engine.connect().execution_options(**WRITE) as connection, connection.begin():
            moved = connection.execute(update(service_report_schedules).where(mine).values(after_us=due[-1].due_us))
            if moved.rowcount:
                connection.execute(dialect_of(connection).insert_new(service_reports), rows)

    def _row(self, schedule: Schedule, period: Period, now_us: int) -> dict[str, Any]:
        key = f"{schedule.schedule} {period.since_us}".encode()
        return {
            "report": hashlib.sha256(key).hexdigest()[:32], "schedule": schedule.schedule, "job": None,
            "principal": schedule.principal, "tenant": schedule.tenant, "framework": schedule.framework,
            "formats": ",".join(schedule.formats), "since_us": period.since_us, "until_us": period.until_us,
            "due_us": period.due_us, "state": "waiting", "owner": "", "lease_us": 0, "tries": 0, "next_us": now_us,
            "checkpoint": None, "digest": None, "opinion": None, "reasons": None, "signed_by": None, "error": None,
            "created_us": now_us, "made_us": None,
        }  # fmt: skip

    # -- making -----------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Claim what waits, and what nobody renews any more."""
        now_us = self._service.clock.utc_us()
        waits = and_(_reports.state == "waiting", _reports.next_us <= now_us)
        left = and_(_reports.state == "making", _reports.lease_us < now_us)
        lives = select(_schedules.schedule).where(_schedules.state == ACTIVE)
        query = select(service_reports).where(or_(waits, left), _reports.schedule.in_(lives))
        with self._engine.connect() as connection:
            rows = _read_whole(stored_rows(connection, query.order_by(_reports.due_us, _reports.report)))
        for row in rows:
            if self._stop.is_set():
                return
            if self._claim(row, "making"):
                self._start(row)

    def _claim(self, row: StoredRow, state: str) -> bool:
        """Own a row that is as it was read; False where another was faster."""
        as_read = and_(
            _reports.report == row.report,
            _reports.state == row.state,
            _reports.owner == row.owner,
            _reports.lease_us == row.lease_us,
        )
        values = {
            "state": state, "owner": self._owner, "lease_us": self._service.clock.utc_us() + _LEASE_US,
        }  # fmt: skip
        if state == "making":
            values["job"] = None
        return self._update(as_read, **values)

    def _start(self, row: StoredRow) -> None:
        service = self._service
        schedule = self._book.get(row.schedule, deleted=True)
        try:
            caller = self._caller(schedule)
            tenant = caller.tenant_of(Permission.READ_CUSTODY, row.tenant)
            service.export(caller)
        except ProblemError as error:
            if error.type.status not in (403, 404):
                self._failed(row, "the policy cannot be asked", times=_TRIES_MAX)
                return
            self._failed(row, _NO_LONGER, times=0)
            self._book.change(schedule.schedule, "pause", by=self._owner, reason=_NO_LONGER)
            return
        try:
            asked = report_parameters(
                service,
                row.framework,
                tenant,
                since_us=row.since_us,
                until_us=row.until_us,
                as_of=row.checkpoint,
                zone=schedule.zone,
            )
            formats = [name for name in row.formats.split(",") if name]
            job = start_report(
                service, schedule.principal, asked, formats, party=caller.party, schedule=schedule.schedule
            )
        except ProblemError as error:
            why = "no checkpoint is signed yet" if error.type.status == 404 else "too many jobs are waiting"
            self._failed(row, why, times=_TRIES_MAX)
            return
        except CustodyError as error:
            self._failed(row, error.message, times=_MAKING_TRIES_MAX)
            return
        self._update(self._mine(row, "making"), job=job.job, checkpoint=asked.checkpoint)

    def _caller(self, schedule: Schedule) -> Caller:
        """Whoever made the schedule, as they are now (rule 2); raises `forbidden` for one who was disabled."""
        record: PrincipalRecord | None = self._service.principals.find(schedule.principal)
        if record is not None and (record.disabled_us is not None or record.unread):
            raise ProblemError("forbidden")
        if record is None or record.kind == TOKEN:  # whom no book here has: by the roles of then
            roles = frozenset(Role(role) for role in schedule.roles)
            return Caller(schedule.principal, roles, schedule.of_tenant, "schedule")
        return Caller(record.name, record.roles, record.tenant, "schedule")

    def _watch(self) -> None:
        """See what became of the jobs of this service, and renew its leases."""
        now_us = self._service.clock.utc_us()
        waits = select(_deliveries.report).where(_deliveries.state == "waiting")
        query = select(service_reports).where(
            _reports.owner == self._owner,
            or_(_reports.state == "making", and_(_reports.state == "made", _reports.report.in_(waits))),
        )
        with self._engine.connect() as connection:
            rows = _read_whole(stored_rows(connection, query))
        for row in rows:
            if row.lease_us - now_us < _LEASE_US // 2:
                self._update(self._mine(row, row.state), lease_us=now_us + _LEASE_US)
            if row.state == "making":
                self._look_at(row, self._job(row))

    def _look_at(self, row: StoredRow, job: Job | None) -> None:
        if job is None or job.state == "lost":
            self._failed(row, "the service ended before the report was made", times=_MAKING_TRIES_MAX, at_once=True)
        elif job.state == "cancelled":
            self._failed(row, "somebody stopped it", times=0)
        elif job.state == "failed":
            self._failed(row, job.error or "failed", times=_MAKING_TRIES_MAX)
        elif job.result is not None and not job.result["digest"]:
            self._failed(row, "the finished report is missing, or its signature does not verify", times=0)
        elif job.result is not None:
            self._made(row, job.result)

    def _job(self, row: StoredRow) -> Job | None:
        if row.job is None:
            return None
        try:
            return self._service.verdicts.on(self._service.jobs.get(row.job, principal=row.principal))
        except ProblemError:
            return None

    def _made(self, row: StoredRow, result: dict[str, Any]) -> None:
        """A report is there: on record, and then to be handed over."""
        schedule, digest = self._book.get(row.schedule, deleted=True), result["digest"]
        if row.digest is not None and row.digest != digest:
            self._failed(row, f"the repeated report has another digest, {digest}", times=0)
            return
        if row.digest is None:
            period = f"{iso(row.since_us)}/{iso(row.until_us)}"
            self._service.record(
                ScheduledReportMade(
                    self._service.clock.now_us(), row.report, row.schedule, row.framework, row.tenant or "", period,
                    result["checkpoint"], digest, result["opinion"], result["signed_by"] or "", row.principal,
                )
            )  # fmt: skip
        now_us = self._service.clock.utc_us()
        values = {
            "state": "made", "error": None, "digest": digest, "opinion": result["opinion"],
            "reasons": orjson.dumps(result["reasons"]).decode(), "signed_by": result["signed_by"], "made_us": now_us,
        }  # fmt: skip
        handed = [
            {
                "report": row.report, "destination": name, "state": "waiting", "tries": 0, "next_us": now_us,
                "failing_us": None, "delivered_us": None, "place": None, "error": None,
            }
            for name in schedule.destinations
        ]  # fmt: skip
        with self._engine.connect().execution_options(**WRITE) as connection, connection.begin():
            done = connection.execute(update(service_reports).where(self._mine(row, "making")).values(**values))
            if done.rowcount and handed:
                connection.execute(dialect_of(connection).insert_new(service_report_deliveries), handed)

    def _failed(self, row: StoredRow, why: str, *, times: int, at_once: bool = False) -> None:
        """A report was not made: try again later, `times` times."""
        tries, now_us = row.tries + 1, self._service.clock.utc_us()
        _log.warning("scheduled report not made", report=row.report, schedule=row.schedule, reason=why)
        self._update(
            self._mine(row, "making"),
            state="waiting" if tries <= times else "failed",
            tries=tries,
            next_us=now_us if at_once else now_us + self._wait_us(tries),
            error=why,
        )

    # -- handing over -----------------------------------------------------------------------------------------

    def _hand_over(self) -> None:
        now_us = self._service.clock.utc_us()
        columns = [column.label(f"d_{column.name}") for column in service_report_deliveries.c]
        query = (
            select(service_reports, *columns)
            .join_from(service_reports, service_report_deliveries, _deliveries.report == _reports.report)
            .where(
                _reports.state == "made",
                _deliveries.state == "waiting",
                _deliveries.next_us <= now_us,
                or_(_reports.owner == self._owner, _reports.lease_us < now_us),
            )
            .order_by(_deliveries.next_us, _reports.report, _deliveries.destination)
        )
        with self._engine.connect() as connection:
            rows = _read_whole(stored_rows(connection, query))
        for row in rows:
            if self._stop.is_set():
                return
            with self._engine.connect() as connection:  # as it is by now: one before may have made it wait
                now = stored_row(connection, select(service_reports).where(_reports.report == row.report))
            if now is not None and now.state == "made" and self._claim(now, "made"):
                self._deliver(now, row)

    def _deliver(self, row: StoredRow, to: StoredRow) -> None:
        """Hand a report over once (rule 4)."""
        schedule = self._book.get(row.schedule, deleted=True)
        files = self._files(row)
        if files is None:  # it was made elsewhere, or its files are gone: it is made again (rule 3)
            self._update(self._mine(row, "made"), state="waiting", next_us=self._service.clock.utc_us())
            return
        where = and_(
            _deliveries.report == row.report,
            _deliveries.destination == to.d_destination,
            _deliveries.state == "waiting",
        )
        try:
            named = self._book.destinations.get(to.d_destination)
            if named is None or not may_receive(named, schedule.of_tenant):
                raise SinkError("the settings of this service name no such destination for these reports")
            if not may_hand_over(self._caller(schedule)):
                raise SinkError("its author may not schedule deliveries; the tenant's administrator may")
            if to.d_tries == 0:
                self._note(row, to.d_destination, "begun")
            place = self._destinations[to.d_destination].deliver(self._parcel(row, files))
        except (SinkError, OSError, ValueError) as error:
            self._not_taken(row, to, error, where)
            return
        self._note(row, to.d_destination, "delivered")
        values = {
            "state": "delivered", "tries": to.d_tries + 1, "delivered_us": self._service.clock.utc_us(),
            "place": place, "error": None,
        }  # fmt: skip
        self._update_delivery(where, values)

    def _not_taken(self, row: StoredRow, to: StoredRow, error: Exception, where: Any) -> None:
        why = error.message if isinstance(error, CustodyError) else type(error).__name__
        tries, now_us = to.d_tries + 1, self._service.clock.utc_us()
        given_up = tries >= _TRIES_MAX
        _log.warning("report not delivered", report=row.report, destination=to.d_destination, reason=why, tries=tries)
        if given_up or to.d_failing_us is None:
            self._note(row, to.d_destination, "given-up" if given_up else "failed", why)
        values = {
            "state": "given-up" if given_up else "waiting", "tries": tries, "next_us": now_us + self._wait_us(tries),
            "failing_us": to.d_failing_us or now_us, "error": why,
        }  # fmt: skip
        self._update_delivery(where, values)

    def _parcel(self, row: StoredRow, files: dict[str, bytes]) -> Parcel:
        days = f"{iso(row.since_us)[:10]}-{iso(row.until_us)[:10]}"
        verdict = self._service.verdicts.of_job(row.job)
        if verdict is None or verdict.digest != row.digest:
            raise SinkError("the finished report differs from the one that its row names")
        facts: dict[str, object] = {
            "ledger": self._service.settings.ledger_origin, "report": row.report, "schedule": row.schedule,
            "framework": row.framework, "tenant": row.tenant, "since_us": row.since_us, "until_us": row.until_us,
            "checkpoint": row.checkpoint, **verdict._asdict(),
        }  # fmt: skip
        return Parcel(row.report, f"{row.framework}-{days}-{row.report[:12]}", facts, files)

    def _files(self, row: StoredRow) -> dict[str, bytes] | None:
        """The report's files as they were made; None where one is not here, or is another by now."""
        job = self._job(row)
        if job is None or job.result is None:
            return None
        contents: dict[str, bytes] = {}
        for each in job.result["files"]:
            try:
                path = self._service.jobs.file(job.job, each["name"], principal=row.principal)
                data = path.read_bytes()
            except (ProblemError, OSError):
                return None
            if hashlib.sha256(data).hexdigest() != each["sha256"]:
                return None
            contents[each["name"]] = data
        return contents

    def _note(self, row: StoredRow, destination: str, action: str, reason: str = "") -> None:
        self._service.record(
            ReportDelivery(
                self._service.clock.now_us(), row.report, row.schedule, row.tenant or "", destination, action,
                row.digest, self._owner, reason,
            )
        )  # fmt: skip

    # -- rows -------------------------------------------------------------------------------------------------

    def _wait_us(self, tries: int) -> int:
        first_us = round(self._service.settings.report_retry_seconds * SECOND_US)
        return min(first_us << min(tries - 1, 30), _WAIT_US_MAX)

    def _mine(self, row: StoredRow, state: str) -> Any:
        return and_(_reports.report == row.report, _reports.owner == self._owner, _reports.state == state)

    def _update(self, where: Any, **values: Any) -> bool:
        with self._engine.connect().execution_options(**WRITE) as connection, connection.begin():
            return bool(connection.execute(update(service_reports).where(where).values(**values)).rowcount)

    def _update_delivery(self, where: Any, values: dict[str, Any]) -> None:
        with self._engine.connect().execution_options(**WRITE) as connection, connection.begin():
            connection.execute(update(service_report_deliveries).where(where).values(**values))


def _read_whole(rows: list[StoredRow]) -> list[StoredRow]:
    """Those that can be acted on: of one that cannot be read, lists say so."""
    return [row for row in rows if not row.unread]
