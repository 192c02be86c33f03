"""Random names for subjects and sessions, kept in a table of their own.

P1 A pseudonym is random: nothing about the subject can be computed from it, and destroying its row unlinks
it.
P2 The name is durable no later than the first leaf that uses it: it travels in the same transaction or
spill.
P3 A session's row also names its subject, so that erasing a subject unlinks its sessions too.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from itertools import chain
from typing import Any

from sqlalchemy import Connection, delete, select

from kvcustody.audit.events import KINDS, Event
from kvcustody.audit.schema import subjects
from kvcustody.errors import LedgerError

Who = tuple[str, str, str]  # tenant, subject, session
Row = tuple[str, str, str, str]  # pseudonym, tenant, subject, session

_SURROGATE = re.compile("[\ud800-\udfff]")
_NAME_BYTES = 12
_CACHED_MAX = 1 << 18
_LOOKUP_ROWS = 100
_WANTED = ", ".join(["(?, ?, ?)"] * _LOOKUP_ROWS)
# A join, because `(…) IN (VALUES …)` reads the whole table on SQLite.
_LOOKUP = (
    "SELECT s.pseudonym, s.tenant, s.subject, s.session"  # noqa: S608 - our own marks
    f" FROM (VALUES {_WANTED}) AS wanted JOIN subjects AS s ON s.tenant = wanted.column1"
    " AND s.subject = wanted.column2 AND s.session = wanted.column3"
)
_INSERT = "INSERT INTO subjects (pseudonym, tenant, subject, session) VALUES (?, ?, ?, ?)"


class SubjectDirectory:
    """The SQL-backed pseudonym port: looks up in batches, invents in memory, writes when told."""

    def __init__(self) -> None:
        self._known: dict[Who, str] = {}
        self._fresh: dict[Who, str] = {}

    def __call__(self, tenant: str, subject: str, session: str = "") -> str:
        """The pseudonym of a subject or session; a new random one when none is known."""
        who = (tenant, subject, session)
        name = self._known.get(who)
        if name is None:
            if not _storable(who):
                raise LedgerError("a subject or session holds characters that no database stores")
            name = self._known[who] = self._fresh[who] = secrets.token_hex(_NAME_BYTES)
        return name

    def prefetch(self, connection: Connection, events: Iterable[Event]) -> None:
        """Have the names that these events need: read where they are known, new ones where they are not."""
        if len(self._known) > _CACHED_MAX:
            self._known = dict(self._fresh)
        wanted = [who for who in _named(events) if who not in self._known]
        if not _storable(chain.from_iterable(wanted)):  # one of them; `__call__` will name it
            wanted = [who for who in wanted if _storable(who)]
        for start in range(0, len(wanted), _LOOKUP_ROWS):
            chunk = wanted[start : start + _LOOKUP_ROWS]
            chunk += chunk[-1:] * (_LOOKUP_ROWS - len(chunk))  # one statement, prepared once
            values = tuple(chain.from_iterable(chunk))
            for name, *who in connection.exec_driver_sql(_marked(connection, _LOOKUP), values):
                self._known[(who[0], who[1], who[2])] = name
        missing = [who for who in wanted if who not in self._known]
        chance = secrets.token_hex(_NAME_BYTES * len(missing))
        names = map("".join, zip(*[iter(chance)] * (2 * _NAME_BYTES), strict=True))
        made = dict(zip(missing, names, strict=True))
        self._known.update(made)
        self._fresh.update(made)

    def fresh(self) -> list[Row]:
        """Rows (pseudonym, tenant, subject, session) not known to be durable yet."""
        return [(name, *who) for who, name in self._fresh.items()]

    def settle(self, rows: Iterable[Row]) -> None:
        """These rows are durable."""
        for _, *who in rows:
            self._fresh.pop((who[0], who[1], who[2]), None)


def store_names(connection: Connection, rows: list[Row], *, skip_known: bool = False) -> None:
    """Insert rows; those of a replay may be there already and are skipped."""
    if skip_known and rows:
        there: set[str] = set()
        for start in range(0, len(rows), _LOOKUP_ROWS):
            names = [row[0] for row in rows[start : start + _LOOKUP_ROWS]]
            query = select(subjects.c.pseudonym).where(subjects.c.pseudonym.in_(names))
            there.update(connection.scalars(query))
        rows = [row for row in dict.fromkeys(rows) if row[0] not in there]
    if rows:
        connection.exec_driver_sql(_marked(connection, _INSERT), rows)


def names_of(connection: Connection, tenant: str, subject: str) -> list[str]:
    """Every pseudonym of a subject and of its sessions (an outage may have given it more than one)."""
    where = (subjects.c.tenant == tenant) & (subjects.c.subject == subject)
    return sorted(connection.scalars(select(subjects.c.pseudonym).where(where)))


def unlink(connection: Connection, tenant: str, subject: str) -> int:
    """Destroy the link between a subject and its pseudonyms; every leaf stays as it is."""
    where = (subjects.c.tenant == tenant) & (subjects.c.subject == subject)
    return connection.execute(delete(subjects).where(where)).rowcount


def _marked(connection: Connection, statement: str) -> str:
    return statement if connection.dialect.name == "sqlite" else statement.replace("?", "%s")


def _storable(texts: Iterable[str]) -> bool:
    """No NUL (PostgreSQL refuses it) and no lone surrogate (UTF-8 has none)."""
    text = "".join(texts)
    return "\0" not in text and (text.isascii() or _SURROGATE.search(text) is None)


_NAMED = frozenset(kind for kind in KINDS if "subject" in kind._fields)  # type: ignore[attr-defined]


def _named(events: Iterable[Event]) -> set[Who]:
    """The subjects and sessions that events name."""
    naming: Iterable[Any] = [event for event in events if event.__class__ in _NAMED]
    wanted = set()
    for event in naming:
        tenant, subject, session = event.tenant or "", event.subject, event.session
        if subject is not None:
            wanted.add((tenant, subject, ""))
        if session is not None:
            wanted.add((tenant, subject or "", session))
    return wanted
