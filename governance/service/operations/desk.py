"""What an operation that only reads may ask of where it is asked: a service that is open, or a ledger that is read.

1. An answer takes a desk, who asks, and the operation's parameters by their names. HTTP, pages and commands share it.
2. An answer uses of a desk what it needs. A ledger's desk opens nothing before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from sqlalchemy import Connection

from kvcustody.errors import CustodyError, LedgerError
from kvcustody.governance.service.access.caller import Caller
from kvcustody.governance.service.access.roles import Permission
from kvcustody.governance.service.operations.operation import Operation
from kvcustody.governance.service.page_cursor import CursorBinding
from kvcustody.governance.service.problem_details import ProblemError
from kvcustody.times import DAY_US

if TYPE_CHECKING:
    from kvcustody.audit.evidence.subjects.subject_key_store import SubjectKeys
    from kvcustody.governance.release.replay_records import ReleaseState
    from kvcustody.governance.service.schedules.made_reports import Verdicts


class UtcClock(Protocol):
    """The time by which deadlines are compared."""

    def utc_us(self) -> int:
        """UTC in microseconds."""


class PageCursors(Protocol):
    """Writes where a page ended, and reads it."""

    def write(self, question: CursorBinding, position: list[Any]) -> str:
        """The cursor of a position."""

    def read(self, question: CursorBinding, cursor: str | None) -> list[Any] | None:
        """The position in a cursor; None where there is none. Raises a `CustodyError` for what is no cursor."""


class Desk(Protocol):
    """Where an operation that only reads is asked."""

    @property
    def clock(self) -> UtcClock:
        """The clock."""

    @property
    def cursors(self) -> PageCursors:
        """The cursors."""

    @property
    def subject_keys(self) -> SubjectKeys | None:
        """The store of subject keys; None where there is none."""

    @property
    def token_issuers(self) -> Sequence[str]:
        """The issuers whose tokens name people here."""

    @property
    def verdicts(self) -> Verdicts:
        """What is shown of reports' verdicts."""

    def released(self) -> ReleaseState | None:
        """The policies that were released; None where none were, or where nothing says by what they are checked."""

    def absent(self, error: LedgerError) -> CustodyError:
        """What is said of something that is not there, or that may not be told."""

    def reading(self, tenant: str | None = None) -> AbstractContextManager[Connection]:
        """A connection in one read transaction; with `tenant`, behind the wall of its rows where there is one."""

    def tenant_of(self, caller: Caller, action: Permission, said: str | None) -> str | None:
        """The tenant to answer a caller about, as they named it: None for all of them."""


class ReadOperation(NamedTuple):
    """An operation that only reads, and what answers it (rule 1)."""

    operation: Operation
    answer: Callable[..., dict[str, Any]]


def last_day_or(desk: Desk, since: int | None, until: int | None) -> tuple[int, int]:
    """The period that is asked about, in UTC µs: up to now and a day long where it is not said.

    Raises `invalid` for an empty one.
    """
    until_us = desk.clock.utc_us() if until is None else until
    since_us = max(0, until_us - DAY_US) if since is None else since
    if since_us >= until_us:
        raise ProblemError("invalid", "`since` is not before `until`")
    return since_us, until_us
