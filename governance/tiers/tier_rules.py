"""What the active revision lets be in a tier, and how much of it is whose: asked at each copy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from kvcustody.errors import LedgerUnavailable
from kvcustody.governance.decisions.access_plan import DomainLabel, is_withheld
from kvcustody.governance.decisions.authorize import OwnData
from kvcustody.governance.decisions.staged_table import quotas_of
from kvcustody.governance.restriction.restricted_subjects import RestrictedSubjects
from kvcustody.governance.tiers.copies.index import CopyLimit, TierShare
from kvcustody.policies.document.model import Action, Labels, OnWorkerDeath, Tier
from kvcustody.policies.table.decision_table import DecisionTable
from kvcustody.policies.table.model import Decision

_KNOWN_MAX = 10_000
NOT_HERE = CopyLimit(0, 1)
Tables = tuple[DecisionTable, DecisionTable | None]


class TierRules:
    """`tables` gives the active revision, and one that is not on record yet: where there is one, both must permit.

    `authorize` has a permit on record before the first copy. `restricted`: whose copies are left as they are; all are
    while `is_lease_over` says that the newest erasures are not known.
    """

    def __init__(
        self,
        tables: Callable[[], Tables],
        authorize: Callable[[Action, OwnData], Decision],
        restricted: Callable[[], RestrictedSubjects],
        is_lease_over: Callable[[], bool],
    ) -> None:
        self._is_lease_over = is_lease_over
        self._restricted = restricted
        self._tables = tables
        self._authorize = authorize
        self._known: dict[tuple[Tier, str, str], CopyLimit] = {}
        self._known_of: Tables | None = None

    @property
    def tenants(self) -> tuple[str, ...]:
        """Whom the policy names."""
        return tuple(tenant.id for tenant in quotas_of(self._tables()[0]).policy.tenants)

    def withholds(self, label: DomainLabel) -> bool:
        """Whether copies of this domain stay where they are now."""
        return self._is_lease_over() or is_withheld(label, self._restricted())

    def agrees(self, label: DomainLabel, place: Mapping[str, Collection[str]]) -> bool:
        """Whether a remote store with these values of labels may hold copies of this domain."""
        labels = () if label.spec is None else label.spec.labels
        return all(self._agrees(table, label, labels, place) for table in self._tables() if table is not None)

    @staticmethod
    def _agrees(table: DecisionTable, label: DomainLabel, labels: Labels, place: Mapping[str, Collection[str]]) -> bool:
        levels = table.policy.classifications
        if label.classification not in levels:
            return False
        duty = table.tier_duty(label.tenant, levels.index(label.classification), Tier.REMOTE)
        return duty.allows(labels, place)

    def limit(self, tier: Tier, tenant: str, classification: str) -> CopyLimit:
        """How long copies may be in `tier`; not at all where they may not, or the permit is not on record."""
        tables = self._tables()
        if tables != self._known_of or len(self._known) > _KNOWN_MAX:
            self._known, self._known_of = {}, tables
        key = (tier, tenant, classification)
        known = self._known.get(key)
        if known is None:
            each = [self._limit(table, tier, tenant, classification) for table in tables if table is not None]
            known = self._known[key] = CopyLimit(*(min(values) for values in zip(*each, strict=True)))
        return known

    def _limit(self, table: DecisionTable, tier: Tier, tenant: str, classification: str) -> CopyLimit:
        levels = table.policy.classifications
        if classification not in levels:
            return NOT_HERE
        level = levels.index(classification)
        duty = table.tier_duty(tenant, level, tier)
        if not duty.absolute_us:
            return NOT_HERE
        try:
            permitted = self._authorize(Action.OFFLOAD, OwnData(tenant, level, classification)).permitted
        except LedgerUnavailable:
            return NOT_HERE
        restores = table.after_death(tenant, level) is OnWorkerDeath.RESTORE
        limit = CopyLimit(duty.absolute_us, duty.bucket_us, duty.within_us, restores)
        return limit if permitted else NOT_HERE

    def share(self, tenant: str) -> TierShare:
        """A tenant's part of a tier is that of the pools: where tenants are kept apart, no more than its guarantee."""
        base = quotas_of(self._tables()[0])
        entry = base.tenant(tenant)
        if entry is None:
            return TierShare(0.0, 0.0)
        guaranteed = float(entry.guaranteed)
        return TierShare(guaranteed, guaranteed if base.policy.profile.isolating else float(entry.cap))
