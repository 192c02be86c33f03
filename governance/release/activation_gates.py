"""The gates that every revision must pass before it comes into effect, whoever signed it.

1. Isolation is proved of exactly the policy that comes into effect.
2. A revision that widens shows exactly what its approver signed for, and its owners' consent to each thing it opens.
3. A revision that broke the glass widens nothing, or it is one that was in effect before, less what was revoked
   since.
4. Whoever takes a revision over asks again: nobody's word that the gates were passed is believed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from kvcustody.errors import PolicyError
from kvcustody.governance.decisions.staged_table import StagedTable
from kvcustody.governance.release.record import ReleaseError
from kvcustody.governance.release.replay_records import Proposal, ReleaseState
from kvcustody.policies.document.model import Policy
from kvcustody.policies.table.compile import compile_policy
from kvcustody.policies.table.decision_table import DecisionTable
from kvcustody.policies.workbench.diff.model import PolicyDiff, WidenedAccess
from kvcustody.policies.workbench.diff.semantic_diff import diff
from kvcustody.policies.workbench.prove.model import Proof
from kvcustody.policies.workbench.prove.prove import prove
from kvcustody.signed_document import digest, encode


@dataclass(frozen=True, slots=True)
class Review:
    """A revision at the gates: its proof, its difference from the active one, and missing consents."""

    proposal: Proposal
    proof: Proof
    change: PolicyDiff
    missing: tuple[WidenedAccess, ...]

    @property
    def cells(self) -> str:
        """The digest of the widened cells, which the approver repeats."""
        return self.change.approval_digest


class TooCostlyError(PolicyError):
    """A policy is too large to work on here; the message says which limit it exceeds."""


class PolicyAt(NamedTuple):
    """A policy, the revision number that it is compiled as, and the revoked ids."""

    policy: Policy
    revision: int
    revoked: frozenset[str]

    def table(self) -> DecisionTable:
        """The policy's decision table."""
        return compile_policy(self.policy, revision=self.revision, revoked=self.revoked)


class Assessment(NamedTuple):
    """The costly results about a revision."""

    proof: Proof
    change: PolicyDiff


def assess(candidate: PolicyAt, base: PolicyAt | None) -> Assessment:
    """Prove a revision and compare it with another; without one, with its own policy that shares and permits
    nothing.
    """
    if base is None:
        closed = replace(candidate.policy, grants=(), groups=(), segments=(), rules=())
        base = PolicyAt(closed, 0, frozenset())
    table = candidate.table()
    return Assessment(prove(table), diff(base.table(), table))


Assess = Callable[[PolicyAt, PolicyAt | None], Assessment]
"""`assess`, here or elsewhere; raises `TooCostlyError` where it is bounded."""
Gate = Callable[[ReleaseState, Proposal], Review]
"""Raises `ReleaseError` where a revision may not come into effect."""


def review(state: ReleaseState, proposal: Proposal, assess: Assess = assess) -> Review:
    """Prove a revision and compare it with the active one; demands nothing yet."""
    proof, change = assess(*compared(state, proposal))
    missing = tuple(opening for opening in change.consents if consent_id(proposal, opening) not in state.consents)
    return Review(proposal, proof, change, missing)


def compared(state: ReleaseState, proposal: Proposal) -> tuple[PolicyAt, PolicyAt | None]:
    """Return a revision and the one that it is compared with: active now, or when it was approved."""
    base = proposal.approval.base if proposal.approval is not None else state.active_revision
    revoked = proposal.approval.revoked if proposal.approval is not None else state.revoked
    return _at(proposal, revoked), _at(state.proposal(base), revoked) if base else None


def check(state: ReleaseState, proposal: Proposal, assess: Assess = assess) -> Review:
    """`review`, and raise `ReleaseError` unless the revision passes every gate."""
    reviewed = review(state, proposal, assess)
    revision, proof = proposal.revision, reviewed.proof
    if not (proof.holds and proof.digest == proposal.manifest.digest == proof.table_digest):
        broken = ", ".join(item.id for item in proof.broken) or "the digest"
        raise ReleaseError(f"revision `{revision}`: isolation is not proved ({broken}); see `kvcustody policy prove`")
    if proposal.is_break_glass:
        if reviewed.change.widens and not proposal.restores:
            raise ReleaseError(
                f"revision `{revision}` widens the active one; breaking the glass only narrows, or restores a "
                "revision that was in effect"
            )
        return reviewed
    approval = proposal.approval
    if approval is None:
        raise ReleaseError(f"revision `{revision}` is not approved")
    if reviewed.cells and approval.cells != reviewed.cells:
        raise ReleaseError(
            f"revision `{revision}` widens other cells (`{reviewed.cells}`) than its approver signed",
            cells=reviewed.cells,
        )
    if reviewed.missing:
        first = reviewed.missing[0]
        raise ReleaseError(
            f"revision `{revision}` opens `{first.id}`, and its owner `{first.owner}` has not consented; "
            "see `kvcustody policy consent`",
            missing=reviewed.missing,
        )
    return reviewed


def table_of(proposal: Proposal, revoked: frozenset[str]) -> DecisionTable:
    """Return the decision table of a revision, without everything that was revoked by its release or since."""
    return _at(proposal, revoked).table()


def _at(proposal: Proposal, revoked: frozenset[str]) -> PolicyAt:
    return PolicyAt(proposal.policy, proposal.revision, revoked | frozenset(proposal.manifest.revoked))


def tables_of(state: ReleaseState) -> DecisionTable | None:
    """Return the table in effect, with a staged one beside it; None without one."""
    if state.active is None:
        return None
    active = table_of(state.active, state.revoked)
    if state.staged is None or state.stage is None:
        return active
    return StagedTable(active, table_of(state.staged, state.revoked), state.stage)


def consent_id(proposal: Proposal, opening: WidenedAccess) -> str:
    """Return the digest that an owner consents to: this opening, by this revision."""
    return opening_id(proposal.manifest.id, opening.data())


def opening_id(manifest: str, what: Mapping[str, Any]) -> str:
    """Return the same digest from `WidenedAccess.data`, for those who have only the manifest's id."""
    return digest(encode({"manifest": manifest, "opening": dict(what)}))


def proof_digest(proof: Proof) -> str:
    """Return the digest by which a record names a revision's proof."""
    return digest(json.dumps(proof.data(), sort_keys=True).encode())
