"""Operations on scans that workers are asked for: operators ask, workers take and answer.

S1 A worker sees and answers its own orders alone; another's are absent.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from fastapi import Path, Query

from kvcustody.governance.api.builder import Api, Asking, Serving
from kvcustody.governance.api.held_open import Wait, held_open
from kvcustody.governance.api.models.base import Cursor, Limit
from kvcustody.governance.api.models.scan_orders import (
    ScanDone,
    ScanOrderModel,
    ScanOrderPage,
    ScansOwed,
    ScanWanted,
)
from kvcustody.governance.api.operation import Operation
from kvcustody.governance.service.cursor import Question
from kvcustody.governance.service.roles import Action
from kvcustody.governance.service.service import Service

WorkerName = Annotated[str, Path(min_length=1, max_length=128, examples=["gpu-0"])]
OrderId = Annotated[str, Path(pattern=r"^[0-9a-f]{32}$", examples=["cd" * 16])]
Uuid = Annotated[str, Path(pattern=r"^[0-9a-f]{32}$", examples=["ab" * 16])]
_read = partial(Operation, method="GET", action=Action.READ_OPERATIONS, tag="operations")
_work = partial(Operation, action=Action.WORK, tag="worker")


def add_scan_orders(api: Api) -> None:
    """Declare the operations."""
    place = "/v1/workers/{worker}/scans"
    asking = Operation("orderScan", "POST", place, Action.OPERATE, "operations", keyed=True)
    api.add(asking, order, answers=ScanOrderModel, status=202, problems=("not-found", "conflict"))
    listing = _read("listScanOrders", path="/v1/orphans/orders")
    api.add(listing, listed, answers=ScanOrderPage, problems=("cursor-invalid",))
    one = _read("getScanOrder", path="/v1/orphans/orders/{order}")
    api.add(one, shown, answers=ScanOrderModel, problems=("not-found",))
    api.add(_work("takeScans", "GET", "/v1/worker/scans"), owed, answers=ScansOwed)
    answering = _work("answerScan", "PUT", "/v1/worker/incarnations/{incarnation}/scans/{order}")
    api.add(answering, answer, answers=ScanOrderModel, problems=("not-found", "conflict"))


def order(caller: Asking, service: Serving, worker: WorkerName, what: ScanWanted) -> dict[str, Any]:
    """Ask a worker to scan all of its memory for orphans and to repair what it finds, at its next pull.

    The order that already waits for this worker is given again.
    """
    made = service.scans.orders.ask(worker, caller.name, what.within_seconds)
    service.changed()
    return made._asdict()


def listed(caller: Asking, service: Serving, cursor: Cursor = None, limit: Limit = 100) -> dict[str, Any]:
    """Scans that workers were asked for, newest first, with what became of each."""
    question = Question("listScanOrders", caller.name, {})
    position = service.cursors.read(question, cursor)
    before = None if position is None else (int(position[0]), str(position[1]))
    found = service.scans.orders.listed(before=before, limit=limit + 1)
    following = None
    if len(found) > limit:
        last = found[limit - 1]
        following = service.cursors.write(question, [last.at_us, last.order])
    return {"items": [item._asdict() for item in found[:limit]], "next": following}


def shown(service: Serving, order: OrderId) -> dict[str, Any]:
    """One order; a scan's findings are those of `getScan` by its incarnation and number."""
    return service.scans.orders.get(order)._asdict()


async def owed(
    caller: Asking,
    service: Serving,
    wait: Wait = 0,
    known: Annotated[
        str, Query(max_length=4096, pattern=r"^[a-f0-9,]*$", description="Orders that it has.")
    ] = "",
) -> dict[str, Any]:
    """Scans that this worker is asked for; held open up to `wait` seconds for one that it does not know."""
    taken = set(known.split(","))
    return await held_open(
        service,
        caller,
        wait,
        lambda: _owed(service, caller.name),
        lambda answer: any(item not in taken for item in answer["orders"]),
    )


def answer(
    caller: Asking, service: Serving, incarnation: Uuid, order: OrderId, what: ScanDone
) -> dict[str, Any]:
    """What became of an order. The same answer again changes nothing; a scan must be in the ledger first."""
    service.fleet.sender(caller.name, incarnation)
    orders = service.scans.orders
    return orders.answer(caller.name, order, incarnation, scan=what.scan, reason=what.reason)._asdict()


def _owed(service: Service, worker: str) -> dict[str, Any]:
    return {"orders": [item.order for item in service.scans.orders.owed(worker)]}
