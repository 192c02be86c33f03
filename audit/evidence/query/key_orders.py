"""Orders of key custodians on tenants' keys, as the ledger has them: what every worker is to follow.

1. An order names a tenant and a moment, never an epoch: whoever follows it twice, late, or beside another process on
   the same keys, does nothing more. What a worker did with its keys is on record by itself (`KeyEvent`).
2. Orders are leaves of the system log, whose content is never dropped: a worker that was away for years finds them.
"""

from __future__ import annotations

from typing import NamedTuple

import orjson
from sqlalchemy import Connection

from kvcustody.audit.evidence.processes.orders import order_leaves

ROTATE, DESTROY = "rotate", "destroy"
_KIND = "keys-ordered"


class KeyOrder(NamedTuple):
    """A tenant's key epochs from before `at_us` (UTC µs) get a successor (`rotate`) or end, with one (`destroy`)."""

    order: int
    at_us: int
    tenant: str
    action: str
    actor: str
    reason: str


def key_orders(connection: Connection) -> list[KeyOrder]:
    """Every order, oldest first; `order` is its place in the system log."""
    return [_order(idx, at_us, orjson.loads(leaf)) for idx, at_us, leaf in order_leaves(connection, _KIND)]


def _order(idx: int, at_us: int, body: dict[str, str]) -> KeyOrder:
    return KeyOrder(idx, at_us, body["of_tenant"], body["action"], body["actor"], body["reason"])
