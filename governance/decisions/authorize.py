"""The one call that authorizes a tenant's own acts at run time. Reuse is decided by `ReuseDecider`.

1. Every action of the policy has a caller at run time, and nothing else asks a table (`tests/architecture`).
2. A permit that takes something out of this cache, or acts on its content, is recorded durably before it is used (class
   A). Only the first of its kind under a revision is recorded. A denial is counted (class C).
3. Where no policy is known, a role decides, and that is recorded in the same way (`role_event`).
4. No decision is made for each block. `admit`, `publish` and `retain` are decided when a plan is made. `offload` is
   decided when a request or a cache begins whose blocks may leave the device.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kvcustody.audit.kinds import DecisionRecorded
from kvcustody.policies.document.model import Action, Scope, Via
from kvcustody.policies.table.decision_table import DecisionTable
from kvcustody.policies.table.model import AccessRequest, Decision


class OwnData(NamedTuple):
    """A tenant's own data at a classification, the object of an act of its own."""

    tenant: str
    level: int
    classification: str


def authorize(table: DecisionTable, action: Action, tenant: str, level: int) -> Decision:
    """Whether a tenant may do this with its own data at a classification; the answer depends on no instant."""
    return table.decide(AccessRequest(action, tenant, tenant, level, Scope.SESSION, Via.OWN), 0)


def decision_event(
    at_us: int, action: Action, tenant: str, classification: str, decision: Decision, trace: str = ""
) -> DecisionRecorded:
    """Return the event of a tenant's own act."""
    return DecisionRecorded(
        at_us,
        action=action.name.lower(),
        effect="permit" if decision.permitted else "deny",
        reader=tenant,
        owner=tenant,
        classification=classification,
        reasons=decision.reasons,
        revision=decision.revision,
        via=Via.OWN.name.lower(),
        trace=trace,
    )


def role_event(at_us: int, action: Action, tenant: str, roles: Iterable[str]) -> DecisionRecorded:
    """Return the event of a tenant's act that its people's roles decided, without a policy (revision 0)."""
    reasons = tuple(f"role:{role}" for role in sorted(roles))
    return DecisionRecorded(
        at_us,
        action=action.name.lower(),
        effect="permit",
        reader=tenant,
        owner=tenant,
        classification="",
        reasons=reasons,
        revision=0,
        via=Via.OWN.name.lower(),
    )
