"""The book of schedules: whose reports, how often, and their destinations.

1. Whatever changes here is on record first (class A), with who does it.
2. A schedule makes what its maker may see, asked anew each time (`report_scheduler`). It names destinations of the
   settings; people of a tenant only those that the settings open to their tenant.
3. What falls due while a schedule is paused is not made. One that is deleted makes nothing more, and what waited to be
   handed over is given up.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import Connection, Engine, func, insert, select, update

from kvcustody.audit.kinds import Event, ReportDelivery, ReportScheduleChanged
from kvcustody.audit.store.database.engine import WRITE
from kvcustody.audit.store.schema.service import (
    service_report_deliveries,
    service_report_schedules,
    service_reports,
)
from kvcustody.audit.store.schema.stored_rows import StoredRow, check_read, stored_row, stored_rows
from kvcustody.clock import Clock
from kvcustody.errors import ConfigError
from kvcustody.governance.service.problem_details import ProblemError, not_found
from kvcustody.governance.service.schedules.calendar_periods import Cadence, Calendar
from kvcustody.governance.service.schedules.open_destinations import may_receive
from kvcustody.governance.service.settings import ReportDestination, ServiceSettings
from kvcustody.time_zones import check_zone

_SCHEDULES_MAX = 512
_SCHEDULES_MAX_OF_PARTY = _SCHEDULES_MAX // 8
ACTIVE, PAUSED, DELETED = "active", "paused", "deleted"
_STATES = {"pause": PAUSED, "resume": ACTIVE, "delete": DELETED}
_DONE = {"pause": "paused", "resume": "resumed", "delete": "deleted"}
_schedules, _reports, _deliveries = (
    service_report_schedules.c,
    service_reports.c,
    service_report_deliveries.c,
)


class Maker(NamedTuple):
    """The maker of a schedule: name, roles, and tenant."""

    name: str
    roles: tuple[str, ...]
    of_tenant: str | None


class WantedSchedule(NamedTuple):
    """A requested schedule; `zone` None: the tenant's or the service's, from the settings."""

    framework: str
    tenant: str | None
    formats: tuple[str, ...]
    destinations: tuple[str, ...]
    every: Cadence
    zone: str | None = None
    hour: int = 6


class Schedule(NamedTuple):
    """A schedule. `roles` and `of_tenant` are its maker's at the time."""

    schedule: str
    principal: str
    roles: tuple[str, ...]
    of_tenant: str | None
    tenant: str | None
    framework: str
    formats: tuple[str, ...]
    destinations: tuple[str, ...]
    every: str
    zone: str
    hour: int
    state: str
    after_us: int
    made_us: int
    changed_us: int
    changed_by: str
    unread: str = ""  # what of its row cannot be read: it makes nothing

    @property
    def calendar(self) -> Calendar:
        """Return its due dates; raises `ConfigError` for an unknown time zone."""
        check_read(self)
        if self.every not in list(Cadence) or not 0 <= self.hour < 24:
            raise ConfigError(f"`{self.every}` at hour {self.hour} is no time that this release knows")
        return Calendar(Cadence(self.every), self.zone, self.hour)

    def data(self, now_us: int) -> dict[str, Any]:
        """Return what is shown of it; `next_us` None: it is paused, or its time is `unread` here."""
        facts = self._asdict()
        for name in ("roles", "of_tenant", "after_us", "unread"):
            del facts[name]
        facts |= {"next_us": None, "unread": self.unread}
        try:
            if self.state == ACTIVE:
                facts["next_us"] = self.calendar.next(now_us).due_us
        except ConfigError as error:
            facts["unread"] = self.unread or error.message
        return facts


def read_schedules(connection: Connection, *, tenant: str | None = None) -> list[Schedule]:
    """Return the schedules that are not deleted, oldest first: of one tenant, or all."""
    query = select(service_report_schedules).where(_schedules.state != DELETED)
    if tenant is not None:
        query = query.where(_schedules.tenant == tenant)
    ordered = query.order_by(_schedules.made_us, _schedules.schedule)
    return [schedule_of(row) for row in stored_rows(connection, ordered)]


