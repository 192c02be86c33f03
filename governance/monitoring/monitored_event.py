"""The record of a monitored request, and the tenants whose enforcement an order changes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvcustody.allocator.pool.accounting import Domain
from kvcustody.allocator.pool.residency import Residency
from kvcustody.audit.kinds import RequestMonitored
from kvcustody.governance.decisions.access_plan import label_of
from kvcustody.governance.monitoring.enforcement import Enforcement
from kvcustody.governance.monitoring.monitor import WOULD_DENY, WOULD_PERMIT, MonitoredRequest
from kvcustody.governance.observability.tenant_counters import TenantCounters


def monitored_event(
    residency: Residency,
    monitored: MonitoredRequest,
    attached: Sequence[Domain],
    *,
    prompt_tokens: int,
    block_tokens: int,
    revision: int,
    order: int,
    at_us: int,
    counters: TenantCounters,
) -> RequestMonitored:
    """Return the event of a decision that was not enforced. `attached`: the domain of each attached block."""
    refused = len(attached) - sum(monitored.would_serve(attached))
    own = monitored.read.own if monitored.read is not None else None
    denied = bool(refused or monitored.refusal or own is None or own.state is None)
    counters.requests += 1
    counters.monitored_requests += 1
    counters.monitored_blocks += len(attached)
    counters.would_refuse_blocks += refused
    counters.forecast_blocks += monitored.forecast_blocks
    label = label_of(residency.domain)
    return RequestMonitored(
        at_us,
        residency.id,
        label.tenant,
        label.classification,
        WOULD_DENY if denied else WOULD_PERMIT,
        monitored.reasons,
        revision,
        order,
        prompt_tokens,
        len(attached) * block_tokens,
        refused * block_tokens,
        monitored.forecast_blocks * block_tokens,
        residency.trace,
    )


def changed_tenants(tenants: Iterable[str], before: Enforcement, after: Enforcement) -> set[str]:
    """Return those of `tenants` whose enforced requests change."""
    same_share = (before.stage.share, before.seed) == (after.stage.share, after.seed)
    return {
        tenant
        for tenant in tenants
        if (stands := after.whole_tenant(tenant)) != before.whole_tenant(tenant) or (stands is None and not same_share)
    }
