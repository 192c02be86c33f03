"""The ledger that a command of `kvcustody audit` reads, and how its options are told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from kvcustody.audit.database.engine import check_store, ledger_error, open_store
from kvcustody.audit.processes.marked_processes import history, read_marked
from kvcustody.audit.subjects.subject_key_store import SubjectKeys, store_beside
from kvcustody.console.command import tell_history
from kvcustody.errors import ConfigError

DEFAULT = "sqlite:///kvcustody.db"
Ledger = Annotated[
    str,
    typer.Option(
        "--ledger",
        envvar="KVCUSTODY_DATABASE_URL",
        help="The ledger: an SQLite file or a PostgreSQL server, as a URL.",
        show_envvar=True,
    ),
]
Keys = Annotated[
    list[str],
    typer.Option("--key", help="A public key of the ledger (`name+id+base64`), or a file that holds it."),
]
Witnesses = Annotated[
    list[str], typer.Option("--witness", help="A witness's public key, or a file; may be given again.")
]

SubjectStore = Annotated[
    str | None,
    typer.Option(
        "--subject-keys",
        envvar="KVCUSTODY_SUBJECT_KEYS_URL",
        help="The store of subject keys, as a URL (default: the one beside a SQLite ledger).",
    ),
]


class SubjectNames(StrEnum):
    """As the setting `subject_names`."""

    SEALED = "sealed"
    CLEAR = "clear"


NamesOfSubjects = Annotated[
    SubjectNames,
    typer.Option(
        "--subject-names",
        envvar="KVCUSTODY_SUBJECT_NAMES",
        help="`clear`: the ledger is one whose workers keep subjects' names as they are.",
    ),
]


@contextmanager
def reading(ledger: str) -> Iterator[Engine]:
    """The ledger's engine, checked; a failure of the database is one line."""
    engine = open_store(ledger, read_only=True)
    try:
        check_store(engine)
        with engine.connect() as connection:
            tell_marked(connection)
        yield engine
    except SQLAlchemyError as problem:
        raise ledger_error(engine, problem) from problem
    finally:
        engine.dispose()


def tell_marked(connection: Connection) -> None:
    """Say what of the ledger is replayed or generated, before anything of it is shown."""
    marked = read_marked(connection)
    if marked:
        tell_history(history(marked), [one._asdict() for one in marked])


@contextmanager
def writing(ledger: str) -> Iterator[Engine]:
    """The ledger's engine for an act that is put on record."""
    engine = open_store(ledger, timeout_seconds=5.0)
    try:
        check_store(engine)
        yield engine
    except SQLAlchemyError as problem:
        raise ledger_error(engine, problem) from problem
    finally:
        engine.dispose()


@contextmanager
def subject_store(url: str | None, ledger: str) -> Iterator[SubjectKeys | None]:
    """The store of subject keys that is named, else the one beside the ledger; None where there is none."""
    beside = store_beside(ledger)
    if url is None and beside is not None and beside.exists():
        url = str(beside)
    keys = None if url is None else SubjectKeys.open(url)
    try:
        yield keys
    finally:
        if keys is not None:
            keys.close()


def key_texts(given: list[str]) -> list[str]:
    """Keys as they were given, or from the files that were named (one key a line, `#` begins a comment)."""
    made: list[str] = []
    for text in given:
        path = Path(text)
        try:
            lines = path.read_text().splitlines() if len(text) < 1000 and path.is_file() else [text]
        except (OSError, UnicodeDecodeError) as problem:
            raise ConfigError(f"key file `{text}` cannot be read: {problem}") from None
        made += [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    return made


def moment_us(text: str | None, option: str) -> int | None:
    """UTC µs from ISO 8601 (a date is its midnight; without an offset it is UTC); None for None."""
    if text is None:
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(
            f"{option} `{text}` is no time; write `2026-11-20` or `2026-11-20T14:00:00Z`"
        ) from None
    return round((found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp() * 1_000_000)


def shown(at_us: int) -> str:
    """UTC µs for people."""
    return datetime.fromtimestamp(at_us / 1_000_000, UTC).strftime("%Y-%m-%d %H:%M:%S") if at_us else "-"
