"""Operations on tiers, as requests ask them: `service.answers.tiers` answers."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any

from fastapi import Query

from kvcustody.governance.api.http.route_builder import Api, CallerDep, ServiceDep
from kvcustody.governance.api.models.base import LARGE
from kvcustody.governance.api.models.custody import ExplainedTransfers, Tiers, Transfers
from kvcustody.governance.api.parameters import NUMBER, Limit, Order, PageOrder, Since, Tenant, Until
from kvcustody.governance.api.parameters import Cursor as CursorText
from kvcustody.governance.service.answers.tiers import EXPLAIN_TRANSFERS, LIST_TIERS, LIST_TRANSFERS
from kvcustody.governance.service.operations.parameter_groups import ParameterGroup, grouped

Residency = Annotated[
    int | None,
    NUMBER,
    Query(
        ge=0,
        lt=LARGE,
        description="The request that blocks were restored for; 0: stores, which are for none.",
    ),
]
Incarnation = Annotated[
    str | None, Query(pattern=r"^[0-9a-f]{32}$", description="Of this process alone: 32 hexadecimal digits.")
]


def add_tiers(api: Api) -> None:
    """Declare the operations."""
    api.add(LIST_TIERS.operation, tiers, answers=Tiers, problems=("not-found",))
    paged = ("not-found", "cursor-invalid")
    api.add(LIST_TRANSFERS.operation, listed_transfers, answers=Transfers, problems=paged)
    api.add(EXPLAIN_TRANSFERS.operation, explained, answers=ExplainedTransfers, problems=("not-found",))


def tiers(
    caller: CallerDep, service: ServiceDep, tenant: Tenant = None, since: Since = None, until: Until = None
) -> dict[str, Any]:
    """Every tier: its copies of all time, and what was decided in [since, until), the last day by default."""
    return LIST_TIERS.answer(service, caller, tenant=tenant, since=since, until=until)


@dataclass(frozen=True, kw_only=True)
class TransferQuery(ParameterGroup):
    """Which decisions are listed."""

    tenant: Tenant = None
    tier: Annotated[
        str | None, Query(pattern=r"^(host|nvme|remote)$", description="Only about this tier.")
    ] = None
    action: Annotated[
        str | None, Query(pattern=r"^(store|restore)$", description="Only stores, or only restores.")
    ] = None
    choice: Annotated[
        str | None,
        Query(
            pattern=r"^(transfer|recompute|none)$",
            description="`transfer`: what was moved; `recompute`: what was left to be computed.",
        ),
    ] = None
    outcome: Annotated[
        str | None,
        Query(
            pattern=r"^(done|partial|failed|none)$",
            description="What came of it; `none`: nothing was to be moved.",
        ),
    ] = None
    residency: Residency = None
    incarnation: Incarnation = None
    since: Since = None
    until: Until = None

    def values(self) -> dict[str, Any]:
        """What is asked for, by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@grouped
def listed_transfers(
    *,
    caller: CallerDep,
    service: ServiceDep,
    sought: TransferQuery,
    order: Order = PageOrder.NEWEST,
    cursor: CursorText = None,
    limit: Limit = 100,
) -> dict[str, Any]:
    """Decisions about moving copies: what either way was predicted to take, and what it took."""
    return LIST_TRANSFERS.answer(service, caller, **sought.values(), order=order, cursor=cursor, limit=limit)


def explained(
    caller: CallerDep,
    service: ServiceDep,
    residency: Annotated[
        int,
        NUMBER,
        Query(ge=0, lt=LARGE, description="The request's number, as its process counts.", examples=[17]),
    ],
    incarnation: Incarnation = None,
    worker: Annotated[
        str | None,
        Query(min_length=1, max_length=128, description="Of this worker's processes alone."),
    ] = None,
    tenant: Tenant = None,
) -> dict[str, Any]:
    """What was decided about restoring blocks for one request: found where, predicted, chosen, measured."""
    return EXPLAIN_TRANSFERS.answer(
        service, caller, residency=residency, incarnation=incarnation, worker=worker, tenant=tenant
    )
