"""Random names for subjects and sessions, kept in a table of their own.

P1 A pseudonym is random: nothing about the subject can be computed from it, and destroying its row unlinks
it.
P2 The name is durable no later than the first leaf that uses it: it travels in the same transaction or
spill.
P3 A session's row also names its subject, so that erasing a subject unlinks its sessions too.
P4 With subject keys (`subject_keys`) rows hold tags instead of names, under a key of each subject that is elsewhere.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from itertools import chain
from typing import Any

from sqlalchemy import ColumnElement, Connection, delete, select

from kvcustody.audit.bulk import insert_rows
from kvcustody.audit.events import KINDS, Event
from kvcustody.audit.schema import subjects
from kvcustody.audit.subject_keys import SubjectKeys, owner_of
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


class SubjectDirectory:
    """The SQL-backed pseudonym port: looks up in batches, invents in memory, writes when told.

    In memory people go by their names; in rows, where there are subject keys, by tags (P4).
    """

    def __init__(self, keys: SubjectKeys | None = None) -> None:
        self._keys = keys
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
        if len(self._known) > _CACHED_MAX or (self._keys is not None and self._keys.refresh()):
            self._known = dict(self._fresh)
        wanted = [who for who in _named(events) if who not in self._known]
        if not _storable(chain.from_iterable(wanted)):  # one of them; `__call__` will name it
            wanted = [who for who in wanted if _storable(who)]
        if self._keys is not None and wanted:
            self._keys.prepare(owner_of(*who) for who in wanted)
        stored = {self._stored(who): who for who in wanted}
        places = list(stored)
        for start in range(0, len(places), _LOOKUP_ROWS):
            chunk = places[start : start + _LOOKUP_ROWS]
            chunk += chunk[-1:] * (_LOOKUP_ROWS - len(chunk))  # one statement, prepared once
            values = tuple(chain.from_iterable(chunk))
            for name, *place in connection.exec_driver_sql(_marked(connection, _LOOKUP), values):
                self._known[stored[(place[0], place[1], place[2])]] = name
        missing = [who for who in wanted if who not in self._known]
        chance = secrets.token_hex(_NAME_BYTES * len(missing))
        names = map("".join, zip(*[iter(chance)] * (2 * _NAME_BYTES), strict=True))
        made = dict(zip(missing, names, strict=True))
        self._known.update(made)
        self._fresh.update(made)

    def fresh(self) -> list[Row]:
        """Rows (pseudonym, tenant, subject, session) not known to be durable yet."""
        return [(name, *self._stored(who)) for who, name in self._fresh.items()]

    def settle(self, rows: Iterable[Row]) -> None:
        """These rows are durable."""
        if self._keys is None:
            for _, *place in rows:
                self._fresh.pop((place[0], place[1], place[2]), None)
            return
        durable = {row[0] for row in rows}
        for who in [who for who, name in self._fresh.items() if name in durable]:
            del self._fresh[who]

    def _stored(self, who: Who) -> Who:
        """How a row names somebody."""
        return who if self._keys is None else tags_of(self._keys, who)


def tags_of(keys: SubjectKeys, who: Who) -> Who:
    """Tenant, and the tags of subject and session under the subject's key (P4)."""
    tenant, subject, session = who
    owner = owner_of(*who)
    return (
        tenant,
        keys.tag(owner, "subject", subject) if subject else "",
        keys.tag(owner, "session", session) if session else "",
    )


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
        insert_rows(connection, subjects, rows)


def names_of(connection: Connection, tenant: str, subject: str, keys: SubjectKeys | None = None) -> list[str]:
    """Every pseudonym of a subject and of its sessions (an outage may have given it more than one)."""
    return sorted(connection.scalars(select(subjects.c.pseudonym).where(_named_so(tenant, subject, keys))))


def unlink(connection: Connection, tenant: str, subject: str, keys: SubjectKeys | None = None) -> int:
    """Destroy the link between a subject and its pseudonyms; every leaf stays as it is.

    `redaction.unlink_subject` does so on record, destroys the key too, and sees to what a database keeps of it.
    """
    return connection.execute(delete(subjects).where(_named_so(tenant, subject, keys))).rowcount


def _named_so(tenant: str, subject: str, keys: SubjectKeys | None) -> ColumnElement[bool]:
    """Rows of a subject: by its name, from before there were keys, and by its tag."""
    stored = [subject]
    if keys is not None and keys.known(tenant, subject):
        stored.append(tags_of(keys, (tenant, subject, ""))[1])
    return (subjects.c.tenant == tenant) & subjects.c.subject.in_(stored)


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
