"""The first page: isolation's proof, deletion coverage, overdue work, the ledger's health, and who holds what.

Beside it the inbox: what waits for whoever looks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from starlette.responses import Response

from kvcustody.audit.evidence.counters.hourly_coverage import RecentCoverage, recent
from kvcustody.audit.evidence.counters.read_figures import tenant_totals
from kvcustody.audit.evidence.erasure.requests_and_answers import read_standings, requests
from kvcustody.audit.tlog.witness.status import WitnessStatus, witness_status
from kvcustody.console.render.time_chart import TimeChart
from kvcustody.console.web import charts
from kvcustody.console.web.charts import CoverageOverTime, PagePeriod, Timeline, period_of
from kvcustody.console.web.page_request import PageRequest
from kvcustody.console.web.pages.policy_status import policy_status
from kvcustody.governance.api.operations import custody as custody_api
from kvcustody.governance.api.operations import health as health_api
from kvcustody.governance.service.access.roles import Permission, Reach


def show(visit: PageRequest) -> Response:
    """Return everything that the caller's roles permit, each in its own part."""
    visit.record("consoleOverview")
    sees = visit.may(Permission.READ_CUSTODY)
    policy = visit.may(Permission.READ_POLICY)
    effect = visit.service.policies_in_effect()
    chosen = period_of(visit)
    day = _over_time(visit, chosen) if sees else None
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
        period=chosen,
        day=day,
        sparks={} if day is None else _sparks(day),
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


class _OverTime(NamedTuple):
    """A period over time; `custody` is None, and `why` says so, where what is held is not known."""

    custody: TimeChart | None
    hits: TimeChart
    avoided: TimeChart
    denied: TimeChart
    coverage: TimeChart
    held: int
    requests_denied: int
    found_share: tuple[int, int]
    why: str = ""


def _over_time(visit: PageRequest, chosen: PagePeriod) -> _OverTime:
    mine = visit.service.tenant_of(visit.caller, Permission.READ_CUSTODY, None)
    with visit.service.reading(mine) as connection:
        totals = tenant_totals(connection, tenant=mine)
        known = {row.tenant: row.held_blocks for row in totals if row.held_blocks is not None}
        times = Timeline.of(visit, connection, chosen, mine)
        held = None if len(known) < len(totals) else charts.custody(connection, times, known)
        hits, refused = charts.hits(connection, times), charts.denied(connection, times)
        avoided = charts.avoided(connection, times)
        covered, _ = CoverageOverTime.of(visit, connection, chosen, times).charts()
    attached, written = (sum(value or 0 for value in series.values) for series in hits.series)
    denied = sum(int(value or 0) for series in refused.series for value in series.values)
    why = "" if held is not None else "unknown while a process with lost leaves runs (see its gaps)"
    return _OverTime(
        held,
        hits,
        avoided,
        refused,
        covered,
        sum(known.values()),
        denied,
        (int(attached), int(attached + written)),
        why,
    )


def _sparks(day: _OverTime) -> dict[str, Sequence[float | None]]:
    """Return the values of the tiles' sparklines by tile, one for each bucket."""
    covered, rest = (series.values for series in day.coverage.series)
    found, computed = (series.values for series in day.hits.series)
    return {
        "coverage": [_share(part, other) for part, other in zip(covered, rest, strict=True)],
        "hits": [_share(part, other) for part, other in zip(found, computed, strict=True)],
        "denied": _added(day.denied),
        "held": [] if day.custody is None else _added(day.custody),
    }


def _share(part: float | None, rest: float | None) -> float | None:
    return None if part is None or rest is None or not part + rest else part / (part + rest)


def _added(chart: TimeChart) -> list[float | None]:
    columns = zip(*(series.values for series in chart.series), strict=True)
    return [
        None if all(value is None for value in column) else sum(value or 0 for value in column) for column in columns
    ]


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
