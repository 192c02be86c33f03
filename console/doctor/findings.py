"""What a check says, and the list of checks.

    @check("disk", "there is room")
    def disk(subject: Examined) -> Iterator[Diagnosis]:
        yield problem("…", "what to do")

1. A check is a generator. One that yields nothing found nothing wrong; one that does not apply yields `skipped`.
2. A check that fails is a problem of its own, and the other checks still run.
3. Nothing is changed: files are read, the ledger is opened for reading, no file is made.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from typing import NamedTuple

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from kvcustody.audit.store.database.engine import ledger_error
from kvcustody.clock import Clock
from kvcustody.errors import CustodyError
from kvcustody.governance.service.settings import ServiceSettings
from kvcustody.governance.settings import Settings


class State(StrEnum):
    """How a check ended: `problem` stops or weakens something now, `warning` will."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"
    SKIPPED = "skipped"


class Diagnosis(NamedTuple):
    """What one check says, in a sentence, and what to do about it."""

    state: State
    text: str
    remedy: str = ""
    check: str = ""


class Examined(NamedTuple):
    """What is examined: settings that were given, the ledger that they name, and this process's surroundings."""

    service: ServiceSettings | None
    worker: Settings | None
    ledger: str | None  # a URL
    engine: Engine | None  # reads the ledger; None where there is none
    clock: Clock
    environment: Mapping[str, str]

    @property
    def settings(self) -> tuple[ServiceSettings | Settings, ...]:
        """Those that were given."""
        return tuple(each for each in (self.service, self.worker) if each is not None)


Run = Callable[[Examined], Iterator[Diagnosis]]


class Check(NamedTuple):
    """A check's name, what is so where it finds nothing, and the check."""

    name: str
    fine: str
    run: Run


CHECKS: list[Check] = []


def check(name: str, fine: str) -> Callable[[Run], Run]:
    """Add a check to the list; `fine` is the sentence where it finds nothing."""

    def add(run: Run) -> Run:
        CHECKS.append(Check(name, fine, run))
        return run

    return add


def problem(text: str, remedy: str) -> Diagnosis:
    """Something does not work, or protects less than it says."""
    return Diagnosis(State.PROBLEM, text, remedy)


def warning(text: str, remedy: str) -> Diagnosis:
    """Something will not work soon, or is unusual."""
    return Diagnosis(State.WARNING, text, remedy)


def skipped(text: str) -> Diagnosis:
    """The check does not apply here."""
    return Diagnosis(State.SKIPPED, text)


def examine(subject: Examined, started: Callable[[str], None] = lambda _: None) -> list[Diagnosis]:
    """Run every check; each yields one finding at least. `started` is told each name before it runs."""
    findings: list[Diagnosis] = []
    for each in CHECKS:
        started(each.name)
        findings += [one._replace(check=each.name) for one in _findings(each, subject)]
    return findings


def _findings(each: Check, subject: Examined) -> list[Diagnosis]:
    try:
        return list(each.run(subject)) or [Diagnosis(State.OK, each.fine)]
    except CustodyError as error:
        return [problem(error.message, "put this right, then run `kvcustody doctor` again")]
    except SQLAlchemyError as error:
        assert subject.engine is not None
        return [problem(ledger_error(subject.engine, error).message, "see whether the database answers")]
    except OSError as error:
        where = error.filename or "a file"
        return [problem(f"`{where}`: {error.strerror}", f"let user {os.geteuid()} read it")]
