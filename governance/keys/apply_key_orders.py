"""Carries out a custodian's key orders on a worker: later epochs, and the end of earlier ones.

- Following the same orders again changes nothing: an epoch is older than the order's moment or it is not.
- An order holds for the one tenant of that name. Owners that this keyring never had are not made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from kvcustody.audit.evidence.query.key_orders import DESTROY, ROTATE
from kvcustody.errors import KeyringError
from kvcustody.governance.identity.domain_spec import KeyOwner
from kvcustody.governance.keys.keyring import KeyFact, Keyring
from kvcustody.logger import get_logger

_log = get_logger(__name__)


class OrderedKeys(NamedTuple):
    """An order: a tenant's epochs from before `before_us` (UTC µs) get a successor, or end with one (`action`)."""

    tenant: str
    action: str
    before_us: int


def newest(orders: Iterable[OrderedKeys]) -> tuple[OrderedKeys, ...]:
    """Return the last order of each kind for each tenant; it includes what the earlier ones asked for.

    An order of no known kind is logged and passed over.
    """
    newest_by_key: dict[tuple[str, str], OrderedKeys] = {}
    for order in orders:
        if order.action not in (ROTATE, DESTROY):
            _log.error("an order on keys cannot be read", tenant=order.tenant, action=order.action)
            continue
        key = (order.tenant, order.action)
        if key not in newest_by_key or newest_by_key[key].before_us < order.before_us:
            newest_by_key[key] = order
    return tuple(newest_by_key[key] for key in sorted(newest_by_key))


def apply_key_orders(
    keyring: Keyring, orders: Iterable[OrderedKeys], name: Callable[[KeyOwner], str]
) -> dict[KeyOwner, list[KeyFact]]:
    """Rotate and destroy as the orders say; returns the acts by owner. `name`: returns the name of an owner's
    tenant.
    """
    keyring.refresh()
    done: dict[KeyOwner, list[KeyFact]] = {}
    for order in orders:
        for owner in keyring.owners():
            if owner.kind == "tenant" and name(owner) == order.tenant:
                done.setdefault(owner, []).extend(_for_owner(keyring, owner, order))
    return {owner: facts for owner, facts in done.items() if facts}


def _for_owner(keyring: Keyring, owner: KeyOwner, order: OrderedKeys) -> list[KeyFact]:
    assert order.action in (ROTATE, DESTROY), order.action
    fact = keyring.rotate_older(owner, order.before_us)
    facts = [] if fact is None else [fact]
    if order.action == DESTROY:
        for epoch in keyring.epochs_before(owner, order.before_us):
            try:
                facts.append(keyring.destroy(owner, epoch).fact)
            except KeyringError:
                if epoch in keyring.epochs(owner):  # else another process of these keys was quicker
                    raise
    return facts
