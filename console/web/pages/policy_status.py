"""Where the policy's release stands, as pages show it: the active revision, when it came, and its proof.

1. A proof is of exactly what is in effect: the revision less everything that was revoked since. It is made once for
   each such pair and kept in memory.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from kvcustody.console.web.page_request import PageRequest
from kvcustody.governance.release.record import ReleaseAction
from kvcustody.governance.release.replay_records import Proposal, ReleaseState
from kvcustody.governance.service.problem_details import ProblemError
from kvcustody.policies.document.model import Policy
from kvcustody.policies.reading.load_policy import load_policy
from kvcustody.policies.table.compile import compile_policy
from kvcustody.policies.workbench.prove.model import Proof
from kvcustody.policies.workbench.prove.prove import prove

_KEPT = 32


class PolicyStatus(NamedTuple):
    """The active revision, when it took effect (UTC µs), and the proof of what is in effect."""

    revision: Proposal
    since_us: int
    proof: Proof


def release_of(visit: PageRequest) -> ReleaseState | None:
    """The release, every record verified; None where this service releases no policies."""
    try:
        return visit.service.policies.state()
    except ProblemError:
        return None


def read_policy_status(state: ReleaseState | None) -> PolicyStatus | None:
    """What is in effect; None where nothing is."""
    if state is None or state.active is None:
        return None
    active = state.active
    taken = [
        record.at_us
        for record in state.records
        if record.action in (ReleaseAction.ACTIVATED, ReleaseAction.BROKE_GLASS)
        and record.body.get("revision") == active.revision
    ]
    return PolicyStatus(active, taken[-1] if taken else active.manifest.issued_us, proof_of(state, active))


def proof_of(state: ReleaseState, proposal: Proposal) -> Proof:
    """The proof of a revision, less all that was revoked."""
    revoked = state.revoked | frozenset(proposal.manifest.revoked)
    return _proof(proposal.document, proposal.revision, revoked)


def active_policy(state: ReleaseState | None) -> Policy | None:
    """The policy that is in effect."""
    return None if state is None or state.active is None else state.active.policy


@lru_cache(_KEPT)
def _proof(document: str, revision: int, revoked: frozenset[str]) -> Proof:
    policy = load_policy(document, name="policy")
    return prove(compile_policy(policy, revision=revision, revoked=revoked))
