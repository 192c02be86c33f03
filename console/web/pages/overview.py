"""The first page: isolation's proof, deletion coverage, overdue work, the ledger's health, and who holds what.

Beside it the inbox: what waits for whoever looks.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from starlette.responses import Response

from kvcustody.audit.evidence.counters.hourly_coverage import RecentCoverage, recent
from kvcustody.audit.evidence.counters.read_figures import tenant_totals
from kvcustody.audit.evidence.erasure.requests_and_answers import read_standings, requests
from kvcustody.audit.tlog.witness.status import WitnessStatus, witness_status
from kvcustody.console.render.charts import Figure, rows, without_values
from kvcustody.console.render.number_format import count
from kvcustody.console.web.page_request import PageRequest
from kvcustody.console.web.pages.policy_status import policy_status
from kvcustody.governance.api.operations import custody as custody_api
from kvcustody.governance.api.operations import health as health_api
from kvcustody.governance.service.access.roles import Permission, Reach

_TENANTS_MAX = 12


def show(visit: PageRequest) -> Response:
    """Return everything that the caller's roles permit, each in its own part."""
    visit.record("consoleOverview")
    sees = visit.may(Permission.READ_CUSTODY)
    policy = visit.may(Permission.READ_POLICY)
    effect = visit.service.policies_in_effect()
    waits = visit.service.inbox(effect)  # which counts every tenant's erasures
    every = {state.value: number for state, number in waits.erasures.items()}
    return visit.page(
        "operate/overview.html",
        "Overview",
        sees_policy=policy,
        effect=policy_status(effect, visit.service.policy_work) if policy else None,
        waits=[item for item in waits.items if item.is_for(visit.caller)],
        erasures=(Counter(every) if sees_all(visit) else erasure_states(visit)) if sees else None,
        coverage=_coverage(visit) if sees else None,
        held=held_by_tenant(visit) if sees else None,
        denials=_denials(visit) if sees else None,
        health=visit.ask(health_api.health) if visit.may(Permission.READ_HEALTH) else None,
        witnesses=witnesses(visit) if visit.may(Permission.READ_HEALTH) else None,
    )


def inbox(visit: PageRequest) -> Response:
    """Return the caller's open tasks, the most urgent first, with the page and command for each."""
    visit.record("consoleInbox")
    return visit.page("operate/inbox.html", "Inbox", items=visit.service.inbox_of(visit.caller))


def witnesses(visit: PageRequest) -> WitnessStatus:
    """Return how far witnesses have seen the ledger."""
    with visit.service.reading() as connection:
        return witness_status(connection, visit.service.clock.utc_us())


def _coverage(visit: PageRequest) -> RecentCoverage:
    """Return the latest judged coverage of the last day; the page shows its age."""
    mine = visit.service.tenant_of(visit.caller, Permission.READ_CUSTODY, None)
    with visit.service.reading(mine) as connection:
        return recent(connection, tenant=mine)


def held_by_tenant(visit: PageRequest) -> Figure:
    """Return blocks allocated and not ended, by tenant: the largest ones, and the rest together."""
    mine = visit.service.tenant_of(visit.caller, Permission.READ_CUSTODY, None)
    with visit.service.reading(mine) as connection:
        totals = tenant_totals(connection, tenant=mine)
    title = "Blocks in custody, by tenant"
    known = [(row.held_blocks, row.tenant) for row in totals if row.held_blocks is not None]
    if len(known) < len(totals):
        return without_values(title, "unknown while a process with lost leaves runs (see its gaps)")
    held = sorted(known, reverse=True)
    first, rest = held[:_TENANTS_MAX], held[_TENANTS_MAX:]
    if rest:
        first.append((sum(blocks for blocks, _ in rest), f"{len(rest)} others"))
    names = [tenant for _, tenant in first]
    values = [[blocks] for blocks, _ in first]
    return rows(
        title,
        names,
        values,
        [("blocks in custody", 1)],
        [count(blocks) for blocks, _ in first],
    )


def _denials(visit: PageRequest) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = visit.ask(custody_api.denials, limit=1000)["items"]
    return sorted(found, key=lambda row: -row["requests"])[:5]


def erasure_states(visit: PageRequest, said: str | None = None) -> Counter[str]:
    """Return how many erasures that the caller sees are in each state."""
    mine = visit.service.tenant_of(visit.caller, Permission.READ_CUSTODY, said)
    periods = visit.service.work_periods()
    with visit.service.reading(mine) as connection:
        asked = requests(connection, tenant=mine)
        standings = read_standings(connection, asked, visit.service.clock.utc_us(), periods)
    return Counter(standing.state.value for standing in standings.values())


def sees_all(visit: PageRequest) -> bool:
    """Return whether the caller sees every tenant's custody."""
    return visit.caller.reach(Permission.READ_CUSTODY) is Reach.ALL
