"""Tiers: each one's content, what moved and how long it took, what was not moved and why, and the cost for serving.

1. Decisions come from the ledger, for a period. A tier's content, and the time that moving took a worker, come from the
   worker's last report, since it began. They are for those who may see operations.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from starlette.responses import Response

from kvcustody.console.render.charts import Figure, rows
from kvcustody.console.render.number_format import count, time_text
from kvcustody.console.tier.wording import lines_of, predicted_text
from kvcustody.console.web.page_request import PageRequest
from kvcustody.governance.api.operations import tiers as tiers_api
from kvcustody.governance.api.operations.tiers import whose
from kvcustody.governance.observability.serving_summary import TierServing, tier_servings
from kvcustody.governance.service.access.roles import Permission, Reach
from kvcustody.governance.service.problem_details import ProblemError
from kvcustody.times import DAY_US, SECOND_US

_PERIODS = {"24h": 1, "7d": 7, "30d": 30}
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
    name = visit.text("period") or "24h"
    until_us = visit.service.clock.utc_us()
    since_us = max(0, until_us - _PERIODS.get(name, 1) * DAY_US)
    tiers = visit.ask(tiers_api.tiers, tenant=tenant_name, since=since_us, until=until_us)["items"]
    summed = [row for tier in tiers for row in tier["transfers"]]
    cursor = visit.text("cursor", 1024)
    listed = visit.ask(tiers_api.listed_transfers, tenant=tenant_name, cursor=cursor, limit=_PAGE)
    residency = visit.number("residency")
    return visit.page(
        "operate/tiers.html",
        "Tiers",
        tenant=tenant_name or tenant,
        all_tenants=tenant is None or visit.caller.tenant is None,
        periods=list(_PERIODS),
        period=name,
        tiers=tiers,
        summed=summed,
        sized=[(row, one) for row in summed for one in row["sizes"]],
        restores=_restores(summed),
        net_us=sum(one["net_us"] for one in tiers),
        moved=_moved(summed),
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


def _moved(summed: list[dict[str, Any]]) -> Figure:
    """Return stored and restored blocks by tier."""
    values = [[row["blocks"], 0] if row["action"] == "store" else [0, row["blocks"]] for row in summed]
    names, notes = [f"{row['tier']}, {row['action']}s" for row in summed], [count(sum(one)) for one in values]
    return rows("Blocks moved, by tier", names, values, [("stored", 1), ("restored", 2)], notes)


def _predicted(summed: list[dict[str, Any]]) -> Figure:
    """Return the total predicted and measured time of the transfers that had a prediction."""
    names: list[str] = []
    values: list[list[int]] = []
    for row in summed:
        if row["predicted"]:
            names += [f"{row['tier']}, {row['action']}s", ""]
            values += [[row["predicted_us"], 0], [0, row["predicted_actual_us"]]]
    notes = [time_text(sum(one)) for one in values]
    legend = [("predicted", 1), ("measured", 2)]
    return rows("Time of transfers, predicted and measured", names, values, legend, notes)


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
