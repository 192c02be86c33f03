"""Decisions in a period by rule, counted when they were made; and the resulting residencies.

1. A counter counts from its first decision to its last. It is of the period where both are; where only a part of it
   is, it is `straddling`, and of both periods that it reaches into. So a period that is split loses nothing: the whole
   is what its parts have, less what straddles between them. Writers end a counter at every whole minute (UTC), so
   that none straddles a bound that is one.
2. A decision about another tenant's blocks is in two logs, and is counted once: in the reader's.
3. What a tenant reuses of its own is no decision of its own: `residencies` has every residency that was opened, by the
   rules that its leaf names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import orjson
from sqlalchemy import and_, case, func, literal, select

from kvcustody.audit.evidence.coverage.custody_units import LifeUnits
from kvcustody.audit.evidence.query.showback import CrossedReuse, dated_reuse
from kvcustody.audit.reports.leaf_counts import LeafCounts
from kvcustody.audit.reports.section import Citation, ReportFacts, ReportReading, Section
from kvcustody.audit.reports.sections.population import Balance
from kvcustody.audit.store.schema.leaf_tables import decisions, hit_counters

ANOTHER = "another tenant"
MEANINGS = {
    "permit": "a rule, grant or segment allowed it",
    "deny": "a rule forbade it, or none permitted it (default-deny): the requester saw a miss",
    "requests": "how often it was decided, whole within the period",
    "straddling": "decided by a counter that also counts outside the period: up to so many more",
    "residencies": "requests that entered the cache, by the rules that their leaves name",
    "processing-restricted": "a case restricted the subject's processing, so nothing of theirs was reused",
    "processing-restricted-beside": "another subject of the tenant was restricted: what was tenant-wide before is "
    "withheld, and the tenant's requests reuse what came since",
    "own-scope": "a request reused, or may reuse, what its own tenant, subject or session had left",
}


class DecisionCount(NamedTuple):
    """Decisions by one rule (rule 1)."""

    action: str
    effect: str
    rule: str
    requests: int
    straddling: int


class RuleResidencies(NamedTuple):
    """Residencies opened under these rules, and how many of them attached existing blocks."""

    rules: str
    residencies: int
    attached: int


class Decided(NamedTuple):
    """All decisions; `balances` compare totals of residencies from two sources."""

    counts: tuple[DecisionCount, ...]
    residencies: tuple[RuleResidencies, ...]
    balances: tuple[Balance, ...]
    crossed: tuple[CrossedReuse, ...] = ()


def read_decisions(reading: ReportReading) -> Decided:
    """Return the decisions and openings of a period; for one tenant, those in its own log."""
    tenant = reading.asked.tenant
    bounds = reading.since_us, reading.until_us
    found = _residencies(reading.lives, *bounds, reading.own_log)
    dated = dated_reuse(reading.connection, *bounds, party=tenant, state=reading.state)
    crossed = [row.undated for row in dated]
    if tenant is not None:  # a tenant's own report names no other
        crossed = sorted(_without_others(row, tenant) for row in crossed)
    return Decided(_counts(reading), found.rules, _balances(reading.counts, found), tuple(crossed))


def _without_others(row: CrossedReuse, tenant: str) -> CrossedReuse:
    reader, owner = (name if name == tenant else ANOTHER for name in (row.reader, row.owner))
    return row._replace(reader=reader, owner=owner)


def _counts(reading: ReportReading) -> tuple[DecisionCount, ...]:
    since_us, until_us = reading.since_us, reading.until_us
    totals: dict[tuple[str, str, str], list[int]] = {}
    counter, single = hit_counters.c, decisions.c
    inside = and_(counter.from_us >= since_us, counter.at_us < until_us)
    several = select(
        counter.action,
        counter.effect,
        counter.rule,
        func.sum(case((inside, counter.requests), else_=0)),
        func.sum(case((inside, 0), else_=counter.requests)),
    ).where(reading.of_own_log(hit_counters), counter.at_us >= since_us, counter.from_us < until_us)
    one = select(single.action, single.effect, single.rule, func.count(), literal(0)).where(reading.within(decisions))
    for query, column in ((several, counter), (one, single)):
        grouped = query.group_by(column.action, column.effect, column.rule)
        for *key, whole, straddling in reading.connection.execute(grouped):
            total = totals.setdefault((key[0], key[1], key[2]), [0, 0])
            total[0] += int(whole or 0)
            total[1] += int(straddling or 0)
    return tuple(sorted(DecisionCount(*key, *numbers) for key, numbers in totals.items()))


class _Opened(NamedTuple):
    """Openings of the period by the rules that their leaves name, and further parts of any."""

    rules: tuple[RuleResidencies, ...]
    further_parts: int


def _residencies(lives: Sequence[LifeUnits], since_us: int, until_us: int, log: int | None) -> _Opened:
    """By the rules that leaves name, and whether anything was attached at the opening."""
    totals: dict[str, list[int]] = {}
    further = 0
    for each in lives:
        opened = each.openings
        at_us = opened.column("at_us")
        here = (at_us >= since_us) & (at_us < until_us)
        if log is not None:
            here &= opened.column("log") == log
        first = opened.column("part") == 1
        further += int((here & ~first).sum())
        code, said = opened.codes("rules")
        for is_attached in (False, True):
            which = here & first & ((opened.column("attached_blocks") > 0) == is_attached)
            numbers = np.bincount(code[which], minlength=len(said)).tolist()
            for (text,), number in zip(said, numbers, strict=False):
                if number:
                    total = totals.setdefault(", ".join(orjson.loads(text)) or "none named", [0, 0])
                    total[0] += number
                    total[1] += number * is_attached
    return _Opened(tuple(RuleResidencies(name, *each) for name, each in sorted(totals.items())), further)


def _balances(overview: LeafCounts, opened: _Opened) -> tuple[Balance, ...]:
    leaves = sum(each.in_period for each in overview.counted if each.kind == "residency-opened")
    return (
        Balance(
            "residencies opened = residencies by the rules that their leaves name",
            leaves - opened.further_parts,
            sum(each.residencies for each in opened.rules),
            "leaves of openings, counted",
            "rules that openings name, added up",
        ),
    )


def _disagreements(report: ReportFacts) -> Iterator[str]:
    for balance in report[SECTION].balances:
        if balance.right != sum(item.residencies for item in report[SECTION].residencies):
            yield "residencies by rule are not those of the identity"


SECTION: Section[Decided] = Section(
    "decided",
    "Decisions",
    read_decisions,
    order=129,
    about=(
        "decisions by rule, at their time; what tenants reused of one another; residencies by the rules that "
        "their leaves name"
    ),
    part=None,
    printed_in="activity",
    fields={"decided": "decisions and residencies by rule"},
    cited={
        "decisions": Citation("Decisions", lambda report: bool(report[SECTION].counts or report[SECTION].residencies))
    },
    disagreements=_disagreements,
)
