"""Decisions: denials with their rules, and the reasons of any decision.

1. Denials come from the ledger through the API's own function, or from a short period's cells: a tenant sees those of
   its own requests.
2. A rule's text is the policy's: who may not read the policy sees the rule's id alone.
"""

from __future__ import annotations

from typing import Any

import orjson
from pydantic import ValidationError
from starlette.responses import Response

from kvcustody.console.web.charts import PagePeriod, Timeline, denied, period_of
from kvcustody.console.web.form_errors import refused
from kvcustody.console.web.page_request import PageRequest
from kvcustody.console.web.pages.overview import sees_all
from kvcustody.console.web.pages.policy_status import known_policy
from kvcustody.console.web.source_listing import lines_of
from kvcustody.governance.api.models.policies import PolicyQuestion
from kvcustody.governance.api.operations import custody as custody_api
from kvcustody.governance.api.operations import policy_workbench as workbench
from kvcustody.governance.service.access.roles import Permission
from kvcustody.governance.service.problem_details import not_found
from kvcustody.policies.document.model import Grant, Policy, Rule, SegmentRule, TenantGroup
from kvcustody.tenants import issuers_of

_PAGE = 100
_ASKED = ("reader", "owner", "classification", "action", "scope", "via", "grant")
_Declared = Rule | Grant | SegmentRule | TenantGroup
CHOICES = {
    "action": ("reuse", "admit", "publish", "retain", "offload", "export", "administer"),
    "scope": ("tenant", "session", "subject", "group", "public"),
    "via": ("own", "grant", "segment"),
}
DEFAULT_DENY = "default-deny"


def show(visit: PageRequest) -> Response:
    """Return denials by reader, owner and rule, and for policy testers the explanation of any request."""
    reads, tests = visit.may(Permission.READ_CUSTODY), visit.may(Permission.WRITE_POLICY)
    if not reads:
        visit.caller.must(Permission.WRITE_POLICY)
    tenant = visit.text("tenant")
    denials = chart = None
    period = period_of(visit)
    if reads:
        mine = visit.service.tenant_of(visit.caller, Permission.READ_CUSTODY, tenant)
        with visit.service.reading(mine) as connection:
            times = Timeline.of(visit, connection, period, mine)
            chart = denied(connection, times)
        visit.record("consoleDecisions", tenant)
        denials = _short(times, period) or visit.ask(
            custody_api.denials, tenant, period.since_us, period.until_us, visit.text("cursor", 1024), _PAGE
        )
    known, why = known_policy(visit.service.policies_in_effect()) if tests else (None, "")
    policy = None if known is None else known.policy
    return visit.page(
        "audit/decisions.html",
        "Decisions",
        denials=denials,
        chart=chart,
        period=period,
        tenant=tenant,
        all_tenants=reads and sees_all(visit),
        tests=tests,
        reads_policy=visit.may(Permission.READ_POLICY),
        policy=policy,
        why=why,
        names=[] if policy is None else [issuers_of(policy.issuers).full(one.id) for one in policy.tenants],
        choices=CHOICES,
        explained=_explained(visit) if policy is not None and visit.text("reader") else None,
    )


def _short(times: Timeline, period: PagePeriod) -> dict[str, Any] | None:
    """Return the denials of exactly a short period; None where it is long, or one page does not show them all."""
    if times.cells is None:
        return None
    denials = times.cells.denials(period.since_us, period.until_us)
    return {"items": [row._asdict() for row in denials], "next": None} if len(denials) <= _PAGE else None


def rule(visit: PageRequest) -> Response:
    """Return a rule, grant or segment as the deciding revision declares it."""
    visit.caller.must(Permission.READ_POLICY)
    id_, number = visit.text("id"), visit.number("revision")
    if id_ is None or number is None:
        raise not_found()
    proposal, released = _revision(visit, number)
    line = 0 if proposal is None else _line_of(proposal, id_)
    return visit.page(
        "policy/rule.html",
        f"Rule {id_}",
        id=id_,
        number=number,
        found=proposal,
        line=line,
        released=released,
        lines=[] if proposal is None else lines_of(proposal.source, target=line)[max(0, line - 4) : line + 5],
        default_deny=id_ == DEFAULT_DENY,
    )


def _revision(visit: PageRequest, number: int) -> tuple[Policy | None, bool]:
    """Return a revision's policy and whether it is the release's; otherwise one from a file that workers run."""
    effect, state = visit.service.policies_in_effect(), visit.service.policies.released()
    for one in effect.policies:
        if one.revision == number and not one.released and one.policy is not None:
            return one.policy, False
    proposal = None if state is None else state.proposals.get(number)
    return (None, False) if proposal is None else (proposal.policy, True)


def _line_of(policy: Policy, id_: str) -> int:
    """Return the line that declares an id; 0 where none does."""
    declared: tuple[_Declared, ...] = (*policy.rules, *policy.grants, *policy.segments, *policy.groups)
    marks = {item.id: item.mark.line for item in declared}
    return marks.get(id_, marks.get(id_.partition("~")[0], 0))


def _explained(visit: PageRequest) -> dict[str, Any]:
    asked = {name: visit.text(name, 160) for name in _ASKED}
    try:
        what = PolicyQuestion(**{name: value for name, value in asked.items() if value is not None})  # type: ignore[arg-type]
    except ValidationError as error:
        raise refused(error) from None
    answer: dict[str, Any] = orjson.loads(visit.ask(workbench.explained, what).body)
    return answer
