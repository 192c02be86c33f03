"""Operations on tiers: what was decided about moving copies, by tier, one by one, and for one request.

1. Every answer is about the tenant that the caller's credential names, or about the one asked for by those who see
   all. Those who run a fleet see all: what is shown names tenants and requests, and neither subjects nor leaves.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from fastapi import Query

from kvcustody.audit.evidence.copies.transfers import (
    ExplainedRequest,
    TransferFilter,
    explain_request,
    has_tiers,
    tier_summaries,
    transfers,
)
from kvcustody.governance.api.http.route_builder import Api, CallerDep, ServiceDep
from kvcustody.governance.api.models.base import LARGE
from kvcustody.governance.api.models.custody import ExplainedTransfers, Tiers, Transfers, facts
from kvcustody.governance.api.parameters import Cursor as CursorText
from kvcustody.governance.api.parameters import Limit, Since, Tenant, Until
from kvcustody.governance.service.access.caller import Caller
from kvcustody.governance.service.access.roles import Permission, Reach
from kvcustody.governance.service.operations.operation import Operation
from kvcustody.governance.service.page_cursor import CursorBinding
from kvcustody.governance.service.problem_details import ProblemError
from kvcustody.governance.service.service import Service
from kvcustody.times import DAY_US

Residency = Annotated[
    int | None,
    Query(
        ge=0,
        lt=LARGE,
        description="The request that blocks were restored for; 0: stores, which are for none.",
    ),
]
Incarnation = Annotated[
    str | None, Query(pattern=r"^[0-9a-f]{32}$", description="Of this process alone: 32 hexadecimal digits.")
]
_read = partial(
    Operation,
    method="GET",
    action=Permission.READ_CUSTODY,
    tag="custody",
    recorded=True,
    also=(Permission.READ_OPERATIONS,),
)


def add_tiers(api: Api) -> None:
    """Declare the operations."""
    api.add(_read("listTiers", path="/v1/tiers"), tiers, answers=Tiers, problems=("not-found",))
    paged = ("not-found", "cursor-invalid")
    api.add(
        _read("listTransfers", path="/v1/tiers/transfers"),
        listed_transfers,
        answers=Transfers,
        problems=paged,
    )
    one = _read("explainTransfers", path="/v1/tiers/requests")
    api.add(one, explained, answers=ExplainedTransfers, problems=("not-found",))


def tiers(
    caller: CallerDep, service: ServiceDep, tenant: Tenant = None, since: Since = None, until: Until = None
) -> dict[str, Any]:
    """Every tier: its copies of all time, and what was decided in [since, until), the last day by default."""
    mine = whose(caller, service, tenant)
    until_us = service.clock.utc_us() if until is None else until
    since_us = max(0, until_us - DAY_US) if since is None else since
    if since_us >= until_us:
        raise ProblemError("invalid", "`since` is not before `until`")
    with service.reading(mine) as connection:
        found = tier_summaries(connection, since_us, until_us, tenant=mine)
    items = [row._asdict() | {"transfers": facts(row.transfers)} for row in found]
    return {"items": items, "since_us": since_us, "until_us": until_us}


def listed_transfers(
    caller: CallerDep,
    service: ServiceDep,
    tenant: Tenant = None,
    tier: Annotated[
        str | None, Query(pattern=r"^(host|nvme|remote)$", description="Only about this tier.")
    ] = None,
    action: Annotated[
        str | None, Query(pattern=r"^(store|restore)$", description="Only stores, or only restores.")
    ] = None,
    choice: Annotated[
        str | None,
        Query(
            pattern=r"^(transfer|recompute|none)$",
            description="`transfer`: what was moved; `recompute`: what was left to be computed.",
        ),
    ] = None,
    outcome: Annotated[
        str | None,
        Query(
            pattern=r"^(done|partial|failed|none)$",
            description="What came of it; `none`: nothing was to be moved.",
        ),
    ] = None,
    residency: Residency = None,
    incarnation: Incarnation = None,
    since: Since = None,
    until: Until = None,
    cursor: CursorText = None,
    limit: Limit = 100,
) -> dict[str, Any]:
    """Decisions about moving copies, newest first: what either way was predicted to take, and what it took."""
    mine = whose(caller, service, tenant)
    wanted = TransferFilter(mine, tier, action, choice, outcome, residency, incarnation, since, until)
    question = CursorBinding("listTransfers", caller.name, wanted._asdict())
    position = service.cursors.read(question, cursor)
    after = None if position is None else (int(position[0]), int(position[1]), int(position[2]))
    with service.reading(mine) as connection:
        found = transfers(connection, wanted, after=after, limit=limit)
    following = None if found.next is None else service.cursors.write(question, list(found.next))
    return {"items": facts(found.transfers), "next": following}


def explained(
    caller: CallerDep,
    service: ServiceDep,
    residency: Annotated[
        int, Query(ge=0, lt=LARGE, description="The request's number, as its process counts.", examples=[17])
    ],
    incarnation: Incarnation = None,
    worker: Annotated[
        str | None,
        Query(min_length=1, max_length=128, description="Of this worker's processes alone."),
    ] = None,
    tenant: Tenant = None,
) -> dict[str, Any]:
    """What was decided about restoring blocks for one request: found where, predicted, chosen, measured."""
    mine = whose(caller, service, tenant)
    with service.reading(mine) as connection:
        found = explain_request(connection, residency, incarnation=incarnation, worker=worker, tenant=mine)
        known = has_tiers(connection, tenant=mine)
    return {"items": [_request(one) for one in found], "any_tier": known}


def whose(caller: Caller, service: Service, tenant: str | None) -> str | None:
    """The tenant to answer about, by whichever of the actions the caller has (rule 1)."""
    reads = caller.reach(Permission.READ_CUSTODY) is not Reach.NONE
    return service.tenant_of(caller, Permission.READ_CUSTODY if reads else Permission.READ_OPERATIONS, tenant)


def _request(one: ExplainedRequest) -> dict[str, Any]:
    return one._asdict() | {"decisions": facts(one.decisions)}
