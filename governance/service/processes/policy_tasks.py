"""What the service does with whole policies, each as one task: the same in its own process and in another.

1. A policy of more grants than are worked on here is refused before anything is made of it (`check_size`).
2. `answer` gives bytes: the process that answers everybody has nothing left to make of a large result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import orjson

from kvcustody.errors import ConfigError
from kvcustody.governance.release.activation_gates import (
    Assessment,
    TooCostlyError,
    assess,
    opening_id,
)
from kvcustody.governance.release.activation_gates import PolicyAt as CompiledAs
from kvcustody.policies.document.model import Action, Policy, Scope, Via
from kvcustody.policies.document.problems import PolicyRejected, Problem
from kvcustody.policies.reading.load_policy import load_policy
from kvcustody.policies.table.compile import compile_policy
from kvcustody.policies.table.decision_table import DecisionTable
from kvcustody.policies.workbench.diff.model import PolicyDiff
from kvcustody.policies.workbench.diff.semantic_diff import diff
from kvcustody.policies.workbench.explain import Explanation, explain
from kvcustody.policies.workbench.lint.lint import lint
from kvcustody.policies.workbench.prove.model import Proof
from kvcustody.policies.workbench.prove.prove import prove
from kvcustody.policies.workbench.request import Request
from kvcustody.policies.workbench.run_test_cases import CasesReport, run_cases
from kvcustody.policies.workbench.simulate import Recorded, RecordedDenials, Simulation, simulate
from kvcustody.policies.workbench.test_case_model import load_cases
from kvcustody.policies.workbench.validate import Validation, validate

GRANTS_MAX = 5_000
_SMALL, _SMALL_TENANTS = 48, 12  # a proof asks every pair of tenants
_SMALL_CHARACTERS = 16 << 10


class Draft(NamedTuple):
    """A document, the revision that it is compiled as, and the ids that are revoked."""

    source: str
    revision: int = 1
    revoked: frozenset[str] = frozenset()
    name: str = "policy"  # as problems call it

    def policy(self) -> Policy:
        """Its policy; raises `PolicyRejected` and `TooCostlyError`."""
        policy = load_policy(self.source, name=self.name)
        check_size(policy)
        return policy

    def table(self) -> DecisionTable:
        """Its decision table; raises as `policy` does."""
        return compile_policy(self.policy(), revision=self.revision, revoked=self.revoked)

    @property
    def is_small(self) -> bool:
        """Whether work on it is done sooner than it is sent; so is what is rejected."""
        if len(self.source) > _SMALL_CHARACTERS:
            return False
        try:
            return is_small(load_policy(self.source, name=self.name))
        except PolicyRejected:
            return True


Compiled = Draft | DecisionTable


class Question(NamedTuple):
    """A request as somebody asks about it: tenants as they call them, the classification by its name."""

    action: Action
    reader: str
    owner: str
    classification: str
    scope: Scope
    via: Via
    now_us: int
    source: str | None


def count_grants(policy: Policy) -> int:
    """The grants of a policy, those that sharing groups stand for counted, and none of these made."""
    members = Counter(tenant.group for tenant in policy.tenants)
    shared = [members[group.id] for group in policy.groups if group.at_most is not None]
    return len(policy.grants) + sum(count * (count - 1) for count in shared)


def check_size(policy: Policy) -> None:
    """Raise `TooCostlyError` for a policy of too many grants (rule 1)."""
    count = count_grants(policy)
    if count > GRANTS_MAX:
        raise TooCostlyError(f"it has {count} grants, those of sharing groups counted; {GRANTS_MAX} at most")


def is_small(policy: Policy) -> bool:
    """Whether work on a policy is done sooner than it is sent."""
    sections = (policy.tenants, policy.segments, policy.rules, policy.classify)
    total = sum(map(len, sections)) + count_grants(policy)
    return total <= _SMALL and len(policy.tenants) <= _SMALL_TENANTS


def answer(task: Callable[..., Any], *given: Any) -> bytes:
    """What a task finds, as the API answers it."""
    return orjson.dumps(task(*given).data(), default=str)


def validated(draft: Draft) -> Validation:
    """What is wrong with a document; of a sound one, its digest, and no policy."""
    found = validate(draft.source, name=draft.name)
    return replace(found, policy=None)


def weight_of(cases: str) -> int:
    """What running cases counts beside the policy: what must never be is a proof each."""
    return len(cases) // 16 + 1_000 * cases.count("never")


def linted(draft: Draft, now_us: int, tiers: Collection[str] | None) -> tuple[str, tuple[Problem, ...]]:
    """The digest of a sound document, and what is probably not meant in it."""
    table = draft.table()
    return table.digest, lint(table, now_us=now_us, tiers=tiers)


def tested(draft: Draft, cases: str, cases_name: str) -> CasesReport:
    """What cases say of a document."""
    table = draft.table()
    return run_cases(table, load_cases(cases, name=cases_name, policy=table.policy))


def compared(old: Compiled, new: Draft) -> PolicyDiff:
    """What a document decides differently."""
    return diff(_table(old), new.table())


def proved(draft: Draft) -> Proof:
    """The proof of a document."""
    return prove(draft.table())


def simulated(
    old: Compiled, new: Draft, requests: Sequence[Recorded], denials: Sequence[RecordedDenials]
) -> Simulation:
    """What recorded requests would lose."""
    return simulate(_table(old), new.table(), requests, denials)


def explained(given: Compiled, asked: Question) -> Explanation:
    """Why one request is permitted or denied; raises `ConfigError` where it names what the policy does not have."""
    table = _table(given)
    policy = table.policy
    if asked.classification not in policy.classifications:
        raise ConfigError("`classification` is none of the policy's")
    level = policy.classifications.index(asked.classification)
    reader, owner = policy.named(asked.reader), policy.named(asked.owner)
    return explain(table, Request(asked.action, reader, owner, level, *asked[4:]))


def assessed(candidate: Draft, base: Draft | None) -> Assessment:
    """What the gates see of a revision."""
    return assess(_compiled_as(candidate), None if base is None else _compiled_as(base))


class ReviewFacts(NamedTuple):
    """What a reviewer is shown of a revision: proof and change as the API answers them, and what has to be asked."""

    proof: bytes
    change: bytes
    cells: str  # `PolicyDiff.approval_digest`
    openings: dict[str, bytes]  # that need a consent, as the API answers them, by what an owner consents to


def reviewed(candidate: Draft, base: Draft | None, manifest: str) -> ReviewFacts:
    """`assessed`, for a reviewer of the revision with this manifest."""
    return review_facts(assessed(candidate, base), manifest)


def review_facts(found: Assessment, manifest: str) -> ReviewFacts:
    """What a reviewer is shown of an assessment."""
    proof, change = (orjson.dumps(part.data(), default=str) for part in found)
    asked = [opening.data() for opening in found.change.consents]
    openings = {opening_id(manifest, what): orjson.dumps(what, default=str) for what in asked}
    return ReviewFacts(proof, change, found.change.approval_digest, openings)


def _compiled_as(draft: Draft) -> CompiledAs:
    return CompiledAs(draft.policy(), draft.revision, draft.revoked)


def _table(given: Compiled) -> DecisionTable:
    return given.table() if isinstance(given, Draft) else given
