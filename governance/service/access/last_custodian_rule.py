"""Whoever may disable principals and revoke their keys does not end the last such principal by oversight.

L1 Counted are those who can ask: enrolled, not disabled, with a key that is valid. Those whom an issuer of tokens keeps
   are not: only the issuer knows them.
L2 Two who end each other at one moment: one of them is refused.
"""

from __future__ import annotations

from sqlalchemy import Connection, select

from kvcustody.audit.schema.service import service_principals
from kvcustody.governance.service.access.principal_table import principal_of, valid_keys
from kvcustody.governance.service.access.roles import Permission, Reach, reach
from kvcustody.governance.service.problem_details import ProblemError


def check_last_custodian(
    connection: Connection, name: str, now_us: int, *, without: str | None = None
) -> None:
    """Raise `conflict` where ending `name`, or its key `without`, would leave nobody who manages keys.

    Call it in the transaction that ends it; a name that manages no keys, or can no longer ask, is nobody's last.
    """
    table = service_principals
    standing = select(table).where(table.c.disabled_us.is_(None)).order_by(table.c.name)
    managers = [
        found.name
        for found in map(principal_of, connection.execute(standing.with_for_update()))
        if reach(found.roles, Permission.MANAGE_KEYS) is not Reach.NONE
    ]
    asking = {manager: set(valid_keys(connection, manager, now_us)) for manager in managers}
    if not asking.get(name):
        return
    left = set() if without is None else asking[name] - {without}
    if without is not None and without not in asking[name]:
        return
    if not left and not any(keys for manager, keys in asking.items() if manager != name):
        raise ProblemError(
            "conflict",
            f"`{name}` is the last who manages keys; enrol another, or say that the last one is meant (`allow_last`)",
        )
