"""Operations of key custodians: the ledger's signing key, subjects' keys, tenants' keys on every worker."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from kvcustody.audit.evidence.query.key_orders import DESTROY, ROTATE
from kvcustody.governance.api.declarations import Declarations
from kvcustody.governance.api.given import CallerDep, ServiceDep
from kvcustody.governance.api.models.key_custody import (
    BreakModel,
    BreakReason,
    HandoverModel,
    KeyOrderModel,
    KeyOrderPage,
    SigningKeys,
    SubjectNamed,
    TenantNamed,
    UnlinkedModel,
)
from kvcustody.governance.service.access.roles import Permission
from kvcustody.governance.service.fleet import key_custody as custody
from kvcustody.governance.service.operations.operation import Operation
from kvcustody.governance.service.operations.pages import page
from kvcustody.governance.service.operations.parameters import Cursor, Limit
from kvcustody.governance.service.page_cursor import CursorBinding

_manage = partial(Operation, action=Permission.MANAGE_KEYS, tag="keys")
_ORDERS = {
    "rotate": (ROTATE, "Order every worker to start a new key epoch for a tenant. Blocks cached under earlier "
                       "epochs are no longer found, and are swept."),
    "destroy": (DESTROY, "Order every worker to destroy a tenant's key epochs and to start a new one: a "
                         "crypto-erasure of everything they sealed. The tenant's earlier segments are misses until "
                         "they are declared again."),
}  # fmt: skip


def add_key_custody(api: Declarations) -> None:
    """Declare the operations."""
    api.add(
        _manage("listSigningKeys", "GET", "/v1/keys/signing", command="keys signing"),
        signing_keys,
        answers=SigningKeys,
    )
    rotating = _manage("rotateSigningKey", "POST", "/v1/keys/signing:rotate", keyed=True, command="keys rotate-signing")
    api.add(rotating, rotate, answers=SigningKeys)
    breaking = _manage(
        "confirmBreak", "POST", "/v1/keys/signing:confirm-break", keyed=True, command="keys confirm-break"
    )
    api.add(breaking, confirm_break, answers=BreakModel, problems=("conflict",))
    unlinking = _manage("unlinkSubject", "POST", "/v1/keys/subjects:destroy", keyed=True, command="subject unlink")
    api.add(unlinking, unlink, answers=UnlinkedModel)
    for verb, (action, says) in _ORDERS.items():
        ordering = _manage(f"{verb}TenantKeys", "POST", f"/v1/keys/tenants:{verb}", keyed=True, command=f"keys {verb}")
        api.add(ordering, _ordering(action, says), answers=KeyOrderModel, status=202, problems=("conflict",))
    listing = _manage("listKeyOrders", "GET", "/v1/keys/tenants", command="keys orders")
    api.add(listing, orders, answers=KeyOrderPage, problems=("cursor-invalid",))


def signing_keys(service: ServiceDep) -> dict[str, Any]:
    """List every public key that signs or signed this ledger, oldest first, with the sizes that each may sign."""
    return {"items": [period._asdict() for period in custody.signing_keys(service)]}


def rotate(caller: CallerDep, service: ServiceDep, how: HandoverModel) -> dict[str, Any]:
    """Hand the ledger over to a new signing key. Both sign the handover, which is on record before the new key signs.

    The old key stays beside the new one, under its id, and may sign nothing newer. Give auditors the new public key.
    """
    return {"items": [period._asdict() for period in custody.hand_over(service, caller.name, how.kind)]}


def confirm_break(caller: CallerDep, service: ServiceDep, what: BreakReason) -> dict[str, int]:
    """Resume signing a ledger that lost signed leaves. Its key signs a statement of the break, which is on record
    first.

    Have workers hand in again what they kept before. The break stays: who holds the lost checkpoint sees it.
    """
    found = custody.confirm_break(service, caller.name, what.reason)
    sizes = {"lost": found.lost.size, "found": found.found.size, "base": found.base.size}
    return sizes | {"replayed": found.replayed}


def unlink(caller: CallerDep, service: ServiceDep, who: SubjectNamed) -> dict[str, Any]:
    """Destroy the link between a subject and its pseudonyms; leaves and proofs stay. The answer says what remains
    where.
    """
    service.check_can_name()
    return custody.unlink(
        service, service.named(who.tenant), who.subject, actor=caller.name, reason=who.reason
    )._asdict()


def orders(caller: CallerDep, service: ServiceDep, cursor: Cursor = None, limit: Limit = 100) -> dict[str, Any]:
    """List orders on tenants' keys, newest first, with their progress; workers' acts are in the tenant's log.

    An order to destroy is complete when no process that was at work then holds any of it. In addition, every key that a
    key service was to destroy must be gone. Without a service, the last reported backup (`keys backup`) must be gone.
    """
    items = [order._asdict() for order in reversed(custody.orders(service))]
    return page(service, CursorBinding("listKeyOrders", caller.name, {}), items, cursor, limit)


def _ordering(action: str, says: str) -> Callable[..., dict[str, Any]]:
    def ordered(caller: CallerDep, service: ServiceDep, what: TenantNamed) -> dict[str, Any]:
        made = custody.order(service, service.named(what.tenant), action, actor=caller.name, reason=what.reason)
        return made._asdict()

    ordered.__doc__ = says
    return ordered
