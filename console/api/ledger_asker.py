"""Answers reading operations from a ledger as a control plane does, without one.

1. A ledger is only read. Its parts open when the answer uses them. So a question works on a read-only ledger, beside a
   running server and on a standby. It needs no settings of a service.
2. Whoever may read the ledger itself sees all of it, and the read is not recorded.
3. A tenant, an actor or an outcome that the ledger does not know is refused, and the message gives the nearest name.
"""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, cached_property, partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

import orjson
from sqlalchemy import Connection, Engine

from kvcustody.audit.evidence.processes.marked_processes import Marked, read_marked
from kvcustody.audit.evidence.query.known_names import check_said, known_tenant
from kvcustody.audit.evidence.subjects.subject_key_store import SubjectKeys
from kvcustody.audit.store.database.dialect import dialect_of
from kvcustody.audit.store.database.private_copy import at_rest
from kvcustody.clock import SystemClock
from kvcustody.console.api.api_reply import ApiReply, refusal
from kvcustody.console.opening import ledger_of, reading, service_settings, subject_store
from kvcustody.console.options import ServiceSource
from kvcustody.errors import ConfigError, CustodyError, LedgerError
from kvcustody.governance.api.declarations import operations_at
from kvcustody.governance.api.given import Wire
from kvcustody.governance.api.operation_request import OperationRequest
from kvcustody.governance.service.access.caller import Caller
from kvcustody.governance.service.access.roles import Permission, Role
from kvcustody.governance.service.operations.answer import etag_of
from kvcustody.governance.service.operations.desk import LedgerReads
from kvcustody.governance.service.operations.operation import check_permission
from kvcustody.governance.service.page_cursor import CursorBinding
from kvcustody.governance.service.problem_details import MEDIA_TYPE, ProblemError

if TYPE_CHECKING:
    from kvcustody.audit.evidence.query.events import EventFilter
    from kvcustody.governance.release.replay_records import ReleaseState
    from kvcustody.governance.service.fleet.workers import Fleet
    from kvcustody.governance.service.inbox.item import InboxItem
    from kvcustody.governance.service.schedules.signed_verdicts import SignedVerdicts
    from kvcustody.governance.service.settings import ServiceSettings

_READER = Caller("local", frozenset({Role.AUDITOR, Role.KEY_CUSTODIAN}), None, "local")  # rule 2


class LedgerAsker:
    """Answers reading operations from a ledger."""

    lasting = False

    def __init__(self, desk: LedgerDesk) -> None:
        self._desk = desk

    def ask(self, asked: OperationRequest) -> ApiReply:
        """Return the operation's answer."""
        declared = operations_at(asked.path)
        operation = declared.operations.find(asked.method, asked.path)
        assert operation is not None and declared.by_name[operation.name].reads, asked
        check_permission(operation, _READER)
        wire = Wire(operation.parameters(asked.path), asked.query, {}, b"")
        try:
            answer = declared.functions[operation.name].read(self._desk, _READER, wire)
        except ProblemError as error:
            raise refusal(ApiReply(error.type.status, MEDIA_TYPE, "", error.body())) from None
        return ApiReply(answer.status, answer.header("content-type"), etag_of(answer.body), answer.body)


@contextmanager
def open_ledger(source: ServiceSource) -> Iterator[LedgerAsker]:
    """Yield the asker for the ledger that the options name."""
    named = ledger_of(source)
    settings = cache(partial(service_settings, source.config, named))
    settled = named is None or source.config is not None

    def subject_keys() -> str | None:
        return source.subject_keys or (settings().subject_keys_url if settled else None)

    ledger = named or settings().database_url
    with LedgerDesk(ledger, subject_keys, settings) as desk:
        yield LedgerAsker(desk)


