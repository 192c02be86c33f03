"""The release as one process may trust it: verified, past the gates, and never behind its rollback mark."""

from __future__ import annotations

from collections.abc import Callable

from kvcustody.errors import ConfigError
from kvcustody.governance.release import activation_gates as gates
from kvcustody.governance.release.activation_gates import Gate
from kvcustody.governance.release.record import ReleaseError
from kvcustody.governance.release.replay_records import Proposal, ReleaseState, fold
from kvcustody.governance.release.rollback_guard import RevisionMark
from kvcustody.governance.release.store import ReleaseStore
from kvcustody.policies.bundle.trust import Trust
from kvcustody.policies.table.decision_table import DecisionTable
from kvcustody.signed_document import digest


class ReleaseReader:
    """The release as one worker may trust it."""

    def __init__(
        self, store: ReleaseStore, trust: Callable[[], Trust], mark: RevisionMark, *, gate: Gate = gates.check
    ) -> None:
        """`trust`: the trust configuration as it is now; another one than before verifies every record anew."""
        self._store = store
        self._trust = trust
        self._mark = mark
        self._gate = gate
        self._passed: set[str] = set()
        self._state: ReleaseState | None = None

    def read(self) -> ReleaseState:
        """Return the verified state and what is in effect past the gates, and move the mark; raises `CustodyError`."""
        state = self.verified()
        self.check(state)
        return state

    @property
    def revoked(self) -> frozenset[str]:
        """The ids revoked by the records verified so far, even if a later record is not valid."""
        return frozenset() if self._state is None else self._state.revoked

    def verified(self) -> ReleaseState:
        """Return the state of all records, past no gate yet; raises `CustodyError`.

        Records that were verified before are not read again: the last of them vouches for all before it.
        """
        trust = self._trust()
        if self._state is None or self._state.trust is not trust:
            return self._first(trust)
        return self._further(self._state)

    def check(self, state: ReleaseState) -> None:
        """Take what is in effect past the gates, and move the mark; raises `CustodyError`."""
        for proposal in (state.active, state.staged):
            if proposal is not None and proposal.manifest.id not in self._passed:
                self._gate(state, proposal)
                self._passed.add(proposal.manifest.id)
        manifest = None if state.active is None else state.active.manifest
        self._mark.advance(manifest, records=len(state.records), head=state.head)

    def _first(self, trust: Trust) -> ReleaseState:
        records = self._store.read()
        self._mark.check_records(records)
        self._state = fold(records, trust)
        return self._state

    def _further(self, state: ReleaseState) -> ReleaseState:
        known = len(state.records)
        records = self._store.read(max(0, known - 1))
        if known and (not records or digest(records[0]) != state.head):
            raise ReleaseError(f"the release was truncated, or its record `{known}` differs from the one seen before")
        for data in records[1:] if known else records:
            state.apply(data)
        return state

    def first(self, profile: str) -> tuple[DecisionTable, int]:
        """Return the table to start with, and when its revision expires (UTC); raises `CustodyError` without one."""
        state = self.read()
        table = gates.tables_of(state)
        if table is None or state.active is None:
            raise ConfigError("the release has no active revision yet; activate one first")
        if table.policy.profile.value != profile:
            raise ConfigError(
                f"revision `{table.revision}` has the profile `{table.policy.profile.value}`, "
                f"this deployment promises `{profile}`",
                profile=profile,
            )
        return table, expiry_of(state)


def expiry_of(state: ReleaseState) -> int:
    """Return when the policy in effect expires (UTC µs); with a stage, the earlier of the two."""
    proposals: list[Proposal | None] = [state.active, state.staged]
    return min(proposal.manifest.expires_us for proposal in proposals if proposal is not None)
