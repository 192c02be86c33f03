"""How a worker follows a release: revoked ids, the active or staged revision, and the lease.

1. A poll reads the store, verifies every record against the worker's own trust configuration, and asks the gates
   again.
2. Revocations go to the engine's thread first and wait for no gate; it drains them at its next step.
3. Only a poll that succeeded renews the lease, counted from before it asked. A worker that hears nothing, or nothing
   that it can verify, keeps its revision, and from the lease's end reuses nothing but the own scope.
4. What was taken over is marked first, so neither a restart nor a restored store leads back.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

from kvcustody.audit.kinds import POLICY_FEED
from kvcustody.clock import Clock
from kvcustody.errors import CustodyError
from kvcustody.governance.custody.custody import Custody
from kvcustody.governance.decisions.access_plan import DomainPool
from kvcustody.governance.release import activation_gates as gates
from kvcustody.governance.release.reader import ReleaseReader, expiry_of
from kvcustody.governance.release.replay_records import ReleaseState
from kvcustody.governance.release.startup_policy import StartupPolicy
from kvcustody.guarding_thread import GuardingThread
from kvcustody.logger import get_logger
from kvcustody.policies.table.decision_table import DecisionTable

LEASE_SECONDS = 60
_AT_ONCE_SECONDS, _AGAIN_SECONDS, _END_SECONDS = 0.05, 0.5, 0.5
_log = get_logger(__name__)


class PolicyFeed:
    """Keeps one authority in step with a release. `poll` may run on any thread; one at a time."""

    def __init__(
        self,
        reader: ReleaseReader,
        authority: Custody[DomainPool],
        clock: Clock,
        *,
        lease_seconds: float = LEASE_SECONDS,
        actor: str = POLICY_FEED,
        heard: bool = True,
    ) -> None:
        """`heard`: what the authority began with was word from the release, so the first lease runs from now."""
        self._reader = reader
        self._authority = authority
        self._clock = clock
        self._lease_us = int(lease_seconds * 1_000_000)
        self._actor = actor
        self._taken = authority.table.revision, _stage_of(authority.table)
        self._revoked = authority.revoked
        self._pending: Future[Any] | None = None
        self._stop = threading.Event()
        self._thread: GuardingThread | None = None
        self._waits = False
        self.problem = ""
        self._renewal: Future[None] | None = None
        self._until_us = 0
        authority.renew_lease(clock.now_us() + (self._lease_us if heard else 0))

    def poll(self) -> bool:
        """Ask once; False where nothing was learned, and `problem` says why."""
        asked_us = self._clock.now_us()
        try:
            try:
                state = self._reader.verified()
            finally:
                self._hand_over_revoked()
            if self._stop.is_set():
                return False
            self._reader.check(state)
            self._hand_over(state)
        except CustodyError as error:
            if str(error) != self.problem and not self._stop.is_set():
                _log.warning("policy feed", problem=str(error))
            self.problem = str(error)
            return False
        self.problem = ""
        self._until_us = asked_us + self._lease_us
        if self._renewal is None or self._renewal.done():  # an engine that sleeps has one waiting, for the newest time
            self._renewal = self._authority.call(lambda authority: authority.renew_lease(self._until_us))
        return True

    def start(self, interval_seconds: float, *, waits: bool = False) -> None:
        """Poll on a thread of its own until `close`.

        `waits`: the release's store holds the question open until there is something new, so a poll that succeeded is
        followed by the next at once.
        """
        self._waits = waits
        self._thread = GuardingThread(self._run, args=(interval_seconds,), name="kvcustody-policy-feed")
        self._thread.start()

    def close(self) -> None:
        """Stop polling; what was applied stays. An open request ends by itself."""
        self._stop.set()
        if self._thread is not None:
            self._thread.end(_END_SECONDS if self._waits else 10)

    def _run(self, interval_seconds: float) -> None:
        first = _AT_ONCE_SECONDS if self._waits else interval_seconds
        pause = first
        while not self._stop.wait(pause):
            heard = self.poll()
            pause = first if heard else min(interval_seconds, max(_AGAIN_SECONDS, 2 * pause))

    def _hand_over_revoked(self) -> None:
        fresh = self._reader.revoked - self._revoked
        if fresh:
            self._authority.call(lambda authority: authority.revoke(fresh, actor=self._actor))
            self._revoked |= fresh

    def _hand_over(self, state: ReleaseState) -> None:
        self._check_last()
        coming = state.staged or state.active
        if coming is None:
            return
        wanted = coming.revision, "" if state.stage is None else str(state.stage)
        if wanted != self._taken:
            table = gates.tables_of(state)
            assert table is not None
            self._activate(table, expiry_of(state), _actor_of(state, self._actor))
            self._taken = wanted

    def _activate(self, table: DecisionTable, expires_us: int, actor: str) -> None:
        self._pending = self._authority.call(
            lambda authority: authority.activate(table, actor=actor, expires_utc_us=expires_us)
        )

    def _check_last(self) -> None:
        """An activation that the ledger could not record is tried again."""
        if self._pending is None or not self._pending.done():
            return
        error, self._pending = self._pending.exception(), None
        if error is not None:
            self._taken = self._authority.table.revision, _stage_of(self._authority.table)
            _log.error("activation failed", problem=str(error))


def follow_release(
    standing: StartupPolicy,
    authority: Custody[DomainPool],
    clock: Clock,
    stack: ExitStack,
    *,
    lease_seconds: int,
) -> PolicyFeed | None:
    """Follow the release that a worker started with; `stack` ends it. None without a release."""
    if standing.reader is None:
        return None
    feed = PolicyFeed(standing.reader, authority, clock, lease_seconds=lease_seconds, heard=standing.heard)
    feed.start(min(10.0, lease_seconds / 6), waits=standing.waits)
    stack.callback(feed.close)
    return feed


def _stage_of(table: DecisionTable) -> str:
    return str(getattr(table, "stage", ""))


def _actor_of(state: ReleaseState, default: str) -> str:
    proposal = state.staged or state.active
    approval = None if proposal is None else proposal.approval
    return (approval.approver if approval else "") or default
