"""Tiers: each one's content, what moved and how long it took, what was not moved and why, and the cost for serving.

1. Decisions come from the ledger, for a period. A tier's content, and the time that moving took a worker, come from the
   worker's last report, since it began. They are for those who may see operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from starlette.responses import Response

from kvcustody.audit.evidence.copies.transfers import TransferTime, tiers_over_time
from kvcustody.console.render.time_chart import Buckets, ChartSeries, NameChart, TimeChart
from kvcustody.console.tier.wording import lines_of, predicted_text
from kvcustody.console.web.charts import Timeline, from_rows, period_of
from kvcustody.console.web.page_request import PageRequest
from kvcustody.governance.api.operations import tiers as tiers_api
from kvcustody.governance.api.operations.tiers import whose
from kvcustody.governance.observability.serving_summary import TierServing, tier_servings
from kvcustody.governance.service.access.roles import Permission, Reach
from kvcustody.governance.service.problem_details import ProblemError
from kvcustody.times import SECOND_US

_PAGE = 50
_SHOWN_MAX = 10


class _WorkerTier(NamedTuple):
    """A running worker's tier; `busy`: the share of the worker's time that moving took."""

    worker: str
    said: TierServing
    busy: float | None

    @property
    def store_us(self) -> int | None:
        """The mean time to store a block."""
        return _each(self.said.store_seconds, self.said.stored_blocks)

    @property
    def restore_us(self) -> int | None:
        """The mean time to restore a block."""
        return _each(self.said.restore_seconds, self.said.restored_blocks)


def show(visit: PageRequest) -> Response:
    """Return a period's tiers, the workers' tiers, the decisions, and one request's explanation where requested."""
    tenant_name = visit.text("tenant")
    tenant = whose(visit.service, visit.caller, tenant_name)
    visit.record("consoleTiers", tenant=tenant)
    chosen = period_of(visit)
    since_us, until_us = chosen.since_us, chosen.until_us
    with visit.service.reading(tenant) as connection:
        buckets = Timeline.of(visit, connection, chosen, tenant).for_rows(chosen)
        shown = tiers_over_time(connection, since_us, until_us, buckets.width_us, tenant=tenant)
    tiers = tiers_api.tier_items(shown.tiers)
    summed = [row for tier in tiers for row in tier["transfers"]]
    cursor = visit.text("cursor", 1024)
    listed = visit.ask(tiers_api.listed_transfers, tenant=tenant_name, cursor=cursor, limit=_PAGE)
    residency = visit.number("residency")
    return visit.page(
        "operate/tiers.html",
        "Tiers",
        tenant=tenant_name or tenant,
        all_tenants=tenant is None or visit.caller.tenant is None,
        period=chosen,
        tiers=tiers,
        summed=summed,
        sized=[(row, one) for row in summed for one in row["sizes"]],
        restores=_restores(summed),
        net_us=sum(one["net_us"] for one in tiers),
        charts=_over_time(buckets, shown.times),
        predicted=_predicted(summed),
        workers=_workers(visit),
        listed=listed,
        predicted_text=predicted_text,
        residency=residency,
        explained=None if residency is None else _explained(visit, tenant_name, residency),
    )


def _workers(visit: PageRequest) -> list[_WorkerTier] | None:
    """Return running workers' tiers by worker; None for callers who may not see them."""
    if visit.caller.reach(Permission.READ_OPERATIONS) is Reach.NONE:
        return None
    return [
        _WorkerTier(one.worker, tier, tier.busy_share((one.seen_us - one.started_us) / SECOND_US))
        for one in sorted(visit.service.fleet.running(), key=lambda one: one.worker)
        for tier in tier_servings(one.status)
    ]


def _restores(summed: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the sums of the period's restores."""
    mine = [row for row in summed if row["action"] == "restore"]
    sums = {name: sum(row[name] for row in mine) for name in ("transfers", "blocks", "failed", "partial")}
    took_us = sum(row["measured_us"] for row in mine)
    latency = took_us // sums["transfers"] if sums["transfers"] else None
    return sums | {"saved_us": sum(row["saved_us"] for row in mine), "latency_us": latency}


def _over_time(buckets: Buckets, moved: Sequence[TransferTime]) -> list[TimeChart]:
    """Return blocks stored and restored, and the time that restores saved against what stores took."""
    counts = [(f"{row.action}d", row.at_us, row.blocks) for row in moved]
    blocks = from_rows(buckets, "Blocks moved", "count", ("stored", "restored"), counts)
    names = {"restore": "saved by restores", "store": "spent on stores"}
    times = [
        (names[row.action], row.at_us, row.saved_us if row.action == "restore" else row.measured_us) for row in moved
    ]
    return [blocks, from_rows(buckets, "Time saved and spent", "duration", names.values(), times)]


def _predicted(summed: list[dict[str, Any]]) -> NameChart:
    """Return the total predicted and measured time of the transfers that had a prediction."""
    rows = [row for row in summed if row["predicted"]]
    series = (
        ChartSeries("predicted", [row["predicted_us"] for row in rows], 1),
        ChartSeries("measured", [row["predicted_actual_us"] for row in rows], 2),
    )
    return NameChart(
        "Time of transfers, predicted and measured",
        "duration",
        "Transfers",
        [f"{row['tier']}, {row['action']}s" for row in rows],
        series,
        across=True,
        grouped=True,
    )


def _explained(visit: PageRequest, tenant: str | None, residency: int) -> list[dict[str, Any]]:
    """Return the requests of that number, each in words."""
    process = visit.text("incarnation", 32)
    if process is not None and not (len(process) == 32 and set(process) <= set("0123456789abcdef")):
        raise ProblemError("invalid", "`incarnation` is not 32 hexadecimal digits")
    found = visit.ask(tiers_api.explained, residency=residency, incarnation=process, tenant=tenant)["items"]
    return [
        {"incarnation": one["incarnation"], "opened_us": one["opened_us"], "lines": lines_of(one)}
        for one in found[:_SHOWN_MAX]
    ]


def _each(seconds: float, blocks: int) -> int | None:
    return int(seconds * SECOND_US / blocks) if blocks else None
