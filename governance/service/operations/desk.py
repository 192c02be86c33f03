"""What a reading operation may use: an open service, or a ledger that is only read.

1. An answer takes a desk, who asks, and the operation's parameters by their names. HTTP, pages and commands share it.
2. An answer uses of a desk what it needs. A ledger's desk opens nothing before.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from sqlalchemy import Connection

from kvcustody.audit.evidence.processes.enforcement import worker_enforcement
from kvcustody.audit.evidence.processes.running_policies import read_running_policies
from kvcustody.audit.evidence.processes.work_periods import WorkPeriod, read_work_periods
from kvcustody.audit.evidence.subjects.subject_table import names_of
from kvcustody.errors import CustodyError, LedgerError
from kvcustody.governance.service.access.caller import Caller
from kvcustody.governance.service.access.roles import Permission
from kvcustody.governance.service.page_cursor import CursorBinding
from kvcustody.governance.service.problem_details import ProblemError
from kvcustody.times import DAY_US

if TYPE_CHECKING:
    from kvcustody.audit.evidence.processes.marked_processes import Marked
    from kvcustody.audit.evidence.query.events import EventFilter
    from kvcustody.audit.evidence.subjects.subject_key_store import SubjectKeys
    from kvcustody.governance.release.policies_in_effect import PoliciesInEffect
    from kvcustody.governance.release.replay_records import ReleaseState
    from kvcustody.governance.service.fleet.workers import Fleet
    from kvcustody.governance.service.inbox.item import InboxItem
    from kvcustody.governance.service.schedules.made_reports import Verdicts


class UtcClock(Protocol):
    """The time that deadlines are compared with."""

    def utc_us(self) -> int:
        """UTC in microseconds."""


class PageCursors(Protocol):
    """Writes and reads cursors of pages."""

    def write(self, question: CursorBinding, position: list[Any]) -> str:
        """The cursor of a position."""

    def read(self, question: CursorBinding, cursor: str | None) -> list[Any] | None:
        """Return the position of a cursor; None without one. Raises a `CustodyError` for an invalid cursor."""


class Desk(Protocol):
    """The service or ledger that a reading operation is asked on."""

    @property
    def clock(self) -> UtcClock:
        """The clock."""

    @property
    def cursors(self) -> PageCursors:
        """The cursors."""

    @property
    def subject_keys(self) -> SubjectKeys | None:
        """The store of subject keys; None without one."""

    @property
    def token_issuers(self) -> Sequence[str]:
        """The issuers whose tokens name people here."""

    @property
    def verdicts(self) -> Verdicts:
        """The verdicts of reports."""

    @property
    def fleet(self) -> Fleet:
        """The workers."""

    def released(self) -> ReleaseState | None:
        """The released policies; None without any, or without a trust configuration to check them."""

    def absent(self, error: LedgerError) -> CustodyError:
        """Return the error for something absent, or hidden from the caller."""

    def check_said(self, connection: Connection, wanted: EventFilter) -> None:
        """Refuse a filter's name that no leaf has, after it matched nothing, where the caller may know that."""

    def reading(self, tenant: str | None = None) -> AbstractContextManager[Connection]:
        """Return a connection in one read transaction; with `tenant`, under row-level security where the database has
        it.
        """

    def reading_for_long(self, tenant: str | None = None) -> AbstractContextManager[Connection]:
        """Return a connection as `reading`, for an answer that takes long on a large ledger."""

    def tenant_of(self, caller: Caller, action: Permission, said: str | None) -> str | None:
        """Return the tenant to answer a caller about, as they named it: None for all."""

    def names_of(self, tenant: str, subject: str) -> list[str]:
        """Return every pseudonym of a tenant's subject."""

    def work_periods(self) -> dict[str, WorkPeriod]:
        """Return which processes ran, and when."""

    def marked(self) -> Marked:
        """Return the processes that replayed or generated what they recorded."""

    def policies_in_effect(self) -> PoliciesInEffect:
        """Return the policies that workers run by their leaves; otherwise the released one."""

    def inbox_of(self, caller: Caller) -> list[InboxItem]:
        """Return a caller's open tasks, the most urgent first."""

    def cover(self) -> None:
        """Seal and sign committed leaves, where a local process does so."""

    def seal_soon(self) -> None:
        """Start `cover` without waiting."""


class LedgerReads:
    """A desk's reads of its ledger, without row-level security: they are of the system log, or name no tenant."""

    def names_of(self: Desk, tenant: str, subject: str) -> list[str]:
        """Every pseudonym of a subject of a tenant. Who is behind a pseudonym is in no tenant's log."""
        with self.reading() as connection:
            return names_of(connection, tenant, subject, self.subject_keys)

    def work_periods(self: Desk) -> dict[str, WorkPeriod]:
        """Which processes were at work, and when."""
        with self.reading() as connection:
            return read_work_periods(connection)

    def policies_in_effect(self: Desk) -> PoliciesInEffect:
        """Which policies workers run, by their leaves; else what is released."""
        from kvcustody.governance.release.policies_in_effect import policies_in_effect

        with self.reading() as connection:
            running = read_running_policies(connection)
            enforcement = worker_enforcement(connection)
        return policies_in_effect(running, self.released(), enforcement)


def last_day_or(desk: Desk, since: int | None, until: int | None) -> tuple[int, int]:
    """Return the requested period in UTC µs; by default the last day.

    Raises `invalid` for an empty one.
    """
    until_us = desk.clock.utc_us() if until is None else until
    since_us = max(0, until_us - DAY_US) if since is None else since
    if since_us >= until_us:
        raise ProblemError("invalid", "`since` is not before `until`")
    return since_us, until_us
