"""Parse the place of a database: `database_url`, `--ledger` and every other database URL.

1. `sqlite:///` is followed by a path as it is: nothing in it is decoded or cut off, so `#`, `?` and `%` are letters.
2. `postgresql://` is followed by a server's address, as SQLAlchemy reads it.
3. Text that is neither is a path too if it begins with `/` or `.`, or contains no `:`, `=` or `@`. So a mistyped
   address never becomes a file whose name contains a password.
4. A message names the scheme of a URL at most, and `masked` hides every password: no output holds one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from sqlalchemy import URL
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from kvcustody.errors import LedgerError

SQLITE, POSTGRES = "sqlite:///", ("postgresql://", "postgresql+psycopg://")
_IN_ADDRESSES = ":=@"
_HIDDEN = "***"
_SHOWN = (
    "application_name",
    "dbname",
    "host",
    "port",
    "sslmode",
    "target_session_attrs",
    "user",
)  # of a URL's options
_MEMORY = ":memory:"


@dataclass(frozen=True, slots=True)
class SqliteFile:
    """A database in a file, or in memory (`path` is `:memory:`)."""

    path: Path

    def masked(self) -> str:
        """Return the URL for people and logs."""
        return f"{SQLITE}{self.path}"

    @property
    def in_memory(self) -> bool:
        """Whether each connection has its own database, which ends with it."""
        return str(self.path) == _MEMORY

    def engine_url(self, mode: str) -> URL:
        """Return the URL for SQLAlchemy, with SQLite's `mode` in a URI: `ro` or `rwc`."""
        name = str(self.path)
        if name.startswith("//"):  # a URI would read a host there
            name = name[1:]
        return URL.create("sqlite", database=f"file:{quote(name)}", query={"mode": mode, "uri": "true"})


@dataclass(frozen=True, slots=True)
class PostgresServer:
    """A database on a server."""

    url: URL

    def masked(self) -> str:
        """Return the URL for people and logs, without the password and without options that may contain one."""
        hidden = {name: _HIDDEN for name in self.url.query if name not in _SHOWN}
        return self.url.update_query_dict(hidden).render_as_string(hide_password=True)


DatabasePlace = SqliteFile | PostgresServer


def database_place(target: str | Path) -> DatabasePlace:
    """Return the database at a path or URL. Raises `LedgerError`, which quotes no address."""
    if isinstance(target, Path):
        return SqliteFile(target)
    if target.startswith(("/", ".")) or (target and not any(letter in target for letter in _IN_ADDRESSES)):
        return SqliteFile(Path(target))
    return place_of_url(target)


def url_of(target: str) -> str:
    """Return the URL of a path or URL; a URL is returned unchanged. Raises `LedgerError`."""
    place = database_place(target)
    return f"{SQLITE}{place.path}" if isinstance(place, SqliteFile) else target


def place_of_url(url: str) -> DatabasePlace:
    """Return the database at a URL. Raises `LedgerError`, which quotes no address."""
    path = url.removeprefix(SQLITE)
    if path != url and path:
        return SqliteFile(Path(path))
    if not url.startswith(POSTGRES):
        scheme, mark, _ = url.partition("://")
        if mark and scheme.isalnum() and not url.startswith("sqlite"):
            raise LedgerError(f"ledger `{scheme}` is neither SQLite nor PostgreSQL", scheme=scheme)
        raise LedgerError("this is not a database URL; write `sqlite:///PATH` or `postgresql://USER@HOST/DATABASE`")
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        raise LedgerError(
            "this PostgreSQL URL cannot be parsed; percent-encode `@`, `/`, `:` and `#` in its password"
        ) from None
    return PostgresServer(parsed.set(drivername="postgresql+psycopg"))


def checked_setting(target: str | None, *, path: bool = False) -> str | None:
    """Return a setting's URL (with `path`, a path too) unchanged after a check; raises `ValueError` that quotes no
    address.
    """
    if target is not None:
        try:
            database_place(target) if path else place_of_url(target)
        except LedgerError as error:
            raise ValueError(error.message) from None
    return target
