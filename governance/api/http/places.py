"""Places for requests in work: a limit for all, a share for each party, and none for a held question.

    with places.taken("gpu-0"):
        ...
        with no_place():          # held open: it holds its connection, and nothing that others wait for
            await news

1. Of questions that wait a party has as many as it may have requests in work. They are bounded by the connections.
2. A question that goes on takes its place again without asking for it: it was let in before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from kvcustody.governance.service.problem_details import ProblemError

_AGAIN = {"Retry-After": "1"}


class Places:
    """A number of places in all, and at most `share` for each party. For one event loop, or for loops that
    take turns.
    """

    def __init__(self, whole: int, share: int) -> None:
        self._whole, self._share = whole, share
        self._working: Counter[str] = Counter()
        self._waiting: Counter[str] = Counter()

    def total(self) -> int:
        """The number of places that are taken."""
        return self._working.total()

    @contextmanager
    def taken(self, party: str) -> Iterator[None]:
        """Hold a place for a party's request; raises `unavailable` where none is free."""
        if self.total() >= self._whole:
            raise ProblemError("unavailable", "too many requests at once", headers=_AGAIN)
        self._check_share(self._working, party)
        token = _TAKEN.set((self, party))
        try:
            with _counted(self._working, party):
                yield
        finally:
            _TAKEN.reset(token)

    @contextmanager
    def _given_back(self, party: str) -> Iterator[None]:
        self._check_share(self._waiting, party)
        self._working[party] -= 1
        try:
            with _counted(self._waiting, party):
                yield
        finally:
            self._working[party] += 1

    def _check_share(self, places: Counter[str], party: str) -> None:
        if places[party] >= self._share:
            raise ProblemError("unavailable", "too many of your requests at once", headers=_AGAIN)


@contextmanager
def _counted(places: Counter[str], party: str) -> Iterator[None]:
    places[party] += 1
    try:
        yield
    finally:
        places[party] -= 1
        if not places[party]:
            del places[party]


_TAKEN: ContextVar[tuple[Places, str] | None] = ContextVar("kvcustody-place", default=None)


@contextmanager
def no_place() -> Iterator[None]:
    """Give up the request's place inside the block (rule 1); raises `unavailable` where its party holds too many
    questions.
    """
    taken = _TAKEN.get()
    if taken is None:
        yield
        return
    places, party = taken
    with places._given_back(party):
        yield
