"""The result of a check, and the list of checks.

    @check("disk", "there is room")
    def disk(subject: Examined) -> Iterator[Diagnosis]:
        yield problem("…", "what to do")

1. A check is a generator. One that yields nothing found nothing wrong; one that does not apply yields `skipped`. Checks
   of a part (`service_check`, `worker_check`, `settings_check`, `ledger_check`) are given it, and skipped where there
   is none.
2. A check that fails is a problem of its own, and the other checks still run.
3. Nothing is changed: files are read, the ledger is opened for reading, no file is made.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple, TypeVar

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from kvcustody.audit.store.database.engine import check_store, ledger_error
from kvcustody.clock import Clock
from kvcustody.errors import CustodyError, LedgerError
from kvcustody.governance.service.settings import ServiceSettings
from kvcustody.governance.settings import Settings


class State(StrEnum):
    """The state of a check: a `problem` stops or weakens something now, a `warning` will; `optional` need not be."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"
    SKIPPED = "skipped"
    OPTIONAL = "optional"


class Diagnosis(NamedTuple):
    """A check's finding in a sentence, and its fix."""

    state: State
    text: str
    remedy: str = ""
    check: str = ""


AnySettings = tuple[ServiceSettings | Settings, ...]


class Examined(NamedTuple):
    """The subject of the checks: the given settings, their ledger, and this process's environment."""

    service: ServiceSettings | None
    worker: Settings | None
    ledger: str | None  # a URL
    engine: Engine | None  # reads the ledger; None where there is none
    clock: Clock
    environment: Mapping[str, str]

    @property
    def settings(self) -> AnySettings:
        """The given settings."""
        return tuple(given for given in (self.service, self.worker) if given is not None)

    @property
    def signing_keys(self) -> list[Path]:
        """The files of the checkpoint signing keys, as the settings name them."""
        paths = [] if self.service is None else [self.service.signing_key_path]
        if self.worker is not None and not self.worker.control_plane:
            paths.append(self.worker.signing_key_file)
        return paths


Part = TypeVar("Part")
Run = Callable[[Examined], Iterator[Diagnosis]]
RunOf = Callable[[Examined, Part], Iterator[Diagnosis]]


class Check(NamedTuple):
    """A check, its name, and the sentence for no finding."""

    name: str
    fine: str
    run: Run


CHECKS: list[Check] = []


def check(name: str, fine: str) -> Callable[[Run], Run]:
    """Add a check to the list; `fine` is the sentence for no finding."""

    def add(run: Run) -> Run:
        CHECKS.append(Check(name, fine, run))
        return run

    return add


def _checks_of(
    part: Callable[[Examined], Part | None], absent: str
) -> Callable[[str, str], Callable[[RunOf[Part]], RunOf[Part]]]:
    """Return `check` for the checks of one part; `absent` says why they are skipped without that part."""

    def check_of(name: str, fine: str) -> Callable[[RunOf[Part]], RunOf[Part]]:
        def add(run: RunOf[Part]) -> RunOf[Part]:
            def run_or_skip(subject: Examined) -> Iterator[Diagnosis]:
                given = part(subject)
                yield from [skipped(absent)] if given is None else run(subject, given)

            check(name, fine)(run_or_skip)
            return run

        return add

    return check_of


def _readable_ledger(subject: Examined) -> Engine | None:
    try:
        if subject.engine is not None:
            check_store(subject.engine)
    except LedgerError:  # the check of the ledger itself says why
        return None
    return subject.engine


service_check = _checks_of(lambda subject: subject.service, "no service's settings were given (`--service`)")
worker_check = _checks_of(lambda subject: subject.worker, "no worker's settings were given (`--worker`)")
settings_check = _checks_of(
    lambda subject: subject.settings or None, "no settings were given (`--service`, `--worker`)"
)
ledger_check = _checks_of(_readable_ledger, "there is no ledger here that can be read")


def open_to_others(path: Path, remedy: str = "chmod 600 it") -> Iterator[Diagnosis]:
    """Yield a problem where other users than the owner can access a file or folder."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        yield problem(f"`{path}` has mode `{mode:04o}`, open to others", remedy)


def problem(text: str, remedy: str) -> Diagnosis:
    """Return a problem: something does not work, or protects less than it claims."""
    return Diagnosis(State.PROBLEM, text, remedy)


def warning(text: str, remedy: str) -> Diagnosis:
    """Return a warning: something will stop working soon, or is unusual."""
    return Diagnosis(State.WARNING, text, remedy)


def optional(text: str, remedy: str) -> Diagnosis:
    """Return the note that a part is not installed, which nothing here needs."""
    return Diagnosis(State.OPTIONAL, text, remedy)


def skipped(text: str) -> Diagnosis:
    """Return the note that the check does not apply here."""
    return Diagnosis(State.SKIPPED, text)


def examine(subject: Examined, started: Callable[[str], None] = lambda _: None) -> list[Diagnosis]:
    """Run every check; each yields at least one finding. `started` is called with each name before its check runs."""
    findings: list[Diagnosis] = []
    for checked in CHECKS:
        started(checked.name)
        findings += [finding._replace(check=checked.name) for finding in run_check(checked, subject)]
    return findings


def run_check(checked: Check, subject: Examined) -> list[Diagnosis]:
    """Return a check's findings; there is at least one."""
    try:
        return list(checked.run(subject)) or [Diagnosis(State.OK, checked.fine)]
    except CustodyError as error:
        return [problem(error.message, "fix this, then run `kvcustody doctor` again")]
    except SQLAlchemyError as error:
        assert subject.engine is not None
        return [problem(ledger_error(subject.engine, error).message, "check whether the database answers")]
    except OSError as error:
        where = error.filename or "a file"
        return [problem(f"`{where}`: {error.strerror}", f"let user {os.geteuid()} read it")]
