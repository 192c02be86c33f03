"""Policies that processes enforced during a period, including ended processes; from signed leaves only.

1. A process enforces the policy of its last `policy-activated` leaf. For a stage, it also enforces that of a
   `policy-staged` leaf since then. Each counts from the moment of its leaf until the next one or the end of the
   process.
2. What a process took back (`grants-revoked`) is revoked there from that moment on. Of a policy an id counts as revoked
   when every process that enforced it had taken it back, from the last of these moments on.
3. A document proves nothing: whoever uses it compares its digest, as with `running_policies`. A process that replays or
   generates history enforced nothing for anybody, and is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import orjson
from sqlalchemy import Connection, select

from kvcustody.audit.evidence.processes.marked_processes import marked_processes
from kvcustody.audit.evidence.processes.running_policies import POLICY_KINDS, documents_of
from kvcustody.audit.evidence.processes.work_periods import Body, WorkPeriod, life_leaves, work_periods
from kvcustody.audit.kinds import SIMULATED, SYSTEM
from kvcustody.audit.store.database.snapshot import AsOf
from kvcustody.audit.store.schema.all_tables import has_leaf
from kvcustody.audit.store.schema.ledger import events, logs

_NEVER_US = 1 << 62


class PeriodPolicy(NamedTuple):
    """A policy in effect at some time of a period, for everybody or a `stage`. Times are UTC microseconds.

    `until_us` None: a process still enforces it. `revoked_us` has ids that were taken back, with the moment.
    """

    digest: str
    stage: str
    name: str
    revision: int
    since_us: int
    until_us: int | None
    workers: tuple[str, ...]
    document: str
    revoked_us: Mapping[str, int]


class _Span(NamedTuple):
    """A policy on one process."""

    incarnation: str
    digest: str
    stage: str
    name: str
    revision: int
    since_us: int
    until_us: int | None


def policies_in_period(
    bodies: Iterable[Body], periods: Mapping[str, WorkPeriod], since_us: int, until_us: int
) -> tuple[PeriodPolicy, ...]:
    """Return the policies in effect between `since_us` and `until_us` (exclusive), earliest first."""
    every = sorted(
        (body for body in bodies if body["kind"] in POLICY_KINDS and body["incarnation"] in periods),
        key=lambda body: int(body["sequence"]),
    )
    texts = documents_of(every)
    groups: dict[tuple[str, str], list[_Span]] = {}
    for life, period in periods.items():
        for span in _spans(life, period, [body for body in every if body["incarnation"] == life]):
            if span.since_us < until_us and (span.until_us is None or span.until_us > since_us):
                groups.setdefault((span.digest, span.stage), []).append(span)
    revoked = _revoked(every)
    found = [_merged(spans, periods, texts, revoked) for spans in groups.values()]
    return tuple(sorted(found, key=lambda one: (one.since_us, one.digest, one.stage)))


def read_policies_in_period(
    connection: Connection, since_us: int, until_us: int, as_of: AsOf | None = None
) -> tuple[PeriodPolicy, ...]:
    """Return the policies from the system log, current or as of a checkpoint."""
    lives = lives_as_of(connection, as_of)
    query = (
        select(events.c.leaf)
        .join(logs, logs.c.id == events.c.log)
        .where(logs.c.name == SYSTEM, events.c.kind.in_(POLICY_KINDS), has_leaf(events))
        .order_by(events.c.idx)
    )
    if as_of is not None:
        query = query.where(as_of.has(events))
    marked = {one.incarnation for one in marked_processes(lives) if one.origin != SIMULATED}
    periods = {life: one for life, one in work_periods(lives).items() if life not in marked}
    bodies = [orjson.loads(bytes(leaf)) for leaf in connection.scalars(query)]
    return policies_in_period(bodies, periods, since_us, until_us)


def lives_as_of(connection: Connection, as_of: AsOf | None) -> list[Body]:
    """Return the leaves about processes, current or as of a checkpoint; raises like `life_leaves`."""
    every = life_leaves(connection)
    if as_of is None or as_of.whole:
        return [leaf.body for leaf in every]
    system = connection.scalar(select(logs.c.id).where(logs.c.name == SYSTEM)) or 0
    size = as_of.sizes.get(system, 0)
    return [leaf.body for leaf in every if leaf.idx < size]


def _spans(life: str, period: WorkPeriod, mine: list[Body]) -> list[_Span]:
    """What one process enforced, one span after the other (rule 1)."""
    spans: list[_Span] = []
    running: dict[str, _Span] = {}  # by stage; empty for everybody

    def end(stage: str, at_us: int | None) -> None:
        span = running.pop(stage, None)
        if span is not None:
            spans.append(span._replace(until_us=at_us))

    for body in mine:
        if body["kind"] not in ("policy-activated", "policy-staged"):
            continue
        at_us, stage = int(body["at_us"]), str(body.get("stage", ""))
        for name in [name for name in running if name or not stage]:  # a stage ends with what it was beside
            end(name, at_us)
        running[stage] = _Span(life, str(body["digest"]), stage, str(body["name"]), int(body["revision"]), at_us, None)
    for stage in list(running):
        end(stage, period.ended_us)
    return spans


def _revoked(bodies: Iterable[Body]) -> dict[str, dict[str, int]]:
    """When each process took each id back."""
    revoked: dict[str, dict[str, int]] = {}
    for body in bodies:
        if body["kind"] == "grants-revoked":
            mine = revoked.setdefault(str(body["incarnation"]), {})
            for id_ in body["ids"]:
                mine.setdefault(str(id_), int(body["at_us"]))
    return revoked


def _merged(
    spans: list[_Span],
    periods: Mapping[str, WorkPeriod],
    texts: Mapping[tuple[str, str], str],
    revoked: Mapping[str, Mapping[str, int]],
) -> PeriodPolicy:
    first, lives = spans[0], {span.incarnation for span in spans}
    ends = [span.until_us for span in spans]
    by_life = [revoked.get(life, {}) for life in lives]
    ids = {id_ for mine in by_life for id_ in mine}
    taken = {id_: max(mine.get(id_, _NEVER_US) for mine in by_life) for id_ in ids}
    documents = (texts.get((life, first.digest), "") for life in sorted(lives))
    return PeriodPolicy(
        first.digest,
        first.stage,
        first.name,
        first.revision,
        min(span.since_us for span in spans),
        None if None in ends else max(end for end in ends if end is not None),
        tuple(sorted({periods[life].worker for life in lives})),
        next(filter(None, documents), ""),
        {id_: at_us for id_, at_us in sorted(taken.items()) if at_us < _NEVER_US},
    )
