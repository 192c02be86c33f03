"""The routes of a report: requests that came through a door before a router, and what they found where they went.

1. Counts are of route receipts in the state of the checkpoint; a receipt is of the period of its door's half, or else
   of its worker's.
2. A half that is missing is counted as that, and measures nothing. One that may still come, by the time of the
   checkpoint's newest leaf, is awaited.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kvcustody.audit.evidence.routes.route_measures import RouteMeasures, measure
from kvcustody.audit.evidence.routes.route_receipts import (
    ReceiptProblem,
    RoutePeriod,
    by_problem,
    read_routes,
)
from kvcustody.audit.reports.section import ReportFacts, ReportReading, Section


class RouteCount(NamedTuple):
    """Requests that one worker answered, or that one tenant made: prompt tokens, and those found."""

    name: str
    requests: int
    prompt_tokens: int
    found_tokens: int
    promises: int
    stale_misses: int


class RouteProblems(NamedTuple):
    """How many receipts have one thing wrong with them."""

    problem: str
    findings: int


class RouteFacts(NamedTuple):
    """All of it."""

    receipts: int
    awaited: int
    measured: int
    prompt_tokens: int
    found_tokens: int
    promises: int
    promised_tokens: int
    kept_tokens: int
    stale_misses: int
    stale_tokens: int
    workers: tuple[RouteCount, ...]
    tenants: tuple[RouteCount, ...]
    problems: tuple[RouteProblems, ...]


def read_route_facts(reading: ReportReading) -> RouteFacts:
    """The facts about routes."""
    period = RoutePeriod(reading.since_us, reading.until_us, reading.asked.tenant)
    joined = read_routes(reading.connection, period, now_us=reading.now_us, as_of=reading.state)
    made = measure(joined.receipts)
    return RouteFacts(
        len(joined.receipts),
        joined.awaited,
        made.requests,
        made.prompt_tokens,
        made.found_tokens,
        made.promises,
        made.promised_tokens,
        made.kept_tokens,
        made.stale_misses,
        made.stale_tokens,
        *_counts(made),
        tuple(RouteProblems(name, number) for name, number in by_problem(joined.findings).items() if number),
    )


def _counts(made: RouteMeasures) -> tuple[tuple[RouteCount, ...], tuple[RouteCount, ...]]:
    workers = tuple(RouteCount(*one[:6]) for one in made.workers)
    return workers, tuple(RouteCount(*one) for one in made.tenants)


def _disagreements(report: ReportFacts) -> Iterator[str]:
    facts = report[SECTION]
    whole = (facts.measured, facts.prompt_tokens, facts.found_tokens, facts.promises, facts.stale_misses)
    for what, counts in (("workers", facts.workers), ("tenants", facts.tenants)):
        sums = [sum(numbers) for numbers in zip(*(one[1:] for one in counts), strict=True)]
        if sums != [*whole] and (counts or any(whole)):
            yield f"routes of {what} do not add up to those of all"
    if not 0 <= facts.measured <= facts.receipts or not 0 <= facts.found_tokens <= facts.prompt_tokens:
        yield "routes: more was measured, or found, than there was"
    if facts.kept_tokens + facts.stale_tokens != facts.promised_tokens:
        yield "routes: promised tokens are not those that were found and those that were not"
    missed = sum(one.findings for one in facts.problems if one.problem == ReceiptProblem.NOT_FOUND)
    if missed != facts.stale_misses:
        yield "routes: stale-location misses are not the findings about promises"


SECTION: Section[RouteFacts] = Section(
    "routes",
    "Routes",
    read_route_facts,
    order=101,
    about=(
        "where requests through a door before a router went, and what they found there: by worker and by tenant; "
        "receipts that lack a half, promises that were not found"
    ),
    fields={"routes": "route receipts"},
    is_shown=lambda report: bool(report[SECTION].receipts),
    disagreements=_disagreements,
)
