"""Sessions of people at the console: a cookie that stands for a credential, and what keeps others from using it.

1. The cookie holds 256 random bits; the database holds their keyed digest. A session ends at its deadline, when it is
   idle too long, when its principal is disabled, or when it is ended.
2. A session is its principal, read anew at every request: roles are never remembered in it.
3. An act in a session needs the session's CSRF token, which is computed from the cookie and kept nowhere, and must
   come from the service's own origin.
"""

from __future__ import annotations

import secrets
from typing import NamedTuple

from sqlalchemy import Engine, delete, insert, or_, select, update

from kvcustody.audit.database.engine import WRITE
from kvcustody.audit.schema.service import service_sessions
from kvcustody.clock import MICROSECONDS, Clock
from kvcustody.governance.service.access.service_secret import ServiceSecret, keyed_digest, same

_TOUCH_US = 60 * MICROSECONDS  # how exactly idleness is known
_TOKEN_CHARACTERS = 43


class NewSession(NamedTuple):
    """A session that just began: `token` goes into the cookie, `csrf` into pages."""

    token: str
    csrf: str
    expires_us: int


class Sessions:
    """Begins, finds and ends sessions; thread-safe."""

    def __init__(
        self, engine: Engine, secret: ServiceSecret, clock: Clock, *, seconds: int, idle_seconds: int
    ) -> None:
        self._engine = engine
        self._key = secret.key("session")
        self._csrf_key = secret.key("csrf")
        self._clock = clock
        self._us, self._idle_us = seconds * MICROSECONDS, idle_seconds * MICROSECONDS

    def begin(self, principal: str) -> NewSession:
        """A session for a principal who has just shown a credential; sessions that are over are removed."""
        token, now_us = secrets.token_urlsafe(32), self._clock.utc_us()
        table = service_sessions
        over = or_(table.c.expires_us <= now_us, table.c.used_us <= now_us - self._idle_us)
        row = {"principal": principal, "begun_us": now_us, "used_us": now_us, "expires_us": now_us + self._us}
        with self._engine.connect().execution_options(**WRITE) as connection, connection.begin():
            connection.execute(delete(table).where(over))
            connection.execute(insert(table).values(digest=self._digest(token), **row))
        return NewSession(token, self.csrf(token), now_us + self._us)

    def principal(self, token: str) -> str | None:
        """Whose session this is, if it is one and not over."""
        if len(token) != _TOKEN_CHARACTERS:
            return None
        digest, now_us, table = self._digest(token), self._clock.utc_us(), service_sessions
        with self._engine.connect() as connection:
            row = connection.execute(select(table).where(table.c.digest == digest)).first()
        if row is None or now_us >= row.expires_us or now_us - row.used_us >= self._idle_us:
            return None
        if now_us - row.used_us >= _TOUCH_US:
            with self._engine.connect().execution_options(**WRITE) as connection, connection.begin():
                connection.execute(update(table).where(table.c.digest == digest).values(used_us=now_us))
        return str(row.principal)

    def end(self, token: str) -> None:
        """End a session; one that is over, or never was, is not an error."""
        where = service_sessions.c.digest == self._digest(token)
        with self._engine.connect().execution_options(**WRITE) as connection, connection.begin():
            connection.execute(delete(service_sessions).where(where))

    def csrf(self, token: str) -> str:
        """The CSRF token of a session."""
        return keyed_digest(self._csrf_key, token.encode())

    def vouches(self, token: str, csrf: str) -> bool:
        """Whether `csrf` belongs to the session (rule 3)."""
        return same(self.csrf(token), csrf)

    def _digest(self, token: str) -> str:
        return keyed_digest(self._key, token.encode("utf-8", "surrogatepass"))
