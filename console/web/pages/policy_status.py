"""The active policies for pages: which ones workers run, since when, and each one's proof.

1. A proof is of exactly what is in effect: the policy less everything that was revoked since. It is made once for each
   such pair and kept in memory. Of a policy whose digest alone is known there is none.
"""

from __future__ import annotations

from typing import NamedTuple

from kvcustody.audit.evidence.processes.enforcement import WorkerEnforcement
from kvcustody.console.web.page_request import PageRequest
from kvcustody.errors import PolicyError
from kvcustody.governance.release.activation_gates import TooCostlyError
from kvcustody.governance.release.policies_in_effect import EffectivePolicy, PoliciesInEffect
from kvcustody.governance.release.replay_records import ReleaseState
from kvcustody.governance.service.processes.policy_tasks import Draft
from kvcustody.governance.service.processes.policy_work import PolicyWork
from kvcustody.policies.workbench.prove.model import Proof


class ProvedPolicy(NamedTuple):
    """An active policy and its proof (rule 1)."""

    policy: EffectivePolicy
    proof: Proof | None


class PolicyStatus(NamedTuple):
    """Everything that is active; `at_work`, `unsaid` and `monitoring` are those of `PoliciesInEffect`."""

    proved: tuple[ProvedPolicy, ...]
    at_work: bool
    unsaid: tuple[str, ...]
    monitoring: tuple[WorkerEnforcement, ...] = ()


def release_of(visit: PageRequest) -> ReleaseState | None:
    """Return the release, with every record verified; None where this service releases no policies."""
    return visit.service.policies.released()


def read_policy_status(visit: PageRequest) -> PolicyStatus:
    """Read and return the status of the active policies."""
    return policy_status(visit.service.policies_in_effect(), visit.service.policy_work)


def policy_status(found: PoliciesInEffect, work: PolicyWork) -> PolicyStatus:
    """Return the status from facts that were read before."""
    proved = tuple(ProvedPolicy(one, _proof_of(one, work)) for one in found.policies)
    return PolicyStatus(proved, found.at_work, found.unsaid, found.monitoring)


def known_policy(effect: PoliciesInEffect) -> tuple[EffectivePolicy | None, str]:
    """Return the policy that is active for everyone, else why none can be shown."""
    try:
        return effect.the_one(), ""
    except PolicyError as error:
        return None, error.message[:1].upper() + error.message[1:] + "."


def _proof_of(one: EffectivePolicy, work: PolicyWork) -> Proof | None:
    """Return a policy's proof; None where its document is unknown, or is too costly to prove here."""
    if one.policy is None:
        return None
    try:
        return work.proved(Draft(one.policy.source, one.revision, one.revoked))
    except TooCostlyError:
        return None
