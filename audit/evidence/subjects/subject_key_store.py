"""One random key for each subject, in a separate store: only its holder can find the subject's pseudonyms.

1. The ledger's database knows a subject by a tag: HMAC-SHA-256 under the subject's key over its name. Without the key
   no guess can be compared with a tag. So the ledger, its write-ahead log, its spills and every backup of them say
   nothing about who a pseudonym is once the key is destroyed.
2. The store is the only place with names and keys, and it is small. Backups of it undo destruction: keep none, or
   destroy them too. On SQLite destroyed rows are overwritten, and its write-ahead log is emptied.
3. A process that has keys in memory forgets them at its next batch after any destruction, by `generation`.
4. A session without a subject has a key of its own.
5. Whoever is to be erased can be named from here alone, by pseudonym: workers that carry the erasure out, now or after
   a crash, need the name. It goes with the key.
6. Secrets that the ledger keeps of subjects are hidden under the subject's key, as the tags are.
7. A ledger has a store unless a setting explicitly keeps names in clear. Beside a SQLite file one is made. On a server
   it has to be named, because several machines would make one each.
"""

from __future__ import annotations

import hmac
import operator
import re
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Engine,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
    and_,
    delete,
    insert,
    or_,
    select,
    update,
)
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from kvcustody.audit.store.database.database_place import SqliteFile, database_place
from kvcustody.audit.store.database.dialect import dialect_of
from kvcustody.audit.store.database.engine import WRITE, ledger_error, open_store
from kvcustody.errors import ConfigError

Owner = tuple[str, str, str]  # tenant, subject, session (empty where there is a subject)

