"""For whom policies are enforced, from signed leaves only: the newest order, the processes' modes, and forecasts.

1. The newest order counts, until its end; it is a leaf of the system log, whose content is never dropped.
2. A process enforces from its start on, for everybody, but where a later leaf of its own says for whom not.
3. What was monitored is no allowed reuse: its figures are kept apart, and a period in which a process monitored
   anybody qualifies whatever is said of that time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import orjson
from sqlalchemy import Connection, select

from kvcustody.audit.evidence.counters.read_figures import monitored_figures
from kvcustody.audit.evidence.processes.marked_processes import marked_processes
from kvcustody.audit.evidence.processes.orders import OrderLeaf, order_leaves
from kvcustody.audit.evidence.processes.work_periods import Body, at_work, life_leaves, work_periods
from kvcustody.audit.kinds import SYSTEM
from kvcustody.audit.store.schema.all_tables import has_leaf
from kvcustody.audit.store.schema.ledger import events, incarnations, logs
from kvcustody.times import SECOND_US, iso

MONITOR, CANARY, ENFORCE = "monitor", "canary", "enforce"
UNREADABLE = "unreadable"  # no mode: what an order has whose leaf is not one
ORDERED, CHANGED = "enforcement-ordered", "enforcement-changed"
_NAMED = 4


class EnforcementOrder(NamedTuple):
    """An order: for whom workers enforce their policy until `until_us` (UTC µs), and whom they monitor.

    `share_millionths` of the sessions of tenants that are not named are enforced in a `canary`; `seed` chooses them.
    """

    order: int
    at_us: int
    mode: str
    tenants: tuple[str, ...]
    share_millionths: int
    seed: str
    until_us: int
    actor: str
    reason: str


class WorkerEnforcement(NamedTuple):
    """The enforcement of a process at work since `since_us` (UTC). `refused`: why it does not follow its newest
    order.
    """

    worker: str
    incarnation: str
    mode: str
    tenants: tuple[str, ...]
    share_millionths: int
    until_us: int
    since_us: int
    order: int
    actor: str
    refused: str


class MonitoredPeriod(NamedTuple):
    """A period in which a process monitored somebody, from `from_us` until `until_us` (UTC; None: it still does)."""

    worker: str
    incarnation: str
    mode: str
    tenants: tuple[str, ...]
    share_millionths: int
    from_us: int
    until_us: int | None
    order: int
    actor: str


class NotEnforced(NamedTuple):
    """A period in which some process did not enforce its policy for everybody (UTC; `until_us` None: still).

    `monitor`: for nobody. `canary`: for some. It names no worker, no tenant and nobody who ordered it.
    """

    from_us: int
    until_us: int | None
    mode: str


class Forecast(NamedTuple):
    """A tenant's monitored requests and prompt tokens.

    `refused_tokens` of `reused_tokens` the policy would not have let them read; enforced, `forecast_tokens` would have
    been found, so that `prefilled_again_tokens` would have been computed.
    """

    tenant: str
    requests: int
    would_deny: int
    prompt_tokens: int
    reused_tokens: int
    refused_tokens: int
    forecast_tokens: int

    @property
    def prefilled_again_tokens(self) -> int:
        """The prompt tokens that enforcement would have prefilled again."""
        return max(0, self.reused_tokens - self.forecast_tokens)

    def data(self) -> dict[str, Any]:
        """Return the forecast as JSON data."""
        return self._asdict() | {"prefilled_again_tokens": self.prefilled_again_tokens}


def newest_order(connection: Connection) -> EnforcementOrder | None:
    """Return the order that counts (rule 1), expired or not; None if there is none."""
    return next(map(_order, order_leaves(connection, ORDERED, newest=True)), None)


def order_at(connection: Connection, number: int) -> EnforcementOrder | None:
    """Return the order at this place of the system log; None if there is none."""
    return next(map(_order, order_leaves(connection, ORDERED, idx=number)), None)


def _order(row: OrderLeaf) -> EnforcementOrder:
    """Return the order in a leaf. A leaf that is not an order gives one without a mode, which its followers refuse."""
    try:
        body = orjson.loads(row.leaf)
        return EnforcementOrder(
            row.idx,
            row.at_us,
            str(body["mode"]),
            tuple(map(str, body["tenants"])),
            int(body["share_millionths"]),
            str(body["seed"]),
            int(body["until_seconds"]) * SECOND_US,
            str(body["actor"]),
            str(body["reason"]),
        )
    except (LookupError, TypeError, ValueError):
        return EnforcementOrder(row.idx, row.at_us, UNREADABLE, (), 0, "", 0, "", "")


def worker_enforcement(connection: Connection) -> tuple[WorkerEnforcement, ...]:
    """Return the enforcement of each process at work, by the worker's name; raises like `life_leaves`."""
    leaves = [leaf.body for leaf in life_leaves(connection)]
    marked = {one.incarnation for one in marked_processes(leaves) if one.origin in ("replayed", "generated")}
    periods = {life: period for life, period in work_periods(leaves).items() if life not in marked}
    now: dict[str, WorkerEnforcement] = {
        life: WorkerEnforcement(period.worker, life, ENFORCE, (), 0, 0, period.started_us, 0, "", "")
        for life, period in periods.items()
    }
    for life, at_us, body in _changes(connection):
        if life in now:
            now[life] = WorkerEnforcement(
                now[life].worker,
                life,
                body["mode"],
                tuple(body["tenants"]),
                body["share_millionths"],
                body["until_seconds"] * SECOND_US,
                at_us,
                body["order"],
                body["actor"],
                body["refused"],
            )
    return tuple(sorted((now[life] for life in at_work(periods) if life in now), key=lambda one: one.worker))


