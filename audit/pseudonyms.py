"""Names that mean nothing for subjects and sessions, and the table that alone links them.

P1 A subject's pseudonym is random. A session's is an HMAC under a random secret of its subject: nothing can be computed
from either, and destroying the subject's row, which holds the secret, unlinks both.
P2 The name is durable no later than the first leaf that uses it: it travels in the same transaction or spill.
P3 A session has a row of its own where it has no subject, where its subject's row has no secret (a worker's that names
people without asking a database, or one from before there were secrets), and where an erasure is about it.
P4 With subject keys (`subject_keys`) rows hold tags instead of names, and the secret is the subject's key, elsewhere.
P5 A process that has pseudonyms in memory forgets them at its first batch after a subject was unlinked, and reads those
that are left anew: who comes back has another pseudonym.
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

from sqlalchemy import ColumnElement, Connection, Engine, delete, insert, select, update

from kvcustody.audit.bulk import insert_new, insert_rows
from kvcustody.audit.by_subject import of_subjects
from kvcustody.audit.events import KINDS, ErasureRequested, Event
from kvcustody.audit.schema import residencies, subject_unlinkings, subjects
from kvcustody.audit.store import marked
from kvcustody.audit.subject_keys import SubjectKeys, owner_of
from kvcustody.errors import LedgerError

Who = tuple[str, str, str]  # tenant, subject, session
Row = tuple[str, str, str, str, str | None]  # pseudonym, tenant, subject, session, secret

_SURROGATE = re.compile("[\ud800-\udfff]")
_NAME_BYTES = 12
_SECRET_BYTES = 16
_CACHED_MAX = 1 << 18
_LOOKUP_ROWS = 100
_WANTED = ", ".join(["(?, ?, ?)"] * _LOOKUP_ROWS)
# A join, because `(…) IN (VALUES …)` reads the whole table on SQLite.
_LOOKUP = (
    "SELECT s.pseudonym, s.secret, s.tenant, s.subject, s.session"  # noqa: S608 - our own marks
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
        self._secrets: dict[tuple[str, str], str] = {}  # by tenant and subject
        self._unlinkings = -1  # how many there were when names were last read; -1: none was

    def __call__(self, tenant: str, subject: str, session: str = "") -> str:
        """The pseudonym of a subject or session; a new random one when none is known."""
        who = (tenant, subject, session)
        name = self._known.get(who) or self._derived(who)
        if name is None:
            if not _storable(who):
                raise LedgerError("a subject or session holds characters that no database stores")
            name = self._known[who] = self._fresh[who] = secrets.token_hex(_NAME_BYTES)
        return name

    def prefetch(self, connection: Connection, events: Iterable[Event]) -> None:
        """Have the names that these events need: read where they are known, new ones where they are not."""
        count = unlinkings(connection)
        stale = count != self._unlinkings
        self._unlinkings = count
        if self._keys is not None and self._keys.refresh():
            stale = True
        if stale or len(self._known) > _CACHED_MAX:
            self._forget()
        named, listed = _named(events)
        wanted = [who for who in named if who not in self._known]
        if not _storable(chain.from_iterable(wanted)):  # one of them; `__call__` will name it
            wanted = [who for who in wanted if _storable(who)]
        if self._keys is not None and wanted:
            self._keys.prepare(owner_of(*who) for who in wanted)
        self._have(connection, [who for who in wanted if not (who[1] and who[2])])
        sessions = [who for who in wanted if who[1] and who[2]]
        self._have(connection, [who for who in sessions if who in listed or self._secret_of(who) is None])
        if self._keys is not None:
            self._keys.keep_names((self._known[who], who) for who in listed if who in self._known)

    def fresh(self) -> list[Row]:
        """Rows (pseudonym, tenant, subject, session, secret) not known to be durable yet."""
        return [(name, *self._stored(who), self._row_secret(who)) for who, name in self._fresh.items()]

    def settle(self, rows: Iterable[Sequence[Any]]) -> None:
        """These rows are durable."""
        if self._keys is None:
            for row in rows:
                self._fresh.pop((row[1], row[2], row[3]), None)
            return
        durable = {row[0] for row in rows}
        for who in [who for who, name in self._fresh.items() if name in durable]:
            del self._fresh[who]

    def durable(self) -> list[str]:
        """The pseudonyms in memory whose rows are durable, for who cannot read whether they still are (P5)."""
        return [name for who, name in self._known.items() if who not in self._fresh]

    def drop(self, gone: Iterable[str]) -> None:
        """Forget these pseudonyms: their rows are there no more."""
        names = frozenset(gone)
        self._known = {who: name for who, name in self._known.items() if name not in names}

    def _forget(self) -> None:
        """Everything but what is not durable yet."""
        self._known = dict(self._fresh)
        fresh = {who[:2] for who in self._fresh}
        kept = fresh if self._keys is None else set()
        self._secrets = {who: secret for who, secret in self._secrets.items() if who in kept}

    def _have(self, connection: Connection, wanted: list[Who]) -> None:
        """Read the rows of these, and invent those that there are none of."""
        stored = {self._stored(who): who for who in wanted}
        places = list(stored)
        for start in range(0, len(places), _LOOKUP_ROWS):
            chunk = places[start : start + _LOOKUP_ROWS]
            chunk += chunk[-1:] * (_LOOKUP_ROWS - len(chunk))  # one statement, prepared once
            values = tuple(chain.from_iterable(chunk))
            for name, secret, *place in connection.exec_driver_sql(marked(connection, _LOOKUP), values):
                who = stored[(place[0], place[1], place[2])]
                self._known[who] = name
                if secret:
                    self._secrets[who[:2]] = secret
        missing = [who for who in wanted if who not in self._known]
        chance = secrets.token_hex((_NAME_BYTES + _SECRET_BYTES) * len(missing))
        drawn = map("".join, zip(*[iter(chance)] * (2 * (_NAME_BYTES + _SECRET_BYTES)), strict=True))
        for who, both in zip(missing, drawn, strict=True):
            if who[1] and not who[2] and self._keys is None:
                self._secrets[who[:2]] = both[2 * _NAME_BYTES :]
            self._known[who] = self._fresh[who] = self._derived(who) or both[: 2 * _NAME_BYTES]

    def _derived(self, who: Who) -> str | None:
        """The pseudonym of a session whose subject has a secret (P1)."""
        _, subject, session = who
        if not (subject and session):
            return None
        secret = self._secret_of(who)
        if secret is None:
            return None
        return _session_name(secret, session)

    def _secret_of(self, who: Who) -> bytes | None:
        secret = self._secrets.get(who[:2])
        if secret is None and self._keys is not None:
            secret = self._secrets[who[:2]] = self._keys.tag(owner_of(*who), "sessions", "")
        return None if secret is None else secret.encode()

    def _row_secret(self, who: Who) -> str | None:
        """The secret that a subject's own row holds: none where there are subject keys."""
        return None if who[2] or self._keys is not None else self._secrets.get(who[:2])

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


