"""The door's records at its control plane: its erase epochs, clipped hints, and its orderly end.

1. The door is a process with a name (`worker_name`, that of its key's principal), an incarnation and a spill.
2. Where the control plane is away its leaves go to the spill, and the door goes on.
3. Hints are folded: one leaf a minute at most, of at most `ROWS_MAX` different values. The last ones are written when
   something is clipped or epochs are heard again, and at the end.
4. Values are numbers, or types of actions that are known: no text of a client gets on record.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Final

from kvcustody.audit.kinds import EpochsTaken, HintsClipped, WorkerStopped
from kvcustody.clock import MICROSECONDS, Clock
from kvcustody.governance.control_plane.connection import ControlPlaneConnection
from kvcustody.governance.control_plane.opening import open_remote_ledger
from kvcustody.governance.control_plane.remote_ledger import RemoteLedger
from kvcustody.governance.edge.erase_epochs import KnownEpochs
from kvcustody.governance.settings import Settings
from kvcustody.integrations.door.client_hints import ClippedHint

ROWS_MAX: Final = 64
FOLD_SECONDS: Final = 60
_ACTIONS: Final = frozenset({"retain", "pin", "share", "prefetch"})
_NUMBER_MAX: Final = 1 << 53


class DoorRecord:
    """The records of one door; any thread may call. `ledger`: where the door's half of route receipts goes, too."""

    def __init__(self, ledger: RemoteLedger, clock: Clock, door: str) -> None:
        self.ledger, self._clock, self._door = ledger, clock, door
        self._lock = threading.Lock()
        self._rows: dict[tuple[str, str, str], int] = {}
        self._others, self._since_us = 0, clock.now_us()

    def epochs(self, known: KnownEpochs) -> None:
        """Record that the door applies these epochs."""
        self.ledger.submit([EpochsTaken(self._clock.now_us(), self._door, known.epochs.version, known.epochs.digest)])

    def hints(self, of_request: Sequence[ClippedHint]) -> None:
        """Take one request's hints; only clipped ones are recorded."""
        with self._lock:
            for hint in of_request:
                row = (hint.name, _said(hint.asked), _said(hint.passed))
                if not hint.is_less:
                    continue
                if row in self._rows or len(self._rows) < ROWS_MAX:
                    self._rows[row] = self._rows.get(row, 0) + 1
                else:
                    self._others += 1
        self.write_hints()

    def write_hints(self, *, now: bool = False) -> None:
        """Write the clipped hints, at most once a minute, or at once with `now`."""
        with self._lock:
            now_us = self._clock.now_us()
            passed_us = now_us - self._since_us
            if passed_us < FOLD_SECONDS * MICROSECONDS and not now:
                return
            rows, others = self._rows, self._others
            self._rows, self._others, self._since_us = {}, 0, now_us
        if rows:
            names, asked, passed = (tuple(row[place] for row in rows) for place in range(3))
            seconds = -(-passed_us // MICROSECONDS)
            requests = tuple(rows.values())
            self.ledger.submit([HintsClipped(now_us, self._door, seconds, names, asked, passed, requests, others)])

    def close(self) -> None:
        """Record the door's orderly end."""
        self.write_hints(now=True)
        self.ledger.submit([WorkerStopped(self._clock.now_us(), self._door, "closed", 0, ())])


def open_door_record(
    settings: Settings, connection: ControlPlaneConnection, clock: Clock, stack: ExitStack
) -> DoorRecord:
    """Return the record for the door with these settings; `stack` closes it.

    Raises `ConfigError` for a key that is refused or is not of a door of that name.
    """
    writer = open_remote_ledger(settings, connection, clock, may_be_away=True)
    stack.callback(writer.close)
    record = DoorRecord(writer, clock, settings.worker_name)
    stack.callback(record.close)
    return record


def _said(value: object) -> str:
    """Return a hint's value for a leaf (rule 4)."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return f"{min(max(value, -_NUMBER_MAX), _NUMBER_MAX):.16g}"
    return str(value) if value in _ACTIONS else "another"
