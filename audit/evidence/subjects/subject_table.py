"""Rows that link people and their pseudonyms: how they are stored, found, and destroyed.

1. A row has a pseudonym, a tenant, and a subject, a session or both. It also has a secret, under which the pseudonym
   commits to them as they stand in the row. Leaves carry the pseudonym: a row that was edited contradicts them
   (`check_row`). The pseudonyms of a subject's sessions without a row are derived from the subject's secret.
2. With subject keys a row holds tags instead of names, and its secret is sealed under the subject's key. Without that
   key no guess can be compared with either. Rows with a sealed secret can be proved only with key and name.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from sqlalchemy import ColumnElement, Connection, Engine, delete, insert, select, update

from kvcustody.audit.evidence.subjects.subject_filter import of_subjects
from kvcustody.audit.evidence.subjects.subject_key_store import (
    Owner,
    SubjectKeys,
    is_sealed,
    is_tag,
    owner_of,
)
from kvcustody.audit.store.database.bulk_insert import insert_new, insert_rows
from kvcustody.audit.store.schema.all_tables import has_leaf
from kvcustody.audit.store.schema.leaf_tables import residencies
from kvcustody.audit.store.schema.ledger import subject_unlinkings, subjects
from kvcustody.errors import LedgerError

Who = tuple[str, str, str]  # tenant, subject, session
Row = tuple[str, str, str, str, str | None]  # pseudonym, tenant, subject, session, secret

SESSIONS = "session-names"  # the tag that is a subject's secret where there are subject keys
PROVED_CHARACTERS = 32
_COMMITMENT = b"kvcustody/pseudonym@2\0"
LOOKUP_ROWS = 100
_UNLINKINGS = select(subject_unlinkings.c.count)


def row_of(values: Sequence[Any]) -> Row:
    """Return a database row as a subject row."""
    pseudonym, tenant, subject, session, secret = values
    return (pseudonym, tenant, subject, session, secret)


def tags_of(keys: SubjectKeys, who: Who) -> Who:
    """Return the tenant, and the tags of subject and session under the subject's key (rule 2)."""
    tenant, subject, session = who
    owner = owner_of(*who)
    return (
        tenant,
        keys.tag(owner, "subject", subject) if subject else "",
        keys.tag(owner, "session", session) if session else "",
    )


def is_tagged(row: Row) -> bool:
    """Return whether a row has tags instead of names (rule 2)."""
    return all(not name or is_tag(name) for name in row[2:4])


def sealed_rows(keys: SubjectKeys, rows: Sequence[Row]) -> list[Row]:
    """Return rows with names as tags and sealed secrets, for a ledger that receives them from processes without keys
    (rule 2).
    """
    keys.refresh()
    keys.prepare({owner_of(*row[1:4]) for row in rows})
    return [
        (row[0], *tags_of(keys, row[1:4]), row[4] and keys.sealed(owner_of(*row[1:4]), row[0], row[4])) for row in rows
    ]


def store_names(connection: Connection, names: Sequence[Row], *, skip_known: bool = False) -> None:
    """Insert rows; rows that a replay inserted before are skipped."""
    rows = sorted(names, key=itemgetter(0))  # neighbours of a random order: fewer pages are sought and changed
    if rows:
        (insert_new if skip_known else insert_rows)(connection, subjects, rows)


def names_of(connection: Connection, tenant: str, subject: str, keys: SubjectKeys | None = None) -> list[str]:
    """Return every pseudonym of a subject and of its sessions (an outage may have caused several)."""
    own = {row[0] for row in _rows(connection, tenant, subject, keys)}
    session = residencies.c.session
    for start in range(0, len(names := sorted(own)), LOOKUP_ROWS):
        theirs = of_subjects(connection, tenant, names[start : start + LOOKUP_ROWS])
        query = select(session).where(*theirs, session.is_not(None), has_leaf(residencies))
        own.update(connection.scalars(query.distinct()))
    return sorted(own)


def subject_names(connection: Connection, tenant: str, subject: str, keys: SubjectKeys | None = None) -> list[str]:
    """Return every pseudonym of a subject itself, without those of its sessions."""
    return sorted(row[0] for row in _rows(connection, tenant, subject, keys) if not row[3])


def session_names(
    connection: Connection, tenant: str, subject: str, session: str, keys: SubjectKeys | None = None
) -> list[str]:
    """Return every pseudonym of a subject's session: from its own rows, and derived from the subject's secret."""
    owner = owner_of(tenant, subject, "")
    tag = None if keys is None else keys.kept_tag(owner, "session", session)
    stored = [session] if tag is None else [session, tag]
    names: set[str] = set()
    for pseudonym, _, _, of_session, secret in _rows(connection, tenant, subject, keys):
        if of_session in stored:
            names.add(pseudonym)
        elif secret and not of_session:
            opened = _secret_in(secret, pseudonym, owner, keys)
            if opened:
                names.add(committed_name(opened, tenant, subject, session))
    if keys is not None and tag is not None:
        secret, person = keys.kept_tag(owner, SESSIONS, ""), keys.kept_tag(owner, "subject", subject)
        if secret and person:
            names.add(committed_name(secret, tenant, person, tag))
    return sorted(names)


