"""Operations of the policy workbench: validate, lint, test, diff, prove, simulate, explain.

They change and keep nothing. Each is a task of `service.policy_work`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from kvcustody.errors import PolicyError
from kvcustody.governance.api.declarations import Declarations
from kvcustody.governance.api.given import ServiceDep
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
from kvcustody.governance.service.operations.answer import Content
from kvcustody.governance.service.operations.operation import Operation
from kvcustody.governance.service.problem_details import ProblemError
from kvcustody.governance.service.processes import policy_tasks as tasks
from kvcustody.governance.service.processes.policy_tasks import Compiled, Draft, Question
from kvcustody.policies.document.model import Action as PolicyAction
from kvcustody.policies.document.model import Policy, Scope, Via
from kvcustody.policies.document.problems import PolicyRejected, Problem
from kvcustody.policies.reading.load_policy import load_policy
from kvcustody.policies.table.decision_table import DecisionTable

if TYPE_CHECKING:
    from kvcustody.governance.service.service import Service

NAME = "policy"
_work = partial(Operation, method="POST", action=Permission.WRITE_POLICY, tag="policies")


def add_workbench(api: Declarations) -> None:
    """Declare the operations."""
    api.add(
        _work("validatePolicy", path="/v1/policies:validate", command="workbench validate"),
        validated,
        answers=ValidationModel,
    )
    costly = ("policy-too-costly",)
    api.add(
        _work("lintPolicy", path="/v1/policies:lint", command="workbench lint"),
        linted,
        answers=ValidationModel,
        problems=costly,
    )
    api.add(
        _work("testPolicy", path="/v1/policies:test", command="workbench test"),
        tested,
        answers=WorkbenchAnswer,
        problems=costly,
    )
    api.add(
        _work("diffPolicy", path="/v1/policies:diff", command="workbench diff"),
        compared,
        answers=WorkbenchAnswer,
        problems=("conflict", *costly),
    )
    api.add(
        _work("provePolicy", path="/v1/policies:prove", command="workbench prove"),
        proved,
        answers=WorkbenchAnswer,
        problems=costly,
    )
    simulating = _work("simulatePolicy", path="/v1/policies:simulate", command="workbench simulate")
    api.add(simulating, simulated, answers=Simulated, problems=("conflict", *costly))
    api.add(
        _work("explainDecision", path="/v1/decisions:explain", command="workbench explain"),
        explained,
        answers=WorkbenchAnswer,
        problems=("conflict", *costly),
    )


def validated(service: ServiceDep, what: PolicySource) -> dict[str, Any]:
    """List the problems of a document with line, column, code and remedy; nothing is guessed or repaired."""
    found = service.policy_work.call(tasks.validated, Draft(what.source))
    problems = [_problem(problem) for problem in found.problems]
    return {"sound": found.sound, "digest": found.digest, "problems": problems, "omitted": found.omitted}


def linted(service: ServiceDep, what: PolicySource) -> dict[str, Any]:
    """List probable mistakes in a valid document: rules without effect, grants that end, names that look alike.

    Also tiers that none of the workers that run has.
    """
    tiers = tiers_at_work(one.status for one in service.fleet.running())
    with _rejecting():
        digest, found = service.policy_work.call(tasks.linted, _draft(what), service.clock.utc_us(), tiers)
    problems = [_problem(problem) for problem in found]
    return {"sound": True, "digest": digest, "problems": problems, "omitted": 0}


def tested(service: ServiceDep, what: CasesRequest) -> Content:
    """Run cases against a document: each result, and the rules that no case reached."""
    more = tasks.weight_of(what.cases)
    return _answer(service, tasks.tested, Draft(what.source), what.cases, NAME, more=more)


def compared(service: ServiceDep, what: PolicyPair) -> Content:
    """Compare a document's decisions with another's, or the one in effect: cells, openings, obligations."""
    return _answer(service, tasks.compared, _old(service, what), _draft(what))


def proved(service: ServiceDep, what: PolicySource) -> Content:
    """Prove isolation over the whole finite domain of a document, or show a request that breaks it."""
    return _answer(service, tasks.proved, _draft(what))


def simulated(service: ServiceDep, what: SimulationRequest) -> dict[str, Any]:
    """Decide recorded requests again under a document: what each tenant would lose, and why; exact for hits."""
    with service.reading() as connection, service.reading() as other:
        asked = recorded_requests(connection, since_us=what.since, revision=what.revision)
        some = list(islice(asked, what.requests_max + 1))
        denials = list(recorded_denials(other))
    given = (_old(service, what), _draft(what), some[: what.requests_max], denials)
    with _rejecting():
        found = service.policy_work.call(tasks.simulated, *given, more=len(some))
    return {
        "tenants": [change.data(what.block_tokens) for change in found.tenants],
        "unknown_levels": found.unknown_levels,
        "complete": len(some) <= what.requests_max,
    }


def explained(service: ServiceDep, what: PolicyQuestion) -> Content:
    """Explain why one request is permitted or denied; for a denial, the nearest permit and the failed term."""
    asked = Question(
        PolicyAction[what.action.upper()],
        what.reader,
        what.owner or what.reader,
        what.classification,
        Scope[what.scope.upper()],
        Via[what.via.upper()],
        service.clock.utc_us() if what.at_us is None else what.at_us,
        what.grant,
    )
    given = _active(service) if what.source is None else Draft(what.source)
    return _answer(service, tasks.explained, given, asked)


def _draft(what: PolicySource | PolicyPair) -> Draft:
    return Draft(what.source, revoked=frozenset(what.revoked))


def _old(service: Service, what: PolicyPair) -> Compiled:
    """What a document is compared with: another, or what is in effect."""
    if what.old is None:
        return _active(service)
    return Draft(what.old, revoked=frozenset(what.revoked))


def policy_of(source: str) -> Policy:
    """Return the policy of a document; raises `invalid` with every problem."""
    with _rejecting():
        return load_policy(source, name=NAME)


@contextmanager
def _rejecting() -> Iterator[None]:
    """Raise `invalid` with every problem where a document is refused."""
    try:
        yield
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
        raise ProblemError("conflict", f"{error.message}; send exactly one document") from None


def _answer(service: Service, task: Callable[..., Any], *given: Any, more: int = 0) -> Content:
    with _rejecting():
        body = service.policy_work.answer(task, *given, more=more)
    return Content(body)


def _problem(problem: Problem) -> dict[str, Any]:
    shown = problem._asdict()
    del shown["file"]
    return shown
