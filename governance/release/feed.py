"""What a worker takes over from a release: what is revoked, what is active or staged, and the lease.

1. A poll reads the store, verifies every record against the worker's own trust configuration, and asks the gates again.
2. Revocations go to the engine's thread first, on their own; it drains them at its next step.
3. Only a poll that succeeded renews the lease, counted from before it asked. A worker that hears nothing, or nothing
   that it can verify, keeps its revision, and from the lease's end reuses nothing but the own scope.
4. What was taken over is marked first, so neither a restart nor a restored store leads back.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import structlog

from kvcustody.clock import Clock
from kvcustody.errors import ConfigError, CustodyError
from kvcustody.governance.authority import Authority
from kvcustody.governance.release import gates
from kvcustody.governance.release.gates import Gate
from kvcustody.governance.release.mark import RevisionMark
from kvcustody.governance.release.state import Proposal, ReleaseState, fold
from kvcustody.governance.release.store import ReleaseStore
from kvcustody.policies.bundle_trust import Trust
from kvcustody.policies.table import DecisionTable

LEASE_SECONDS = 60
_log = structlog.get_logger(__name__)


class ReleaseReader:
    """The release as one worker may believe it."""

    def __init__(
        self, store: ReleaseStore, trust: Trust, mark: RevisionMark, *, gate: Gate = gates.check
    ) -> None:
        self._store = store
        self._trust = trust
        self._mark = mark
        self._gate = gate
        self._passed: set[str] = set()

    def read(self) -> ReleaseState:
        """The verified state, what is in effect in it past the gates, and the mark moved; raises `CustodyError`."""
        records = self._store.read()
        self._mark.check_records(records)
        state = fold(records, self._trust)
        for proposal in (state.active, state.staged):
            if proposal is not None and proposal.manifest.id not in self._passed:
                self._gate(state, proposal)
                self._passed.add(proposal.manifest.id)
        self._mark.advance(None if state.active is None else state.active.manifest, records)
        return state

    def first(self, profile: str) -> tuple[DecisionTable, int]:
        """The table to start with, and when its revision expires (UTC); raises `CustodyError` where there is none."""
        state = self.read()
        table = gates.tables_of(state)
        if table is None or state.active is None:
            raise ConfigError("nothing is in effect in the release yet; activate a revision first")
        if table.policy.profile.value != profile:
            raise ConfigError(
                f"revision `{table.revision}` has the profile `{table.policy.profile.value}`, "
                f"this deployment promises `{profile}`",
                profile=profile,
            )
        return table, expiry_of(state)


class PolicyFeed:
    """Keeps one authority in step with a release. `poll` may run on any thread; one at a time."""

    def __init__(
        self,
        reader: ReleaseReader,
        authority: Authority,
        clock: Clock,
        *,
        lease_seconds: float = LEASE_SECONDS,
        actor: str = "policy-feed",
    ) -> None:
        self._reader = reader
        self._authority = authority
        self._clock = clock
        self._lease_us = int(lease_seconds * 1_000_000)
        self._actor = actor
        self._taken = authority.table.revision, _stage_of(authority.table)
        self._revoked = authority.revoked
        self._pending: Future[Any] | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.problem = ""
        authority.renew_lease(clock.now_us() + self._lease_us)

    def poll(self) -> bool:
        """Ask once; False where nothing could be learned, and `problem` then says why."""
        asked_us = self._clock.now_us()
        try:
            state = self._reader.read()
            self._hand_over(state)
        except CustodyError as error:
            if str(error) != self.problem:
                _log.warning("policy feed", problem=str(error))
            self.problem = str(error)
            return False
        self.problem = ""
        until_us = asked_us + self._lease_us
        self._authority.call(lambda authority: authority.renew_lease(until_us))
        return True

    def start(self, interval_seconds: float) -> None:
        """Poll on a thread of its own until `close`."""
        self._thread = threading.Thread(
            target=self._run, args=(interval_seconds,), name="kvcustody-policy-feed", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop polling; what was handed over stays."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=10)

    def _run(self, interval_seconds: float) -> None:
        while not self._stop.wait(interval_seconds):
            self.poll()

    def _hand_over(self, state: ReleaseState) -> None:
        fresh = state.revoked - self._revoked
        if fresh:
            self._authority.call(lambda authority: authority.revoke(fresh, actor=self._actor))
            self._revoked |= fresh
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


def expiry_of(state: ReleaseState) -> int:
    """When what is in effect expires, UTC microseconds: with a stage, when the first of the two does."""
    proposals: list[Proposal | None] = [state.active, state.staged]
    return min(proposal.manifest.expires_us for proposal in proposals if proposal is not None)


def _stage_of(table: DecisionTable) -> str:
    return str(getattr(table, "stage", ""))


def _actor_of(state: ReleaseState, default: str) -> str:
    proposal = state.staged or state.active
    approval = None if proposal is None else proposal.approval
    return (approval.approver if approval else "") or default