def subjects_of_session(connection: Connection, tenant: str, session: str) -> list[str] | None:
    """Return the subjects of a session by name; None if no row tells, because none has it or rows have tags."""
    columns = subjects.c
    of_session = (columns.tenant == tenant) & (columns.session == session)
    rows = connection.scalars(select(columns.subject).where(of_session).distinct().limit(LOOKUP_ROWS + 1)).all()
    is_known = 0 < len(rows) <= LOOKUP_ROWS and not any(is_tag(name) for name in rows)
    return sorted(name for name in rows if name) if is_known else None


def named_row(connection: Connection, pseudonym: str) -> Row | None:
    """Return the row of a pseudonym, verified as far as possible; None if nobody is behind it."""
    columns = subjects.c
    query = select(columns.pseudonym, columns.tenant, columns.subject, columns.session, columns.secret)
    row = connection.execute(query.where(columns.pseudonym == pseudonym)).first()
    if row is None:
        return None
    made = row_of(row)
    check_row(made)
    return made


def subject_behind(connection: Connection, pseudonym: str, keys: SubjectKeys | None = None) -> str | None:
    """Return the subject's name behind a pseudonym; None if its link is gone, or `keys` cannot resolve its tag."""
    row = named_row(connection, pseudonym)
    name = None if row is None else row[2]
    if name is None or not is_tag(name):
        return name
    kept = None if keys is None else keys.named(pseudonym)
    return None if kept is None else kept[1]


def has_tags(engine: Engine) -> bool:
    """Return whether anybody is known by a tag here; then names can only be found with the store of subject keys (rule
    2).
    """
    with engine.connect() as connection:
        return connection.scalar(select(subjects.c.subject).where(subjects.c.subject.like("k1:%")).limit(1)) is not None


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
    """Return how often a subject was unlinked here (`pseudonyms`, rule 5 of `pseudonym_directory`)."""
    return int(connection.scalar(_UNLINKINGS) or 0)


def unknown_pseudonyms(connection: Connection, names: Sequence[str]) -> list[str]:
    """Return the pseudonyms that belong to nobody any more, or never did."""
    there: set[str] = set()
    for start in range(0, len(names), LOOKUP_ROWS):
        query = select(subjects.c.pseudonym).where(subjects.c.pseudonym.in_(names[start : start + LOOKUP_ROWS]))
        there.update(connection.scalars(query))
    return [name for name in names if name not in there]


def committed_name(secret: str, tenant: str, subject: str, session: str) -> str:
    """Return the pseudonym that commits, for holders of the secret, to a person (rule 1). No name contains a NUL."""
    try:
        message = _COMMITMENT + f"{tenant}\0{subject}\0{session}".encode()
    except UnicodeEncodeError:
        raise LedgerError("a subject or session contains characters that databases cannot store") from None
    return hmac.digest(secret.encode(), message, "sha256").hex()[:PROVED_CHARACTERS]


def is_proved(row: Row) -> bool | None:
    """Return whether a row is the one for which its pseudonym was made; None if the row alone cannot tell (rule 2)."""
    pseudonym, tenant, subject, session, secret = row
    if is_sealed(secret or "") and is_tag(subject or session):
        return None
    return secret is not None and committed_name(secret, tenant, subject, session) == pseudonym


def check_row(row: Row) -> None:
    """Raise `LedgerError` for a row of `subjects` that contradicts the leaves."""
    if is_proved(row) is False:
        raise LedgerError(
            f"`subjects` names another for pseudonym `{row[0]}` than it was made for: run `kvcustody audit fsck`",
            pseudonym=row[0],
        )


def _rows(connection: Connection, tenant: str, subject: str, keys: SubjectKeys | None) -> list[Row]:
    """Return a subject's rows, each verified as far as possible."""
    owner = owner_of(tenant, subject, "")
    columns = subjects.c
    query = select(columns.pseudonym, columns.tenant, columns.subject, columns.session, columns.secret)
    subject_rows = []
    for row in connection.execute(query.where(_named_so(tenant, subject, keys))):
        made = row_of(row)
        pseudonym, *_, session, secret = made
        opened = _secret_in(secret, pseudonym, owner, keys) if secret and is_sealed(secret) else None
        check_row(made if opened is None or session else (pseudonym, tenant, subject, "", opened))
        subject_rows.append(made)
    return subject_rows


def _secret_in(stored: str, pseudonym: str, owner: Owner, keys: SubjectKeys | None) -> str | None:
    """Return the secret in a row, open or sealed; None if its key is missing."""
    if not is_sealed(stored):
        return stored
    return None if keys is None else keys.unsealed(owner, pseudonym, stored)


def _named_so(tenant: str, subject: str, keys: SubjectKeys | None) -> ColumnElement[bool]:
    """Rows of a subject: by its name, from before there were keys, and by its tag."""
    tag = None if keys is None else keys.kept_tag(owner_of(tenant, subject, ""), "subject", subject)
    stored = [subject] if tag is None else [subject, tag]
    return (subjects.c.tenant == tenant) & subjects.c.subject.in_(stored)
