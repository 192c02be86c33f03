"""The issuers of tenants that a ledger names, from its leaves.

1. The first leaf that gives an issuer the bare ids makes it the home of the ledger; nothing takes them from it again.
2. These are leaves of the system log, whose content is never dropped, and nothing beside them is asked.
"""

from __future__ import annotations

import orjson
from sqlalchemy import Connection, func, select

from kvcustody.audit.evidence.processes.orders import order_leaves
from kvcustody.audit.kinds import BARE
from kvcustody.audit.store.database.signed_orders import SIGNED_LATER
from kvcustody.audit.store.schema.all_tables import has_leaf
from kvcustody.audit.store.schema.ledger import events, tenants
from kvcustody.ids import TenantId
from kvcustody.tenants import SEPARATOR, Issuers

_KIND = "issuer-assigned"
_ASSIGNMENTS = (
    select(func.count()).select_from(events).where(events.c.kind.in_((_KIND, SIGNED_LATER)), has_leaf(events))
)


def known_issuers(connection: Connection) -> Issuers:
    """Return the issuers that the ledger has met, in that order."""
    home, met = "", dict[str, None]()
    for order in order_leaves(connection, _KIND):
        body = orjson.loads(order.leaf)
        if body["tenants"] == BARE and not home:
            home = body["issuer"]
        elif body["tenants"] != BARE:  # a second claim to the bare ids came too late, and is none
            met[body["issuer"]] = None
    return Issuers(home, tuple(one for one in met if one != home))


class RememberedIssuers:
    """`known_issuers` for a process that needs them at each request; thread-safe.

    NOTE: leaves are only ever added. So the answer is that of before while no leaf of these kinds was added, whoever
    added it: the count is asked of the database each time, in the transaction of the reader.
    """

    def __init__(self) -> None:
        self._read = -1, Issuers("", ())

    def known(self, connection: Connection) -> Issuers:
        """Return the issuers that this ledger has met."""
        assignments = connection.scalar(_ASSIGNMENTS) or 0
        counted, issuers = self._read
        if assignments != counted:
            issuers = known_issuers(connection)
            self._read = assignments, issuers
        return issuers


def named_tenant(connection: Connection, name: str, issuers: Issuers | None = None) -> TenantId:
    """Return the tenant name that the given name stands for; raises `ConfigError` if it is ambiguous.

    `issuers`: those of the ledger, where they are known already.
    """
    issuers = known_issuers(connection) if issuers is None else issuers
    if len(issuers.all) < 2 and SEPARATOR not in name:
        return TenantId(name)
    names = [issuers.name(issuer, name) for issuer in issuers.all]
    return issuers.resolve(name, connection.scalars(select(tenants.c.tenant).where(tenants.c.tenant.in_(names))).all())
