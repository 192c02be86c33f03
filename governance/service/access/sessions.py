"""Console sessions: a cookie that stands for a credential, and its protection against use by others.

1. The cookie holds 256 random bits, and the public prefix of the key that the session was begun with; the database
   holds the keyed digest of both. A session ends in any of these cases:
   - its deadline passes, or it is idle too long;
   - its key is revoked, expired or replaced;
   - its principal is disabled;
   - somebody ends it.
2. The session's principal is read anew at every request; the session never remembers roles.
3. A row's `expires_us` is when the session ends unless it is used before. So the row is enough to know whether the
   session is over (`principal_table.session_end`).
4. An act in a session must come from the service's own origin. It needs the session's CSRF token, which is computed
   from the cookie and stored nowhere.
"""

from __future__ import annotations

import re
import secrets
from typing import Any, NamedTuple

from sqlalchemy import Connection, Engine, delete, insert, or_, select, update

from kvcustody.audit.store.database.engine import WRITE
from kvcustody.audit.store.schema.service import service_sessions
from kvcustody.audit.store.schema.stored_rows import stored_row
from kvcustody.clock import MICROSECONDS, Clock
from kvcustody.governance.credentials.service_secret import ServiceSecret, keyed_digest, same
from kvcustody.governance.service.access.principal_table import valid_keys

_TOUCH_US = 60 * MICROSECONDS  # how exactly idleness is known
_TOKEN = re.compile(r"[A-Za-z0-9_-]{43}\.((?:[0-9a-f]{12})?)")


class NewSession(NamedTuple):
    """A session that just began: `token` goes into the cookie, `csrf` into pages."""

    token: str
    csrf: str
    expires_us: int


class StandingSession(NamedTuple):
    """A running session: its principal, and the prefix of the key that began it (empty: none did)."""

    principal: str
    key: str
    digest: str


class Sessions:
    """Begins, finds and ends sessions; thread-safe."""

    def __init__(self, engine: Engine, secret: ServiceSecret, clock: Clock, *, seconds: int, idle_seconds: int) -> None:
        self._engine = engine
        self._key = secret.key("session")
        self._csrf_key = secret.key("csrf")
        self._clock = clock
        self._us, self._idle_us = seconds * MICROSECONDS, idle_seconds * MICROSECONDS

    def begin(self, principal: str, *, key: str) -> NewSession:
        """Begin a session for a principal that has just shown a credential; ended sessions are removed.

        `key`: the prefix of the API key that was shown; empty where a link or nothing of the kind was.
        """
        token, now_us = f"{secrets.token_urlsafe(32)}.{key}", self._clock.utc_us()
        table = service_sessions
        over = or_(table.c.expires_us <= now_us, table.c.used_us <= now_us - self._idle_us)
        row = {"principal": principal, "begun_us": now_us, "used_us": now_us}
        row["expires_us"] = min(now_us + self._us, now_us + self._idle_us)
        with self._engine.connect().execution_options(**WRITE) as connection, connection.begin():
            connection.execute(delete(table).where(over))
            connection.execute(insert(table).values(digest=self._digest(token), **row))
        return NewSession(token, self.csrf(token), now_us + self._us)

    def find(self, token: str) -> StandingSession | None:
        """Return the running session of a cookie, and note its use."""
        form, now_us, table = _TOKEN.fullmatch(token), self._clock.utc_us(), service_sessions
        if form is None:
            return None
        digest = self._digest(token)
        with self._engine.connect() as connection:
            row = self._standing(connection, digest, form[1], now_us)
        if row is None:
            return None
        if now_us - row.used_us >= _TOUCH_US:
            with self._engine.connect().execution_options(**WRITE) as connection, connection.begin():
                ends = {"used_us": now_us, "expires_us": min(row.begun_us + self._us, now_us + self._idle_us)}
                connection.execute(update(table).where(table.c.digest == digest).values(ends))
        return StandingSession(str(row.principal), form[1], digest)

    def expiry(self, digest: str) -> int | None:
        """Return when a session ends at the latest (UTC)."""
        query = select(service_sessions).where(service_sessions.c.digest == digest)
        with self._engine.connect() as connection:
            row = stored_row(connection, query)
        return None if row is None or row.unread else int(row.begun_us) + self._us

    def stands(self, digest: str, key: str) -> bool:
        """Whether a session is still running."""
        with self._engine.connect() as connection:
            return self._standing(connection, digest, key, self._clock.utc_us()) is not None

    def _standing(self, connection: Connection, digest: str, key: str, now_us: int) -> Any:
        """The row of a session that is not over (rule 1)."""
        table = service_sessions
        row = stored_row(connection, select(table).where(table.c.digest == digest))
        if row is None or row.unread or now_us >= row.expires_us or now_us - row.used_us >= self._idle_us:
            return None
        return row if not key or key in valid_keys(connection, row.principal, now_us) else None

    def end(self, token: str) -> None:
        """End a session; an ended or unknown one is no error."""
        where = service_sessions.c.digest == self._digest(token)
        with self._engine.connect().execution_options(**WRITE) as connection, connection.begin():
            connection.execute(delete(service_sessions).where(where))

    def csrf(self, token: str) -> str:
        """The CSRF token of a session."""
        return keyed_digest(self._csrf_key, token.encode())

    def vouches(self, token: str, csrf: str) -> bool:
        """Whether `csrf` belongs to the session (rule 4)."""
        return same(self.csrf(token), csrf)

    def _digest(self, token: str) -> str:
        return keyed_digest(self._key, token.encode("utf-8", "surrogatepass"))
