"""Checks that a stream of numbered batches is complete: missed batches, replayed ones, and restarts.

1. Within one life of a publisher, every sequence number is delivered once and in order, or reported as missed.
2. A publisher that restarts counts from 0 again. It is recognised by one of these:
   - a number that went back;
   - a batch that differs from the one received before under its number;
   - a replay that lacks what was received before.
3. No sockets and no clock here: `replay` asks for batches from a number on and may fail.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

_REMEMBERED = 16_384
_ROUNDS = 16


class Delivered(NamedTuple):
    """One batch, in order."""

    sequence: int
    payload: bytes
    replayed: bool


class Missed(NamedTuple):
    """Batches that cannot be recovered, first and last included."""

    first: int
    last: int
    cause: str


class Restarted(NamedTuple):
    """A restarted publisher: everything in its earlier life is gone. `had`: batches seen of that life."""

    had: int


Arrival = Delivered | Missed | Restarted


class ReplayedBatches(NamedTuple):
    """The answer to a replay request, in order, up to its end marker."""

    batches: list[tuple[int, bytes]]


class Continuity:
    """The bookkeeping of one stream. `expected` is the next number; `replay(first)` returns None when it failed."""

    def __init__(self, replay: Callable[[int], ReplayedBatches | None] | None = None) -> None:
        self.expected = 0
        self.duplicates = 0
        self.failed_replays = 0
        self._replay = replay
        self._last_live = -1
        self._digests: OrderedDict[int, bytes] = OrderedDict()
        self._began = False
        self._doubt = False

    def doubt(self) -> None:
        """Verify with the next batch that it is the same publisher, because the connection broke."""
        self._doubt = True

    def live(self, sequence: int, payload: bytes) -> list[Arrival]:
        """Return what a live batch leads to."""
        out: list[Arrival] = []
        if sequence <= self._last_live or (sequence < self.expected and not self._is_had(sequence, payload)):
            self._restart(out)
        self._last_live = sequence
        if sequence < self.expected:
            self.duplicates += 1
            return out
        if sequence > self.expected or self._doubt:
            self._catch_up(out)
        if sequence >= self.expected:
            if sequence > self.expected:
                self._miss(sequence, out)
            self._deliver(sequence, payload, False, out)
        return out

    def check(self) -> list[Arrival]:
        """Request what may have been missed without a live batch to show it."""
        out: list[Arrival] = []
        self._catch_up(out)
        return out

    def _catch_up(self, out: list[Arrival]) -> None:
        """Deliver everything that replays have from the expected number on.

        An answer may lack batches that the publisher has (a full pipe drops them), so the last one asked for is the
        one that brings nothing new; what is still absent then is missed.
        """
        self._doubt = False
        had: dict[int, bytes] = {}
        for _ in range(_ROUNDS):
            got = self._replay(max(0, self.expected - 1)) if self._replay is not None else None
            if got is None:
                self.failed_replays += self._replay is not None
                break
            if not self._continues(got):
                self._restart(out)
                had.clear()
                continue
            fresh = [pair for pair in got.batches if pair[0] >= self.expected and pair[0] not in had]
            had.update(fresh)
            while self.expected in had:
                self._deliver(self.expected, had.pop(self.expected), True, out)
            if not had or not fresh:
                break
        for sequence in sorted(had):
            if sequence > self.expected:
                self._miss(sequence, out)
            self._deliver(sequence, had[sequence], True, out)

    def _continues(self, got: ReplayedBatches) -> bool:
        """Return whether an answer from the number before the expected one is from the same life (rule 2).

        An empty one proves nothing, because a publisher may keep no batch: then all that it has is asked for. The
        first batch that was had before decides; where none was, it is another life if all its numbers are behind.
        """
        if not self.expected:
            return True
        batches = got.batches
        if not batches:
            everything = self._replay(0) if self._replay is not None else None
            batches = everything.batches if everything is not None else []
        for sequence, payload in batches:
            if sequence in self._digests:
                return self._is_had(sequence, payload)
        return not batches or batches[-1][0] >= self.expected - 1

    def _restart(self, out: list[Arrival]) -> None:
        out.append(Restarted(self.expected))
        self.expected = 0
        self._last_live = -1
        self._digests.clear()
        self._began = True

    def _miss(self, until: int, out: list[Arrival]) -> None:
        cause = "not to be replayed" if self._began else "before observation began"
        out.append(Missed(self.expected, until - 1, cause))
        self.expected = until

    def _deliver(self, sequence: int, payload: bytes, replayed: bool, out: list[Arrival]) -> None:
        out.append(Delivered(sequence, payload, replayed))
        self.expected = sequence + 1
        self._began = True
        self._digests[sequence] = _digest(payload)
        if len(self._digests) > _REMEMBERED:
            self._digests.popitem(last=False)

    def _is_had(self, sequence: int, payload: bytes) -> bool:
        """Return whether this batch was seen under its number."""
        return self._digests.get(sequence) == _digest(payload)


def _digest(payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=16).digest()
