"""Meaningless names for subjects and sessions. Only the table in `subject_rows` links them to people.

1. A pseudonym is an HMAC over its row's names under a random secret in that row (`committed_name`), so leaves prove the
   row. A session uses its subject's secret. Without the row nothing can be computed from a pseudonym: destroying the
   subject's row, which holds the secret, unlinks both.
2. The name is durable no later than the first leaf that uses it: it travels in the same transaction, batch or spill.
3. A session has a row of its own in three cases:
   - it has no subject;
   - its subject's row has no secret, because it is from before there were secrets;
   - an erasure is about it.
4. With subject keys (`subject_keys`) rows hold tags instead of names, and a session's secret comes from the subject's
   key. A process that names people without a database has its own secrets; the receiver of its rows seals them
   (`kept`). Without keys nobody is named, unless a setting allows names in clear (`clear_names`).
5. A process with pseudonyms in memory forgets them at its first batch after a subject was unlinked, and reads the
   remaining ones anew. So a subject that comes back gets another pseudonym.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from sqlalchemy import Connection

from kvcustody.audit.evidence.subjects.subject_key_store import SubjectKeys, is_sealed, owner_of
from kvcustody.audit.evidence.subjects.subject_table import (
    LOOKUP_ROWS,
    SESSIONS,
    Row,
    Who,
    committed_name,
    is_tagged,
    sealed_rows,
    tags_of,
    unlinkings,
)
from kvcustody.audit.kinds import KINDS, CaseOpened, ErasureRequested, Event
from kvcustody.audit.store.database.dialect import dialect_of
from kvcustody.errors import LedgerError

_SECRET_BYTES = 16
_SURROGATE = re.compile("[\ud800-\udfff]")
_CACHED_MAX = 1 << 18
_WANTED = ", ".join(["(?, ?, ?)"] * LOOKUP_ROWS)
# A join, because `(…) IN (VALUES …)` reads the whole table on SQLite.
_LOOKUP = (
    "SELECT s.pseudonym, s.secret, s.tenant, s.subject, s.session"  # noqa: S608 - our own marks
    f" FROM (VALUES {_WANTED}) AS wanted JOIN subjects AS s ON s.tenant = wanted.column1"
    " AND s.subject = wanted.column2 AND s.session = wanted.column3"
)


class SubjectDirectory:
    """The SQL-backed pseudonym port: looks up in batches, invents in memory, writes on request.

    In memory people go by their names; in rows, where there are subject keys, by tags (rule 4).
    """

    def __init__(self, keys: SubjectKeys | None = None, *, clear_names: bool = False) -> None:
        self._keys = keys
        self._mute = keys is None and not clear_names  # rule 4: nobody can be named
        self._known: dict[Who, str] = {}
        self._fresh: dict[Who, str] = {}
        self._row_secrets: dict[Who, str] = {}  # of those that are fresh
        self._secrets: dict[tuple[str, str], str] = {}  # by tenant and subject
        self._unlinkings = -1  # how many there were when names were last read; -1: none was

    def __call__(self, tenant: str, subject: str, session: str = "") -> str:
        """Return the pseudonym of a subject or session; a new random one if none is known."""
        who = (tenant, subject, session)
        return self._known.get(who) or self._derived(who) or self._invented(who)

    def prefetch(self, connection: Connection, events: Iterable[Event]) -> None:
        """Load the names that these events need, and make new ones for unknown people."""
        if self._mute:
            return
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

    def list_erased(self, events: Iterable[Event]) -> None:
        """Add rows for those that erasures concern (rule 3), without asking a database."""
        for who in _named(event for event in events if event.__class__ is ErasureRequested)[1]:
            if who not in self._known:
                self._known[who] = self._fresh[who] = self(*who)
                if who not in self._row_secrets:
                    self._row_secrets[who] = self._secret_of(who) or ""

    def trim(self) -> None:
        """Forget durable names once there are many, without asking a database; a returning person gets a new
        pseudonym.
        """
        if len(self._known) > _CACHED_MAX:
            self._forget()

    def fresh(self) -> list[Row]:
        """Return rows (pseudonym, tenant, subject, session, secret) that are not known to be durable yet."""
        return [(name, *self._stored(who), self._row_secrets.get(who) or None) for who, name in self._fresh.items()]

    def kept(self, rows: Sequence[Row], *, own: bool) -> list[Row]:
        """Return rows of another process in this ledger's form (rule 4); `own`: the process has the same subject keys.

        Raises `LedgerError` where they are names and nothing says that names are kept.
        """
        if self._keys is None:
            if self._mute and not all(map(is_tagged, rows)):
                raise _no_keys()
            return list(rows)
        named = [row for row in rows if not (own and is_tagged(row))]
        return [row for row in rows if own and is_tagged(row)] + sealed_rows(self._keys, named)

    def settle(self, rows: Iterable[Sequence[Any]]) -> None:
        """Mark these rows as durable."""
        if self._keys is None:
            for row in rows:
                self._fresh.pop((row[1], row[2], row[3]), None)
                self._row_secrets.pop((row[1], row[2], row[3]), None)
            return
        durable = {row[0] for row in rows}
        for who in [who for who, name in self._fresh.items() if name in durable]:
            del self._fresh[who]
            self._row_secrets.pop(who, None)

    def durable(self) -> list[str]:
        """Return the pseudonyms in memory with durable rows, for callers that cannot check the table (rule 5)."""
        return [name for who, name in self._known.items() if who not in self._fresh]

    def drop(self, gone: Iterable[str]) -> None:
        """Forget these pseudonyms, whose rows no longer exist."""
        names = frozenset(gone)
        for who in [who for who, name in self._known.items() if name in names]:
            del self._known[who]
            if not who[2]:
                self._secrets.pop(who[:2], None)

    def _forget(self) -> None:
        """Everything but what is not durable yet."""
        self._known = dict(self._fresh)
        fresh = {who[:2] for who in self._fresh}
        kept = fresh if self._keys is None else set()
        self._secrets = {who: secret for who, secret in self._secrets.items() if who in kept}

    def _have(self, connection: Connection, wanted: list[Who]) -> None:
        """Read the rows of these, and invent those that there are none of."""
        stored = {self._stored(who): who for who in wanted}
        places, lookup = list(stored), dialect_of(connection).with_placeholders(_LOOKUP)
        for start in range(0, len(places), LOOKUP_ROWS):
            chunk = places[start : start + LOOKUP_ROWS]
            chunk += chunk[-1:] * (LOOKUP_ROWS - len(chunk))  # one statement, prepared once
            values = tuple(chain.from_iterable(chunk))
            for name, secret, *place in connection.exec_driver_sql(lookup, values):
                who = stored[(place[0], place[1], place[2])]
                self._known[who] = name
                if secret and self._keys is None and not (who[2] or is_sealed(secret)):
                    self._secrets[who[:2]] = secret
        missing = [who for who in wanted if who not in self._known]
        chance = secrets.token_hex(_SECRET_BYTES * len(missing))
        drawn = map("".join, zip(*[iter(chance)] * (2 * _SECRET_BYTES), strict=True))
        for who, secret in zip(missing, drawn, strict=True):
            self._name(who, self._secret_of(who) or secret)

    def _invented(self, who: Who) -> str:
        """Return a new pseudonym for a person whom no database was asked about."""
        if not _storable(who):
            raise LedgerError("a subject or session contains characters that databases cannot store")
        tenant, subject, session = who
        if subject and session and (tenant, subject, "") not in self._known:
            self(tenant, subject)  # and with it the secret that the session's comes from
            return self(tenant, subject, session)
        return self._name(who, secrets.token_hex(_SECRET_BYTES))

    def _name(self, who: Who, secret: str) -> str:
        """Return the pseudonym of a person under the secret that its row will hold."""
        if who[1] and not who[2] and self._keys is None:
            self._secrets[who[:2]] = secret
        self._row_secrets[who] = secret
        name = self._known[who] = self._fresh[who] = committed_name(secret, *self._stored(who))
        return name

    def _derived(self, who: Who) -> str | None:
        """Return the pseudonym of a session whose subject has a secret (rule 1)."""
        secret = self._secret_of(who)
        return None if secret is None else committed_name(secret, *self._stored(who))

    def _secret_of(self, who: Who) -> str | None:
        """Return the secret of a session's subject; None if it is not a session of a subject, or there is no secret."""
        if not (who[1] and who[2]):
            return None
        secret = self._secrets.get(who[:2])
        if secret is None and self._keys is not None:
            secret = self._secrets[who[:2]] = self._keys.tag(owner_of(*who), SESSIONS, "")
        return secret

    def _stored(self, who: Who) -> Who:
        """How a row names somebody."""
        if self._mute:
            raise _no_keys()
        return who if self._keys is None else tags_of(self._keys, who)