def hidden(keys: SubjectKeys, rows: Sequence[tuple[str, str, str, str]]) -> list[tuple[str, str, str, str]]:
    """Rows of names as tags: for a ledger that takes them from processes without keys (P4)."""
    keys.refresh()
    keys.prepare({owner_of(*who) for _, *who in rows})
    return [(name, *tags_of(keys, (tenant, subject, session))) for name, tenant, subject, session in rows]


def store_names(connection: Connection, names: Sequence[Sequence[Any]], *, skip_known: bool = False) -> None:
    """Insert rows, with or without a secret; those of a replay may be there already and are skipped."""
    rows = [(*row[:4], row[4] if len(row) > 4 else None) for row in names]
    rows.sort(key=itemgetter(0))  # neighbours of a random order: fewer pages are sought and changed
    if rows:
        (insert_new if skip_known else insert_rows)(connection, subjects, rows)


def names_of(connection: Connection, tenant: str, subject: str, keys: SubjectKeys | None = None) -> list[str]:
    """Every pseudonym of a subject and of its sessions (an outage may have given it more than one)."""
    own = set(connection.scalars(select(subjects.c.pseudonym).where(_named_so(tenant, subject, keys))))
    session = residencies.c.session
    for start in range(0, len(names := sorted(own)), _LOOKUP_ROWS):
        theirs = of_subjects(connection, tenant, names[start : start + _LOOKUP_ROWS])
        query = select(session).where(*theirs, session.is_not(None))
        own.update(connection.scalars(query.distinct()))
    return sorted(own)


def subject_names(
    connection: Connection, tenant: str, subject: str, keys: SubjectKeys | None = None
) -> list[str]:
    """Every pseudonym of a subject itself, without those of its sessions."""
    query = select(subjects.c.pseudonym).where(_named_so(tenant, subject, keys), subjects.c.session == "")
    return sorted(connection.scalars(query))


