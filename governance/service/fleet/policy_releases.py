"""The service's policy release: it takes signed steps and checks each again; it signs nothing.

1. People sign with keys of their own, elsewhere. The service verifies a step against its own trust configuration, asks
   the gates, puts it on record, stores it. A step whose signer is not the caller is refused.
2. An operation takes the steps that it is named after, and no other: what a role may do is decided by the operation.
3. What narrows is stored first and recorded after; everything else is on record before it is stored.
4. A tenant's acts on its own data are authorized by the policy in effect (`authorize`). If nothing is released here,
   the role that admitted the caller decides, and is recorded as the basis of the decision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from sqlalchemy import Engine

from kvcustody.audit.kinds import ReleaseStep
from kvcustody.deadline_clock import DeadlineClock
from kvcustody.errors import PolicyError
from kvcustody.governance.decisions.authorize import authorize, decision_event, role_event
from kvcustody.governance.ledger_protocol import Ledger
from kvcustody.governance.release import activation_gates as gates
from kvcustody.governance.release.record import (
    ReleaseAction,
    ReleaseError,
    ReleaseRecord,
    read_record,
)
from kvcustody.governance.release.replay_records import ReleaseState, fold
from kvcustody.governance.release.store import SqlStore
from kvcustody.governance.release.trust import TrustFile
from kvcustody.governance.service.problem_details import ProblemError
from kvcustody.policies.bundle.bundle import SKEW_US
from kvcustody.policies.bundle.trust import Trust
from kvcustody.policies.document.model import Action
from kvcustody.policies.table.decision_table import DecisionTable
from kvcustody.signed_document import digest

_AUTHORIZED_MAX = 1 << 16
_NARROWING = (ReleaseAction.REVOKED, ReleaseAction.BROKE_GLASS)


class PolicyReleases:
    """Adds signed steps to the ledger's release. `trust` None: this service releases no policies."""

    def __init__(
        self,
        engine: Engine,
        trust: Path | None,
        clock: DeadlineClock,
        ledger: Ledger,
        assess: gates.Assess = gates.assess,
    ) -> None:
        self.assess = assess
        self._store = SqlStore(engine)
        self._trust = None if trust is None else TrustFile(trust)
        self._clock = clock
        self._ledger = ledger
        self._verified: tuple[Trust, list[bytes], ReleaseState] | None = None
        self._table: tuple[Trust | None, int, DecisionTable | None] = (None, 0, None)  # of so many steps
        self._authorized: dict[tuple[int, Action, str, int], str] = {}  # what is on record, and why not (empty: so)

    @property
    def trust(self) -> Trust:
        """The trust configuration; raises `conflict` without one."""
        if self._trust is None:
            raise ProblemError("conflict", "this service has no trust configuration for policies; set `policy_trust`")
        return self._trust.current()

    def records(self) -> list[bytes]:
        """Return every signed step in its stored form."""
        return self._store.read()

    def state(self) -> ReleaseState:
        """Return the state of the release, with every record verified."""
        return fold(self._store.read(), self.trust)

    def released(self) -> ReleaseState | None:
        """Return the release for reading; None where this service releases no policies.

        Every record is read each time; they are verified anew where they are not, byte for byte, those of before,
        or where the trust configuration has changed.
        """
        if self._trust is None:
            return None
        trust, records = self.trust, self._store.read()
        if self._verified is None or self._verified[0] is not trust or self._verified[1] != records:
            self._verified = trust, records, fold(records, trust)
        return self._verified[2]

    def _current(self) -> tuple[int, DecisionTable | None]:
        """How many steps the release has, and what they put in effect: read anew where there are more."""
        if self._trust is None:
            return 0, None
        trust, (of_trust, steps, table) = self.trust, self._table
        if trust is not of_trust or self._store.read(steps):
            state = self.state()
            steps, table = len(state.records), gates.tables_of(state)
            self._table = (trust, steps, table)
        return steps, table

    def authorize(
        self,
        action: Action,
        tenant: str,
        classifications: Iterable[str],
        roles: Iterable[str],
        *,
        once: bool = False,
    ) -> None:
        """Let a tenant act on its own data of these classifications, or raise `forbidden`; recorded first.

        Where no policy is released here, roles alone decide, and that is on record (rule 4): what workers run from
        files is not asked. `once`: a decision that is on record under this state of the release, in this process, is
        not recorded again: for reads.
        """
        steps, table = self._current()
        if table is None:
            if not (once and (steps, action, tenant, -1) in self._authorized):
                self._ledger.submit_durable(role_event(self._clock.now_us(), action, tenant, roles))
                self._remember((steps, action, tenant, -1), "")
            return
        levels = [
            table.policy.classifications.index(name) for name in classifications if name in table.policy.classifications
        ]
        for level in levels or range(len(table.policy.classifications)):
            name = table.policy.classifications[level]
            refused = self._authorized.get((steps, action, tenant, level)) if once else None
            if refused is None:
                decision = authorize(table, action, tenant, level)
                event = decision_event(self._clock.now_us(), action, tenant, name, decision)
                self._ledger.submit_durable(event)
                refused = "" if decision.permitted else decision.reasons[0]
                self._remember((steps, action, tenant, level), refused)
            if refused:
                what = f"`{action.name.lower()}` of `{name}`"
                raise ProblemError("forbidden", f"the policy does not permit {what}: {refused}")

    def _remember(self, asked: tuple[int, Action, str, int], refused: str) -> None:
        if len(self._authorized) >= _AUTHORIZED_MAX:
            self._authorized.clear()  # on record a second time
        self._authorized[asked] = refused

    def take(
        self,
        data: bytes,
        *,
        caller: str,
        steps: tuple[ReleaseAction, ...],
        staged: bool | None = None,
        check: Callable[[ReleaseState, ReleaseRecord], None] | None = None,
    ) -> ReleaseState:
        """Take a signed step of one of these kinds; raises `ReleaseError` or `ProblemError` and then changes nothing.

        `staged`: whether an activation must be, or must not be, a staged one (None: it is none). `check` is asked, and
        raises, before a step that follows the last one is applied.
        """
        record = read_record(data)
        if record.action not in steps:
            raise ProblemError("invalid", f"this operation does not accept a step `{record.action.value}`")
        if record.actor != caller:
            raise ProblemError("forbidden", "a step must be signed by the principal who sends it")
        self._check_time(record)
        state = self.state()
        if record.number != len(state.records) + 1:
            raise ProblemError("conflict", f"the release has `{len(state.records)}` steps; read it again")
        if check is not None:
            check(state, record)
        if record.action is ReleaseAction.ACTIVATED:
            self._check_activation(state, record, staged)
        state.apply(data)
        if record.action is ReleaseAction.BROKE_GLASS:
            assert state.active is not None
            gates.check(state, state.active, self.assess)
        self._keep(record, data, state)
        return state

    def _check_time(self, record: ReleaseRecord) -> None:
        """A step of a time to come would make every later one as late; one taken at a time in doubt may be that."""
        now = self._clock.state()
        if now.in_doubt and record.action not in _NARROWING:
            raise ProblemError(
                "conflict",
                "the clock of this service is in doubt: set it right, or have an operator confirm it (`confirmClock`); "
                "only what narrows is released until then",
            )
        if record.at_us > now.now_us + SKEW_US:
            raise ReleaseError(
                f"the step is dated {(record.at_us - now.now_us) // 1_000_000} seconds ahead; check the clock of the "
                "machine that it was signed on"
            )

    def _check_activation(self, state: ReleaseState, record: ReleaseRecord, staged: bool | None) -> None:
        revision = record.body.get("revision")
        if type(revision) is not int:
            raise ReleaseError("the step names no revision")
        if (record.body.get("stage") is not None) is not staged:
            raise ProblemError("invalid", "`stage` needs a staged step, and no other operation accepts one")
        proposal = state.proposal(revision)
        state.check_activable(proposal, max(self._clock.utc_us(), record.at_us))
        gates.check(state, proposal, self.assess)

    def _keep(self, record: ReleaseRecord, data: bytes, state: ReleaseState) -> None:
        revision = record.body.get("revision")
        about = state.proposals.get(revision) if type(revision) is int else state.active
        event = ReleaseStep(
            self._clock.now_us(),
            record.number,
            record.action.value,
            0 if about is None else about.revision,
            "" if about is None else about.manifest.digest,
            digest(data),
            record.actor,
        )
        narrows = record.action in _NARROWING
        if not narrows:
            self._ledger.submit_durable(event)
        try:
            self._store.append(record.number, data)
        except PolicyError as error:
            raise ProblemError("conflict", error.message) from None
        if narrows:
            self._ledger.submit_durable(event)