class LedgerDesk(LedgerReads):
    """The ledger that operations read (rule 1). Use it as a context manager."""

    def __init__(
        self, ledger: str, subject_keys: Callable[[], str | None], settings: Callable[[], ServiceSettings]
    ) -> None:
        """Open the ledger. `subject_keys`: their store's URL; None: the store next to the ledger, if there is one."""
        self._ledger = ledger
        self._keys = subject_keys
        self._settings = settings
        self._stack = ExitStack()
        self.cursors = PlainCursors()

    @cached_property
    def clock(self) -> _DeadlineClock:
        """The time with which deadlines are compared on this machine."""
        return _DeadlineClock()

    @cached_property
    def subject_keys(self) -> SubjectKeys | None:
        """The store of subject keys, or None."""
        return self._stack.enter_context(subject_store(self._keys(), self._ledger))

    @property
    def token_issuers(self) -> tuple[str, ...]:
        """None: a service's settings are not read."""
        return ()

    @cached_property
    def verdicts(self) -> SignedVerdicts:
        """The verdicts on reports: only those recorded in leaves."""
        from kvcustody.governance.service.schedules.signed_verdicts import SignedVerdicts

        return SignedVerdicts()

    @cached_property
    def _release(self) -> ReleaseState | None:
        trust = self._settings().policy_trust
        if trust is None:
            return None
        from kvcustody.governance.release.replay_records import fold
        from kvcustody.governance.release.store import SqlStore
        from kvcustody.governance.release.trust import read_trust

        return fold(SqlStore(self._engine).read(), read_trust(trust))

    def released(self) -> ReleaseState | None:
        """Return the released policies; None where the settings name no trust configuration."""
        return self._release

    @cached_property
    def fleet(self) -> Fleet:
        """The workers on record; nothing can be registered here."""
        from kvcustody.governance.service.fleet.workers import Fleet

        return Fleet(self._engine, SystemClock(), _closes_nothing, apart_us=0)

    def marked(self) -> Marked:
        """Return the processes whose records are replayed or generated."""
        with self.reading() as connection:
            return read_marked(connection)

    def inbox_of(self, caller: Caller) -> list[InboxItem]:
        """Return all open tasks; proposals only where the settings name the trust configuration that checks them."""
        from kvcustody.governance.service.fleet.webhooks import stored_troubles
        from kvcustody.governance.service.inbox.read_inbox import InboxReader

        effect, now_us = self.policies_in_effect(), self.clock.utc_us()
        settings = self._settings()
        reader = InboxReader(settings.certificates, troubles=lambda: stored_troubles(settings, now_us))
        with self.reading() as connection:
            return list(reader.read(connection, now_us, release=self.released(), effect=effect).items)

    def cover(self) -> None:
        """Do nothing: reading seals nothing."""

    def seal_soon(self) -> None:
        """Do nothing: reading seals nothing."""

    def absent(self, error: LedgerError) -> LedgerError:
        """Return the error for something that the ledger does not hold, with its name."""
        return error

    def check_said(self, connection: Connection, wanted: EventFilter) -> None:
        """Refuse a name that no leaf has, and suggest the nearest known one (rule 3)."""
        check_said(connection, wanted)

    @cached_property
    def _engine(self) -> Engine:
        return self._stack.enter_context(reading(self._ledger))

    @contextmanager
    def reading(self, tenant: str | None = None) -> Iterator[Connection]:
        """Yield a connection in one read transaction."""
        with _reading(self._engine) as connection:
            yield connection

    @contextmanager
    def reading_for_long(self, tenant: str | None = None) -> Iterator[Connection]:
        """Yield such a connection to a copy of a file ledger, so that a long read blocks no writer (`private_copy`)."""
        with at_rest(self._engine) as engine, _reading(engine) as connection:
            yield connection

    def tenant_of(self, caller: Caller, action: Permission, name: str | None) -> str | None:
        """Return the tenant to which the answer is limited (rule 3)."""
        caller.must(action)
        if name is None:
            return None
        with self.reading() as connection:
            return known_tenant(connection, name)

    def __enter__(self) -> LedgerDesk:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)


@contextmanager
def _reading(engine: Engine) -> Iterator[Connection]:
    with engine.connect() as connection, connection.begin():
        dialect_of(connection).begin_reading(connection)
        yield connection


def _closes_nothing(worker: str, incarnation: str) -> None:
    """Do nothing: reading registers nothing."""
    raise CustodyError(f"`{worker}` was registered by somebody who only looks")


class _DeadlineClock:
    """Reads the settings about the clock when the time is needed."""

    def utc_us(self) -> int:
        """Return UTC in microseconds."""
        from kvcustody.console.clock import deadline_us

        return deadline_us()


class PlainCursors:
    """Unsigned cursors: a caller who reads the ledger itself needs no proof that a cursor is their own."""

    def write(self, question: CursorBinding, position: list[Any]) -> str:
        """Return the cursor of a position."""
        return urlsafe_b64encode(orjson.dumps(position)).rstrip(b"=").decode()

    def read(self, question: CursorBinding, cursor: str | None) -> list[Any] | None:
        """Return the position in a cursor.

        Raises:
            ConfigError: it is no cursor.
        """
        if cursor is None:
            return None
        try:
            position = orjson.loads(urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
        except ValueError:
            position = None
        if not isinstance(position, list):
            raise ConfigError(
                f"--cursor `{cursor}` is no cursor of this command; give the one printed after `more:`", cursor=cursor
            )
        return position
