"""Finding principals and keys, and whose key this is: the reading half of the book of principals.

1. A key that was found valid is not looked up again for a second. What this process narrows takes effect at once all
   the same; what another process narrows (`kvcustody apikey revoke` beside a server), within that second. A key
   that ends with a session is looked up every time.
2. A key that is bound to a client certificate is valid over connections with that certificate alone.
3. A key that was revoked, has expired, or whose principal was disabled costs what an unknown one costs (api_key, rule
   2 of `api_key`).
"""

from __future__ import annotations

from typing import Any

import structlog
from sqlalchemy import Engine, literal, select, update

from kvcustody.audit.evidence.query.issuers import named_tenant
from kvcustody.audit.store.database.engine import WRITE
from kvcustody.audit.store.schema.service import service_keys, service_principals
from kvcustody.audit.store.schema.stored_rows import stored_row
from kvcustody.clock import MICROSECONDS, Clock
from kvcustody.governance.credentials.api_key import KeyHasher, session_of
from kvcustody.governance.credentials.certificate_thumbprint import certificate_matches
from kvcustody.governance.service.access.principal_table import (
    KEY_COLUMNS,
    ApiKeyRecord,
    PrincipalRecord,
    find_principal,
    keys_of_principal,
    principal_of,
    principals_after,
    session_end,
)
from kvcustody.governance.service.problem_details import not_found

_log = structlog.get_logger(__name__)
_USED_EVERY_US = 60 * MICROSECONDS  # how exactly a key's last use is known
_KNOWN_US = MICROSECONDS
_KNOWN_MAX = 4096


class PrincipalLookup:
    """Reads the book of principals; thread-safe."""

    def __init__(self, engine: Engine, hasher: KeyHasher, clock: Clock) -> None:
        self._engine = engine
        self._hasher = hasher
        self._clock = clock
        self._known: dict[
            str, tuple[int, int, str, PrincipalRecord, str | None]
        ] = {}  # by prefix: looked up, expires, hash, whose, bound to (rule 1)

    def find(self, name: str) -> PrincipalRecord | None:
        """The principal of this name, if there ever was one."""
        with self._engine.connect() as connection:
            return find_principal(connection, name)

    def get(self, name: str) -> PrincipalRecord:
        """The principal of this name; raises `not-found`."""
        found = self.find(name)
        if found is None:
            raise not_found()
        return found

    def listed(self, *, after: str = "", limit: int = 100) -> tuple[list[PrincipalRecord], bool]:
        """Principals in the order of their names, and whether more follow: `principals_after`."""
        with self._engine.connect() as connection:
            return principals_after(connection, after, limit)

    def keys(self, name: str) -> list[ApiKeyRecord]:
        """Every key that a principal ever had, newest first; at most 1,000."""
        with self._engine.connect() as connection:
            return keys_of_principal(connection, name, self._clock.utc_us())

    def known(self, prefix: str, key: str, certificate: str | None = None) -> PrincipalRecord | None:
        """The principal whose key this is, if that was looked up within a second (rule 1); no I/O."""
        found = self._known.get(prefix)
        if found is None:
            return None
        now_us = self._clock.utc_us()
        looked_up_us, expires_us, stored, principal, bound = found
        if not certificate_matches(bound, certificate):
            return None
        fresh = looked_up_us <= now_us < min(looked_up_us + _KNOWN_US, expires_us)
        return principal if fresh and self._hasher.remembers(key, stored) else None

    def by_key(
        self, prefix: str | None, key: str, certificate: str | None = None
    ) -> tuple[PrincipalRecord, str] | None:
        """The principal whose valid key this is, and the key's prefix; equally dear for all that are not (rule 3).

        `certificate`: the thumbprint of the client certificate that came with it (rule 2).
        """
        row, known = None, self._known
        if prefix is not None:
            joined = service_principals.c.name == service_keys.c.principal
            query = select(*service_principals.c, *KEY_COLUMNS).where(joined, service_keys.c.prefix == prefix)
            with self._engine.connect() as connection:
                row = stored_row(connection, query)
                if row is not None and row.unread:
                    row = None
                if row is not None and session_end(connection, row.hash, self._clock.utc_us()) is not None:
                    row = None
        now_us = self._clock.utc_us()
        counts = row is not None and _counts(row, now_us, certificate)
        if not self._hasher.verify(key, row.hash if row is not None and counts else None):
            return None
        assert row is not None and prefix is not None
        if row.used_us is None or now_us - row.used_us >= _USED_EVERY_US:
            self._used(prefix, now_us)
        if len(known) >= _KNOWN_MAX:
            known.clear()
        principal = principal_of(row)
        if session_of(row.hash):
            return principal, prefix
        known[prefix] = (
            now_us,
            row.expires_us,
            row.hash,
            principal,
            row.certificate,
        )  # the one from before the look-up, if cleared
        return principal, prefix

    def named(self, tenant: str) -> str:
        """The name of the tenant that somebody calls so; raises `ConfigError` where that could be several."""
        with self._engine.connect() as connection:
            return named_tenant(connection, tenant)

    def ended(self, name: str, prefix: str = "") -> bool:
        """Whether a principal, or the key that it used, was ended since: for answers that take long, and for tokens."""
        whose = service_principals.c
        over = select(literal(1)).where(whose.name == name, whose.disabled_us.is_not(None))
        with self._engine.connect() as connection:
            if connection.scalar(over) is not None:
                return True
            if not prefix:
                return False
            key = stored_row(connection, select(*KEY_COLUMNS).where(service_keys.c.prefix == prefix))
            now_us = self._clock.utc_us()
            if key is None or key.unread or session_end(connection, key.hash, now_us) is not None:
                return True
        return key.revoked_us is not None or now_us >= key.expires_us

    def expiry(self, prefix: str) -> int | None:
        """When a key expires (UTC)."""
        query = select(*KEY_COLUMNS).where(service_keys.c.prefix == prefix)
        with self._engine.connect() as connection:
            row = stored_row(connection, query)
        return None if row is None else int(row.expires_us)

    def narrowed_since(self, name: str, since_us: int) -> bool:
        """Whether a principal is disabled, or a key of it was revoked at or after this time (UTC)."""
        table = service_keys.c
        revoked = select(literal(1)).where(table.principal == name, table.revoked_us >= since_us).limit(1)
        with self._engine.connect() as connection:
            if connection.scalar(revoked) is not None:
                return True
        return self.ended(name)

    def binding(self, prefix: str) -> str | None:
        """The certificate that a key is bound to (rule 2)."""
        query = select(*KEY_COLUMNS).where(service_keys.c.prefix == prefix)
        with self._engine.connect() as connection:
            row = stored_row(connection, query)
        return None if row is None else row.certificate

    def _used(self, prefix: str, now_us: int) -> None:
        """Note a key's use. Not where the database is busy: the next use will be noted."""
        try:
            with self._engine.connect().execution_options(**WRITE) as connection, connection.begin():
                where = service_keys.c.prefix == prefix
                connection.execute(update(service_keys).where(where).values(used_us=now_us))
        except Exception:
            _log.info("last use of an API key not noted", exc_info=True)


def _counts(row: Any, now_us: int, certificate: str | None) -> bool:
    """Whether a key may be used now, whoever has it; what may not costs as much as an unknown one (rule 3)."""
    ended = row.revoked_us is not None or row.disabled_us is not None or now_us >= row.expires_us
    return not ended and certificate_matches(row.certificate, certificate)