def monitored_periods(
    connection: Connection, since_us: int = 0, until_us: int | None = None, tenant: str | None = None
) -> tuple[MonitoredPeriod, ...]:
    """Return the periods in which anybody was monitored, in order of time (rule 3); raises like `life_leaves`.

    Empty: the policy was enforced for everybody. With `tenant`: for everybody of it.
    """
    if not any(body["mode"] != ENFORCE for _, _, body in _changes(connection)):
        return ()
    lives = [leaf.body for leaf in life_leaves(connection)]
    changes = [body | {"at_us": at_us, "incarnation": life} for life, at_us, body in _changes(connection)]
    found = monitored_in([*lives, *changes], since_us, until_us)
    return tuple(one for one in found if one.mode == MONITOR or tenant is None or tenant not in one.tenants)


def unnamed(periods: Iterable[MonitoredPeriod]) -> tuple[NotEnforced, ...]:
    """Return the periods for readers who may not know of others: merged where they touch, with the less strict mode."""
    spans: list[NotEnforced] = []
    for one in sorted(periods, key=lambda one: one.from_us):
        last = spans[-1] if spans else None
        if last is None or (last.until_us is not None and one.from_us > last.until_us):
            spans.append(NotEnforced(one.from_us, one.until_us, one.mode))
            continue
        ends = None if None in (last.until_us, one.until_us) else max(last.until_us or 0, one.until_us or 0)
        spans[-1] = NotEnforced(last.from_us, ends, MONITOR if MONITOR in (last.mode, one.mode) else CANARY)
    return tuple(spans)


