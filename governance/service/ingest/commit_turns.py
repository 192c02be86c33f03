"""Turns between control planes: those that share tenants commit one after the other, instead of each in small parts.

1. A commit to which others left less than three quarters of what it wanted begins turns: whoever has the ledger's turn
   commits, and the others come back a moment later. Nobody waits for a lock meanwhile, and what waits grows together.
2. After so many commits in turn one is tried without: planes that share no tenants any more need not wait. As often as
   that fails, twice as many commits go by until the next trial.
3. A turn is a courtesy, never needed for what is committed to be right: after `PATIENCE_SECONDS` without one a plane
   commits what it can, and so does each that knows no turns.
"""

from __future__ import annotations

import time

TURN = 7_215_413  # the number of the lock
PATIENCE_SECONDS = 5.0
_POLL_SECONDS = 0.01
_REST_SHARE = 8  # of what a commit took, after it: who polls, slowly where all is busy, comes before who had the turn
_TURNS, _TURNS_MOST = 64, 4096


class CommitTurns:
    """Whether one plane's next commit needs the turn; for one thread."""

    def __init__(self) -> None:
        self._turns = _TURNS
        self._left = 0  # commits in turn until one without is tried
        self._since: float | None = None  # that the turn has been waited for
        self._rest_seconds = 0.0

    @property
    def needed(self) -> bool:
        """Whether the next commit needs the turn (rules 1 and 3)."""
        waited = 0.0 if self._since is None else time.monotonic() - self._since
        return self._left > 0 and waited < PATIENCE_SECONDS

    def missed(self) -> None:
        """Wait a moment, because another plane has the turn."""
        if self._since is None:
            self._since = time.monotonic()
        time.sleep(_POLL_SECONDS)

    def committed(self, added: int, wanted: int, seconds: float) -> None:
        """Note the number of committed leaves out of those wanted, and the commit's duration."""
        self._since = None
        self._rest_seconds = max(2 * _POLL_SECONDS, seconds / _REST_SHARE)
        if self._left:
            self._left -= 1
        elif 4 * added < 3 * wanted:
            self._left, self._turns = self._turns, min(_TURNS_MOST, 2 * self._turns)
        else:
            self._turns = _TURNS

    def rest(self) -> None:
        """Wait after a commit, so that others get a chance to take the turn."""
        if self._left:
            time.sleep(self._rest_seconds)
