"""The routes of a report: requests through a door before a router, and their hits at the chosen worker.

1. Counts are of route receipts in the state of the checkpoint; a receipt is of the period of its door's half, or else
   of its worker's.
2. A half that is missing is counted as that, and measures nothing. One that may still come, by the time of the
   checkpoint's newest leaf, is awaited.
3. Receipts are taken one by one, and none is kept. Where a period has more than `HALVES_MAX` halves of doors or of
   workers, the newest are counted, and the facts say from when on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from kvcustody.audit.evidence.routes.route_measures import RouteCounts, RouteSums
from kvcustody.audit.evidence.routes.route_receipts import (
    ReceiptProblem,
    RoutePeriod,
    judge,
    newest_part,
    receipts_in_order,
)
from kvcustody.audit.reports.section import ReportFacts, ReportReading, Section

HALVES_MAX: Final = 1_000_000


class RouteCount(NamedTuple):
    """Requests answered by one worker or made by one tenant: prompt tokens, and hits among them."""

    name: str
    requests: int
    prompt_tokens: int
    found_tokens: int
    promises: int
    stale_misses: int


class RouteProblems(NamedTuple):
    """The number of receipts with one kind of problem."""

    problem: str
    findings: int


class RouteFacts(NamedTuple):
    """All route facts; `since_us`: the start of counting receipts (rule 3)."""

    since_us: int
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
    """Return the facts about routes."""
    whole = RoutePeriod(reading.since_us, reading.until_us, reading.asked.tenant)
    period = newest_part(reading.connection, whole, HALVES_MAX, as_of=reading.state)
    sums, problems, receipts, awaited = RouteSums(), Counter[ReceiptProblem](), 0, 0
    for receipt in receipts_in_order(reading.connection, period, as_of=reading.state):
        sums.take(receipt)
        is_awaited, findings = judge(receipt, now_us=reading.now_us)
        problems.update(finding.problem for finding in findings)
        receipts, awaited = receipts + 1, awaited + is_awaited
    figures = sums.whole
    return RouteFacts(
        period.since_us,
        receipts,
        awaited,
        figures.requests,
        figures.prompt_tokens,
        figures.found_tokens,
        figures.promises,
        figures.promised_tokens,
        figures.kept_tokens,
        figures.stale_misses,
        figures.promised_tokens - figures.kept_tokens,
        _rows(sums.by_worker),
        _rows(sums.by_tenant),
        tuple(RouteProblems(one.value, problems[one]) for one in ReceiptProblem if problems[one]),
    )


def _rows(counts: Mapping[str, RouteCounts]) -> tuple[RouteCount, ...]:
    return tuple(RouteCount(name, *counts[name][:5]) for name in sorted(counts))


def _disagreements(report: ReportFacts) -> Iterator[str]:
    facts = report[SECTION]
    whole = (facts.measured, facts.prompt_tokens, facts.found_tokens, facts.promises, facts.stale_misses)
    for what, counts in (("workers", facts.workers), ("tenants", facts.tenants)):
        sums = [sum(numbers) for numbers in zip(*(one[1:] for one in counts), strict=True)]
        if sums != [*whole] and (counts or any(whole)):
            yield f"routes of {what} do not add up to those of all"
    if not report.asked.since_us <= facts.since_us <= report.asked.until_us:
        yield "routes: receipts are counted from a moment outside the period"
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
