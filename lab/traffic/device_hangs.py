"""A device whose steps hang now and then, as in real engines: its blocks stay in quarantine until the step retires."""

from __future__ import annotations

from kvcustody.governance.governor.governor import Governor


class DeviceHangs:
    """Begins and ends one Governor's hangs, on the thread that owns its state. Times are seconds; 0: never."""

    def __init__(self, every: float, seconds: float) -> None:
        self._every, self._seconds = every, seconds
        self._next = every / 2
        self._hanging: list[tuple[float, int]] = []

    def look(self, at: float, governor: Governor) -> None:
        """End hangs that are over, and begin one when it is time and a request runs."""
        for due, fence in [one for one in self._hanging if one[0] <= at]:
            governor.retire(fence)
            self._hanging.remove((due, fence))
        if self._every and at >= self._next and governor.running:
            self._next = at + self._every
            self._hanging.append((at + self._seconds, governor.fence(list(governor.running))))

    def end(self, governor: Governor) -> None:
        """End all hangs."""
        for _, fence in self._hanging:
            governor.retire(fence)
        self._hanging.clear()
