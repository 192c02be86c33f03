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

from collections import Counter
from typing import NamedTuple

import orjson
from sqlalchemy import ColumnElement, Connection, and_, case, func, literal, select

from kvcustody.audit.database.snapshot import AsOf
from kvcustody.audit.report.reconciliation import Balance
from kvcustody.audit.schema.ledger import decisions, events, hit_counters, logs, residencies

_REASONS, _AFTER, _NOTHING = b'"reasons":', b',"residency":', b'"blocks":0,'
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
    column = events.c
    where = [
        state.has(events),
        column.kind == "residency-opened",
        column.part == 1,
        column.at_us >= since_us,
        column.at_us < until_us,
    ]
    log = _log(connection, tenant)
    if log is not None:
        where.append(column.log == log)
    found: Counter[tuple[bytes, bool]] = Counter()
    # Leaves have their keys in order and quotes in texts escaped: nothing else in one reads like these keys.
    for leaf in connection.scalars(select(column.leaf).where(*where).execution_options(yield_per=10_000)):
        begun = leaf.index(_REASONS) + len(_REASONS)
        found[bytes(leaf[begun : leaf.index(_AFTER, begun)]), _NOTHING not in leaf] += 1
    made: dict[str, list[int]] = {}
    for (text, is_attached), number in found.items():
        total = made.setdefault(", ".join(orjson.loads(text)) or "none named", [0, 0])
        total[0] += number
        total[1] += number * is_attached
    return tuple(RuleResidencies(name, *numbers) for name, numbers in sorted(made.items()))


def _balances(
    connection: Connection,
    state: AsOf,
    since_us: int,
    until_us: int,
    tenant: str | None,
    found: tuple[RuleResidencies, ...],
) -> tuple[Balance, ...]:
    where = _openings(state, since_us, until_us, _log(connection, tenant))
    opened = connection.scalar(select(func.count()).select_from(residencies).where(*where)) or 0
    return (
        Balance(
            "residencies opened = residencies by the rules that permitted them",
            opened,
            sum(each.residencies for each in found),
            "openings, counted",
            "rules that openings name, added up",
        ),
    )


def _log(connection: Connection, tenant: str | None) -> int | None:
    if tenant is None:
        return None
    return connection.scalar(select(logs.c.id).where(logs.c.name == f"tenant/{tenant}")) or -1
