"""Run a policy's test cases, and report what they did not cover.

1. A rule, grant or segment is covered when a case's decision names it; a cell when a case asks it.
2. No cases is a failure: an empty file shows nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvcustody.policies.document.model import Action, Effect, Scope, Tier, Via
from kvcustody.policies.document.problems import SourceMark
from kvcustody.policies.table.decision_table import DecisionTable
from kvcustody.policies.table.model import Decision
from kvcustody.policies.workbench.prove.prove import prove
from kvcustody.policies.workbench.request import DOMAIN_ACTIONS, SHARED, Request
from kvcustody.policies.workbench.test_case_model import Cases, Classified, PolicyCase

Cell = tuple[Via, Action, str, str, int, Scope]


@dataclass(frozen=True, slots=True)
class CaseResult:
    """The result of one check, with the expected result if that differs."""

    name: str
    asked: str
    passed: bool
    got: str
    expected: str
    mark: SourceMark

    def __str__(self) -> str:
        return f"{self.name}: {self.asked}: {self.got}" + ("" if self.passed else f", expected {self.expected}")


@dataclass(frozen=True, slots=True)
class CaseCoverage:
    """The coverage of the cases: ids that decided something, and cells of the table that were asked."""

    named: int
    named_total: int
    not_named: tuple[str, ...]
    cells: int
    cells_total: int

    @property
    def named_share(self) -> float:
        """The covered share of rules, grants and segments; 1.0 if there are none."""
        return self.named / self.named_total if self.named_total else 1.0

    @property
    def cell_share(self) -> float:
        """The covered share of cells."""
        return self.cells / self.cells_total if self.cells_total else 1.0


@dataclass(frozen=True, slots=True)
class CasesReport:
    """Every result, and the coverage."""

    file: str
    policy: str
    digest: str
    results: tuple[CaseResult, ...]
    coverage: CaseCoverage

    @property
    def passed(self) -> bool:
        """Whether there are cases and all of them pass."""
        return bool(self.results) and all(result.passed for result in self.results)

    @property
    def failures(self) -> tuple[CaseResult, ...]:
        """The checks that did not pass."""
        return tuple(result for result in self.results if not result.passed)

    def data(self) -> dict[str, Any]:
        """Return the report as JSON data."""
        coverage = self.coverage
        return {
            "file": self.file,
            "policy": self.policy,
            "digest": self.digest,
            "passed": self.passed,
            "cases": len(self.results),
            "failures": [
                {"name": f.name, "asked": f.asked, "got": f.got, "expected": f.expected, "line": f.mark.line}
                for f in self.failures
            ],
            "coverage": {
                "named": coverage.named,
                "named_total": coverage.named_total,
                "not_named": list(coverage.not_named),
                "cells": coverage.cells,
                "cells_total": coverage.cells_total,
            },
        }


def run_cases(table: DecisionTable, cases: Cases) -> CasesReport:
    """Ask every case, compare the answers, and measure the coverage."""
    named: set[str] = set()
    cells: set[Cell] = set()
    results = [_ask(table, case, named, cells) for case in cases.asked]
    results += [_classify(table, case) for case in cases.classified]
    for never, mark in cases.never:
        broken = next((p for p in prove(table, never=[never]).broken if p.id == "ISO-11"), None)
        example = broken.counterexample.text if broken and broken.counterexample else "nothing permits it"
        said = ", ".join(f"{name} {value}" for name, value in never._asdict().items() if value is not None)
        results.append(CaseResult("never", said or "anything across", broken is None, example, "no permit", mark))
    return CasesReport(cases.file, table.policy.name, table.digest, tuple(results), _coverage(table, named, cells))


def _ask(table: DecisionTable, case: PolicyCase, named: set[str], cells: set[Cell]) -> CaseResult:
    request = case.request
    decision = request.decide(table)
    question_text = request.text(table.policy.classifications)
    if case.tier is not None:
        decision, question_text = _in_tier(table, request, decision, case.tier), f"{question_text} in {case.tier}"
    named.update(decision.reasons)
    cells.add((request.via, request.action, request.reader, request.owner, request.level, request.scope))
    passed = decision.effect is case.expect and case.because in (None, decision.reasons)
    got = f"{decision.effect.value} by {', '.join(decision.reasons)}"
    expected = case.expect.value + (f" by {', '.join(case.because)}" if case.because else "")
    return CaseResult(case.name, question_text, passed, got, expected, case.mark)


def _in_tier(table: DecisionTable, request: Request, decision: Decision, tier: Tier) -> Decision:
    """Return whether copies may be in a tier, according to both the decision and the tier's duty."""
    duty = table.tier_duty(request.owner, request.level, tier)
    if decision.permitted and not duty.absolute_us:
        return Decision(Effect.DENY, duty.reasons, decision.revision)
    return decision


def _classify(table: DecisionTable, case: Classified) -> CaseResult:
    got = table.policy.classifications[table.classify(case.tenant, case.route, case.claim, case.hint)]
    parts = (("route", case.route), ("claim", case.claim), ("hint", case.hint))
    asked = f"classify {case.tenant}" + "".join(f" {name} {value}" for name, value in parts if value is not None)
    return CaseResult(case.name, asked, got == case.expect, got, case.expect, case.mark)


def _coverage(table: DecisionTable, named: set[str], cells: set[Cell]) -> CaseCoverage:
    policy = table.policy
    ids = [entry.id for section in (policy.rules, policy.grants, policy.segments) for entry in section]
    ids += [group.id for group in policy.groups if group.at_most is not None]
    reached = {name for reason in named for name in (reason, reason.split("~", 1)[0])}
    missing = tuple(sorted(set(ids) - reached))
    known = _cells(table)
    return CaseCoverage(len(ids) - len(missing), len(ids), missing, len(cells & known), len(known))


def _cells(table: DecisionTable) -> set[Cell]:
    """Every cell that the table keeps for listed tenants: own rows, and what grants and segments can open."""
    levels = range(len(table.policy.classifications))
    cells = {
        (Via.OWN, action, tenant.id, tenant.id, level, scope)
        for tenant in table.policy.tenants
        for action in Action
        for level in levels
        for scope in Scope
    }
    declared = {(grant.reader, grant.owner) for grant in (*table.policy.grants, *table.policy.group_grants())}
    cells |= {
        (Via.GRANT, Action.REUSE, reader, owner, level, scope)
        for reader, owner in declared
        for level in levels
        for scope in SHARED
    }
    cells |= {
        (Via.SEGMENT, action, reader, segment.owner, segment.level, scope)
        for segment in table.policy.segments
        for reader in (segment.tenants or [tenant.id for tenant in table.policy.tenants])
        for action in DOMAIN_ACTIONS
        for scope in SHARED
    }
    return cells
