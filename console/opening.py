"""Opens what the shared options name: a ledger to read, its snapshot, a ledger for an act, a control plane."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from kvcustody.audit.evidence.coverage.custody_units import CustodySelection
from kvcustody.audit.evidence.processes.marked_processes import history, read_marked
from kvcustody.audit.evidence.subjects.subject_key_store import SubjectKeys, store_beside
from kvcustody.audit.store.database.database_place import url_of
from kvcustody.audit.store.database.dialect import dialect_of
from kvcustody.audit.store.database.engine import check_store, check_there, ledger_error, open_store
from kvcustody.audit.store.database.private_copy import at_rest
from kvcustody.audit.store.database.signed_orders import SignedOrders, authenticate
from kvcustody.audit.store.database.snapshot import AsOf, as_of_sizes
from kvcustody.audit.tlog.database_proofs import LedgerProofs
from kvcustody.console.command import tell_history
from kvcustody.console.options import ControlPlane, ServiceSource, moment_us
from kvcustody.errors import ConfigError
from kvcustody.files import read_words

if TYPE_CHECKING:
    from kvcustody.governance.control_plane.connection import ControlPlaneConnection
    from kvcustody.governance.service.settings import ServiceSettings

_SNAPSHOT_SECONDS = 600.0
_LEDGER, _SERVICE_LEDGER = "KVCUSTODY_DATABASE_URL", "KVCUSTODY_SERVICE_DATABASE_URL"
_TRUST_VARIABLES = frozenset({"KVCUSTODY_POLICY_TRUST", "KVCUSTODY_CONFIG"})


@contextmanager
def reading(ledger: str) -> Iterator[Engine]:
    """Yield the ledger's engine, checked; a database failure is a one-line error.

    Orders count as the settings of workers say (`policy_trust`): what is printed is what workers follow.
    """
    engine = open_store(ledger, read_only=True)
    if not _TRUST_VARIABLES.isdisjoint(map(str.upper, os.environ)):  # else nothing names a trust: no settings to read
        authenticate(engine, _signed_orders(may_sign=False))
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
    """Report replayed or generated history in the ledger, before anything else is shown."""
    marked = read_marked(connection)
    if marked:
        tell_history(history(marked), [one._asdict() for one in marked])


@contextmanager
def writing(ledger: str) -> Iterator[Engine]:
    """Yield the ledger's engine for a recorded act; orders are signed where the worker's settings say so."""
    check_there(ledger)
    orders = _signed_orders(may_sign=True)
    engine = open_store(ledger, timeout_seconds=5.0)
    authenticate(engine, orders)
    try:
        check_store(engine)
        yield engine
    except SQLAlchemyError as problem:
        raise ledger_error(engine, problem) from problem
    finally:
        engine.dispose()


def _signed_orders(*, may_sign: bool) -> SignedOrders | None:
    from kvcustody.governance.release.order_signing import read_signed_orders
    from kvcustody.governance.settings import load_settings

    settings = load_settings()
    trust = Path(settings.policy_trust) if settings.policy_trust else None
    return read_signed_orders(trust, settings.ledger_origin, settings.order_key_path if may_sign else None)


@contextmanager
def subject_store(url: str | None, ledger: str) -> Iterator[SubjectKeys | None]:
    """Yield the named store of subject keys, else the one next to the ledger; None where there is none."""
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
    """Return the given keys, or those in the named files (one key per line, `#` begins a comment)."""
    texts: list[str] = []
    for text in given:
        path = Path(text)
        try:
            lines = read_words(path).splitlines() if len(text) < 1000 and path.is_file() else [text]
        except (OSError, UnicodeDecodeError) as problem:
            raise ConfigError(f"key file `{text}` cannot be read: {problem}") from None
        texts += [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if given and not texts:
        raise ConfigError(f"`{given[0]}` holds no key; name a public key, or a file that holds one")
    return texts


@contextmanager
def snapshot(ledger: str) -> Iterator[Connection]:
    """Yield a read-only connection in one snapshot; a long read blocks no writer (`private_copy`).

    Raises `LedgerError` where there is no ledger of this schema.
    """
    engine = open_store(ledger, read_only=True, timeout_seconds=_SNAPSHOT_SECONDS, mapped=True)
    try:
        check_store(engine)
        with at_rest(engine) as read, read.connect() as connection:
            dialect_of(read).one_snapshot(connection)
            tell_marked(connection)
            yield connection
    except SQLAlchemyError as problem:
        raise ledger_error(engine, problem) from problem
    finally:
        engine.dispose()


def one_ledger(ctx: typer.Context) -> None:
    """Refuse a ledger's own files beside a control plane.

    Raises:
        ConfigError: both were given.
    """
    source = ctx.get_parameter_source("ledger")
    if source is not None and source.name == "COMMANDLINE":
        raise ConfigError("--server and --ledger name two ledgers: give one of them (KVCUSTODY_SERVER counts, too)")


def state_of(connection: Connection, checkpoint: int | None) -> AsOf | None:
    """Return the state at a checkpoint; None for the current ledger."""
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
    """Return the selection.

    Raises:
        ConfigError: a time is invalid, or a period is empty.
    """
    made = CustodySelection(moment_us(since), moment_us(until), tenant, classification, model, tier)
    if made.since_us is not None and made.until_us is not None and made.since_us >= made.until_us:
        raise ConfigError(f"the period from `{since}` to `{until}` is empty", since=since, until=until)
    return made


def ledger_of(source: ServiceSource) -> str | None:
    """Return a command's ledger: its option's, else that of `KVCUSTODY_DATABASE_URL`; None: the settings name it.

    Settings of a service are stronger than the variable, which is the workers'.
    """
    variables = {name.upper(): value for name, value in os.environ.items()}
    if source.ledger is not None or source.config is not None or _SERVICE_LEDGER in variables:
        return source.ledger
    return variables.get(_LEDGER)


def service_settings(config: Path | None, ledger: str | None, **explicit: str | None) -> ServiceSettings:
    """Return a service's settings; given options override them."""
    from kvcustody.governance.service.settings import load_service_settings

    given = {"database_url": None if ledger is None else url_of(ledger), **explicit}
    return load_service_settings(config, **{name: value for name, value in given.items() if value is not None})


def connect(
    plane: ControlPlane, certificate: Path | None = None, certificate_key: Path | None = None
) -> ControlPlaneConnection:
    """Return the connection that the options name; `certificate` is a client's, with its key.

    Raises:
        ConfigError: the options are wrong.
    """
    from kvcustody.governance.control_plane.connection import ControlPlaneConnection, read_key_file

    if plane.server is None:
        raise ConfigError("--server is needed: a control plane answers this")
    if plane.key_file is None:
        raise ConfigError("--server needs --api-key-file")
    return ControlPlaneConnection(
        plane.server,
        read_key_file(plane.key_file),
        authority=plane.authority,
        certificate=certificate,
        certificate_key=certificate_key,
        on_history=tell_history,
    )


def control_plane(source: ServiceSource) -> ControlPlaneConnection:
    """Return the connection of a command that names a ledger or a control plane.

    Raises:
        ConfigError: both are given.
    """
    one_ledger(source.ctx)
    return connect(source.plane)
