"""What was decided in a period, by rule, counted when it was decided; and the residencies that follow from it.

1. A counter counts from its first decision to its last. It is of the period where both are; where only a part of it
   is, it is `straddling`, and of both periods that it reaches into. So a period that is split loses nothing: the whole
   is what its parts have, less what straddles between them. Writers end a counter at every whole minute (UTC), so
   that none straddles a bound that is one.
2. A decision about another tenant's blocks is in two logs, and is counted once: in the reader's.
3. What a tenant reuses of its own is no decision of its own: `residencies` has every residency that was opened, by the
   rules that its leaf names.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import orjson
from sqlalchemy import ColumnElement, Connection, Text, and_, case, func, literal, select
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from kvcustody.audit.database.snapshot import AsOf
from kvcustody.audit.report.reconciliation import Balance
from kvcustody.audit.schema.ledger import decisions, events, hit_counters, logs, residencies

MEANINGS = {
    "permit": "a rule, grant or segment allowed it",
    "deny": "a rule forbade it, or none permitted it (default-deny): the requester saw a miss",
    "requests": "how often it was decided, whole within the period",
    "straddling": "decided by a counter that also counts outside the period: up to so many more",
    "residencies": "requests that entered the cache, by the rules that their leaves name",
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
    """Residencies that were opened under these rules, and how many of them attached blocks that were there."""

    rules: str
    residencies: int
    attached: int


class Decided(NamedTuple):
    """All of it; `balances`: totals of residencies from two sides."""

    counts: tuple[DecisionCount, ...]
    residencies: tuple[RuleResidencies, ...]
    balances: tuple[Balance, ...]


class _Reasons(FunctionElement[str]):
    """The rules that the leaf of an opening names, as JSON text."""

    inherit_cache = True
    type = Text()
    name = "reasons_of"


@compiles(_Reasons, "postgresql")
def _postgres_reasons(element: Any, compiler: Any, **how: Any) -> str:
    (leaf,) = (compiler.process(each, **how) for each in element.clauses)
    return f"(convert_from({leaf}, 'UTF8')::json ->> 'reasons')"


@compiles(_Reasons)
def _sqlite_reasons(element: Any, compiler: Any, **how: Any) -> str:
    (leaf,) = (compiler.process(each, **how) for each in element.clauses)
    return f"json_extract(CAST({leaf} AS TEXT), '$.reasons')"


def read_decisions(
    connection: Connection, state: AsOf, since_us: int, until_us: int, *, tenant: str | None
) -> Decided:
    """The decisions and openings of a period; of one tenant, those in its own log."""
    found = _residencies(connection, state, since_us, until_us, tenant)
    return Decided(
        _counts(connection, state, since_us, until_us, tenant),
        found,
        _balances(connection, state, since_us, until_us, tenant, found),
    )


def _counts(
    connection: Connection, state: AsOf, since_us: int, until_us: int, tenant: str | None
) -> tuple[DecisionCount, ...]:
    totals: dict[tuple[str, str, str], list[int]] = {}
    counter, single, log = hit_counters.c, decisions.c, _log(connection, tenant)
    inside = and_(counter.from_us >= since_us, counter.at_us < until_us)
    several = select(
        counter.action,
        counter.effect,
        counter.rule,
        func.sum(case((inside, counter.requests), else_=0)),
        func.sum(case((inside, 0), else_=counter.requests)),
    ).where(state.has(hit_counters), counter.at_us >= since_us, counter.from_us < until_us)
    one = select(single.action, single.effect, single.rule, func.count(), literal(0)).where(
        state.has(decisions), single.at_us >= since_us, single.at_us < until_us
    )
    for query, column in ((several, counter), (one, single)):
        chosen = query if log is None else query.where(column.log == log)
        for *key, whole, straddling in connection.execute(
            chosen.group_by(column.action, column.effect, column.rule)
        ):
            total = totals.setdefault((key[0], key[1], key[2]), [0, 0])
            total[0] += int(whole or 0)
            total[1] += int(straddling or 0)
    return tuple(sorted(DecisionCount(*key, *numbers) for key, numbers in totals.items()))


def _openings(state: AsOf, since_us: int, until_us: int, log: int | None) -> list[ColumnElement[bool]]:
    column = residencies.c
    here = [
        state.has(residencies),
        column.part == 1,
        column.opened_us >= since_us,
        column.opened_us < until_us,
    ]
    return here if log is None else [*here, column.log == log]


def _residencies(
    connection: Connection, state: AsOf, since_us: int, until_us: int, tenant: str | None
) -> tuple[RuleResidencies, ...]:
    """By the rules that leaves name, and whether anything was attached at the opening."""
    log = _log(connection, tenant)
    leaf = and_(
        events.c.log == residencies.c.log,
        events.c.idx == residencies.c.idx,
        events.c.at_us == residencies.c.opened_us,
    )
    rules = _Reasons(events.c.leaf).label("rules")
    query = (
        select(rules, func.count(), func.sum(case((residencies.c.attached_blocks > 0, 1), else_=0)))
        .select_from(residencies.join(events, leaf))
        .where(*_openings(state, since_us, until_us, log))
        .group_by(rules.element)
    )
    made: dict[str, list[int]] = {}
    for text, number, attached in connection.execute(query):
        named = ", ".join(orjson.loads(text or "[]")) or "none named"
        total = made.setdefault(named, [0, 0])
        total[0] += int(number)
        total[1] += int(attached or 0)
    return tuple(RuleResidencies(name, *numbers) for name, numbers in sorted(made.items()))


def _balances(
    connection: Connection,
    state: AsOf,
    since_us: int,
    until_us: int,
    tenant: str | None,
    found: tuple[RuleResidencies, ...],
) -> tuple[Balance, ...]:
    kind = [
        state.has(events),
        events.c.kind == "residency-opened",
        events.c.part == 1,
        events.c.at_us >= since_us,
        events.c.at_us < until_us,
    ]
    log = _log(connection, tenant)
    if log is not None:
        kind.append(events.c.log == log)
    opened = connection.scalar(select(func.count()).select_from(events).where(*kind)) or 0
    return (
        Balance(
            "residencies opened = residencies by the rules that permitted them",
            opened,
            sum(each.residencies for each in found),
            "leaves of openings, counted",
            "rules that openings name, added up",
        ),
    )


def _log(connection: Connection, tenant: str | None) -> int | None:
    if tenant is None:
        return None
    return connection.scalar(select(logs.c.id).where(logs.c.name == f"tenant/{tenant}")) or -1