class ScheduleBook:
    """The schedules of one ledger; `record` makes an event durable before it returns, or raises."""

    def __init__(
        self, engine: Engine, clock: Clock, record: Callable[[Event], object], settings: ServiceSettings
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._record = record
        self._zone, self._zones = settings.time_zone, settings.tenant_time_zones
        self.destinations: Mapping[str, ReportDestination] = {each.name: each for each in settings.report_destinations}

    def make(self, by: Maker, wanted: WantedSchedule) -> Schedule:
        """Make a schedule; raises `invalid` for an unknown destination or zone, `conflict` where there are too many."""
        self._check(by, wanted)
        zone = wanted.zone or self._zones.get(wanted.tenant or "", self._zone)
        try:
            check_zone(zone)
        except ConfigError as error:
            raise ProblemError("invalid", error.message) from None
        now_us = self._clock.utc_us()
        schedule = Schedule(
            uuid.uuid4().hex[:16], by.name, by.roles, by.of_tenant, wanted.tenant, wanted.framework, wanted.formats,
            wanted.destinations, wanted.every.value, zone, wanted.hour, ACTIVE, now_us, now_us, now_us, by.name,
        )  # fmt: skip
        self._note(schedule, "made", by.name)
        values = schedule._asdict() | {
            name: ",".join(getattr(schedule, name)) for name in ("roles", "formats", "destinations")
        }
        del values["unread"]
        with self._engine.connect().execution_options(**WRITE) as connection, connection.begin():
            connection.execute(insert(service_report_schedules).values(**values))
        return schedule

    def get(self, schedule: str, *, deleted: bool = False) -> Schedule:
        """Return a schedule; raises `not-found`, for a deleted one too unless `deleted`."""
        query = select(service_report_schedules).where(_schedules.schedule == schedule)
        with self._engine.connect() as connection:
            row = stored_row(connection, query)
        if row is None or (row.state == DELETED and not deleted):
            raise not_found()
        return schedule_of(row)

    def listed(self, *, tenant: str | None = None) -> list[Schedule]:
        """Return those that are not deleted, oldest first: of one tenant, or all."""
        with self._engine.connect() as connection:
            return read_schedules(connection, tenant=tenant)

    def change(self, schedule: str, act: str, *, by: str, reason: str = "") -> Schedule:
        """Pause, resume or delete a schedule; recorded first. No change where it is so already."""
        found = self.get(schedule)
        state, now_us = _STATES[act], self._clock.utc_us()
        if found.state == state:
            return found
        self._note(found, _DONE[act], by, reason)
        values: dict[str, Any] = {"state": state, "changed_us": now_us, "changed_by": by}
        if act == "resume":
            values["after_us"] = now_us
        with self._engine.connect().execution_options(**WRITE) as connection, connection.begin():
            connection.execute(update(service_report_schedules).where(_schedules.schedule == schedule).values(**values))
            if act == "delete":
                mine = select(_reports.report).where(_reports.schedule == schedule)
                connection.execute(
                    update(service_report_deliveries)
                    .where(_deliveries.report.in_(mine), _deliveries.state == "waiting")
                    .values(state="given-up", error="its schedule was deleted")
                )
                connection.execute(
                    update(service_reports)
                    .where(_reports.schedule == schedule, _reports.state.in_(("waiting", "making")))
                    .values(state="skipped", error="its schedule was deleted")
                )
        return self.get(schedule, deleted=True)

    def retry(self, report: str, *, by: str) -> None:
        """Make a failed report again, or deliver a given-up one again; recorded first.

        Raises `not-found`, and `conflict` where there is nothing to try again.
        """
        with self._engine.connect() as connection:
            row = stored_row(connection, select(service_reports).where(_reports.report == report))
            given_up = connection.scalars(
                select(_deliveries.destination).where(_deliveries.report == report, _deliveries.state == "given-up")
            ).all()
        if row is None or row.schedule is None:
            raise not_found()
        self.get(row.schedule)
        check_read(row)
        again = ["", *given_up] if row.state == "failed" else list(given_up)
        if not again:
            raise ProblemError("conflict", "this report has no failed delivery to retry")
        for destination in again:
            self._record(
                ReportDelivery(
                    self._clock.now_us(), report, row.schedule, row.tenant or "", destination, "again",
                    row.digest or "", by,
                )
            )  # fmt: skip
        now_us = self._clock.utc_us()
        values = {"state": "waiting", "tries": 0, "next_us": now_us, "error": None}
        with self._engine.connect().execution_options(**WRITE) as connection, connection.begin():
            connection.execute(
                update(service_reports).where(_reports.report == report, _reports.state == "failed").values(**values)
            )
            connection.execute(
                update(service_report_deliveries)
                .where(_deliveries.report == report, _deliveries.state == "given-up")
                .values(**values)
            )

    def _check(self, by: Maker, wanted: WantedSchedule) -> None:
        for name in wanted.destinations:
            named = self.destinations.get(name)
            if named is None or not may_receive(named, by.of_tenant):
                raise ProblemError("invalid", f"`{name}` is not a destination for your reports")
        where = _schedules.state != DELETED
        party = _schedules.of_tenant == by.of_tenant if by.of_tenant else _schedules.principal == by.name
        with self._engine.connect() as connection:
            every = connection.scalar(select(func.count()).select_from(service_report_schedules).where(where))
            mine = connection.scalar(select(func.count()).select_from(service_report_schedules).where(where, party))
        if (every or 0) >= _SCHEDULES_MAX or (mine or 0) >= _SCHEDULES_MAX_OF_PARTY:
            raise ProblemError("conflict", "there are too many schedules; delete one first")

    def _note(self, found: Schedule, action: str, actor: str, reason: str = "") -> None:
        self._record(
            ReportScheduleChanged(
                self._clock.now_us(), found.schedule, action, found.framework, found.tenant or "", found.every,
                found.zone, found.destinations, actor, reason,
            )
        )  # fmt: skip


def schedule_of(row: StoredRow) -> Schedule:
    """Return the schedule of a row."""
    values: dict[str, Any] = {name: getattr(row, name) for name in Schedule._fields}
    for name in ("roles", "formats", "destinations"):
        values[name] = tuple(filter(None, str(values[name]).split(",")))
    return Schedule(**values)


def listed_destinations(named: Sequence[ReportDestination], of_tenant: str | None) -> list[dict[str, str]]:
    """Return names and kinds of the destinations for people of a tenant (None: of none); no address."""
    return [{"name": each.name, "kind": each.kind} for each in named if may_receive(each, of_tenant)]
