"""The policies in effect: those that running workers run, released or from a file; otherwise the released one.

1. What workers run is read from their signed leaves; of a release it takes the documents alone. Workers may run several
   policies, and that is said, not resolved.
2. A document counts where its digest is the activation's: as a revision of the release, or as a worker recorded it.
   Else the policy is known by its digest alone, and nothing is claimed of what it permits.
3. Where no worker is at work, what the release has activated is what the next one will run, and it is shown as that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from kvcustody.audit.evidence.processes.enforcement import ENFORCE, WorkerEnforcement
from kvcustody.audit.evidence.processes.running_policies import RunningPolicy
from kvcustody.errors import PolicyError
from kvcustody.governance.decisions.staged_table import StagedTable
from kvcustody.governance.release import activation_gates as gates
from kvcustody.governance.release.declared_openings import DeclaredOpening, declared_openings
from kvcustody.governance.release.record import ReleaseAction
from kvcustody.governance.release.replay_records import Proposal, ReleaseState
from kvcustody.policies.document.digest import digest as digest_of
from kvcustody.policies.document.model import Policy
from kvcustody.policies.reading.load_policy import load_policy
from kvcustody.policies.table.compile import compile_policy
from kvcustody.policies.table.decision_table import DecisionTable

_KEPT = 32


@dataclass(frozen=True, slots=True)
class EffectivePolicy:
    """A policy and the workers that run it, for everybody or for a `stage` in words.

    `workers` are empty where none is at work: then it is released (rule 3). `policy` None: its digest alone is known
    (rule 2). `released`: it is that revision of the release. `since_us` (UTC) is when it first took effect on a worker
    that runs it, or when it was activated.
    """

    revision: int
    name: str
    digest: str
    since_us: int
    stage: str
    workers: tuple[str, ...]
    released: bool
    policy: Policy | None
    revoked: frozenset[str]

    def table(self) -> DecisionTable | None:
        """The compiled policy without revoked ids; None where only its digest is known."""
        return None if self.policy is None else _compiled(self.policy.source, self.revision, self.revoked)

    def data(self) -> dict[str, Any]:
        """Return JSON data without the document."""
        return {
            "revision": self.revision,
            "name": self.name,
            "digest": self.digest,
            "since_us": self.since_us,
            "stage": self.stage,
            "workers": list(self.workers),
            "source": "release" if self.released else "document" if self.policy is not None else "unknown",
            "revoked": sorted(self.revoked),
        }


class PoliciesInEffect(NamedTuple):
    """All policies in effect, those for everybody first; `at_work`: workers run them (rule 3).

    `unsaid` are workers at work of which no leaf says what they run, `monitoring` those that do not enforce it for
    everybody: whatever is proved of a policy holds for whom it is enforced.
    """

    policies: tuple[EffectivePolicy, ...]
    at_work: bool
    unsaid: tuple[str, ...] = ()
    monitoring: tuple[WorkerEnforcement, ...] = ()

    @property
    def unknown(self) -> tuple[EffectivePolicy, ...]:
        """The policies of which only the digest is known."""
        return tuple(one for one in self.policies if one.policy is None)

    def data(self) -> dict[str, Any]:
        """Return JSON data."""
        items = [one.data() for one in self.policies]
        monitoring = [one._asdict() for one in self.monitoring]
        return {
            "items": items,
            "at_work": self.at_work,
            "unsaid": list(self.unsaid),
            "monitoring": monitoring,
        }

    def run_by(self, digest: str) -> tuple[str, ...]:
        """Return the running workers of the policy with this digest, for everybody or a stage."""
        return tuple(sorted({name for one in self.policies if one.digest == digest for name in one.workers}))

    def the_one(self) -> EffectivePolicy:
        """Return the policy for everybody with its document; raises `PolicyError` that says why there is none."""
        whole = [one for one in self.policies if not one.stage]
        if not whole:
            raise PolicyError("no policy is in effect: no running worker reports one, and none is released")
        if len(whole) > 1:
            names = ", ".join(f"`{one.name}` ({one.digest}) on {', '.join(one.workers)}" for one in whole)
            raise PolicyError(f"workers run {len(whole)} policies: {names}")
        if whole[0].policy is None:
            raise PolicyError(
                f"of the policy `{whole[0].name}` that {', '.join(whole[0].workers)} runs the ledger has the digest "
                f"alone: {whole[0].digest}"
            )
        return whole[0]

    def the_table(self, state: ReleaseState | None) -> DecisionTable:
        """Return that policy's table as workers use it, with a staged one beside it; raises as `the_one`."""
        whole = self.the_one()
        staged = [one for one in self.policies if one.stage]
        if staged and state is not None and all(one.released for one in (whole, *staged)):
            found = gates.tables_of(state)
            if isinstance(found, StagedTable) and found.base.digest == whole.digest:
                return found
        table = whole.table()
        assert table is not None, "its document is known"
        return table

    def openings(self, now_us: int, *, owner: str | None = None) -> tuple[DeclaredOpening, ...]:
        """Return the openings of all policies across tenants, or on this owner's data; unknown policies contribute
        none.
        """
        ways = {
            way
            for one in self.policies
            if one.policy is not None
            for way in declared_openings(one.policy, one.revoked, now_us)
            if owner is None or way.owner == owner
        }
        return tuple(sorted(ways))


