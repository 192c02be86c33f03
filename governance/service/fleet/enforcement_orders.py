"""Orders that set for whom workers enforce their policy.

1. An order is on record before any worker hears of it. It is refused where a worker at work runs a policy of a profile
   that is never monitored: every worker refuses for itself, too, what its own settings do not allow.
2. An order to enforce needs less than one that opens: whoever may narrow may give it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcustody.audit.evidence.processes import enforcement
from kvcustody.errors import LedgerError
from kvcustody.governance.monitoring.enforcement import ENFORCE
from kvcustody.governance.monitoring.ordering import enforcement_order
from kvcustody.governance.service.problem_details import ProblemError
from kvcustody.policies.document.model import Profile

if TYPE_CHECKING:
    from kvcustody.governance.service.service import Service


def order(
    service: Service,
    mode: str,
    *,
    tenants: list[str],
    share: str,
    until_us: int | None,
    actor: str,
    reason: str,
) -> dict[str, Any]:
    """Record an order; raises `ConfigError` for one that does not fit, and `conflict` (rule 1)."""
    if mode != ENFORCE:
        _refuse_isolated(service)
    with service.reading() as connection:
        previous = enforcement.newest_order(connection)
    order = enforcement_order(
        previous,
        mode,
        at_us=service.clock.now_us(),
        now_utc_us=service.clock.utc_us(),
        tenants=[service.named(tenant) for tenant in tenants],
        share=share,
        until_us=until_us,
        actor=actor,
        reason=reason,
    )
    service.record(order)
    service.changed()
    with service.reading() as connection:
        found = enforcement.newest_order(connection)
    if found is None:
        raise LedgerError("the order could not be recorded")
    return found._asdict()


def _refuse_isolated(service: Service) -> None:
    for one in service.policies_in_effect().policies:
        if one.policy is not None and one.policy.profile is not Profile.SHARED:
            raise ProblemError(
                "conflict",
                f"the policy `{one.name}` has the profile `{one.policy.profile.value}`, which is always enforced",
            )
