"""What is in effect, as pages show it: which policies workers run, since when, and the proof of each.

1. A proof is of exactly what is in effect: the policy less everything that was revoked since. It is made once for each
   such pair and kept in memory. Of a policy whose digest alone is known there is none.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from kvcustody.audit.processes.enforcement import WorkerEnforcement
from kvcustody.console.web.page_request import PageRequest
from kvcustody.errors import PolicyError
from kvcustody.governance.release.policies_in_effect import EffectivePolicy, PoliciesInEffect
from kvcustody.governance.release.replay_records import ReleaseState
from kvcustody.policies.reading.load_policy import load_policy
from kvcustody.policies.table.compile import compile_policy
from kvcustody.policies.workbench.prove.model import Proof
from kvcustody.policies.workbench.prove.prove import prove

_KEPT = 32


class ProvedPolicy(NamedTuple):
    """A policy in effect, and its proof (rule 1)."""

    policy: EffectivePolicy
    proof: Proof | None


class PolicyStatus(NamedTuple):
    """Everything that is in effect; `at_work`, `unsaid` and `monitoring` as `PoliciesInEffect` has them."""

    proved: tuple[ProvedPolicy, ...]
    at_work: bool
    unsaid: tuple[str, ...]
    monitoring: tuple[WorkerEnforcement, ...] = ()


def release_of(visit: PageRequest) -> ReleaseState | None:
    """The release, every record verified; None where this service releases no policies."""
    return visit.service.policies.released()


def read_policy_status(visit: PageRequest) -> PolicyStatus:
    """What is in effect."""
    return policy_status(visit.service.policies_in_effect())


def policy_status(found: PoliciesInEffect) -> PolicyStatus:
    """The same of what was read before."""
    proved = tuple(ProvedPolicy(one, _proof_of(one)) for one in found.policies)
    return PolicyStatus(proved, found.at_work, found.unsaid, found.monitoring)


def known_policy(effect: PoliciesInEffect) -> tuple[EffectivePolicy | None, str]:
    """The one that is in effect for everybody, else why none can be shown."""
    try:
        return effect.the_one(), ""
    except PolicyError as error:
        return None, error.message[:1].upper() + error.message[1:] + "."


def _proof_of(one: EffectivePolicy) -> Proof | None:
    return None if one.policy is None else _proof(one.policy.source, one.revision, one.revoked)


@lru_cache(_KEPT)
def _proof(document: str, revision: int, revoked: frozenset[str]) -> Proof:
    policy = load_policy(document, name="policy")
    return prove(compile_policy(policy, revision=revision, revoked=revoked))
