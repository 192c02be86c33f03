"""A sink's files on disk, and the problems that people must see; used by health, the inbox, metrics and commands.

1. Everything is in a separate file that is replaced whole, so a process that only reads needs no lock. The files are
   `positions.json`, `detached`, `failing.json` (since when, and why) and `acknowledged.json`. The batches that were
   given up are in `dead/`.
2. A loss (`SinkLosses`) stays a trouble until somebody acknowledges it, over restarts too.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from kvcustody.audit.siem.cursor_reader import (
    SinkPositions,
    describe_losses,
    read_losses,
    read_positions,
    write_positions,
)
from kvcustody.files import private_folder, write_file
from kvcustody.plurals import several
from kvcustody.times import MINUTE_US, readable

TROUBLE_AFTER_US = 5 * MINUTE_US  # a shorter failure is no trouble: it is tried again meanwhile


class SinkFailure(NamedTuple):
    """The start of a receiver's failure, and its first message."""

    since_us: int
    problem: str


class SinkStatus(NamedTuple):
    """A sink's state: leaves delivered by this process and dead batches. `problem`: why it does not continue, or why
    the newest dead batch was given up.
    """

    name: str
    attached: bool
    delivered: int
    dead: int
    failures: int
    problem: str
    withheld: int = 0  # leaves that the policy keeps here, in this process
    restarted: int = 0  # times that a log was read again from its first leaf, as after a restore
    purged: int = 0  # leaves that retention deleted before the sink had them
    failing_since_us: int | None = None
    losses: tuple[str, ...] = ()  # the restores and purges that nobody acknowledged, a sentence each


class SinkTrouble(NamedTuple):
    """One problem that people must see. `lasting`: only a person ends it. `operation`: the API command for it."""

    about: str
    lasting: bool
    text: str
    operation: str
    since_us: int | None = None


def find_troubles(status: SinkStatus, now_us: int) -> Iterator[SinkTrouble]:
    """Yield a sink's problems: it has failed for long, batches were given up, leaves were lost."""
    since_us = status.failing_since_us if status.attached else None
    if since_us is not None and now_us - since_us >= TROUBLE_AFTER_US:
        problem = f"takes nothing since {readable(since_us)}: {status.problem}"
        yield SinkTrouble("failing", False, problem, "list-sinks", since_us)
    if status.dead:
        problem = f"{several(status.dead, 'batch')} given up: {status.problem}"
        yield SinkTrouble("given-up", True, problem, f"retry-sink {status.name}")
    if status.losses:
        about, problem = f"lost-{status.restarted + status.purged}", "; ".join(status.losses)
        yield SinkTrouble(about, True, problem, f"acknowledge-sink {status.name}")


class SinkFolder:
    """The files of one sink (rule 1)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._dead = path / "dead"

    def make(self) -> None:
        """Create the folder if it is missing; raises `OSError`."""
        private_folder(self._dead)

    def exists(self) -> bool:
        """Return whether this is a sink's folder."""
        return self._dead.is_dir()

    @property
    def attached(self) -> bool:
        """Whether the sink receives leaves."""
        return not (self.path / "detached").exists()

    def detach(self) -> None:
        """Stop deliveries, now and after a restart."""
        write_file(self.path / "detached", b"")

    def attach(self) -> None:
        """Resume where it stopped; the receiver's time limit starts again."""
        self.end_failure()
        (self.path / "detached").unlink(missing_ok=True)

    def read_positions(self) -> SinkPositions:
        """Return the sink's positions; raises `LedgerError` for a damaged file."""
        return read_positions(self.path / "positions.json")

    def write_positions(self, positions: SinkPositions) -> None:
        """Replace the positions durably; raises `LedgerError` if the disk refuses."""
        write_positions(self.path / "positions.json", positions)

    def failure(self) -> SinkFailure | None:
        """Return the start of its receiver's failure; None while it accepts."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            value = orjson.loads((self.path / "failing.json").read_bytes())
            return SinkFailure(int(value["since_us"]), str(value["problem"]))
        return None

    def begin_failure(self, now_us: int, problem: str) -> SinkFailure:
        """Return the current failure, or start one."""
        failure = self.failure()
        if failure is None:
            failure = SinkFailure(now_us, problem)
            with suppress(OSError):  # a full disk stops no delivery; a restart then counts anew
                write_file(self.path / "failing.json", orjson.dumps(failure._asdict()))
        return failure

    def end_failure(self) -> None:
        """End the failure: its receiver accepted something."""
        (self.path / "failing.json").unlink(missing_ok=True)

    def dead(self) -> list[Path]:
        """Return batches that were given up, oldest first."""
        return sorted(self._dead.glob("*.json"))

    def reasons(self, newest: int = 0) -> list[str]:
        """Return why each was given up, or each of the `newest`. A batch sent meanwhile has no reason."""
        reasons = list[str]()
        for path in self.dead()[-newest:]:
            try:
                reasons.append(str(orjson.loads(path.read_bytes())["reason"]))
            except FileNotFoundError:
                continue
            except (OSError, ValueError, KeyError, TypeError):
                reasons.append(f"batch `{path.name}` cannot be read")
        return reasons

    def bury(self, identity: str, body: bytes, content_type: str, reason: str) -> None:
        """Store a batch that was given up, durably."""
        value: dict[str, Any] = {
            "identity": identity,
            "reason": reason,
            "content_type": content_type,
            "body": body.decode(),
        }
        path = self._dead / f"{time.time_ns():020d}-{identity[:16]}.json"
        write_file(path, orjson.dumps(value), exclusive=True)

    def acknowledge(self) -> None:
        """Mark every loss so far as seen (rule 2)."""
        write_file(self.path / "acknowledged.json", self.read_positions().losses.to_bytes())

    def status(self, name: str, positions: SinkPositions) -> SinkStatus:
        """Return the state according to the files; the pump knows more."""
        failure, reasons = self.failure(), self.reasons(newest=1)
        acknowledged = read_losses(self.path / "acknowledged.json")
        return SinkStatus(
            name,
            self.attached,
            0,
            len(self.dead()),
            0,
            failure.problem if failure is not None else (reasons[-1] if reasons else ""),
            0,
            sum(positions.restarted.values()),
            sum(positions.purged.values()),
            None if failure is None else failure.since_us,
            tuple(describe_losses(positions.losses.since(acknowledged))),
        )
