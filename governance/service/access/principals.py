"""The service's principals and their keys: who may call it, until when, with which roles.

1. A principal's name is never given twice, not even after it was disabled.
2. A change that widens access is recorded in the ledger before it takes effect. A change that narrows takes effect at
   once.
3. A key expires. Replacing it leaves the old one valid for the requested overlap, and no longer.
4. A key that is bound to a client certificate is valid only over connections with that certificate. Its replacement is
   bound in the same way, unless the request states otherwise.
5. Disabling a principal ends its keys and sessions; enabling it again does not restore them. A principal kept by an
   issuer of tokens (`issuer:name`) has a row here from the first time that it is disabled.
6. The following end with a key: its sessions always, and, once it is revoked, the keys that were made with it and with
   those. A key made in a session ends with the session, however that ends, and so does every key made with that key. It
   expires no later than the session's key. An administrator's key depends on no other key. The same holds for a key
   from the moment that an administrator other than its principal keeps it (`keep_key`).
7. The last principal who may disable principals and revoke their keys cannot be ended by oversight. Only principals who
   can act are counted: enrolled, not disabled, with a valid key. Those kept by an issuer of tokens are not counted,
   because only the issuer knows them. If two end each other at one moment, one is refused.
8. A bootstrap key can grant only one of two mutually exclusive roles (`APART`), whoever receives it: by enrolling, by a
   further key and by enabling alike. The first role that it grants is fixed, and stored before it is granted. Somebody
   with their own bootstrap key grants the other. The service cannot detect two names of one person.
9. A key that was revoked, has expired, or whose principal was disabled costs what an unknown one costs (`api_key`, rule
   2).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import Any, NamedTuple

from sqlalchemy import Connection, Engine, delete, insert, literal, select, update
from sqlalchemy.exc import IntegrityError

from kvcustody.audit.evidence.query.issuers import named_tenant
from kvcustody.audit.kinds import Event, PrincipalChanged
from kvcustody.audit.leaf.batch import UNKNOWN_WORKER
from kvcustody.audit.store.database.engine import WRITE
from kvcustody.audit.store.schema.service import service_keys, service_principals, service_sessions
from kvcustody.audit.store.schema.stored_rows import check_read, stored_row, stored_rows
from kvcustody.clock import MICROSECONDS, Clock
from kvcustody.errors import IdentityError
from kvcustody.governance.credentials.api_key import (
    KeyHasher,
    made_with,
    session_of,
    with_source,
    without_source,
)
from kvcustody.governance.credentials.certificate_thumbprint import certificate_matches
from kvcustody.governance.identity.principal import check_identifier, check_tenant_name
from kvcustody.governance.service.access.principal_table import (
    KEY_COLUMNS,
    ApiKeyRecord,
    IssuedKey,
    KeySource,
    PrincipalRecord,
    find_principal,
    key_of,
    keys_of_principal,
    principal_of,
    principals_after,
    roles_of,
    roles_text,
    session_end,
    valid_keys,
)
from kvcustody.governance.service.access.roles import (
    ALONE,
    APART,
    PROCESSES,
    Permission,
    Reach,
    Role,
    check_roles,
    reach,
)
from kvcustody.governance.service.problem_details import ProblemError, not_found
from kvcustody.logger import get_logger


def check_last_custodian(
    connection: Connection, name: str, now_us: int, *, without: Collection[str] | None = None
) -> None:
    """Raise `conflict` where ending `name`, or its keys `without`, would leave nobody who manages keys.

    Call it in the transaction that ends it; a name that manages no keys, or can no longer ask, is nobody's last.
    """
    table = service_principals
    standing = select(table).where(table.c.disabled_us.is_(None)).order_by(table.c.name)
    rows = stored_rows(connection, standing.with_for_update())
    managers = [
        found.name
        for found in map(principal_of, rows)
        if not found.unread and reach(found.roles, Permission.MANAGE_KEYS) is not Reach.NONE
    ]
    asking = {manager: set(valid_keys(connection, manager, now_us)) for manager in managers}
    if not asking.get(name):
        return
    left = set() if without is None else asking[name].difference(without)
    if left == asking[name]:
        return
    if not left and not any(keys for manager, keys in asking.items() if manager != name):
        raise ProblemError(
            "conflict",
            f"`{name}` is the last principal who manages keys; enrol another first, or allow it with `allow_last`",
        )


_log = get_logger(__name__)
# Who acts in the ledger and is no principal, and whose a process is that no leaf has named yet.
RESERVED_NAMES = frozenset({"control-plane", "governor", "local", UNKNOWN_WORKER})
DAY_US = 86_400 * MICROSECONDS
_USED_EVERY_US = 60 * MICROSECONDS  # how exactly a key's last use is known
_KEYS_MAX = 16  # keys of one principal that are valid at a time
TOKEN = "token"  # noqa: S105 - the kind of a principal whom an issuer of tokens keeps


def claim_apart(connection: Connection, by: str, roles: frozenset[Role]) -> None:
    """Reserve which of two exclusive roles a bootstrap key grants; raises `conflict` for the other (rule 8)."""
    table = service_principals
    found = stored_row(connection, select(table).where(table.c.name == by).with_for_update())
    if found is None or Role.BOOTSTRAP not in principal_of(found).roles:
        return
    check_read(found)
    before = roles_of(found.given or "")
    for pair in APART:
        for role, other in (pair, pair[::-1]):
            if role in roles and other in before:
                raise ProblemError(
                    "conflict",
                    f"`{by}` has let somebody in as `{other}`: an `{role}` is let in by another person, with another "
                    "key of `kvcustody init`",
                )
    given = before | (roles & {role for pair in APART for role in pair})
    if given != before:
        connection.execute(update(table).where(table.c.name == by).values(given=roles_text(given)))


class FoundKey(NamedTuple):
    """A valid key: its principal, its prefix, and its expiry; None: the end of its session."""

    principal: PrincipalRecord
    prefix: str
    expires_us: int | None


class Principals:
    """The book of principals; `record` makes a class A event durable before it returns, or raises. Thread-safe."""

    def __init__(
        self,
        engine: Engine,
        hasher: KeyHasher,
        clock: Clock,
        record: Callable[[Event], object],
        issuers: Iterable[str] = (),
    ) -> None:
        """`issuers`: the names of those whose tokens count; `issuer:name` may be disabled here (rule 5)."""
        self._engine = engine
        self._hasher = hasher
        self._clock = clock
        self._record = record
        self._issuers = frozenset(issuers)
        self.narrowings = 0  # another number once something here has narrowed: what was found before may not hold

    def enrol(
        self, name: str, roles: Iterable[Role], *, tenant: str | None = None, kind: str = "person", by: str
    ) -> PrincipalRecord:
        """Add a principal; raises `IdentityError` for roles or a name that are not permitted, `conflict` for a taken
        name.
        """
        _checked_name(name)
        held = check_roles(roles, tenant)
        if tenant is not None:
            tenant = self.named(check_tenant_name(tenant))
        if held & ALONE:
            kind = "machine"
        record = PrincipalRecord(name, kind, held, tenant, self._clock.utc_us(), by, None, 1)
        if self.find(name) is not None:
            raise _taken(name)
        self._claim(by, held)
        self._note(record, "enrolled", by)
        values = record._asdict() | {"roles": roles_text(held)}
        del values["unread"]
        try:
            with self._engine.connect().execution_options(**WRITE) as connection, connection.begin():
                connection.execute(insert(service_principals).values(**values))
        except IntegrityError:
            raise _taken(name) from None
        return record

    def disable(self, name: str, *, version: int | None = None, allow_last: bool = False, by: str) -> PrincipalRecord:
        """Disable a principal with all of its keys and sessions at once; recorded afterwards.

        Raises `conflict` for the last who manages keys, unless `allow_last`.
        """
        now_us = self._clock.utc_us()
        self._meet(name, now_us)
        table = service_principals.c
        where = (table.name == name) & table.disabled_us.is_(None)
        if version is not None:
            where &= table.version == version
        with self._engine.connect().execution_options(**WRITE) as connection, connection.begin():
            if not allow_last:
                check_last_custodian(connection, name, now_us)
            values = {"disabled_us": now_us, "version": table.version + 1}
            changed = connection.execute(update(service_principals).where(where).values(**values)).rowcount
            if changed:
                _end_credentials(connection, name, now_us)
        self.narrowings += 1
        found = self.get(name)
        if not changed and found.disabled_us is None:
            raise ProblemError("changed")
        if changed:
            self._note(found, "disabled", by)
        return found

    def enable(self, name: str, *, by: str) -> PrincipalRecord:
        """Enable a disabled principal, which needs a new key (rule 5); recorded before."""
        found = self.get(name)
        if found.disabled_us is None:
            return found
        check_read(found)
        self._claim(by, found.roles)
        self._note(found, "enabled", by)
        table, now_us = service_principals.c, self._clock.utc_us()
        where = (table.name == name) & table.disabled_us.is_not(None)
        with self._engine.connect().execution_options(**WRITE) as connection, connection.begin():
            _end_credentials(connection, name, now_us)  # a program from before may have left them
            values = {"disabled_us": None, "version": table.version + 1}
            connection.execute(update(service_principals).where(where).values(**values))
        return self.get(name)

    def issue_key(
        self,
        name: str,
        *,
        days: float,
        overlap_days: float | None = None,
        certificate: str | None = None,
        source: KeySource | None = None,
        by: str,
    ) -> IssuedKey:
        """Issue a key for a principal; with `overlap_days` its other keys expire after that many days.

        `certificate` binds it (rule 4): workers alone present one. `source`: what it is made with (rule 6), where its
        principal makes it; raises `unauthenticated` where that has ended.
        """
        principal = self.get(name)
        check_read(principal)
        if principal.disabled_us is not None:
            raise ProblemError("conflict", f"principal `{name}` is disabled")
        if principal.kind == TOKEN:
            raise ProblemError("conflict", f"principal `{name}` comes from a token issuer and has no keys")
        if certificate is not None and not PROCESSES.intersection(principal.roles):
            raise ProblemError("invalid", "only a worker's or a door's key can be bound to a certificate")
        self._claim(by, principal.roles)
        now_us = self._clock.utc_us()
        if certificate is None and overlap_days is not None:
            certificate = self._binding(name, now_us)
        fresh = self._hasher.make()
        expires_us = now_us + int(days * DAY_US)
        if source is not None and source.until_us is not None:
            expires_us = min(expires_us, source.until_us)
        issued = IssuedKey(fresh.prefix, fresh.key, expires_us)
        detail = fresh.prefix if certificate is None else f"{fresh.prefix} x5t#S256={certificate}"
        self._note(principal, "key-replaced" if overlap_days is not None else "key-issued", by, detail)
        source_key = "" if source is None else source.key
        with self._engine.connect().execution_options(**WRITE) as connection, connection.begin():
            if source_key:
                lock = select(service_keys.c.prefix).where(service_keys.c.prefix == source_key)
                connection.execute(lock.with_for_update())  # a revocation comes before or after
            valid = valid_keys(connection, name, now_us)
            if source_key and source_key not in valid:
                raise ProblemError("unauthenticated")
            session = "" if source is None else source.session or _session_of(connection, source_key)
            if overlap_days is not None:
                until_us = now_us + int(overlap_days * DAY_US)
                late = service_keys.c.prefix.in_(valid) & (service_keys.c.expires_us > until_us)
                connection.execute(update(service_keys).where(late).values(expires_us=until_us))
            elif len(valid) >= _KEYS_MAX:
                raise ProblemError("conflict", f"principal `{name}` has `{_KEYS_MAX}` valid keys; revoke one")
            row = {
                "prefix": fresh.prefix,
                "principal": name,
                "issued_us": now_us,
                "expires_us": issued.expires_us,
                "certificate": certificate,
                "hash": with_source(fresh.hash, source_key, session),
            }
            connection.execute(insert(service_keys).values(row))
        self.narrowings += 1
        return issued

    def revoke_key(
        self,
        prefix: str,
        *,
        principal: str | None = None,
        keep: str = "",
        allow_last: bool = False,
        by: str,
    ) -> ApiKeyRecord:
        """Refuse a key, and those made with it (rule 6), from now on; recorded afterwards.

        Another principal's key is absent where one is named. `keep`: the prefix of a key that stays all the same.
        Raises `conflict` for the last key of the last who manages keys, unless `allow_last`.
        """
        where = service_keys.c.prefix == prefix
        if principal is not None:
            where &= service_keys.c.principal == principal
        now_us = self._clock.utc_us()
        with self._engine.connect().execution_options(**WRITE) as connection, connection.begin():
            row = stored_row(connection, select(*KEY_COLUMNS).where(where).with_for_update())
            if row is None:
                raise not_found()
            ending = _made_with(connection, row.principal, prefix, keep)
            if not allow_last:
                check_last_custodian(connection, row.principal, now_us, without=ending)
            fresh = service_keys.c.prefix.in_(ending) & service_keys.c.revoked_us.is_(None)
            changed = [found.prefix for found in stored_rows(connection, select(*KEY_COLUMNS).where(fresh))]
            connection.execute(update(service_keys).where(fresh).values(revoked_us=now_us))
        self.narrowings += 1
        if changed:
            changed.sort(key=ending.index)
            self._note(self.get(row.principal), "key-revoked", by, ",".join(changed))
        return key_of(row)._replace(revoked_us=row.revoked_us or now_us)

    def keep_key(self, prefix: str, *, principal: str, days: float, by: str) -> ApiKeyRecord:
        """Make a key independent of the one that it was made with (rule 6), for some days from now; recorded before.

        Raises `conflict` for a key of `by`, for one that stands alone, and for one that is not valid any more.
        """
        owner, now_us = self.get(principal), self._clock.utc_us()
        if owner.name == by:
            raise ProblemError("conflict", "a key can only be kept by its own principal")
        where = (service_keys.c.prefix == prefix) & (service_keys.c.principal == owner.name)
        with self._engine.connect() as connection:
            row = stored_row(connection, select(*KEY_COLUMNS).where(where))
            is_valid = prefix in valid_keys(connection, owner.name, now_us)
        if row is None:
            raise not_found()
        key = key_of(row)
        if not is_valid or not (key.made_with or key.in_session):
            why = "stands alone already" if is_valid else "is no longer valid"
            raise ProblemError("conflict", f"key `{prefix}` {why}")
        check_read(owner)
        self._claim(by, owner.roles)
        self._note(owner, "key-kept", by, prefix)
        expires_us = now_us + int(days * DAY_US)
        with self._engine.connect().execution_options(**WRITE) as connection, connection.begin():
            still = where & service_keys.c.revoked_us.is_(None) & (service_keys.c.hash == row.hash)
            values = {"hash": without_source(row.hash), "expires_us": expires_us}
            kept = connection.execute(update(service_keys).where(still).values(values)).rowcount
        self.narrowings += 1
        if not kept:
            raise ProblemError("conflict", f"key `{prefix}` is not valid any more")
        return key._replace(expires_us=expires_us, made_with=None, in_session=False)

    def revoke_keys(self, name: str, *, allow_last: bool = False, by: str) -> list[ApiKeyRecord]:
        """Refuse every key of a principal from now on, and end its sessions; recorded afterwards."""
        principal, now_us = self.get(name), self._clock.utc_us()
        with self._engine.connect().execution_options(**WRITE) as connection, connection.begin():
            if not allow_last:
                check_last_custodian(connection, name, now_us)
            changed = _end_credentials(connection, name, now_us)
        self.narrowings += 1
        if changed:
            self._note(principal, "key-revoked", by, ",".join(changed))
        return self.keys(name)

    def find(self, name: str) -> PrincipalRecord | None:
        """Return the principal of this name, or None."""
        with self._engine.connect() as connection:
            return find_principal(connection, name)

    def get(self, name: str) -> PrincipalRecord:
        """Return the principal of this name; raises `not-found`."""
        found = self.find(name)
        if found is None:
            raise not_found()
        return found

    def listed(self, *, after: str = "", limit: int = 100) -> tuple[list[PrincipalRecord], bool]:
        """Return principals in order of name, and whether more follow: `principals_after`."""
        with self._engine.connect() as connection:
            return principals_after(connection, after, limit)

    def keys(self, name: str) -> list[ApiKeyRecord]:
        """Return every key that a principal ever had, newest first; at most 1,000."""
        with self._engine.connect() as connection:
            return keys_of_principal(connection, name, self._clock.utc_us())

    def by_key(self, prefix: str | None, key: str, certificate: str | None = None) -> FoundKey | None:
        """Return the principal of a valid key; the cost is equal for every other key (rule 9).

        `certificate`: the thumbprint of the client certificate that came with it (rule 4).
        """
        row = None
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
        return FoundKey(principal_of(row), prefix, None if session_of(row.hash) else row.expires_us)

    def named(self, tenant: str) -> str:
        """Return the unambiguous name of a tenant; raises `ConfigError` where several match."""
        with self._engine.connect() as connection:
            return named_tenant(connection, tenant)

    def ended(self, name: str, prefix: str = "") -> bool:
        """Whether a principal, or the key that it used, has ended since: for long answers, and for tokens."""
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
        """The certificate that a key is bound to (rule 4)."""
        query = select(*KEY_COLUMNS).where(service_keys.c.prefix == prefix)
        with self._engine.connect() as connection:
            row = stored_row(connection, query)
        return None if row is None else row.certificate

    def _meet(self, name: str, now_us: int) -> None:
        """Have a row for one whom an issuer of tokens keeps (rule 5)."""
        issuer, separated, _ = name.partition(":")
        if not separated or issuer not in self._issuers or self.find(name) is not None:
            return
        check_identifier("principal", name)
        row = PrincipalRecord(name, TOKEN, frozenset(), None, now_us, issuer, None, 1)
        with (
            suppress(IntegrityError),
            self._engine.connect().execution_options(**WRITE) as connection,
            connection.begin(),
        ):
            values = row._asdict() | {"roles": ""}
            del values["unread"]
            connection.execute(insert(service_principals).values(**values))

    def _claim(self, by: str, roles: frozenset[Role]) -> None:
        """Let a bootstrap key give roles, unless it gave what nobody holds beside them (rule 8)."""
        with self._engine.connect().execution_options(**WRITE) as connection, connection.begin():
            claim_apart(connection, by, roles)

    def _binding(self, name: str, now_us: int) -> str | None:
        """What the newest valid key of a principal is bound to."""
        valid = (key for key in self.keys(name) if key.revoked_us is None and key.expires_us > now_us)
        newest = next(valid, None)
        return None if newest is None else newest.certificate

    def _used(self, prefix: str, now_us: int) -> None:
        """Note a key's use. Not where the database is busy: the next use will be noted."""
        try:
            with self._engine.connect().execution_options(**WRITE) as connection, connection.begin():
                where = service_keys.c.prefix == prefix
                connection.execute(update(service_keys).where(where).values(used_us=now_us))
        except Exception:
            _log.info("last use of an API key not recorded", exc_info=True)

    def _note(self, principal: PrincipalRecord, action: str, by: str, detail: str = "") -> None:
        roles = tuple(sorted(principal.roles))
        at_us = self._clock.now_us()
        self._record(PrincipalChanged(at_us, principal.name, action, roles, principal.tenant or "", by, detail))


