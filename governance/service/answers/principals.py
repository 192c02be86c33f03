"""Principals and their keys: everybody who was ever enrolled, and the keys of one."""

from __future__ import annotations

from functools import partial
from typing import Any

from kvcustody.governance.service.access.caller import Caller
from kvcustody.governance.service.access.principal_table import (
    PrincipalRecord,
    find_principal,
    keys_of_principal,
    principals_after,
)
from kvcustody.governance.service.access.roles import Permission
from kvcustody.governance.service.operations.desk import Desk, ReadOperation
from kvcustody.governance.service.operations.operation import Operation
from kvcustody.governance.service.page_cursor import CursorBinding
from kvcustody.governance.service.problem_details import not_found

_read = partial(Operation, method="GET", tag="principals")


def shown(found: PrincipalRecord) -> dict[str, Any]:
    """A principal as it is shown."""
    return found._asdict() | {"roles": sorted(found.roles)}


def _principals(
    desk: Desk, caller: Caller, *, cursor: str | None = None, limit: int | None = None
) -> dict[str, Any]:
    """All of them where no limit is said."""
    question = CursorBinding("listPrincipals", caller.name, {})
    position = desk.cursors.read(question, cursor)
    after = str(position[0]) if position else ""
    with desk.reading() as connection:
        found, more = principals_after(connection, after, limit)
    following = desk.cursors.write(question, [found[-1].name]) if more else None
    return {"items": [shown(item) for item in found], "next": following}


def _keys(desk: Desk, caller: Caller, *, name: str) -> dict[str, Any]:
    with desk.reading() as connection:
        if find_principal(connection, name) is None:
            raise not_found()
        return {"items": [key._asdict() for key in keys_of_principal(connection, name, desk.clock.utc_us())]}


LIST_PRINCIPALS = ReadOperation(
    _read("listPrincipals", path="/v1/principals", action=Permission.ENROL, also=(Permission.MANAGE_KEYS,)),
    _principals,
)
LIST_KEYS = ReadOperation(
    _read(
        "listKeys",
        path="/v1/principals/{name}/keys",
        action=Permission.MANAGE_KEYS,
        also=(Permission.ENROL,),
    ),
    _keys,
)