def session_names(
    connection: Connection, tenant: str, subject: str, session: str, keys: SubjectKeys | None = None
) -> list[str]:
    """Every pseudonym of a session of a subject: of rows of its own, and those that come from its subject's secret."""
    tag = None if keys is None else keys.kept_tag(owner_of(tenant, subject, ""), "session", session)
    stored = [session] if tag is None else [session, tag]
    query = select(subjects.c.pseudonym, subjects.c.session, subjects.c.secret)
    found, secret_texts = set(), set()
    for row in connection.execute(query.where(_named_so(tenant, subject, keys))):
        if row.session in stored:
            found.add(row.pseudonym)
        elif not row.session and row.secret:
            secret_texts.add(row.secret)
    if keys is not None:
        kept = keys.kept_tag(owner_of(tenant, subject, ""), "sessions", "")
        secret_texts |= set() if kept is None else {kept}
    return sorted(found | {_session_name(text.encode(), session) for text in secret_texts})


def has_tags(engine: Engine) -> bool:
    """Somebody is known by a tag here: without the store of subject keys nobody finds them by name (P4)."""
    with engine.connect() as connection:
        return (
            connection.scalar(select(subjects.c.subject).where(subjects.c.subject.like("k1:%")).limit(1))
            is not None
        )


def unlink(connection: Connection, tenant: str, subject: str, keys: SubjectKeys | None = None) -> int:
    """Destroy the link between a subject and its pseudonyms; every leaf stays as it is.

    `redaction.unlink_subject` does so on record, destroys the key too, and sees to what a database keeps of it.
    """
    gone = connection.execute(delete(subjects).where(_named_so(tenant, subject, keys))).rowcount
    table = subject_unlinkings.c
    if not connection.execute(update(subject_unlinkings).values(count=table.count + 1)).rowcount:
        connection.execute(insert(subject_unlinkings).values(id=1, count=1))
    return gone


def unlinkings(connection: Connection) -> int:
    """How often a subject was unlinked here (P5)."""
    return int(connection.scalar(select(subject_unlinkings.c.count)) or 0)


def without_row(connection: Connection, names: Sequence[str]) -> list[str]:
    """Those of the pseudonyms that nobody is behind any more, or ever was."""
    there: set[str] = set()
    for start in range(0, len(names), _LOOKUP_ROWS):
        query = select(subjects.c.pseudonym).where(
            subjects.c.pseudonym.in_(names[start : start + _LOOKUP_ROWS])
        )
        there.update(connection.scalars(query))
    return [name for name in names if name not in there]


def _session_name(secret: bytes, session: str) -> str:
    """The pseudonym of a session under its subject's secret (P1)."""
    try:
        return hmac.digest(secret, session.encode(), "sha256").hex()[: 2 * _NAME_BYTES]
    except UnicodeEncodeError:
        raise LedgerError("a session holds characters that no database stores") from None


def _named_so(tenant: str, subject: str, keys: SubjectKeys | None) -> ColumnElement[bool]:
    """Rows of a subject: by its name, from before there were keys, and by its tag."""
    tag = None if keys is None else keys.kept_tag(owner_of(tenant, subject, ""), "subject", subject)
    stored = [subject] if tag is None else [subject, tag]
    return (subjects.c.tenant == tenant) & subjects.c.subject.in_(stored)


def _storable(texts: Iterable[str]) -> bool:
    """No NUL (PostgreSQL refuses it) and no lone surrogate (UTF-8 has none)."""
    text = "".join(texts)
    return "\0" not in text and (text.isascii() or _SURROGATE.search(text) is None)


_NAMED = frozenset(kind for kind in KINDS if "subject" in kind._fields)  # type: ignore[attr-defined]


def names_anybody(events: Iterable[Event]) -> bool:
    """Whether any of the events is of a kind that names a subject or a session."""
    return not _NAMED.isdisjoint(map(type, events))


def _named(events: Iterable[Event]) -> tuple[set[Who], set[Who]]:
    """The subjects and sessions that events name, and those that erasures are about: their sessions need a row each."""
    naming: Iterable[Any] = [event for event in events if event.__class__ in _NAMED]
    wanted, listed = set(), set()
    for event in naming:
        tenant, subject, session = event.tenant or "", event.subject, event.session
        who = []
        if subject is not None:
            who.append((tenant, subject, ""))
        if session is not None:
            who.append((tenant, subject or "", session))
        wanted.update(who)
        if event.__class__ is ErasureRequested:
            listed.update(who)
    return wanted, listed
