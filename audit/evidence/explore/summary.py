"""Counts by facet, in total and over time of the leaves that match a filter, for the explorer page.

1. If a filter uses only tenant, kind, outcome and period, everything that has figures (`counters`) is read from them.
   The figures are exact for the whole hours that the period touches, whatever the size of the ledger. Items of lists
   count each.
2. Actors and grants have no figures, nor has any other filter: those are counted in the `SAMPLE_MAX` newest leaves that
   fit, and `sampled` says of how many. A total is then `exact` where all were seen, else estimated from those.
3. A rule's figure is how many requests it denied, in the log of whoever asked, whichever way they are counted. In a
   sample (rule 2) it is how many leaves name the rule.
4. A period of no more than `_FINE_US` with no more than `FINE_LEAVES_MAX` leaves is counted in its leaves, all of them:
   exact for the period itself, in columns of minutes. What is read is bounded, whatever the size of the ledger.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from sqlalchemy import Connection

from kvcustody.audit.evidence.counters.read_figures import events_by_log, hour_span, hourly_counts, leaves_in
from kvcustody.audit.evidence.explore.by_time import find_by_time
from kvcustody.audit.evidence.query.events import EventFilter, logs_of
from kvcustody.audit.kinds import SYSTEM, log_of, tenant_of
from kvcustody.audit.leaf.change_items import plain_bodies
from kvcustody.audit.project import ASKING, DEFAULT_DENY, DENIED, OUTCOMES
from kvcustody.times import HOUR_US, MINUTE_US

SAMPLE_MAX = 1_000
FINE_LEAVES_MAX = 2_000
_SCAN_MAX = 50_000
_COLUMNS_MAX = 60
_VALUES_MAX = 64
_FINE_US = 4 * HOUR_US
_WIDTHS_MINUTES = (1, 2, 5, 10, 15, 30)
_WIDTHS_HOURS = (1, 2, 3, 6, 12, 24, 48, 7 * 24, 14 * 24, 28 * 24, 91 * 24)
_WIDTHS_US = (
    *(minutes * MINUTE_US for minutes in _WIDTHS_MINUTES),
    *(hours * HOUR_US for hours in _WIDTHS_HOURS),
)
_NONE = "none"  # the name of no log: what is asked for may not be seen
REFUSED = frozenset({"deny", "partial", "failed", "mismatch"})


class FacetValue(NamedTuple):
    """A value and the number of events that have it."""

    value: str
    events: int


class HistogramColumn(NamedTuple):
    """Events of one interval; `refused` are those that were denied, failed or partial."""

    at_us: int
    events: int
    refused: int


class ExplorerSummary(NamedTuple):
    """Facets by name. `counted` facets cover every event; the others cover the `sampled` newest matching leaves."""

    total: int
    exact: bool
    facets: Mapping[str, tuple[FacetValue, ...]]
    counted: frozenset[str]
    sampled: int
    column_us: int
    columns: tuple[HistogramColumn, ...]


def summarize(connection: Connection, wanted: EventFilter) -> ExplorerSummary:
    """Return the summary; `wanted.logs` restricts the visible logs, as in a search."""
    if _by_figures(wanted) and (fine := _fine(connection, wanted)) is not None:
        return fine
    sample = _Sample(connection, wanted)
    if not _by_figures(wanted):
        width, columns = _columns(sample.times, wanted, MINUTE_US)
        facets = {name: _most(found) for name, found in sample.facets.items()}
        total, exact = sample.total(connection, wanted)
        return ExplorerSummary(total, exact, facets, frozenset(), sample.leaves, width, columns)
    log = None if wanted.tenant is None else log_of(wanted.tenant)
    if wanted.logs is not None:
        log = wanted.logs[0] if log is None or log in wanted.logs else _NONE
    by_kind, by_outcome, by_rule = Counter[str](), Counter[str](), Counter[str]()
    times: Counter[tuple[int, bool]] = Counter()
    period = {"since_us": wanted.since_us, "until_us": wanted.until_us}
    total = 0
    for hour_us, kind, outcome, events in hourly_counts(connection, log, **period):
        if kind == DENIED:
            by_rule[outcome] += events
            continue
        of_kind = not wanted.kinds or kind in wanted.kinds
        of_outcome = wanted.outcome is None or outcome == wanted.outcome
        if of_outcome:
            by_kind[kind] += events
        if of_kind:
            by_outcome[outcome] += events
            if of_outcome:
                times[hour_us, outcome in REFUSED] += events
                total += events
    by_log = (
        Counter({str(log): total})
        if wanted.logs is not None
        else events_by_log(connection, kinds=wanted.kinds, outcome=wanted.outcome, **period)
    )
    names = Counter({tenant_of(name): events for name, events in by_log.items() if name != SYSTEM})
    facets = {
        "tenant": _most(names),
        "kind": _most(by_kind),
        "outcome": _most(by_outcome),
        "rule": _most(by_rule),
        "grant": _most(sample.facets["grant"]),
        "actor": _most(sample.facets["actor"]),
    }
    width, columns = _columns(times, wanted, HOUR_US)
    counted = frozenset({"tenant", "kind", "outcome", "rule"})
    return ExplorerSummary(total, True, facets, counted, sample.leaves, width, columns)


def _by_figures(wanted: EventFilter) -> bool:
    """Return whether figures alone can answer the filter; kinds without outcomes of their own cannot be filtered by
    them.
    """
    plain = wanted._replace(logs=None, tenant=None, since_us=None, until_us=None, kinds=(), outcome=None)
    whole = wanted.outcome is None or not wanted.kinds or all(kind in OUTCOMES for kind in wanted.kinds)
    return plain == EventFilter() and whole


def _fine(connection: Connection, wanted: EventFilter) -> ExplorerSummary | None:
    """All leaves of a short period, counted (rule 4); None where it is longer, or has more."""
    since_us = wanted.since_us or 0
    if not _is_short(connection, wanted, since_us):
        return None
    whole = wanted._replace(kinds=(), outcome=None)
    page = find_by_time(connection, whole, limit=FINE_LEAVES_MAX + 1, scan_max=2 * FINE_LEAVES_MAX)
    if page.next is not None or len(page.rows) > FINE_LEAVES_MAX:
        return None
    facets: dict[str, Counter[str]] = {
        name: Counter() for name in ("tenant", "kind", "outcome", "rule", "grant", "actor")
    }
    times: Counter[tuple[int, bool]] = Counter()
    for row in page.rows:
        for body in plain_bodies(row.body):
            if body.get("part", 1) != 1 or body["at_us"] < since_us:
                continue  # counted where it begins; or it waited in a list for others
            outcome = body.get(OUTCOMES.get(body["kind"], ""), "")
            of_kind = not wanted.kinds or body["kind"] in wanted.kinds
            of_outcome = wanted.outcome is None or outcome == wanted.outcome
            for name, value in _values(row.log, body):
                if name != "rule" and (of_kind or name == "kind") and (of_outcome or name == "outcome"):
                    facets[name][value] += 1
            for rule, requests in _denied(row.log, body):
                facets["rule"][rule] += requests
            if of_kind and of_outcome:
                times[int(body["at_us"]) // MINUTE_US * MINUTE_US, outcome in REFUSED] += 1
    width, columns = _columns(times, wanted, MINUTE_US)
    found = {name: _most(values) for name, values in facets.items()}
    leaves = len(page.rows)
    return ExplorerSummary(sum(times.values()), True, found, frozenset(found), leaves, width, columns)


def _is_short(connection: Connection, wanted: EventFilter, since_us: int) -> bool:
    """Return whether a period is short and, by its hours' figures, has few leaves; empty hours do not count."""
    span = hour_span(connection)
    if span is None:
        return False
    since_us = max(since_us, span[0])
    until_us = span[1] + HOUR_US if wanted.until_us is None else min(wanted.until_us, span[1] + HOUR_US)
    if not 0 < until_us - since_us <= _FINE_US + HOUR_US:
        return False
    of_all = wanted.tenant is None and wanted.logs is None
    logs = [None] if of_all else [log.id for log in logs_of(connection, wanted)]
    leaves = sum(leaves_in(connection, log, since_us=since_us, until_us=until_us) for log in logs)
    touched_us = -(-until_us // HOUR_US) * HOUR_US - since_us // HOUR_US * HOUR_US
    return leaves * (until_us - since_us) <= FINE_LEAVES_MAX * touched_us


class _Sample:
    """The newest leaves that fit, counted (rule 2)."""

    def __init__(self, connection: Connection, wanted: EventFilter) -> None:
        page = find_by_time(connection, wanted, limit=SAMPLE_MAX, scan_max=_SCAN_MAX)
        self.leaves = len(page.rows)
        self._ended = page.next is None
        self._scanned = max(page.scanned, self.leaves)
        self.facets: dict[str, Counter[str]] = defaultdict(Counter)
        self.times: Counter[tuple[int, bool]] = Counter()
        self._last_us = min((row.at_us for row in page.rows), default=0)
        for row in page.rows:
            refused = False
            for body in plain_bodies(row.body):
                for name, value in _values(row.log, body):
                    self.facets[name][value] += 1
                refused = refused or any(body.get(key) in REFUSED for key in ("effect", "outcome", "result"))
            self.times[row.at_us // MINUTE_US * MINUTE_US, refused] += 1

    def total(self, connection: Connection, wanted: EventFilter) -> tuple[int, bool]:
        """Return the number of matching leaves: exact if all were seen, else estimated from the share examined."""
        if self._ended:
            return self.leaves, True
        logs = [log.id for log in logs_of(connection, wanted)]
        of_all = wanted.tenant is None and wanted.logs is None
        every = sum(
            leaves_in(connection, log, since_us=wanted.since_us or 0, until_us=wanted.until_us)
            for log in ([None] if of_all else logs)
        )
        return max(self.leaves, every * self.leaves // max(1, self._scanned)), False


def _denied(log: str, body: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the rules that denied requests, with counts (rule 3)."""
    asking = body.get(ASKING.get(body["kind"], ""))
    if asking is not None and body["effect"] == "deny" and log == log_of(asking):
        yield body.get("rule") or (*body["reasons"], DEFAULT_DENY)[0], int(body.get("requests", 1))


def _values(log: str, body: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    if log != SYSTEM:
        yield "tenant", tenant_of(log)
    yield "kind", str(body["kind"])
    outcome = body.get(OUTCOMES.get(body["kind"], "outcome"))
    for name, value in (("outcome", outcome), ("actor", body.get("actor")), ("rule", body.get("rule"))):
        if isinstance(value, str) and value:
            yield name, value
    reasons = body.get("reasons")
    if isinstance(reasons, list) and reasons and not body.get("rule"):
        yield "rule", str(reasons[0])
    for value in {body.get("grant"), body.get("via")}:
        if isinstance(value, str) and value:
            yield "grant", value


def _most(found: Counter[str]) -> tuple[FacetValue, ...]:
    """Return the values that most events have, without those of no event."""
    return tuple(FacetValue(value, events) for value, events in found.most_common(_VALUES_MAX) if value and events > 0)


def _columns(
    times: Mapping[tuple[int, bool], int], wanted: EventFilter, finest_us: int
) -> tuple[int, tuple[HistogramColumn, ...]]:
    """Columns as narrow as makes no more than `_COLUMNS_MAX` of the period, or of what there is."""
    if not times:
        return finest_us, ()
    moments = [at_us for at_us, _ in times]
    first = max(min(moments), (wanted.since_us or 0) // finest_us * finest_us)
    last = max(moments) + finest_us
    widths = [width for width in _WIDTHS_US if width >= finest_us]
    width = next((width for width in widths if last - first // width * width <= width * _COLUMNS_MAX), widths[-1])
    first = first // width * width
    if last - first > width * _COLUMNS_MAX:
        first = (last - 1) // width * width - (_COLUMNS_MAX - 1) * width
    sums: Counter[tuple[int, bool]] = Counter()
    for (at_us, refused), events in times.items():
        sums[at_us // width * width, refused] += events
    return width, tuple(
        HistogramColumn(at, sums[at, False] + sums[at, True], sums[at, True]) for at in range(first, last, width)
    )
