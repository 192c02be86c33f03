"""Operations of a data owner on its grants: list them, and withdraw one at once.

1. An owner takes back what the revisions in effect say is its own alone. Another tenant's grant and none: one answer.
2. It takes effect before it is on record, for good, on every worker by its next pull, which is held open for it.
"""

from __future__ import annotations

from typing import Any

from kvcustody.governance.api.declarations import Declarations
from kvcustody.governance.api.given import CallerDep, DeskDep, ServiceDep
from kvcustody.governance.api.models.policies import OwnGrants, Release, SignedStep
from kvcustody.governance.api.operations.policy_release import taken
from kvcustody.governance.release.record import ReleaseAction, ReleaseRecord
from kvcustody.governance.release.replay_records import ReleaseState
from kvcustody.governance.service.access.roles import Permission
from kvcustody.governance.service.operations.answer import Content
from kvcustody.governance.service.operations.operation import Operation
from kvcustody.governance.service.operations.pages import page
from kvcustody.governance.service.operations.parameters import Cursor, Limit
from kvcustody.governance.service.page_cursor import CursorBinding
from kvcustody.governance.service.problem_details import not_found

_FIELDS = ("id", "kind", "reader", "at_most", "until_us", "state", "reason")


def add_grants(api: Declarations) -> None:
    """Declare the operations."""
    listing = Operation(
        "listOwnGrants", "GET", "/v1/policies/grants", Permission.CONSENT, "policies", command="policy grants"
    )
    api.add(listing, own_grants, answers=OwnGrants, problems=("cursor-invalid",))
    taking = Operation(
        "withdrawGrants",
        "POST",
        "/v1/policies:withdraw",
        Permission.CONSENT,
        "policies",
        keyed=True,
        command="policy withdraw",
    )
    api.add(taking, withdraw, answers=Release, problems=("not-found", "conflict"))


def own_grants(caller: CallerDep, desk: DeskDep, cursor: Cursor = None, limit: Limit = 100) -> dict[str, Any]:
    """List the grants and segments in effect on your own tenant's blocks: to whom, how much, until when."""
    effect = desk.policies_in_effect()
    ways = effect.openings(desk.clock.utc_us(), owner=caller.tenant or "")
    items = [{name: getattr(way, name) for name in _FIELDS} for way in ways]
    found = page(desk, CursorBinding("listOwnGrants", caller.name, {}), items, cursor, limit)
    return found | {"unknown": [one.digest for one in effect.unknown], "at_work": effect.at_work}


def withdraw(caller: CallerDep, service: ServiceDep, what: SignedStep) -> Content:
    """Withdraw grants and segments on your own tenant's blocks, at once and permanently."""

    def check(state: ReleaseState, record: ReleaseRecord) -> None:
        ids = record.body.get("ids")
        named = [id_ for id_ in ids if isinstance(id_, str)] if isinstance(ids, list) else []
        if any(state.owners(id_) != {caller.tenant} for id_ in named):
            raise not_found()

    return taken(service, what, caller, (ReleaseAction.REVOKED,), None, check)
