"""Principals and their keys in the database, and which keys are valid.

A role that this release does not know, as one of a later release, gives nothing; it is logged once.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from sqlalchemy import Connection, and_, select

from kvcustody.audit.store.schema.service import service_keys, service_principals, service_sessions
from kvcustody.audit.store.schema.stored_rows import StoredRow, stored_page, stored_row, stored_rows
from kvcustody.governance.credentials.api_key import session_of, source_of
from kvcustody.governance.service.access.roles import Role
from kvcustody.logger import get_logger

_log = get_logger(__name__)
_NAMES_KEPT = 64


class PrincipalRecord(NamedTuple):
    """A principal of the service: a person or a machine.

    `kind` is `token` for one whom an issuer of tokens keeps: it is here because it was disabled here, and its roles
    are in its tokens.
    """

    name: str
    kind: str
    roles: frozenset[Role]
    tenant: str | None
    enrolled_us: int
    enrolled_by: str
    disabled_us: int | None
    version: int
    unread: str = ""  # what of its row cannot be read: it is nobody then, until it was disabled


class ApiKeyRecord(NamedTuple):
    """The public facts of a key: never its secret, never its hash."""

    prefix: str
    principal: str
    issued_us: int
    expires_us: int
    used_us: int | None
    revoked_us: int | None
    certificate: str | None = None  # `x5t#S256` of the client certificate that it is bound to
    made_with: str | None = None  # prefix of the key with which it ends; none: with none
    in_session: bool = False  # made in a session, with which it ends
    unread: str = ""  # what of its row cannot be read: it counts as no key then


class IssuedKey(NamedTuple):
    """A new key, shown once."""

    prefix: str
    key: str
    expires_us: int


class KeySource(NamedTuple):
    """What a principal's own new key depends on: the key that it used, or its session and that session's key.

    `until_us` (UTC): the key expires no later; None: it replaces what it was made with. `session`: its digest.
    """

    key: str
    until_us: int | None
    session: str = ""


_STORED = ApiKeyRecord._fields[:-3]
KEY_COLUMNS = [*(service_keys.c[name] for name in _STORED), service_keys.c.hash]


def key_of(row: StoredRow) -> ApiKeyRecord:
    """Return the key of a row of `KEY_COLUMNS`."""
    stored = {name: row.values[name] for name in _STORED}
    source, session = source_of(row.hash) or None, bool(session_of(row.hash))
    return ApiKeyRecord(**stored, made_with=source, in_session=session, unread=row.unread)


def principal_of(row: StoredRow) -> PrincipalRecord:
    """Return the principal of a row that has its columns."""
    values = {name: getattr(row, name) for name in PrincipalRecord._fields}
    return PrincipalRecord(**values | {"roles": roles_of(str(values["roles"]))})


def roles_of(text: str) -> frozenset[Role]:
    """Parse stored roles, without unknown ones."""
    found = (_role(name) for name in text.split(",") if name)
    return frozenset(role for role in found if role is not None)


@lru_cache(_NAMES_KEPT)
def _role(name: str) -> Role | None:
    try:
        return Role(name)
    except ValueError:
        _log.warning("an unknown role is ignored", role=name)
        return None


def roles_text(roles: Iterable[Role]) -> str:
    """Return roles in their stored form."""
    return ",".join(sorted(roles))


def find_principal(connection: Connection, name: str) -> PrincipalRecord | None:
    """Return the principal of this name, or None."""
    row = stored_row(connection, select(service_principals).where(service_principals.c.name == name))
    return None if row is None else principal_of(row)


def principals_after(connection: Connection, after: str, limit: int | None) -> tuple[list[PrincipalRecord], bool]:
    """Return principals in order of name, after a name, and whether more follow.

    `limit`, and more where the name of the last could not be read; None: all of them.
    """
    name = service_principals.c.name
    query = select(service_principals).where(name > after).order_by(name)
    if limit is None:
        return [principal_of(row) for row in stored_rows(connection, query)], False
    page = stored_page(connection, query, (name,), limit)
    return [principal_of(row) for row in page.rows], page.more


def keys_of_principal(connection: Connection, name: str, now_us: int) -> list[ApiKeyRecord]:
    """Return every key that a principal ever had, newest first; at most 1,000."""
    query = select(*KEY_COLUMNS).where(service_keys.c.principal == name)
    rows = stored_rows(connection, query.order_by(service_keys.c.issued_us.desc()).limit(1000))
    ends = [session_end(connection, row.hash, now_us) for row in rows]
    return [
        key_of(row)._replace(expires_us=min(row.expires_us, row.expires_us if end is None else end))
        for row, end in zip(rows, ends, strict=True)
    ]


def valid_keys(connection: Connection, name: str, now_us: int) -> list[str]:
    """Return the prefixes of a principal's keys that are not revoked, not expired, and whose session has not ended.

    One that cannot be read whole is none.
    """
    table = service_keys.c
    where = and_(table.principal == name, table.revoked_us.is_(None), table.expires_us > now_us)
    rows = [row for row in stored_rows(connection, select(*KEY_COLUMNS).where(where)) if not row.unread]
    return [row.prefix for row in rows if session_end(connection, row.hash, now_us) is None]


def session_end(connection: Connection, stored: str, now_us: int) -> int | None:
    """Return when the session ended that a key depends on, at the latest now; None: it goes on, or there is none."""
    digest = session_of(stored)
    if not digest:
        return None
    row = stored_row(connection, select(service_sessions).where(service_sessions.c.digest == digest))
    expires_us = None if row is None or row.unread else row.expires_us
    return None if expires_us is not None and now_us < expires_us else min(expires_us or now_us, now_us)