def monitored_in(bodies: Iterable[Body], since_us: int = 0, until_us: int | None = None) -> tuple[MonitoredPeriod, ...]:
    """Return the monitored periods from leaves about processes and their changes; other leaves are ignored."""
    every = list(bodies)
    periods = work_periods(every)
    monitored: list[MonitoredPeriod] = []
    last: dict[str, MonitoredPeriod] = {}
    changes = (body for body in every if body["kind"] == CHANGED)
    for body in sorted(changes, key=lambda body: (int(body["at_us"]), int(body["sequence"]))):
        life, at_us = str(body["incarnation"]), int(body["at_us"])
        before = last.pop(life, None)
        if before is not None:
            monitored.append(before._replace(until_us=at_us))
        if body["mode"] != ENFORCE and life in periods:
            last[life] = MonitoredPeriod(
                periods[life].worker,
                life,
                body["mode"],
                tuple(body["tenants"]),
                body["share_millionths"],
                at_us,
                None,
                body["order"],
                body["actor"],
            )
    monitored += [one._replace(until_us=periods[one.incarnation].ended_us) for one in last.values()]
    inside = (
        one
        for one in monitored
        if (until_us is None or one.from_us < until_us) and (one.until_us is None or one.until_us > since_us)
    )
    return tuple(sorted(inside, key=lambda one: (one.from_us, one.worker)))


def qualification(periods: Sequence[MonitoredPeriod]) -> str:
    """Return the sentence that qualifies reports of a time in which somebody was monitored (rule 3); empty for none."""
    if not periods:
        return ""
    named = "; ".join(
        f"{one.worker} {one.incarnation[:12]} ({one.mode}, {enforced_for(one)}, {iso(one.from_us)} to "
        f"{'now' if one.until_us is None else iso(one.until_us)}, ordered by {one.actor})"
        for one in periods[:_NAMED]
    )
    more = f"; and {len(periods) - _NAMED:,} more" if len(periods) > _NAMED else ""
    text = (
        f"The policy was not enforced for everybody in this period: {named}{more}. What was monitored then was reused "
        "under the engine's own keys, across domains too, and is no reuse that the policy permitted."
    )
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def enforced_for(period: MonitoredPeriod) -> str:
    """Return for whom a policy was enforced while others were monitored."""
    parts = list(period.tenants[:_NAMED])
    if len(period.tenants) > _NAMED:
        parts.append(f"{len(period.tenants) - _NAMED:,} more")
    if period.share_millionths:
        parts.append(f"{period.share_millionths / 10_000:g} % of the sessions of the others")
    return f"enforced for {', '.join(parts) or 'nobody'}"


def unnamed_qualification(spans: Sequence[NotEnforced]) -> str:
    """Return the qualification for one tenant, or for a document that others than operators read."""
    if not spans:
        return ""
    listed = "; ".join(
        f"{iso(one.from_us)} to {'now' if one.until_us is None else iso(one.until_us)}"
        f" ({'for nobody' if one.mode == MONITOR else 'for some requests'})"
        for one in spans[:_NAMED]
    )
    more = f"; and {len(spans) - _NAMED:,} more" if len(spans) > _NAMED else ""
    return (
        f"The policy was not enforced for every request in this period: {listed}{more}. Reuse then went on under the "
        "engine's own keys, across domains too; coverage counts what was due then as ever."
    )


def forecasts(
    connection: Connection, *, since_us: int | None = None, until_us: int | None = None
) -> tuple[Forecast, ...]:
    """Return the monitored requests and tokens by tenant, in whole hours of a period."""
    forecasts = []
    for tenant, figures in sorted(monitored_figures(connection, since_us=since_us, until_us=until_us).items()):
        forecasts.append(
            Forecast(
                tenant,
                figures["events"],
                figures["would_deny"],
                figures["prompt_tokens"],
                figures["reused_tokens"],
                figures["refused_tokens"],
                figures["forecast_tokens"],
            )
        )
    return tuple(forecasts)


def _changes(connection: Connection) -> Iterable[tuple[str, int, dict[str, Any]]]:
    query = (
        select(incarnations.c.uuid, events.c.at_us, events.c.leaf)
        .join(logs, logs.c.id == events.c.log)
        .join(incarnations, incarnations.c.id == events.c.incarnation)
        .where(logs.c.name == SYSTEM, events.c.kind == CHANGED, has_leaf(events))
        .order_by(events.c.at_us, events.c.idx)
    )
    for row in connection.execute(query):
        yield row.uuid, row.at_us, orjson.loads(bytes(row.leaf))
