"""Operations of doors and of erase epochs: what is raised, who acts by it, and who does not yet.

1. The question after epochs is the acknowledgement, too: who asks with a version acts by it.
"""

from __future__ import annotations

from typing import Annotated, Any

from anyio.to_thread import run_sync

from kvcustody.governance.api.declarations import Declarations
from kvcustody.governance.api.given import CallerDep, ServiceDep
from kvcustody.governance.api.http.long_poll import Wait, long_poll
from kvcustody.governance.api.models.workers import Doors, EpochsModel
from kvcustody.governance.service.access.caller import Caller
from kvcustody.governance.service.access.roles import Permission, Role
from kvcustody.governance.service.operations.operation import Operation
from kvcustody.governance.service.operations.parameters import LARGE, NUMBER, Query


def add_doors(api: Declarations) -> None:
    """Declare the operations."""
    listing = Operation(
        "listDoors", "GET", "/v1/doors", Permission.READ_OPERATIONS, "operations", command="door list"
    )
    api.add(listing, listed, answers=Doors)
    taking = Operation(
        "takeEpochs",
        "GET",
        "/v1/worker/epochs",
        Permission.HAND_IN,
        "worker",
        command="protocol take-epochs",
    )
    api.add(taking, epochs, answers=EpochsModel)


def listed(service: ServiceDep) -> dict[str, Any]:
    """Doors and workers that ask for erase epochs: the version each acts by, and since when it lacks the newest."""
    return {"items": [one._asdict() for one in service.epochs.takers()], "next": None}


async def epochs(
    caller: CallerDep,
    service: ServiceDep,
    known: Annotated[int, Query(ge=0, lt=LARGE, description="The version that it acts by."), NUMBER] = 0,
    floor: Annotated[int, Query(ge=0, lt=LARGE, description="The floor of what it has."), NUMBER] = 0,
    after: Annotated[
        int | None,
        Query(ge=0, lt=LARGE, description="The version that pages go on from, where it is not `known`."),
        NUMBER,
    ] = None,
    wait: Wait = 0,
) -> dict[str, Any]:
    """Erase epochs raised since a version, up to 10,000; held open up to `wait` seconds for news.

    A page after which more follow has no digest. Whoever puts the pages together has the snapshot of the digest.
    """
    await run_sync(service.epochs.heard, caller.name, role_of(caller), known)
    start = known if after is None else after
    return await long_poll(
        service,
        caller,
        wait,
        lambda: _page(service, start),
        lambda answer: (answer["version"], answer["floor"]) != (start, floor),
    )


def role_of(caller: Caller) -> str:
    """`door` for a door before a router, else `worker`."""
    return (Role.DOOR if Role.DOOR in caller.roles else Role.WORKER).value


def _page(service: ServiceDep, start: int) -> dict[str, Any]:
    page = service.epochs.page(after=start)
    return {
        "key": service.epochs.key.hex(),
        "version": page.version,
        "floor": page.floor,
        "digest": page.digest,
        "raised": [[number, tag.hex()] for number, tag in page.raised],
        "at_us": service.clock.utc_us(),
    }
