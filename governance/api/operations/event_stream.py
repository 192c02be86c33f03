"""The ledger as a stream for security monitoring: pulled, in sealing order, resumable at any time.

1. `next` is always there: asked for with it, the answer goes on where this one ended, without a hole or a double.
   After a restore of the ledger the answer begins again at its first leaf, and says so.
2. A caller of one tenant is given that tenant's log alone.
3. A question that is held open ends as soon as its caller has.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import orjson
from anyio.to_thread import run_sync

from kvcustody.audit.kinds import log_of
from kvcustody.audit.siem.commit_order_reader import (
    START,
    CommitOrderPage,
    Position,
    newest,
    read_in_commit_order,
)
from kvcustody.audit.siem.formats import SiemFormat, open_shape
from kvcustody.governance.api.declarations import Declarations
from kvcustody.governance.api.given import CallerDep, ServiceDep
from kvcustody.governance.api.models.audit import StreamPage
from kvcustody.governance.service.access.caller import Caller
from kvcustody.governance.service.access.roles import Permission
from kvcustody.governance.service.operations.answer import Content
from kvcustody.governance.service.operations.operation import Operation
from kvcustody.governance.service.operations.parameters import NUMBER, Cursor, Limit, Query, Tenant
from kvcustody.governance.service.page_cursor import CursorBinding

if TYPE_CHECKING:
    from kvcustody.governance.service.service import Service

_LOOK_SECONDS = 0.5
_SEAL_SECONDS = 1.0


def add_stream(api: Declarations) -> None:
    """Declare the operation."""
    operation = Operation(
        "streamEvents",
        "GET",
        "/v1/audit/stream",
        Permission.READ_CUSTODY,
        "audit",
        recorded=True,
        exports=True,
        command="audit stream",
    )
    api.add(operation, stream, answers=StreamPage, problems=("not-found", "cursor-invalid"))


async def stream(
    caller: CallerDep,
    service: ServiceDep,
    tenant: Tenant = None,
    shape: Annotated[SiemFormat, Query(description="OCSF, CloudEvents, or the unchanged leaf.")] = SiemFormat.OCSF,
    begin: Annotated[
        str, Query(pattern="^(oldest|newest)$", description="Where a stream without a cursor starts.")
    ] = "oldest",
    wait: Annotated[int, Query(ge=0, le=30, description="Seconds to wait for something new."), NUMBER] = 0,
    cursor: Cursor = None,
    limit: Limit = 100,
) -> Content:
    """Read leaves in sealing order from the cursor on; held open up to `wait` seconds."""
    mine = service.tenant_of(caller, Permission.READ_CUSTODY, tenant)
    binding = CursorBinding("streamEvents", caller.name, {"tenant": mine})
    given = service.cursors.read(binding, cursor)
    at = None if given is None else Position(int(given[0]), int(given[1]), str(given[2]))
    batch = await _news(service, caller, mine, at, begin, limit, wait)
    told_as = open_shape(shape, service.identity)
    answer: dict[str, Any] = {
        "items": [told_as.shape(row) for row in batch.rows],
        "next": service.cursors.write(binding, list(batch.position)),
        "more": batch.more,
        "restarted": batch.restarted,
        "purged": batch.purged,
    }
    return Content(orjson.dumps(answer))


async def _news(
    service: Service,
    caller: Caller,
    tenant: str | None,
    at: Position | None,
    begin: str,
    limit: int,
    wait_seconds: int,
) -> CommitOrderPage:
    ends = time.monotonic() + wait_seconds
    log = None if tenant is None else log_of(tenant)

    def look(before: CommitOrderPage | None = None) -> CommitOrderPage:
        with service.reading(tenant) as connection:
            place = at if before is None else before.position
            start = place or (newest(connection) if begin == "newest" else START)
            found = read_in_commit_order(connection, start, log=log, limit=limit)
        if before is None:
            return found
        purged = found.purged if found.restarted else before.purged + found.purged
        return found._replace(restarted=before.restarted or found.restarted, purged=purged)

    def look_again(before: CommitOrderPage) -> CommitOrderPage:
        found = look(before)
        service.authenticator.check_still_valid(caller)  # last: nothing is given that was read after the end
        return found

    seal = partial(service.writer.seal, _SEAL_SECONDS)  # the order of commits is that of their seals
    if at is None and begin == "newest":
        await run_sync(seal)
    batch = await run_sync(look)
    if not (batch.rows or batch.more):
        await run_sync(seal)
        batch = await run_sync(look, batch)
    while True:
        if batch.rows or batch.more or time.monotonic() >= ends or service.stopping.is_set():
            return batch
        service.writer.seal_soon()
        await asyncio.sleep(_LOOK_SECONDS)
        batch = await run_sync(look_again, batch)
