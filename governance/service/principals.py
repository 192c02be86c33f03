"""The principals of the service and their keys: who may ask, until when, with which roles.

P1 A principal's name is never given twice, not even after it was disabled.
P2 Whatever changes here is on record in the ledger before it takes effect if it widens, and takes effect at once if
   it narrows.
P3 A key expires. Replacing it leaves the old one valid for the overlap that was asked for, and no longer.
P4 A key that was found valid is not looked up again for a second. What this process narrows takes effect at once all
   the same; what another process narrows (`kvcustody apikey revoke` beside a server), within that second.
P5 A key that is bound to a client certificate is valid over connections with that certificate alone. What replaces it
   is bound as it was, unless told otherwise.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import structlog
from sqlalchemy import Connection, Engine, and_, insert, select, update
from sqlalchemy.exc import IntegrityError

from kvcustody.audit.events import Event, PrincipalChanged
from kvcustody.audit.service_schema import service_keys, service_principals
from kvcustody.audit.store import WRITE
from kvcustody.clock import MICROSECONDS, Clock
from kvcustody.errors import IdentityError
from kvcustody.governance.identity import check_identifier
from kvcustody.governance.service.api_key import KeyHasher
from kvcustody.governance.service.problems import ProblemError, not_found
from kvcustody.governance.service.roles import ALONE, Role, check_roles

_log = structlog.get_logger(__name__)
DAY_US = 86_400 * MICROSECONDS
_USED_EVERY_US = 60 * MICROSECONDS  # how exactly a key's last use is known
_KEYS_MAX = 16  # keys of one principal that are valid at a time
_KNOWN_US = MICROSECONDS
_KNOWN_MAX = 4096


class Principal(NamedTuple):
    """Somebody who may ask the service: a person or a machine."""

    name: str
    kind: str
    roles: frozenset[Role]
    tenant: str | None
    enrolled_us: int
    enrolled_by: str
    disabled_us: int | None
    version: int


class Key(NamedTuple):
    """What may be known of a key: never its secret, never its hash."""

    prefix: str
    principal: str
    issued_us: int
    expires_us: int
    used_us: int | None
    revoked_us: int | None
    certificate: str | None = None  # `x5t#S256` of the client certificate that it is bound to (P5)


class IssuedKey(NamedTuple):
    """A new key, shown once."""

    prefix: str
    key: str
    expires_us: int


class Principals:
    """The book of principals; `record` makes a class A event durable before it returns, or raises."""

    def __init__(
        self, engine: Engine, hasher: KeyHasher, clock: Clock, record: Callable[[Event], object]
    ) -> None:
        self._engine = engine
        self._hasher = hasher
        self._clock = clock
        self._record = record
        self._known: dict[
            str, tuple[int, int, str, Principal, str | None]
        ] = {}  # by prefix: looked up, expires, hash, whose, bound to (P4)

    def enrol(
        self, name: str, roles: Iterable[Role], *, tenant: str | None = None, kind: str = "person", by: str
    ) -> Principal:
        """Add a principal; raises `IdentityError` where roles or name do not allow it, `conflict` if it is taken."""
        _checked_name(name)
        held = check_roles(roles, tenant)
        if tenant is not None:
            check_identifier("tenant", tenant)
        if held & ALONE:
            kind = "machine"
        found = Principal(name, kind, held, tenant, self._clock.utc_us(), by, None, 1)
        if self.find(name) is not None:
            raise _taken(name)
        self._note(found, "enrolled", by)
        values = found._asdict() | {"roles": _text(held)}
        try:
            with self._engine.connect().execution_options(**WRITE) as connection, connection.begin():
                connection.execute(insert(service_principals).values(**values))
        except IntegrityError:
            raise _taken(name) from None
        return found

    def disable(self, name: str, *, version: int | None = None, by: str) -> Principal:
        """End a principal and all of its keys and sessions at once; on record afterwards."""
        now_us = self._clock.utc_us()
        table = service_principals.c
        where = (table.name == name) & table.disabled_us.is_(None)
        if version is not None:
            where &= table.version == version
        with self._engine.connect().execution_options(**WRITE) as connection, connection.begin():
            values = {"disabled_us": now_us, "version": table.version + 1}
            changed = connection.execute(update(service_principals).where(where).values(**values)).rowcount
        self._known = {}
        found = self.get(name)
        if not changed and found.disabled_us is None:
            raise ProblemError("changed")
        if changed:
            self._note(found, "disabled", by)
        return found

    def issue_key(
        self,
        name: str,
        *,
        days: float,
        overlap_days: float | None = None,
        certificate: str | None = None,
        by: str,
    ) -> IssuedKey:
        """A new key for a principal; with `overlap_days` its other keys expire after so many days.

        `certificate` binds it (P5): workers alone present one.
        """
        principal = self.get(name)
        if principal.disabled_us is not None:
            raise ProblemError("conflict", f"principal `{name}` is disabled")
        if certificate is not None and Role.WORKER not in principal.roles:
            raise ProblemError("invalid", "a key is bound to a certificate for a worker alone")
        now_us = self._clock.utc_us()
        if certificate is None and overlap_days is not None:
            certificate = self._binding(name, now_us)
        made = self._hasher.make()
        issued = IssuedKey(made.prefix, made.key, now_us + int(days * DAY_US))
        detail = made.prefix if certificate is None else f"{made.prefix} x5t#S256={certificate}"
        self._note(principal, "key-replaced" if overlap_days is not None else "key-issued", by, detail)
        with self._engine.connect().execution_options(**WRITE) as connection, connection.begin():
            valid = _valid(connection, name, now_us)
            if overlap_days is not None:
                until_us = now_us + int(overlap_days * DAY_US)
                late = service_keys.c.prefix.in_(valid) & (service_keys.c.expires_us > until_us)
                connection.execute(update(service_keys).where(late).values(expires_us=until_us))
            elif len(valid) >= _KEYS_MAX:
                raise ProblemError("conflict", f"principal `{name}` has `{_KEYS_MAX}` valid keys; revoke one")
            row = Key(made.prefix, name, now_us, issued.expires_us, None, None, certificate)._asdict()
            connection.execute(insert(service_keys).values(**row, hash=made.hash))
        self._known = {}
        return issued

    def revoke_key(self, prefix: str, *, principal: str | None = None, by: str) -> Key:
        """Refuse a key from now on; on record afterwards. Another principal's key is absent where one is named."""
        where = service_keys.c.prefix == prefix
        if principal is not None:
            where &= service_keys.c.principal == principal
        with self._engine.connect().execution_options(**WRITE) as connection, connection.begin():
            fresh = where & service_keys.c.revoked_us.is_(None)
            values = {"revoked_us": self._clock.utc_us()}
            changed = connection.execute(update(service_keys).where(fresh).values(**values)).rowcount
            row = connection.execute(select(*_KEY_COLUMNS).where(where)).first()
        self._known = {}
        if row is None:
            raise not_found()
        key = Key(*row)
        if changed:
            self._note(self.get(key.principal), "key-revoked", by, prefix)
        return key

    def find(self, name: str) -> Principal | None:
        """The principal of this name, if there ever was one."""
        with self._engine.connect() as connection:
            row = connection.execute(
                select(service_principals).where(service_principals.c.name == name)
            ).first()
        return None if row is None else _principal(row)

    def get(self, name: str) -> Principal:
        """The principal of this name; raises `not-found`."""
        found = self.find(name)
        if found is None:
            raise not_found()
        return found

    def listed(self, *, after: str = "", limit: int = 100) -> list[Principal]:
        """Principals in the order of their names."""
        query = select(service_principals).where(service_principals.c.name > after)
        with self._engine.connect() as connection:
            rows = connection.execute(query.order_by(service_principals.c.name).limit(limit))
            return [_principal(row) for row in rows]

    def keys(self, name: str) -> list[Key]:
        """Every key that a principal ever had, newest first; at most 1,000."""
        query = select(*_KEY_COLUMNS).where(service_keys.c.principal == name)
        with self._engine.connect() as connection:
            rows = connection.execute(query.order_by(service_keys.c.issued_us.desc()).limit(1000))
            return [Key(*row) for row in rows]

    def known(self, prefix: str, key: str, certificate: str | None = None) -> Principal | None:
        """The principal whose key this is, if that was looked up within a second (P4); no I/O."""
        found = self._known.get(prefix)
        if found is None:
            return None
        now_us = self._clock.utc_us()
        looked_up_us, expires_us, stored, principal, bound = found
        if not _presents(bound, certificate):
            return None
        fresh = looked_up_us <= now_us < min(looked_up_us + _KNOWN_US, expires_us)
        return principal if fresh and self._hasher.remembers(key, stored) else None

    def by_key(
        self, prefix: str | None, key: str, certificate: str | None = None
    ) -> tuple[Principal, str] | None:
        """The principal whose valid key this is, and the key's prefix; equally dear for all that are not (K2).

        `certificate`: the thumbprint of the client certificate that came with it (P5).
        """
        row, known = None, self._known
        if prefix is not None:
            columns = (
                *service_principals.c,
                service_keys.c.hash,
                service_keys.c.used_us,
                service_keys.c.expires_us,
                service_keys.c.certificate,
            )
            joined = service_principals.c.name == service_keys.c.principal
            query = select(*columns, service_keys.c.revoked_us).where(joined, service_keys.c.prefix == prefix)
            with self._engine.connect() as connection:
                row = connection.execute(query).first()
        matches = self._hasher.verify(key, None if row is None else row.hash)
        if prefix is None or row is None or not matches or row.revoked_us is not None:
            return None
        now_us = self._clock.utc_us()
        if (
            now_us >= row.expires_us
            or row.disabled_us is not None
            or not _presents(row.certificate, certificate)
        ):
            return None
        if row.used_us is None or now_us - row.used_us >= _USED_EVERY_US:
            self._used(prefix, now_us)
        if len(known) >= _KNOWN_MAX:
            known.clear()
        principal = _principal(row)
        known[prefix] = (
            now_us,
            row.expires_us,
            row.hash,
            principal,
            row.certificate,
        )  # the one from before the look-up, if cleared
        return principal, prefix

    def _binding(self, name: str, now_us: int) -> str | None:
        """What the newest valid key of a principal is bound to."""
        valid = (key for key in self.keys(name) if key.revoked_us is None and key.expires_us > now_us)
        newest = next(valid, None)
        return None if newest is None else newest.certificate

    def _used(self, prefix: str, now_us: int) -> None:
        """Note a key's use, unless the database is busy: the next use will be noted."""
        try:
            with self._engine.connect().execution_options(**WRITE) as connection, connection.begin():
                where = service_keys.c.prefix == prefix
                connection.execute(update(service_keys).where(where).values(used_us=now_us))
        except Exception:
            _log.info("last use of an API key not noted", exc_info=True)

    def _note(self, principal: Principal, action: str, by: str, detail: str = "") -> None:
        roles = tuple(sorted(principal.roles))
        at_us = self._clock.now_us()
        self._record(
            PrincipalChanged(at_us, principal.name, action, roles, principal.tenant or "", by, detail)
        )


_KEY_COLUMNS = [service_keys.c[name] for name in Key._fields]


def _valid(connection: Connection, name: str, now_us: int) -> list[str]:
    table = service_keys.c
    where = and_(table.principal == name, table.revoked_us.is_(None), table.expires_us > now_us)
    return list(connection.scalars(select(table.prefix).where(where)))


def _principal(row: Any) -> Principal:
    values = {name: getattr(row, name) for name in Principal._fields}
    values["roles"] = frozenset(map(Role, str(values["roles"]).split(",")))
    return Principal(**values)


def _presents(bound: str | None, certificate: str | None) -> bool:
    """Whether a connection with this certificate may use a key that is bound so (P5)."""
    return bound is None or (certificate is not None and hmac.compare_digest(bound, certificate))


def _text(roles: Iterable[Role]) -> str:
    return ",".join(sorted(roles))


def _checked_name(name: str) -> None:
    check_identifier("principal", name)
    if ":" in name:
        raise IdentityError(
            "principal: `:` is for names that a token issuer gives", field="principal", reason="has `:`"
        )


def _taken(name: str) -> ProblemError:
    return ProblemError("conflict", f"principal `{name}` exists; names are never given twice")
