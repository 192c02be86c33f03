"""Administration on the ledger's own files, without a server: the first key, principals, keys.

1. Whoever may write the database may do this; everything done is on record as `local:<user>`.
2. A bootstrap key can only enrol principals, and ends after hours.
3. Commands write under one name, apart from a server's, and with a spill of their own: one at a time, in turn.
"""

from __future__ import annotations

import fcntl
import getpass
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.write.event_writer import EventWriter
from kvcustody.clock import Clock
from kvcustody.errors import LedgerError
from kvcustody.governance.credentials.api_key import KeyHasher
from kvcustody.governance.service.access.principal_table import IssuedKey
from kvcustody.governance.service.access.principals import Principals
from kvcustody.governance.service.access.roles import Role
from kvcustody.governance.service.settings import ServiceSettings
from kvcustody.migrations.upgrade import ready_schema

TURN_SECONDS = 30.0  # how long a command waits for another
_LOOK_SECONDS = 0.02
LOCAL_SPILL = "spill-local"  # in the state folder, apart from a server's


class Administration(NamedTuple):
    """The book of principals, and the actor that changes it."""

    principals: Principals
    by: str


@contextmanager
def open_administration(settings: ServiceSettings, *, clock: Clock | None = None) -> Iterator[Administration]:
    """Open the ledger beside a server that may be running on it."""
    with ExitStack() as stack:
        stack.enter_context(local_turn(settings))
        clock = settings.open_clock(clock, stack)
        engine = open_store(settings.database_url, timeout_seconds=5.0)
        stack.callback(engine.dispose)
        ready_schema(engine, migrate=settings.migrate)
        spill, name = settings.state_path / LOCAL_SPILL, local_writer(settings)
        writer = stack.enter_context(EventWriter(engine, worker=name, clock=clock, spill_directory=spill))
        issuers = [issuer.name for issuer in settings.issuers]
        book = Principals(engine, KeyHasher(), clock, writer.submit_durable, issuers)
        yield Administration(book, local_name())


def make_bootstrap(administration: Administration, *, hours: float) -> IssuedKey:
    """Create a principal that can only enrol others, and its key."""
    principals, by = administration
    number = 1
    while principals.find(f"bootstrap-{number}") is not None:
        number += 1
    name = f"bootstrap-{number}"
    principals.enrol(name, [Role.BOOTSTRAP], kind="machine", by=by)
    return principals.issue_key(name, days=hours / 24, by=by)


@contextmanager
def local_turn(settings: ServiceSettings) -> Iterator[None]:
    """Write under the commands' name inside the block (rule 3). Raises `LedgerError` where another command holds the
    turn too long.
    """
    settings.make_state_folder()
    deadline = time.monotonic() + TURN_SECONDS
    descriptor = os.open(settings.state_path / "local.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    name = local_writer(settings)
                    raise LedgerError(f"another command is writing as `{name}`: wait until it ends") from None
                time.sleep(_LOOK_SECONDS)
        yield
    finally:
        os.close(descriptor)


def local_writer(settings: ServiceSettings) -> str:
    """Return the name of the commands that write the ledger beside the service of these settings."""
    return f"{settings.name}.local"


def local_name() -> str:
    """Return the actor of an act on the ledger's own files (rule 1)."""
    try:
        return f"local:{getpass.getuser()}"
    except (KeyError, OSError):
        return "local:unknown"
