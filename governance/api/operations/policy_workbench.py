"""Operations of the policy workbench: validate, lint, test, diff, prove, simulate, explain.

They change and keep nothing.
"""

from __future__ import annotations

from functools import partial
from itertools import islice
from typing import Any

import orjson
from fastapi import Response

from kvcustody.errors import ConfigError, PolicyError
from kvcustody.governance.api.http.operation import Operation
from kvcustody.governance.api.http.route_builder import Api, ServiceDep
from kvcustody.governance.api.models.policies import (
    CasesRequest,
    PolicyPair,
    PolicyQuestion,
    PolicySource,
    Simulated,
    SimulationRequest,
    ValidationModel,
    WorkbenchAnswer,
)
from kvcustody.governance.decisions.replay_decisions import recorded_denials, recorded_requests
from kvcustody.governance.observability.serving_summary import tiers_at_work
from kvcustody.governance.service.access.roles import Permission
from kvcustody.governance.service.problem_details import ProblemError
from kvcustody.governance.service.service import Service
from kvcustody.policies.document.model import Action as PolicyAction
from kvcustody.policies.document.model import Policy, Scope, Via
from kvcustody.policies.document.problems import PolicyRejected, Problem
from kvcustody.policies.reading.load_policy import load_policy
from kvcustody.policies.table.compile import compile_policy
from kvcustody.policies.table.decision_table import DecisionTable
from kvcustody.policies.workbench.diff.semantic_diff import diff
from kvcustody.policies.workbench.explain import explain
from kvcustody.policies.workbench.lint.lint import lint
from kvcustody.policies.workbench.prove.prove import prove
from kvcustody.policies.workbench.request import Request
from kvcustody.policies.workbench.run_test_cases import run_cases
from kvcustody.policies.workbench.simulate import simulate
from kvcustody.policies.workbench.test_case_model import load_cases
from kvcustody.policies.workbench.validate import validate

NAME = "policy"
_work = partial(Operation, method="POST", action=Permission.WRITE_POLICY, tag="policies")


def add_workbench(api: Api) -> None:
    """Declare the operations."""
    api.add(_work("validatePolicy", path="/v1/policies:validate"), validated, answers=ValidationModel)
    api.add(_work("lintPolicy", path="/v1/policies:lint"), linted, answers=ValidationModel)
    api.add(_work("testPolicy", path="/v1/policies:test"), tested, answers=WorkbenchAnswer)
    api.add(
        _work("diffPolicy", path="/v1/policies:diff"),
        compared,
        answers=WorkbenchAnswer,
        problems=("conflict",),
    )
    api.add(_work("provePolicy", path="/v1/policies:prove"), proved, answers=WorkbenchAnswer)
    simulating = _work("simulatePolicy", path="/v1/policies:simulate")
    api.add(simulating, simulated, answers=Simulated, problems=("conflict",))
    api.add(
        _work("explainDecision", path="/v1/decisions:explain"),
        explained,
        answers=WorkbenchAnswer,
        problems=("conflict",),
    )


def validated(what: PolicySource) -> dict[str, Any]:
    """What is wrong with a document, each with line, column, code and what to do; nothing is guessed or repaired."""
    found = validate(what.source, name=NAME)
    problems = [_problem(problem) for problem in found.problems]
    return {"sound": found.sound, "digest": found.digest, "problems": problems, "omitted": found.omitted}


def linted(service: ServiceDep, what: PolicySource) -> dict[str, Any]:
    """What in a sound document is probably not meant: rules that do nothing, grants that end, names that look alike.

    Also tiers that none of the workers that run has.
    """
    table = _table(what.source, what.revoked)
    tiers = tiers_at_work(one.status for one in service.fleet.running())
    problems = [_problem(problem) for problem in lint(table, now_us=service.clock.utc_us(), tiers=tiers)]
    return {"sound": True, "digest": table.digest, "problems": problems, "omitted": 0}


def tested(what: CasesRequest) -> Response:
    """Run cases against a document: each result, and what the cases did not reach."""
    table = _table(what.source, [])
    report = run_cases(table, _rejecting(load_cases, what.cases, policy=table.policy))
    return _answer(report.data())


def compared(service: ServiceDep, what: PolicyPair) -> Response:
    """What a document decides differently from another, or from the one in effect: cells, openings, obligations."""
    new = _table(what.source, what.revoked)
    old = _active(service) if what.old is None else _table(what.old, what.revoked)
    return _answer(diff(old, new).data())


def proved(what: PolicySource) -> Response:
    """Prove isolation over the whole finite domain of a document, or show the request that breaks it."""
    return _answer(prove(_table(what.source, what.revoked)).data())


def simulated(service: ServiceDep, what: SimulationRequest) -> dict[str, Any]:
    """Decide recorded requests again under a document: what each tenant would lose, and why; exact for what was hit."""
    new = _table(what.source, what.revoked)
    old = _active(service) if what.old is None else _table(what.old, what.revoked)
    with service.reading() as connection, service.reading() as other:
        asked = recorded_requests(connection, since_us=what.since, revision=what.revision)
        some = list(islice(asked, what.requests_max + 1))
        found = simulate(old, new, some[: what.requests_max], recorded_denials(other))
    return {
        "tenants": [change.data(what.block_tokens) for change in found.tenants],
        "unknown_levels": found.unknown_levels,
        "complete": len(some) <= what.requests_max,
    }


def explained(service: ServiceDep, what: PolicyQuestion) -> Response:
    """Why one request is permitted or denied; for a deny, the nearest permit and the term that failed."""
    table = _active(service) if what.source is None else _table(what.source, [])
    levels = table.policy.classifications
    if what.classification not in levels:
        raise ProblemError("invalid", "`classification` is none of the policy's")
    try:
        reader, owner = table.policy.named(what.reader), table.policy.named(what.owner or what.reader)
    except ConfigError as error:
        raise ProblemError("invalid", error.message) from None
    request = Request(
        PolicyAction[what.action.upper()],
        reader,
        owner,
        levels.index(what.classification),
        Scope[what.scope.upper()],
        Via[what.via.upper()],
        service.clock.utc_us() if what.at_us is None else what.at_us,
        what.grant,
    )
    return _answer(explain(table, request).data())


def _table(source: str, revoked: list[str]) -> DecisionTable:
    return compile_policy(policy_of(source), revision=1, revoked=frozenset(revoked))


def policy_of(source: str) -> Policy:
    """The policy of a document; raises `invalid` with every problem where it is refused."""
    policy: Policy = _rejecting(load_policy, source)
    return policy


def _rejecting(load: Any, source: str, **more: Any) -> Any:
    """What `load` makes of a text; raises `invalid` with every problem where it is refused."""
    try:
        return load(source, name=NAME, **more)
    except PolicyRejected as error:
        found = [
            {"at": f"{item.line}:{item.column}", "what": f"{item.code} {item.message}; {item.hint}"[:500]}
            for item in error.problems[:50]
        ]
        raise ProblemError("invalid", "the document is rejected", errors=found) from None


def _active(service: Service) -> DecisionTable:
    try:
        return service.policies_in_effect().the_table(service.policies.released())
    except PolicyError as error:
        raise ProblemError("conflict", f"{error.message}; send the document that is meant") from None


def _answer(data: Any) -> Response:
    return Response(orjson.dumps(data, default=str), media_type="application/json")


def _problem(problem: Problem) -> dict[str, Any]:
    shown = problem._asdict()
    del shown["file"]
    return shown
