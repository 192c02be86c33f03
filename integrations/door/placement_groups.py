"""Placement groups: sets of workers, each behind its own router, and the choice of a request's group.

    placement = PlacementGroups(read_placement(path), secret)
    placement.of(principal)      # the group's name

1. A tenant's requests go to `spread` groups, the first by rendezvous over the tenant: what its subjects share becomes
   resident there. A group that comes or goes moves the tenants of that group alone.
2. Of these, a subject's requests, else a session's, go to one.
3. Every door with the same document and secret says the same; a tenant that chooses its name cannot choose its group.
4. The group is in the token: a worker of another group refuses it. Rendezvous is among the groups that policy lets
   serve the request (`demand`); where the document has none of these, the request goes nowhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kvcustody.governance.credentials.scope_token_secret import keyed_state
from kvcustody.governance.edge.placement_document import PlacementDocument
from kvcustody.governance.identity import tlv
from kvcustody.governance.identity.principal import Principal
from kvcustody.governance.keys.locked_buffer import KeyBuffer
from kvcustody.policies.table.placement import ANYWHERE, Demand

PLACEMENT_HEADER: Final = "x-kvcustody-placement"
_WEIGHT_BYTES: Final = 8


class PlacementGroups:
    """Chooses a request's group."""

    def __init__(self, document: PlacementDocument, secret: KeyBuffer) -> None:
        """Prepare the choice. `secret`: the secret behind the names."""
        self._document = document
        self._state = keyed_state(secret, "placement-group", _WEIGHT_BYTES)

    def of(self, principal: Principal, demand: Demand = ANYWHERE) -> str | None:
        """Return the group's name. `demand`: the groups that policy permits; None where the document has none of
        them.
        """
        groups = demand.among(self._document.groups)
        if not groups:
            return None
        tenant = (principal.issuer, principal.tenant)
        own = sorted(groups, key=lambda group: self._weight(group, *tenant))[: self._document.spread]
        who = (principal.subject, None if principal.subject is not None else principal.session)
        return min(own, key=lambda group: self._weight(group, *tenant, *who))

    def fields(self, group: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields by which the group's router filters its workers, beside the body's own."""
        taints = self._document.groups[group].taints
        if not taints:
            return {}
        return {"nvext": {**(body.get("nvext") or {}), "routing_constraints": {"required_taints": list(taints)}}}

    def _weight(self, *of: str | None) -> bytes:
        state = self._state.copy()
        state.update(tlv.encode("kvcustody/placement", 1, dict(enumerate(of, 1))))
        return state.digest()
