"""The pages of the console and who may open them: the roles' table decides, nothing here does."""

from __future__ import annotations

from typing import NamedTuple

from kvcustody.governance.service.access.caller import Caller
from kvcustody.governance.service.access.roles import Permission, Reach


class Place(NamedTuple):
    """A page in the navigation, and the actions of which any opens it."""

    path: str
    name: str
    actions: tuple[Permission, ...]


_CUSTODY = (Permission.READ_CUSTODY,)
_POLICY = (Permission.READ_POLICY, Permission.CONSENT)
PLACES = (
    Place("/console/", "Overview", ()),
    Place("/console/policy", "Policy", _POLICY),
    Place("/console/grants", "Grants", _POLICY),
    Place("/console/decisions", "Decisions", (Permission.READ_CUSTODY, Permission.WRITE_POLICY)),
    Place("/console/custody", "Custody", _CUSTODY),
    Place("/console/erasures", "Erasures", _CUSTODY),
    Place("/console/deletion", "Deletion", _CUSTODY),
    Place("/console/audit", "Audit explorer", _CUSTODY),
    Place("/console/reports", "Reports", _CUSTODY),
    Place("/console/health", "Health", (Permission.READ_HEALTH,)),
    Place("/console/principals", "Access", (Permission.MANAGE_KEYS,)),
)


def places_of(caller: Caller) -> tuple[Place, ...]:
    """The pages that a caller may open."""
    return tuple(
        place
        for place in PLACES
        if not place.actions or any(caller.reach(action) is not Reach.NONE for action in place.actions)
    )
