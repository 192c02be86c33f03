"""A device whose step hangs now and then, as it does in engines: its blocks wait in quarantine until it retires."""

from __future__ import annotations

from kvcustody.governance.governor.governor import Governor


class DeviceHangs:
    """Begins and ends hangs of one Governor, on the thread that owns its state. Times are seconds; 0: never."""

    def __init__(self, every: float, seconds: float) -> None:
        self._every, self._seconds = every, seconds
        self._next = every / 2
        self._hanging: list[tuple[float, int]] = []

    def look(self, at: float, governor: Governor) -> None:
        """End what is over, and begin one where it is time and something runs."""
        for due, fence in [one for one in self._hanging if one[0] <= at]:
            governor.retire(fence)
            self._hanging.remove((due, fence))
        if self._every and at >= self._next and governor.running:
            self._next = at + self._every
            self._hanging.append((at + self._seconds, governor.fence(list(governor.running))))

    def end(self, governor: Governor) -> None:
        """End all of them."""
        for _, fence in self._hanging:
            governor.retire(fence)
        self._hanging.clear()
