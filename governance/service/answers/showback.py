"""What tenants had of the cache in a period, and which prefixes were worth keeping."""

from __future__ import annotations

from functools import partial
from typing import Any

from kvcustody.audit.evidence.query.prefix_value import prefix_values
from kvcustody.audit.evidence.query.showback import costs_of, showback
from kvcustody.governance.service.access.caller import Caller
from kvcustody.governance.service.access.roles import Permission
from kvcustody.governance.service.fleet.workers import statuses
from kvcustody.governance.service.operations.desk import Desk, ReadOperation, last_day_or
from kvcustody.governance.service.operations.operation import Operation

_read = partial(Operation, method="GET", action=Permission.READ_OPERATIONS, tag="operations")


def _showback(
    desk: Desk,
    caller: Caller,
    *,
    since: int | None,
    until: int | None,
    tenant: str | None,
) -> dict[str, Any]:
    since_us, until_us = last_day_or(desk, since, until)
    with desk.reading() as connection:
        rows = showback(connection, since_us, until_us, costs_of(statuses(connection)))
    items = [row._asdict() for row in rows if tenant in (None, row.tenant)]
    return {"since_us": since_us, "until_us": until_us, "items": items}


def _prefixes(
    desk: Desk,
    caller: Caller,
    *,
    since: int | None,
    until: int | None,
    tenant: str | None,
    limit: int,
) -> dict[str, Any]:
    since_us, until_us = last_day_or(desk, since, until)
    with desk.reading() as connection:
        costs = costs_of(statuses(connection))
        rows = prefix_values(connection, since_us, until_us, costs, tenant=tenant, limit=limit)
    return {"since_us": since_us, "until_us": until_us, "items": [row._asdict() for row in rows]}


GET_SHOWBACK = ReadOperation(_read("getShowback", path="/v1/showback"), _showback)
LIST_PREFIXES = ReadOperation(_read("listPrefixes", path="/v1/prefixes"), _prefixes)