def policies_in_effect(
    running: Iterable[RunningPolicy],
    state: ReleaseState | None,
    enforcement: Iterable[WorkerEnforcement] = (),
) -> PoliciesInEffect:
    """Return them from workers' leaves, their enforcement, and the release (None: nothing is released here)."""
    monitoring = tuple(one for one in enforcement if one.mode != ENFORCE)
    every = tuple(running)
    unsaid = tuple(one.worker for one in every if not one.digest)
    groups: dict[tuple[str, str, int], list[RunningPolicy]] = {}
    for one in every:
        if one.digest:
            groups.setdefault((one.stage, one.digest, one.revision), []).append(one)
    if not groups:
        return PoliciesInEffect(_released(state), False, unsaid, monitoring)
    found = [_effective(group, state) for group in groups.values()]
    return PoliciesInEffect(tuple(sorted(found, key=_order)), True, unsaid, monitoring)


def _order(one: EffectivePolicy) -> tuple[bool, int, str, tuple[str, ...]]:
    return bool(one.stage), -len(one.workers), one.name, one.workers


def _effective(group: list[RunningPolicy], state: ReleaseState | None) -> EffectivePolicy:
    first = group[0]
    proposal = None if state is None else state.proposals.get(first.revision)
    released = proposal is not None and proposal.manifest.digest == first.digest
    revoked = frozenset.intersection(*(one.revoked for one in group))  # else it is open somewhere
    policy: Policy | None
    if released and proposal is not None and state is not None:
        policy, revoked = proposal.policy, revoked | state.revoked | frozenset(proposal.manifest.revoked)
    else:
        documents = (one.document for one in group if one.document)
        policy = next(filter(None, (policy_of_document(document, first.digest) for document in documents)), None)
    return EffectivePolicy(
        first.revision,
        first.name,
        first.digest,
        min(one.since_us for one in group),
        first.stage,
        tuple(sorted(one.worker for one in group)),
        released,
        policy,
        revoked,
    )


def _released(state: ReleaseState | None) -> tuple[EffectivePolicy, ...]:
    if state is None or state.active is None:
        return ()
    made = [_of_release(state, state.active, "")]
    if state.staged is not None:
        made.append(_of_release(state, state.staged, str(state.stage)))
    return tuple(made)


def _of_release(state: ReleaseState, proposal: Proposal, stage: str) -> EffectivePolicy:
    taken = [
        record.at_us
        for record in state.records
        if record.action in (ReleaseAction.ACTIVATED, ReleaseAction.BROKE_GLASS)
        and record.body.get("revision") == proposal.revision
    ]
    since_us = taken[-1] if taken else proposal.manifest.issued_us
    revoked = state.revoked | frozenset(proposal.manifest.revoked)
    manifest = proposal.manifest
    return EffectivePolicy(
        proposal.revision, manifest.name, manifest.digest, since_us, stage, (), True, proposal.policy, revoked
    )


@lru_cache(_KEPT)
def policy_of_document(document: str, digest: str) -> Policy | None:
    """Return the policy of a document; None where its digest differs from this one (rule 2)."""
    try:
        policy = load_policy(document, name="policy")
    except PolicyError:
        return None
    return policy if digest_of(policy) == digest else None


@lru_cache(_KEPT)
def _compiled(document: str, revision: int, revoked: frozenset[str]) -> DecisionTable:
    return compile_policy(load_policy(document, name="policy"), revision=revision, revoked=revoked)
