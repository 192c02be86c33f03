"""Whose tenants a ledger names, as its leaves say.

1. The first leaf that gives an issuer the bare ids makes it the home of the ledger; nothing takes them from it again.
2. These are leaves of the system log, whose content is never dropped, and nothing beside them is asked.
"""

from __future__ import annotations

import orjson
from sqlalchemy import Connection, select

from kvcustody.audit.evidence.processes.orders import order_leaves
from kvcustody.audit.kinds import BARE
from kvcustody.audit.store.schema.ledger import tenants
from kvcustody.ids import TenantId
from kvcustody.tenants import SEPARATOR, Issuers

_KIND = "issuer-assigned"


def known_issuers(connection: Connection) -> Issuers:
    """The issuers that the ledger has met, in the order in which it met them."""
    home, met = "", dict[str, None]()
    for order in order_leaves(connection, _KIND):
        body = orjson.loads(order.leaf)
        if body["tenants"] == BARE and not home:
            home = body["issuer"]
        elif body["tenants"] != BARE:  # a second claim to the bare ids came too late, and is none
            met[body["issuer"]] = None
    return Issuers(home, tuple(one for one in met if one != home))


def named_tenant(connection: Connection, said: str) -> TenantId:
    """The name of the tenant that somebody calls so; raises `ConfigError` where that could be several."""
    issuers = known_issuers(connection)
    if len(issuers.all) < 2 and SEPARATOR not in said:
        return TenantId(said)
    names = [issuers.name(issuer, said) for issuer in issuers.all]
    return issuers.resolve(
        said, connection.scalars(select(tenants.c.tenant).where(tenants.c.tenant.in_(names))).all()
    )
