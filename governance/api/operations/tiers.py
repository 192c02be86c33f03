"""Operations on transfer decisions: by tier, one by one, and for one request.

1. Every answer is about the tenant that the caller's credential names, or about the one asked for by those who see
   all. Those who run a fleet see all: what is shown names tenants and requests, and neither subjects nor leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Annotated, Any

from kvcustody.audit.evidence.copies.transfers import (
    ExplainedRequest,
    TierSummary,
    TransferFilter,
    TransferSummary,
    explain_request,
    has_tiers,
    tier_summaries,
    transfers,
)
from kvcustody.governance.api.declarations import Declarations
from kvcustody.governance.api.given import CallerDep, DeskDep
from kvcustody.governance.api.models.custody import ExplainedTransfers, Tiers, Transfers
from kvcustody.governance.service.access.caller import Caller
from kvcustody.governance.service.access.roles import Permission, Reach
from kvcustody.governance.service.operations.desk import Desk, last_day_or
from kvcustody.governance.service.operations.operation import Operation
from kvcustody.governance.service.operations.parameter_groups import ParameterGroup, grouped
from kvcustody.governance.service.operations.parameters import (
    LARGE,
    NUMBER,
    Cursor,
    Incarnation,
    Limit,
    Order,
    PageOrder,
    Query,
    Since,
    Tenant,
    Until,
)
from kvcustody.governance.service.page_cursor import CursorBinding

_read = partial(
    Operation,
    method="GET",
    action=Permission.READ_CUSTODY,
    tag="custody",
    recorded=True,
    also=(Permission.READ_OPERATIONS,),
)


def add_tiers(api: Declarations) -> None:
    """Declare the operations."""
    api.add(
        _read("listTiers", path="/v1/tiers", command="tier list"),
        tiers,
        answers=Tiers,
        problems=("not-found",),
    )
    api.add(
        _read("listTransfers", path="/v1/tiers/transfers", command="tier transfers"),
        listed_transfers,
        answers=Transfers,
        problems=("not-found", "cursor-invalid"),
    )
    api.add(
        _read("explainTransfers", path="/v1/tiers/requests", command="tier explain"),
        explained,
        answers=ExplainedTransfers,
        problems=("not-found",),
    )


def whose(desk: Desk, caller: Caller, tenant: str | None) -> str | None:
    """Return the tenant to answer about, by the permission that the caller has (rule 1)."""
    reads = caller.reach(Permission.READ_CUSTODY) is not Reach.NONE
    return desk.tenant_of(caller, Permission.READ_CUSTODY if reads else Permission.READ_OPERATIONS, tenant)


def tiers(
    desk: DeskDep, caller: CallerDep, *, tenant: Tenant = None, since: Since = None, until: Until = None
) -> dict[str, Any]:
    """List every tier: its copies since it began, and the decisions in [since, until), by default the last day."""
    mine = whose(desk, caller, tenant)
    since_us, until_us = last_day_or(desk, since, until)
    with desk.reading(mine) as connection:
        found = tier_summaries(connection, since_us, until_us, tenant=mine)
    return {"items": tier_items(found), "since_us": since_us, "until_us": until_us}


def tier_items(found: Sequence[TierSummary]) -> list[dict[str, Any]]:
    """Convert tiers to the API's form."""
    return [row._asdict() | {"transfers": [_with_sizes(one) for one in row.transfers]} for row in found]


def _with_sizes(totals: TransferSummary) -> dict[str, Any]:
    return totals._asdict() | {"sizes": [one._asdict() for one in totals.sizes]}


@dataclass(frozen=True, kw_only=True)
class TransferQuery(ParameterGroup):
    """Conditions on decisions."""

    tenant: Tenant = None
    tier: Annotated[str | None, Query(pattern=r"^(host|nvme|remote)$", description="Only this tier.")] = None
    action: Annotated[str | None, Query(pattern=r"^(store|restore)$", description="Only stores, or only restores.")] = (
        None
    )
    choice: Annotated[
        str | None,
        Query(
            pattern=r"^(transfer|recompute|none)$",
            description="`transfer` for moved blocks, `recompute` for blocks left to be computed.",
        ),
    ] = None
    outcome: Annotated[
        str | None,
        Query(
            pattern=r"^(done|partial|failed|none)$",
            description="The result; `none` where nothing was to be moved.",
        ),
    ] = None
    residency: Annotated[
        int | None,
        Query(
            ge=0,
            lt=LARGE,
            description="The request that blocks were restored for; 0 for stores, which belong to no request.",
        ),
        NUMBER,
    ] = None
    incarnation: Incarnation = None
    since: Since = None
    until: Until = None

    def filter(self, mine: str | None) -> TransferFilter:
        """The filter, of one tenant or (None) of all."""
        asked = {field.name: getattr(self, field.name) for field in fields(self)}
        times = {f"{name}_us": asked.pop(name) for name in ("since", "until")}
        return TransferFilter(**asked | times | {"tenant": mine})


@grouped
def listed_transfers(
    desk: DeskDep,
    caller: CallerDep,
    *,
    sought: TransferQuery,
    order: Order = PageOrder.NEWEST,
    cursor: Cursor = None,
    limit: Limit = 100,
) -> dict[str, Any]:
    """List decisions about moving copies: predicted time of either way, and the time taken."""
    mine = whose(desk, caller, sought.tenant)
    wanted = sought.filter(mine)
    question = CursorBinding("listTransfers", caller.name, wanted._asdict() | {"order": str(order)})
    position = desk.cursors.read(question, cursor)
    after = None if position is None else (int(position[0]), int(position[1]), int(position[2]))
    with desk.reading(mine) as connection:
        found = transfers(connection, wanted, after=after, limit=limit, newest=order is PageOrder.NEWEST)
    following = None if found.next is None else desk.cursors.write(question, list(found.next))
    return {"items": [one._asdict() for one in found.transfers], "next": following}


def explained(
    desk: DeskDep,
    caller: CallerDep,
    *,
    residency: Annotated[
        int,
        Query(ge=0, lt=LARGE, description="The request's number within its process.", examples=[17]),
        NUMBER,
    ],
    incarnation: Incarnation = None,
    worker: Annotated[
        str | None,
        Query(min_length=1, max_length=128, description="Only processes of this worker."),
    ] = None,
    tenant: Tenant = None,
) -> dict[str, Any]:
    """Explain the restore decisions of one request: where copies were, predicted, chosen, measured."""
    mine = whose(desk, caller, tenant)
    with desk.reading(mine) as connection:
        found = explain_request(connection, residency, incarnation=incarnation, worker=worker, tenant=mine)
        known = has_tiers(connection, tenant=mine)
    return {"items": [_request(one) for one in found], "any_tier": known}


def _request(one: ExplainedRequest) -> dict[str, Any]:
    return one._asdict() | {"decisions": [each._asdict() for each in one.decisions]}
