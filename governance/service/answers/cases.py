"""Cases of people's requests: how each stands, and one with everything about it.

1. A tenant's administrator has that tenant's cases alone; the tenant comes from the credential.
2. Why all content is held is for those who see all.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from kvcustody.audit.evidence.cases.case_record import SubjectCase
from kvcustody.audit.evidence.cases.read_cases import read_case, read_cases
from kvcustody.errors import LedgerError
from kvcustody.governance.cases.show_case import summary_of, view_case
from kvcustody.governance.service.access.caller import Caller
from kvcustody.governance.service.access.roles import Permission, Reach
from kvcustody.governance.service.operations.desk import Desk, ReadOperation
from kvcustody.governance.service.operations.operation import Operation
from kvcustody.governance.service.problem_details import not_found

READ = Permission.READ_CUSTODY
_read = partial(Operation, method="GET", action=READ, tag="cases", recorded=True)


def find_case(desk: Desk, caller: Caller, case_id: str, action: Permission = READ) -> SubjectCase:
    """The case, if it is there and the caller may do this with its tenant's (rule 1)."""
    caller.must(action)
    own = caller.tenant if caller.reach(action) is Reach.OWN else None
    with desk.reading(own) as connection:
        try:
            found = read_case(connection, case_id)
        except LedgerError as error:
            raise desk.absent(error) from None
    if own is not None and found.opened.tenant != own:
        raise not_found()
    return found


def view_of(desk: Desk, caller: Caller, case: SubjectCase) -> dict[str, Any]:
    """The case with everything about it (rule 2)."""
    with desk.reading() as connection:  # no wall: who is behind a pseudonym is in no tenant's log
        view = view_case(
            connection,
            case,
            desk.clock.utc_us(),
            keys=desk.subject_keys,
            release=desk.released(),
            issuers=desk.token_issuers,
        )
    if caller.reach(READ) is not Reach.ALL:
        holds = tuple(one if one.tenant is not None else one._replace(reason="") for one in view.holds)
        view = view._replace(holds=holds)
    return view.data()


def _cases(desk: Desk, caller: Caller, *, tenant: str | None) -> dict[str, Any]:
    mine = desk.tenant_of(caller, READ, tenant)
    now_us = desk.clock.utc_us()
    with desk.reading(mine) as connection:
        found = read_cases(connection, tenant=mine)
    return {"items": [summary_of(case, now_us)._asdict() for case in found]}


def _case(desk: Desk, caller: Caller, *, case: str) -> dict[str, Any]:
    return view_of(desk, caller, find_case(desk, caller, case))


LIST_CASES = ReadOperation(_read("listCases", path="/v1/cases"), _cases)
GET_CASE = ReadOperation(_read("getCase", path="/v1/cases/{case}"), _case)
