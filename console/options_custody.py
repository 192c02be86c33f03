"""Options that commands about a ledger share: which ledger, which part of it, as of when."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Annotated

import typer
from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from kvcustody.audit.coverage.custody_units import CustodySelection
from kvcustody.audit.database.engine import check_store, ledger_error, open_store
from kvcustody.audit.database.snapshot import AsOf, as_of_sizes
from kvcustody.audit.tlog.database_proofs import LedgerProofs
from kvcustody.console.options_ledger import tell_marked
from kvcustody.errors import ConfigError

_READ_SECONDS = 600.0
Db = Annotated[str, typer.Option("--db", help="The ledger: a SQLite file or a postgresql: URL. Only read.")]
Since = Annotated[str | None, typer.Option(help="Custody due from this UTC date or time on (ISO 8601).")]
Until = Annotated[str | None, typer.Option(help="Custody due before this UTC date or time.")]
Tenant = Annotated[str | None, typer.Option(help="Only this tenant's custody.")]
Class = Annotated[str | None, typer.Option(help="Only this classification.")]
Model = Annotated[
    str | None, typer.Option(help="Only this model, as leaves name it (16 hexadecimal digits).")
]
Tier = Annotated[
    str | None, typer.Option(help="Only this tier; today custody is recorded in `device` alone.")
]
At = Annotated[
    int | None, typer.Option("--as-of", help="The ledger as this checkpoint left it (its root log size).")
]
DEFAULT_DB = "kvcustody.db"


@contextmanager
def reading(db: str) -> Iterator[Connection]:
    """A read-only connection in one snapshot; raises `LedgerError` where there is no ledger of this schema."""
    engine = open_store(db, read_only=True, timeout_seconds=_READ_SECONDS, mapped=True)
    try:
        check_store(engine)
        with engine.connect() as connection:
            if engine.dialect.name == "postgresql":
                connection.execution_options(isolation_level="REPEATABLE READ")
            tell_marked(connection)
            yield connection
    except SQLAlchemyError as problem:
        raise ledger_error(engine, problem) from problem
    finally:
        engine.dispose()


def one_ledger(db: str) -> None:
    """Raises `ConfigError` where a command that asks a control plane was given a ledger's own files too."""
    if db != DEFAULT_DB:
        raise ConfigError(
            "--server and --db name two ledgers: give one of them (KVCUSTODY_SERVER counts as well)"
        )


def state_of(connection: Connection, checkpoint: int | None) -> AsOf | None:
    """The state that a checkpoint left; None for the ledger as it is."""
    if checkpoint is None:
        return None
    return as_of_sizes(connection, LedgerProofs(connection).sizes(checkpoint))


def selection(
    since: str | None,
    until: str | None,
    tenant: str | None,
    classification: str | None,
    model: str | None,
    tier: str | None,
) -> CustodySelection:
    """What was asked for; raises `ConfigError` for a time that is none, or a period that is empty."""
    made = CustodySelection(moment_us(since), moment_us(until), tenant, classification, model, tier)
    if made.since_us is not None and made.until_us is not None and made.since_us >= made.until_us:
        raise ConfigError(f"the period from `{since}` to `{until}` is empty", since=since, until=until)
    return made


def moment_us(text: str | None) -> int | None:
    """UTC microseconds of an ISO 8601 date or time; without a zone it is UTC."""
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(
            f"`{text}` is no ISO 8601 date or time such as 2026-03-31T12:00", text=text
        ) from None
    moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
    whole = moment - datetime(1970, 1, 1, tzinfo=UTC)
    return (whole.days * 86_400 + whole.seconds) * 1_000_000 + whole.microseconds
