"""Records, before leaves are handed over, that a command takes them out of the ledger.

No policy is asked: whoever opens a ledger's own database has all of it. Where the record cannot be written (a copy, a
login that may only read), the command reports that. It then does its work only with `--unrecorded`.
"""

from __future__ import annotations

import getpass
from typing import Annotated

import typer

from kvcustody.audit.kinds import AccessRecorded
from kvcustody.audit.write.record_operator_act import record_operator_act
from kvcustody.console.opening import writing
from kvcustody.errors import ConfigError, LedgerError

Unrecorded = Annotated[
    bool,
    typer.Option("--unrecorded", help="Hand over without a record, because the ledger cannot be written."),
]
ROLE = "ledger"  # no role of the service: who has the database


def record_taken(ledger: str, operation: str, *, unrecorded: bool) -> None:
    """Record that leaves are taken out of the ledger (class A).

    Raises:
        ConfigError: it cannot be recorded.
    """
    if unrecorded:
        return
    try:
        with writing(ledger) as engine:
            record_operator_act(engine, lambda at_us: AccessRecorded(at_us, _user(), (ROLE,), operation))
    except LedgerError as error:
        raise ConfigError(
            f"{error.message}; so the export cannot be recorded: `--unrecorded` skips the record"
        ) from None


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"
