"""What a door puts on record at its control plane: the erase epochs it acts by, its half of route receipts, its end.

1. The door is a process with a name (`worker_name`, that of its key's principal), an incarnation and a spill.
2. Where the control plane is away its leaves go to the spill, and the door goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple

from kvcustody.audit.kinds import EpochsTaken, WorkerStopped
from kvcustody.clock import Clock
from kvcustody.governance.control_plane.connection import ControlPlaneConnection
from kvcustody.governance.control_plane.opening import open_remote_ledger
from kvcustody.governance.control_plane.remote_ledger import RemoteLedger
from kvcustody.governance.edge.erase_epochs import KnownEpochs
from kvcustody.governance.settings import Settings


class DoorRecord(NamedTuple):
    """What writes that the door acts by some epochs, and the ledger that it writes to."""

    taken: Callable[[KnownEpochs], None]
    ledger: RemoteLedger


def open_door_record(
    settings: Settings, connection: ControlPlaneConnection, clock: Clock, stack: ExitStack
) -> DoorRecord:
    """The record of this door; `stack` ends it.

    Raises `ConfigError` for a key that is refused or is not of a door of that name.
    """
    writer = open_remote_ledger(settings, connection, clock, may_be_away=True)
    stack.callback(writer.close)
    door = settings.worker_name
    stack.callback(lambda: writer.submit([WorkerStopped(clock.now_us(), door, "closed", 0, ())]))

    def record(known: KnownEpochs) -> None:
        writer.submit([EpochsTaken(clock.now_us(), door, known.epochs.version, known.epochs.digest)])

    return DoorRecord(record, writer)
