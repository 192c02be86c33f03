"""What a door puts on record at its control plane: which erase epochs it acts by, and that it ended in order.

1. The door is a process with a name (`worker_name`, that of its key's principal), an incarnation and a spill.
2. Where the control plane is away its leaves go to the spill, and the door goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from kvcustody.audit.kinds import EpochsTaken, WorkerStopped
from kvcustody.clock import Clock
from kvcustody.governance.control_plane.connection import ControlPlaneConnection
from kvcustody.governance.control_plane.opening import open_remote_ledger
from kvcustody.governance.edge.erase_epochs import KnownEpochs
from kvcustody.governance.settings import Settings


def open_door_record(
    settings: Settings, connection: ControlPlaneConnection, clock: Clock, stack: ExitStack
) -> Callable[[KnownEpochs], None]:
    """What writes that the door acts by these epochs; `stack` ends the record.

    Raises `ConfigError` for a key that is refused or is not of a door of that name.
    """
    writer = open_remote_ledger(settings, connection, clock, may_be_away=True)
    stack.callback(writer.close)
    door = settings.worker_name
    stack.callback(lambda: writer.submit([WorkerStopped(clock.now_us(), door, "closed", 0, ())]))

    def record(known: KnownEpochs) -> None:
        writer.submit([EpochsTaken(clock.now_us(), door, known.epochs.version, known.epochs.digest)])

    return record