def _no_keys() -> LedgerError:
    return LedgerError("subjects cannot be named: there is no store of subject keys, and names are not stored in clear")


def _storable(texts: Iterable[str]) -> bool:
    """No NUL (PostgreSQL refuses it) and no lone surrogate (UTF-8 has none)."""
    text = "".join(texts)
    return "\0" not in text and (text.isascii() or _SURROGATE.search(text) is None)


_NAMED = frozenset(kind for kind in KINDS if "subject" in kind.__struct_fields__)


def names_anybody(events: Iterable[Event]) -> bool:
    """Return whether any event is of a kind that names a subject or a session."""
    return not _NAMED.isdisjoint(map(type, events))


def _named(events: Iterable[Event]) -> tuple[set[Who], set[Who]]:
    """Return the subjects and sessions that events name, and those that erasures and cases concern.

    Sessions of these need a row each, and the store of subject keys can name them.
    """
    naming: Iterable[Any] = [event for event in events if event.__class__ in _NAMED]
    wanted, listed = set(), set()
    for event in naming:
        tenant, subject, session = event.tenant or "", event.subject, getattr(event, "session", None)
        who = []
        if subject is not None:
            who.append((tenant, subject, ""))
        if session is not None:
            who.append((tenant, subject or "", session))
        wanted.update(who)
        if event.__class__ in (ErasureRequested, CaseOpened):
            listed.update(who)
    return wanted, listed