KEY_BYTES = 32
_DOMAIN = b"kvcustody/subject-tag@1\0"
_SEAL_DOMAIN = b"kvcustody/subject-secret@1\0"
_SEALED = "s1:"
_CACHED_MAX = 1 << 17
_TAG = re.compile("k1:[0-9a-f]{40}")
_metadata = MetaData()
_keys = Table(
    "subject_keys",
    _metadata,
    Column("tenant", Text, nullable=False),
    Column("subject", Text, nullable=False),
    Column("session", Text, nullable=False),
    Column("key", LargeBinary, nullable=False),
    PrimaryKeyConstraint("tenant", "subject", "session"),
)
_names = Table(
    "subject_names",
    _metadata,
    Column("pseudonym", Text, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("subject", Text, nullable=False),
    Column("session", Text, nullable=False),
)
_destroyed = Table(
    "subject_keys_destroyed",
    _metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("count", BigInteger, nullable=False),
)
_GENERATION = select(_destroyed.c.count)


def store_beside(ledger: str | Path) -> Path | None:
    """Return the default place of a SQLite ledger's store (rule 7); None for a ledger on a server."""
    place = database_place(ledger)
    if not isinstance(place, SqliteFile) or place.in_memory:
        return None
    return place.path.with_name(f"{place.path.stem}-subjects.db")


def open_subject_keys(ledger: str | Path, url: str | None, *, clear: bool) -> SubjectKeys | None:
    """Return the store at `url`, or this ledger's own; None if its names are stored in clear (rule 7).

    Raises `ConfigError` where nobody says which of the two it is.
    """
    if url is None and clear:
        return None
    target = store_beside(ledger) if url is None else url
    if target is None:
        raise ConfigError(
            "subject_keys_url: a ledger on a server needs a store of subject keys; `subject_names: clear` keeps "
            "subjects' names in the ledger as they are"
        )
    return SubjectKeys.open(target)


def owner_of(tenant: str, subject: str, session: str) -> Owner:
    """Return the owner of the key that hides these names (rule 4)."""
    return (tenant, subject, "" if subject else session)


def is_tag(text: str) -> bool:
    """Return whether this is a tag, which stands for a name, and not a name."""
    return _TAG.fullmatch(text) is not None


def is_sealed(secret: str) -> bool:
    """Return whether a subject's secret is only available with the subject's key."""
    return secret.startswith(_SEALED)


class SubjectKeys:
    """The store of subject keys: an SQLite file or a PostgreSQL database, never the ledger's own."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._known: dict[Owner, bytes] = {}
        self._pending: dict[Owner, bytes] = {}
        try:
            _metadata.create_all(engine)
            with engine.connect().execution_options(**WRITE) as connection, connection.begin():
                if connection.scalar(select(_destroyed.c.count)) is None:
                    connection.execute(insert(_destroyed).values(id=1, count=0))
            self.generation = self._generation()
        except IntegrityError:
            self.generation = self._generation()
        except SQLAlchemyError as problem:
            raise ledger_error(engine, problem) from problem

    @classmethod
    def open(cls, target: str | Path) -> SubjectKeys:
        """Return the store at a path or URL; a new SQLite file gets mode 0600. Raises `LedgerError` if it cannot be
        used.
        """
        return cls(open_store(target, keys=True))

    def refresh(self) -> bool:
        """Forget every key in memory if one was destroyed meanwhile; return whether that was so (rule 3)."""
        found = self._generation()
        if found == self.generation:
            return False
        self.generation = found
        self._known.clear()
        return True

    def prepare(self, owners: Iterable[Owner]) -> None:
        """Load the keys of these people, or create and store them. Raises the database's errors."""
        if len(self._known) > _CACHED_MAX:
            self._known.clear()
        wanted = {owner for owner in owners if owner not in self._known} | self._pending.keys()
        if not wanted:
            return
        with self._engine.connect() as connection:
            self._known |= _read(connection, wanted)
        missing = [owner for owner in wanted if owner not in self._known]
        if missing:
            self._known |= self._store(missing)
        self._pending = {}

    def tag(self, owner: Owner, kind: str, name: str) -> str:
        """Return the ledger's tag for a name. A key that the store could not give is made, and stored later."""
        key = self._known.get(owner) or self._pending.get(owner)
        if key is None:
            key = self._pending[owner] = secrets.token_bytes(KEY_BYTES)
        return _tag(key, kind, name)

    def keep_names(self, names: Iterable[tuple[str, Owner]]) -> None:
        """Store the people behind these pseudonyms as (tenant, subject, session): durable on return (rule 5)."""
        rows = [
            {"pseudonym": name, "tenant": tenant, "subject": subject, "session": session}
            for name, (tenant, subject, session) in names
        ]
        if rows:
            with self._engine.connect().execution_options(**WRITE) as connection, connection.begin():
                connection.execute(_insert_new(connection, _names), rows)

    def named(self, pseudonym: str) -> Owner | None:
        """Return the (tenant, subject, session) of a person to erase; None if nobody was stored (rule 5)."""
        query = select(_names.c.tenant, _names.c.subject, _names.c.session)
        with self._engine.connect() as connection:
            row = connection.execute(query.where(_names.c.pseudonym == pseudonym)).first()
        return None if row is None else (row.tenant, row.subject, row.session)

    def kept_tag(self, owner: Owner, kind: str, name: str) -> str | None:
        """Return the tag of a name whose key the store has, else None. Creates and remembers nothing: on any thread."""
        with self._engine.connect() as connection:
            key = _read(connection, {owner}).get(owner)
        return None if key is None else _tag(key, kind, name)

    def sealed(self, owner: Owner, pseudonym: str, secret: str) -> str:
        """Return a 32-character secret of a pseudonym, encrypted under the subject's key (rule 6).

        A pseudonym has one secret, so no two are hidden alike. The key must be prepared.
        """
        return _SEALED + _masked(self._known[owner], pseudonym, secret.encode()).hex()

    def unsealed(self, owner: Owner, pseudonym: str, sealed: str) -> str | None:
        """Return the decrypted secret; None if the store no longer has the key. On any thread."""
        with self._engine.connect() as connection:
            key = _read(connection, {owner}).get(owner)
        if key is None:
            return None
        return _masked(key, pseudonym, bytes.fromhex(sealed.removeprefix(_SEALED))).decode("ascii", "replace")

    def destroy(self, tenant: str, subject: str, session: str = "") -> int:
        """Overwrite and delete a subject's key (`store`); return how many there were. Durable on return (rule 2)."""
        owner = owner_of(tenant, subject, session)
        with self._engine.connect().execution_options(**WRITE) as connection, connection.begin():
            gone = connection.execute(delete(_keys).where(*_is(owner))).rowcount
            whose = [_names.c.tenant == tenant, _names.c.subject == subject]
            whose += [] if subject else [_names.c.session == session]
            connection.execute(delete(_names).where(*whose))
            connection.execute(update(_destroyed).values(count=_destroyed.c.count + 1))
        empty_wal(self._engine)
        self._known.pop(owner, None)
        self._pending.pop(owner, None)
        return gone

    def close(self) -> None:
        """Close the store."""
        self._engine.dispose()

    def _generation(self) -> int:
        with self._engine.connect() as connection:
            return int(connection.scalar(_GENERATION) or 0)

    def _store(self, missing: list[Owner]) -> dict[Owner, bytes]:
        """Insert keys; where another process was quicker, its key counts."""
        made = {owner: self._pending.get(owner) or secrets.token_bytes(KEY_BYTES) for owner in missing}
        rows = [
            {"tenant": tenant, "subject": subject, "session": session, "key": key}
            for (tenant, subject, session), key in made.items()
        ]
        with self._engine.connect().execution_options(**WRITE) as connection, connection.begin():
            connection.execute(_insert_new(connection, _keys), rows)
            return _read(connection, set(missing))


def _tag(key: bytes, kind: str, name: str) -> str:
    message = _DOMAIN + kind.encode() + b"\0" + name.encode()
    return "k1:" + hmac.digest(key, message, "sha256").hex()[:40]


def _masked(key: bytes, pseudonym: str, secret: bytes) -> bytes:
    mask = hmac.digest(key, _SEAL_DOMAIN + pseudonym.encode(), "sha256")[: len(secret)]
    return bytes(map(operator.xor, secret, mask))


def empty_wal(engine: Engine) -> bool:
    """Empty SQLite's write-ahead log, which holds earlier pages; return False if a reader prevents it.

    True on PostgreSQL, where there is nothing that a client could do: its log is kept and archived by the server.
    """
    if not dialect_of(engine).in_file:
        return True
    raw = engine.raw_connection()
    try:
        busy, *_ = raw.cursor().execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    finally:
        raw.close()
    return not busy


def _is(owner: Owner) -> list[Any]:
    tenant, subject, session = owner
    return [_keys.c.tenant == tenant, _keys.c.subject == subject, _keys.c.session == session]


def _read(connection: Connection, owners: set[Owner]) -> dict[Owner, bytes]:
    keys: dict[Owner, bytes] = {}
    each = sorted(owners)
    for start in range(0, len(each), 100):
        some = [and_(*_is(owner)) for owner in each[start : start + 100]]
        rows = connection.execute(select(_keys).where(or_(*some)))
        keys |= {(row.tenant, row.subject, row.session): bytes(row.key) for row in rows}
    return keys


def _insert_new(connection: Connection, table: Table) -> Any:
    return dialect_of(connection).insert_new(table)
