"""The service's work on whole policies, one function a task: the same in its own process and in a child.

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
    """A document, the revision number that it is compiled as, and the revoked ids."""

    source: str
    revision: int = 1
    revoked: frozenset[str] = frozenset()
    name: str = "policy"  # as problems call it

    def policy(self) -> Policy:
        """The draft's policy; raises `PolicyRejected` and `TooCostlyError`."""
        policy = load_policy(self.source, name=self.name)
        check_size(policy)
        return policy

    def table(self) -> DecisionTable:
        """The draft's decision table; raises as `policy` does."""
        return compile_policy(self.policy(), revision=self.revision, revoked=self.revoked)

    @property
    def is_small(self) -> bool:
        """Whether work on it takes less time than sending it; true for a rejected one."""
        if len(self.source) > _SMALL_CHARACTERS:
            return False
        try:
            return is_small(load_policy(self.source, name=self.name))
        except PolicyRejected:
            return True


Compiled = Draft | DecisionTable


class Question(NamedTuple):
    """A request to explain: tenants by their names, the classification by its name."""

    action: Action
    reader: str
    owner: str
    classification: str
    scope: Scope
    via: Via
    now_us: int
    source: str | None


def count_grants(policy: Policy) -> int:
    """Count a policy's grants, with those that sharing groups stand for, without making them."""
    members = Counter(tenant.group for tenant in policy.tenants)
    shared = [members[group.id] for group in policy.groups if group.at_most is not None]
    return len(policy.grants) + sum(count * (count - 1) for count in shared)


def check_size(policy: Policy) -> None:
    """Raise `TooCostlyError` for a policy of too many grants (rule 1)."""
    count = count_grants(policy)
    if count > GRANTS_MAX:
        raise TooCostlyError(f"it has {count} grants, those of sharing groups counted; {GRANTS_MAX} at most")


def is_small(policy: Policy) -> bool:
    """Whether work on a policy takes less time than sending it."""
    sections = (policy.tenants, policy.segments, policy.rules, policy.classify)
    total = sum(map(len, sections)) + count_grants(policy)
    return total <= _SMALL and len(policy.tenants) <= _SMALL_TENANTS


def answer(task: Callable[..., Any], *given: Any) -> bytes:
    """Return a task's result in the API's form."""
    return orjson.dumps(task(*given).data(), default=str)


def validated(draft: Draft) -> Validation:
    """Return a document's problems, or a valid one's digest."""
    found = validate(draft.source, name=draft.name)
    return replace(found, policy=None)


def weight_of(cases: str) -> int:
    """Return the weight of running cases beside the policy: each prohibition costs a proof."""
    return len(cases) // 16 + 1_000 * cases.count("never")


def linted(draft: Draft, now_us: int, tiers: Collection[str] | None) -> tuple[str, tuple[Problem, ...]]:
    """Return a valid document's digest, and its probable mistakes."""
    table = draft.table()
    return table.digest, lint(table, now_us=now_us, tiers=tiers)


def tested(draft: Draft, cases: str, cases_name: str) -> CasesReport:
    """Return the results of cases against a document."""
    table = draft.table()
    return run_cases(table, load_cases(cases, name=cases_name, policy=table.policy))


def compared(old: Compiled, new: Draft) -> PolicyDiff:
    """Return a document's different decisions."""
    return diff(_table(old), new.table())


def proved(draft: Draft) -> Proof:
    """Return the proof of a document."""
    return prove(draft.table())


def simulated(
    old: Compiled, new: Draft, requests: Sequence[Recorded], denials: Sequence[RecordedDenials]
) -> Simulation:
    """Return what recorded requests would lose."""
    return simulate(_table(old), new.table(), requests, denials)


def explained(given: Compiled, asked: Question) -> Explanation:
    """Explain why one request is permitted or denied; raises `ConfigError` for names that the policy lacks."""
    table = _table(given)
    policy = table.policy
    if asked.classification not in policy.classifications:
        raise ConfigError("`classification` is none of the policy's")
    level = policy.classifications.index(asked.classification)
    reader, owner = policy.named(asked.reader), policy.named(asked.owner)
    return explain(table, Request(asked.action, reader, owner, level, *asked[4:]))


def assessed(candidate: Draft, base: Draft | None) -> Assessment:
    """Return a revision's assessment for the gates."""
    return assess(_compiled_as(candidate), None if base is None else _compiled_as(base))


class ReviewFacts(NamedTuple):
    """A reviewer's facts of a revision: proof and change in the API's form, and the required consents."""

    proof: bytes
    change: bytes
    cells: str  # `PolicyDiff.approval_digest`
    openings: dict[str, bytes]  # that need a consent, as the API answers them, by what an owner consents to


def reviewed(candidate: Draft, base: Draft | None, manifest: str) -> ReviewFacts:
    """Return `assessed` for a reviewer of the revision with this manifest."""
    return review_facts(assessed(candidate, base), manifest)


def review_facts(found: Assessment, manifest: str) -> ReviewFacts:
    """Return a reviewer's facts of an assessment."""
    proof, change = (orjson.dumps(part.data(), default=str) for part in found)
    asked = [opening.data() for opening in found.change.consents]
    openings = {opening_id(manifest, what): orjson.dumps(what, default=str) for what in asked}
    return ReviewFacts(proof, change, found.change.approval_digest, openings)


def _compiled_as(draft: Draft) -> CompiledAs:
    return CompiledAs(draft.policy(), draft.revision, draft.revoked)


def _table(given: Compiled) -> DecisionTable:
    return given.table() if isinstance(given, Draft) else given