def _counts(row: Any, now_us: int, certificate: str | None) -> bool:
    """Whether a key may be used now, whoever has it; what may not costs as much as an unknown one (rule 9)."""
    ended = row.revoked_us is not None or row.disabled_us is not None or now_us >= row.expires_us
    return not ended and certificate_matches(row.certificate, certificate)


def _session_of(connection: Connection, prefix: str) -> str:
    """The session that a key ends with; empty: with none, or there is no such key."""
    row = stored_row(connection, select(*KEY_COLUMNS).where(service_keys.c.prefix == prefix))
    return "" if row is None else session_of(row.hash)


def _made_with(connection: Connection, name: str, prefix: str, keep: str) -> list[str]:
    """The prefixes of a key and of all made with it, directly or not (rule 6); neither `keep` nor what it made."""
    ending = [prefix]
    for source in ending:
        stored = service_keys.c.hash.startswith(made_with(source), autoescape=True)
        children = select(*KEY_COLUMNS).where(service_keys.c.principal == name, stored)
        rows = stored_rows(connection, children.order_by(service_keys.c.issued_us).with_for_update())
        fresh = [row.prefix for row in rows]
        ending += [found for found in fresh if found not in ending and found != keep]
    return ending


def _end_credentials(connection: Connection, name: str, now_us: int) -> list[str]:
    """Revoke every key and end every session; the prefixes of the keys that were valid."""
    valid = valid_keys(connection, name, now_us)
    fresh = (service_keys.c.principal == name) & service_keys.c.revoked_us.is_(None)
    connection.execute(update(service_keys).where(fresh).values(revoked_us=now_us))
    connection.execute(delete(service_sessions).where(service_sessions.c.principal == name))
    return valid


def _checked_name(name: str) -> None:
    check_identifier("principal", name)
    if name.lower() in RESERVED_NAMES:
        raise IdentityError(
            f"principal: `{name}` is reserved for kvcustody's own records; choose another name",
            field="principal",
            reason="reserved",
        )
    if ":" in name:
        raise IdentityError(
            "principal: `:` is reserved for names from token issuers", field="principal", reason="has `:`"
        )


def _taken(name: str) -> ProblemError:
    return ProblemError("conflict", f"principal `{name}` exists; names are never reused")
