"""Rows that link people and their pseudonyms: how they are stored, found, and destroyed.

1. A row has a pseudonym, a tenant, and a subject, a session or both. That of a subject may have a secret, from which
   come the pseudonyms of those of its sessions that have no row (`pseudonyms`, rule 1 of `pseudonym_directory`).
2. With subject keys a row holds tags instead of names, and a secret only sealed under the subject's key: without it
   no guess can be compared with either.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from sqlalchemy import ColumnElement, Connection, Engine, delete, insert, select, update

from kvcustody.audit.database.bulk_insert import insert_new, insert_rows
from kvcustody.audit.schema.ledger import residencies, subject_unlinkings, subjects
from kvcustody.audit.subjects.subject_filter import of_subjects
from kvcustody.audit.subjects.subject_key_store import Owner, SubjectKeys, is_sealed, owner_of
from kvcustody.errors import LedgerError

Who = tuple[str, str, str]  # tenant, subject, session
Row = tuple[str, str, str, str, str | None]  # pseudonym, tenant, subject, session, secret

NAME_BYTES = 12
LOOKUP_ROWS = 100


def row_of(values: Sequence[Any]) -> Row:
    """A row as a spill has it: one from before there were secrets has none."""
    pseudonym, tenant, subject, session, *secret = values
    return (pseudonym, tenant, subject, session, secret[0] if secret else None)


def tags_of(keys: SubjectKeys, who: Who) -> Who:
    """Tenant, and the tags of subject and session under the subject's key (rule 2)."""
    tenant, subject, session = who
    owner = owner_of(*who)
    return (
        tenant,
        keys.tag(owner, "subject", subject) if subject else "",
        keys.tag(owner, "session", session) if session else "",
    )


def sealed_rows(keys: SubjectKeys, rows: Sequence[Row]) -> list[Row]:
    """Rows of names as tags, and secrets sealed: for a ledger that takes them from processes without keys (rule 2)."""
    keys.refresh()
    keys.prepare({owner_of(*row[1:4]) for row in rows})
    return [
        (row[0], *tags_of(keys, row[1:4]), row[4] and keys.sealed(owner_of(*row[1:4]), row[0], row[4]))
        for row in rows
    ]


def store_names(connection: Connection, names: Sequence[Row], *, skip_known: bool = False) -> None:
    """Insert rows; those of a replay may be there already and are skipped."""
    rows = sorted(
        names, key=itemgetter(0)
    )  # neighbours of a random order: fewer pages are sought and changed
    if rows:
        (insert_new if skip_known else insert_rows)(connection, subjects, rows)


def names_of(connection: Connection, tenant: str, subject: str, keys: SubjectKeys | None = None) -> list[str]:
    """Every pseudonym of a subject and of its sessions (an outage may have given it more than one)."""
    own = set(connection.scalars(select(subjects.c.pseudonym).where(_named_so(tenant, subject, keys))))
    session = residencies.c.session
    for start in range(0, len(names := sorted(own)), LOOKUP_ROWS):
        theirs = of_subjects(connection, tenant, names[start : start + LOOKUP_ROWS])
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
    owner = owner_of(tenant, subject, "")
    tag = None if keys is None else keys.kept_tag(owner, "session", session)
    stored = [session] if tag is None else [session, tag]
    query = select(subjects.c.pseudonym, subjects.c.session, subjects.c.secret)
    found: set[str] = set()
    secret_texts: set[str | None] = set()
    for row in connection.execute(query.where(_named_so(tenant, subject, keys))):
        if row.session in stored:
            found.add(row.pseudonym)
        elif not row.session and row.secret:
            secret_texts.add(_secret_in(row.secret, row.pseudonym, owner, keys))
    if keys is not None:
        secret_texts.add(keys.kept_tag(owner, "sessions", ""))
    return sorted(found | {session_name(text.encode(), session) for text in secret_texts if text})


def has_tags(engine: Engine) -> bool:
    """Somebody is known by a tag here: without the store of subject keys nobody finds them by name (rule 2)."""
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
    """How often a subject was unlinked here (`pseudonyms`, rule 5 of `pseudonym_directory`)."""
    return int(connection.scalar(select(subject_unlinkings.c.count)) or 0)


def unknown_pseudonyms(connection: Connection, names: Sequence[str]) -> list[str]:
    """Those of the pseudonyms that nobody is behind any more, or ever was."""
    there: set[str] = set()
    for start in range(0, len(names), LOOKUP_ROWS):
        query = select(subjects.c.pseudonym).where(
            subjects.c.pseudonym.in_(names[start : start + LOOKUP_ROWS])
        )
        there.update(connection.scalars(query))
    return [name for name in names if name not in there]


def session_name(secret: bytes, session: str) -> str:
    """The pseudonym of a session under its subject's secret (rule 1 of `pseudonym_directory`)."""
    try:
        return hmac.digest(secret, session.encode(), "sha256").hex()[: 2 * NAME_BYTES]
    except UnicodeEncodeError:
        raise LedgerError("a session holds characters that no database stores") from None


def _secret_in(stored: str, pseudonym: str, owner: Owner, keys: SubjectKeys | None) -> str | None:
    """The secret that a row has, open or sealed; None where its key is not there."""
    if not is_sealed(stored):
        return stored
    return None if keys is None else keys.unsealed(owner, pseudonym, stored)


def _named_so(tenant: str, subject: str, keys: SubjectKeys | None) -> ColumnElement[bool]:
    """Rows of a subject: by its name, from before there were keys, and by its tag."""
    tag = None if keys is None else keys.kept_tag(owner_of(tenant, subject, ""), "subject", subject)
    stored = [subject] if tag is None else [subject, tag]
    return (subjects.c.tenant == tenant) & subjects.c.subject.in_(stored)
