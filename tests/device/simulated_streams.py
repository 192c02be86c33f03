"""Streams without a device: work runs later, in any interleaving that stream order and waits allow.

A seeded choice picks which stream goes next, so a missing wait shows as a wrong byte under some seed.
"""

from __future__ import annotations

import random


class SimulatedEvent:
    def __init__(self, streams):
        self._streams = streams
        self._version = 0
        self._reached = 0

    def record(self, stream=None):
        self._version += 1
        version = self._version
        queue = self._streams.queues[self._streams.current() if stream is None else stream]
        queue.append(("record", self, version))

    def reached(self, version):
        return self._reached >= version

    def query(self):
        return self._reached >= self._version

    def synchronize(self):
        self._streams.host_waits += 1
        while not self.query():
            assert self._streams.advance(), "a wait that can never end"


class SimulatedStreams:
    """Streams 0 (the engine's) and up; `advance` runs one piece of work."""

    def __init__(self, seed=0):
        self._random = random.Random(seed)
        self.queues = {0: []}
        self.host_waits = 0
        self.capturing = False

    def side(self):
        self.queues[len(self.queues)] = []
        return len(self.queues) - 1

    def current(self):
        return 0

    def event(self):
        return SimulatedEvent(self)

    def run(self, stream, work, *, by_handle=None):
        """The engine's own work, without `by_handle`; or that of a scrub, which is given a handle."""
        self.queues[stream].append(("work", work if by_handle is None else lambda: work(0), None))

    def is_capturing(self):
        return self.capturing

    def wait(self, stream, event):
        # A wait is for the recording that was last made when the wait was put there.
        self.queues[stream].append(("wait", event, event._version))

    def ready(self):
        found = []
        for stream, queue in self.queues.items():
            if queue and (queue[0][0] != "wait" or queue[0][1].reached(queue[0][2])):
                found.append(stream)
        return found

    def advance(self):
        """One step of one ready stream; False when nothing can go on."""
        ready = self.ready()
        if not ready:
            assert not any(self.queues.values()), "the streams wait for each other"
            return False
        kind, what, version = self.queues[self._random.choice(ready)].pop(0)
        if kind == "work":
            what()
        elif kind == "record":
            what._reached = max(what._reached, version)
        return True

    def drain(self):
        while self.advance():
            pass
