"""A door that follows a control plane's erase epochs: it applies, shows and records them.

1. The door opens whether or not the control plane answers; until it does, no request finds anything.
2. Each newer version that the door acts by is put on record, at most one a second: the newest stands for those before.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from kvcustody.clock import MICROSECONDS, Clock
from kvcustody.governance.control_plane.connection import ControlPlaneConnection
from kvcustody.governance.control_plane.epoch_feed import EpochFeed
from kvcustody.governance.edge.erase_epochs import KnownEpochs
from kvcustody.integrations.door.door_metrics import DoorMetrics
from kvcustody.integrations.door.door_record import DoorRecord


class EpochsOfDoor:
    """The feed's latest answer, for metrics and the record. Written on the feed's thread, read on any."""

    def __init__(self, clock: Clock, record: DoorRecord | None = None) -> None:
        self._clock = clock
        self._record = record
        self._version, self._heard_us = 0, -1
        self._recorded_version, self._recorded_us = -1, -MICROSECONDS

    def take(self, known: KnownEpochs, until_us: int) -> None:
        """Take the feed's answer."""
        self._version, self._heard_us = known.epochs.version, self._clock.now_us()
        is_due = self._heard_us - self._recorded_us >= MICROSECONDS
        if self._record is not None and self._version != self._recorded_version and is_due:
            self._recorded_version, self._recorded_us = self._version, self._heard_us
            self._record.epochs(known)
        if self._record is not None:
            self._record.write_hints()

    @property
    def version(self) -> int:
        """The newest known epoch; 0 before the first answer."""
        return self._version

    @property
    def age_seconds(self) -> float:
        """The seconds since the last answer; -1 before the first."""
        return -1.0 if self._heard_us < 0 else (self._clock.now_us() - self._heard_us) / MICROSECONDS


def follow_epochs(
    connection: ControlPlaneConnection,
    clock: Clock,
    metrics: DoorMetrics,
    stack: ExitStack,
    *,
    lease_seconds: float,
    record: DoorRecord | None = None,
) -> Callable[[], KnownEpochs | None]:
    """Return the current epochs for a gate, shown by `metrics`, until `stack` closes."""
    taken = EpochsOfDoor(clock, record)
    metrics.show_epochs(lambda: taken.version, lambda: taken.age_seconds)
    feed = EpochFeed(connection, clock, lease_seconds=lease_seconds, on_known=taken.take)
    stack.callback(feed.stop)
    feed.start()
    return feed.known
