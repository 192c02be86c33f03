"""What was decided about moving copies: by tier, one by one, and for one request.

1. Every answer is about the tenant that the caller's credential names, or about the one asked for by those who see
   all. Those who run a fleet see all: what is shown names tenants and requests, and neither subjects nor leaves.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from kvcustody.audit.evidence.copies.transfers import (
    ExplainedRequest,
    TransferFilter,
    explain_request,
    has_tiers,
    tier_summaries,
    transfers,
)
from kvcustody.governance.service.access.caller import Caller
from kvcustody.governance.service.access.roles import Permission, Reach
from kvcustody.governance.service.operations.desk import Desk, ReadOperation, last_day_or
from kvcustody.governance.service.operations.operation import Operation
from kvcustody.governance.service.page_cursor import CursorBinding

_read = partial(
    Operation,
    method="GET",
    action=Permission.READ_CUSTODY,
    tag="custody",
    recorded=True,
    also=(Permission.READ_OPERATIONS,),
)


def whose(desk: Desk, caller: Caller, tenant: str | None) -> str | None:
    """The tenant to answer about, by whichever of the actions the caller has (rule 1)."""
    reads = caller.reach(Permission.READ_CUSTODY) is not Reach.NONE
    return desk.tenant_of(caller, Permission.READ_CUSTODY if reads else Permission.READ_OPERATIONS, tenant)


def _tiers(
    desk: Desk, caller: Caller, *, tenant: str | None, since: int | None, until: int | None
) -> dict[str, Any]:
    mine = whose(desk, caller, tenant)
    since_us, until_us = last_day_or(desk, since, until)
    with desk.reading(mine) as connection:
        found = tier_summaries(connection, since_us, until_us, tenant=mine)
    items = [row._asdict() | {"transfers": [one._asdict() for one in row.transfers]} for row in found]
    return {"items": items, "since_us": since_us, "until_us": until_us}


def _transfers(
    desk: Desk,
    caller: Caller,
    *,
    tenant: str | None,
    since: int | None,
    until: int | None,
    order: str,
    cursor: str | None,
    limit: int,
    **filters: Any,
) -> dict[str, Any]:
    mine = whose(desk, caller, tenant)
    wanted = TransferFilter(mine, since_us=since, until_us=until, **filters)
    question = CursorBinding("listTransfers", caller.name, wanted._asdict() | {"order": str(order)})
    position = desk.cursors.read(question, cursor)
    after = None if position is None else (int(position[0]), int(position[1]), int(position[2]))
    with desk.reading(mine) as connection:
        found = transfers(connection, wanted, after=after, limit=limit, newest=order == "newest")
    following = None if found.next is None else desk.cursors.write(question, list(found.next))
    return {"items": [one._asdict() for one in found.transfers], "next": following}


def _explained(
    desk: Desk,
    caller: Caller,
    *,
    residency: int,
    incarnation: str | None,
    worker: str | None,
    tenant: str | None,
) -> dict[str, Any]:
    mine = whose(desk, caller, tenant)
    with desk.reading(mine) as connection:
        found = explain_request(connection, residency, incarnation=incarnation, worker=worker, tenant=mine)
        known = has_tiers(connection, tenant=mine)
    return {"items": [_request(one) for one in found], "any_tier": known}


def _request(one: ExplainedRequest) -> dict[str, Any]:
    return one._asdict() | {"decisions": [each._asdict() for each in one.decisions]}


LIST_TIERS = ReadOperation(_read("listTiers", path="/v1/tiers"), _tiers)
LIST_TRANSFERS = ReadOperation(_read("listTransfers", path="/v1/tiers/transfers"), _transfers)
EXPLAIN_TRANSFERS = ReadOperation(_read("explainTransfers", path="/v1/tiers/requests"), _explained)
