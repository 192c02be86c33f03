"""One question to a control plane, or to a ledger itself: the same operation answers it.

1. A ledger is only read. Its parts open when the answer uses them, so a question works on a read-only ledger, beside a
   running server, on a standby and without settings of a service.
2. Whoever may read the ledger itself sees all of it, and no read of it is put on record.
3. Of a ledger itself, a tenant that it does not know is refused with the nearest name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from sqlalchemy import Connection, Engine

from kvcustody.audit.evidence.query.known_names import known_tenant
from kvcustody.audit.evidence.subjects.subject_key_store import SubjectKeys
from kvcustody.audit.store.database.dialect import dialect_of
from kvcustody.console.opening import control_plane, reading, service_settings, subject_store
from kvcustody.console.options import ActSource, AnySource, ServiceSource, SubjectSource
from kvcustody.errors import ConfigError, LedgerError
from kvcustody.governance.service.access.caller import Caller
from kvcustody.governance.service.access.roles import Permission, Role
from kvcustody.governance.service.operations.desk import ReadOperation
from kvcustody.governance.service.operations.operation import check_permission
from kvcustody.governance.service.page_cursor import CursorBinding

if TYPE_CHECKING:
    from kvcustody.governance.service.schedules.signed_verdicts import SignedVerdicts

_READER = Caller("local", frozenset({Role.AUDITOR, Role.KEY_CUSTODIAN}), None, "local")  # rule 2


def asked(wanted: ReadOperation, source: AnySource, **parameters: Any) -> dict[str, Any]:
    """What the operation answers.

    Args:
        wanted: The operation.
        source: Whom to ask.
        parameters: All parameters of the operation, by their names; None: left out.

    Raises:
        CustodyError: The question is refused, or cannot be answered.
    """
    if source.plane.server is not None:
        with control_plane(source) as plane:
            path, query = _request(wanted, parameters)
            return dict(plane.get(path, **query))
    return _of_ledger(wanted, source, parameters)


def listed(wanted: ReadOperation, source: AnySource, **parameters: Any) -> list[dict[str, Any]]:
    """Every item of the list that the operation answers, as `asked`."""
    if source.plane.server is not None:
        with control_plane(source) as plane:
            path, query = _request(wanted, parameters)
            return plane.items(path, **query)
    return list(_of_ledger(wanted, source, parameters)["items"])


def _of_ledger(wanted: ReadOperation, source: AnySource, parameters: dict[str, Any]) -> dict[str, Any]:
    check_permission(wanted.operation, _READER)
    ledger = source.ledger
    if ledger is None:
        assert isinstance(source, ServiceSource), "every other source has a ledger by default"
        ledger = service_settings(source.config, None).database_url
    keys = source.subject_keys if isinstance(source, SubjectSource | ActSource) else None
    with LedgerDesk(ledger, keys) as desk:
        return wanted.answer(desk, _READER, **parameters)


def _request(wanted: ReadOperation, parameters: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The path and the query that say these parameters."""
    path = wanted.operation.path
    there = {name: quote(str(value), safe="") for name, value in parameters.items() if f"{{{name}}}" in path}
    return path.format_map(there), {name: value for name, value in parameters.items() if name not in there}


class LedgerDesk:
    """A ledger that operations read (rule 1). Use it as a context manager."""

    def __init__(self, ledger: str, subject_keys: str | None = None) -> None:
        """`subject_keys`: their store, by its URL; None: the one beside the ledger, if there is one."""
        self._ledger = ledger
        self._keys = subject_keys
        self._stack = ExitStack()
        self.cursors = PlainCursors()

    @cached_property
    def clock(self) -> _DeadlineClock:
        """The time by which deadlines are compared on this machine."""
        return _DeadlineClock()

    @cached_property
    def subject_keys(self) -> SubjectKeys | None:
        """The store of subject keys; None where there is none."""
        return self._stack.enter_context(subject_store(self._keys, self._ledger))

    @property
    def token_issuers(self) -> tuple[str, ...]:
        """None: the settings of a service are not read."""
        return ()

    @cached_property
    def verdicts(self) -> SignedVerdicts:
        """What is shown of reports' verdicts: those of leaves alone."""
        from kvcustody.governance.service.schedules.signed_verdicts import SignedVerdicts

        return SignedVerdicts()

    def released(self) -> None:
        """None: nothing here says by what releases are checked."""

    def absent(self, error: LedgerError) -> LedgerError:
        """What is not in the ledger is said by its name."""
        return error

    @cached_property
    def _engine(self) -> Engine:
        return self._stack.enter_context(reading(self._ledger))

    @contextmanager
    def reading(self, tenant: str | None = None) -> Iterator[Connection]:
        """A connection in one read transaction."""
        with self._engine.connect() as connection, connection.begin():
            dialect_of(connection).begin_reading(connection)
            yield connection

    def tenant_of(self, caller: Caller, action: Permission, said: str | None) -> str | None:
        """The tenant to answer about (rule 3)."""
        caller.must(action)
        if said is None:
            return None
        with self.reading() as connection:
            return known_tenant(connection, said)

    def __enter__(self) -> LedgerDesk:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)


class _DeadlineClock:
    """Reads the settings that say where time is kept when it is asked."""

    def utc_us(self) -> int:
        """UTC in microseconds."""
        from kvcustody.console.clock import deadline_us

        return deadline_us()


class PlainCursors:
    """Cursors of whoever reads the ledger itself, who needs no proof that a cursor is their own: three numbers."""

    def write(self, question: CursorBinding, position: list[Any]) -> str:
        """The cursor of a position."""
        return ":".join(map(str, position))

    def read(self, question: CursorBinding, cursor: str | None) -> list[Any] | None:
        """The position in a cursor; raises `ConfigError`."""
        if cursor is None:
            return None
        found = re.fullmatch(r"(\d{1,18}):(\d{1,9}):(\d{1,18})", cursor)
        if found is None:
            raise ConfigError(
                f"--cursor `{cursor}` is no cursor of this command; give what `more:` said", cursor=cursor
            )
        return [int(number) for number in found.groups()]
