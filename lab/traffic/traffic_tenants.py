"""The tenants of a demo's traffic: those of the policy in effect, and invented ones up to the workload's number.

1. A tenant that the policy names has traffic as soon as the policy is in effect, and none once it names it no more.
2. A tenant keeps its rank for good, so that what was counted or sent for a rank stays that tenant's.
3. A rank whose tenant has no traffic any more is not used again. Its conversations go on as another tenant's.
"""

from __future__ import annotations

from kvcustody.lab.replay.traces.seeded_draws import draw
from kvcustody.lab.replay.workload.generator import WorkloadSpec
from kvcustody.lab.replay.workload.labels import Label
from kvcustody.lab.replay.workload.tenant_assignment import LabelledPrincipals, tenant_names
from kvcustody.policies.document.model import Policy


class TrafficTenants:
    """Who sends the requests of a generated workload, under the policy that is in effect when each is sent."""

    def __init__(self, policy: Policy, spec: WorkloadSpec) -> None:
        self._spec, self._policy = spec, policy
        names = self._wanted(policy)
        self.population = LabelledPrincipals(policy, len(names))
        self._ranks = tuple(range(len(names)))  # that have traffic now; position: the place in the workload

    @property
    def names(self) -> list[str]:
        """The tenants that have traffic now."""
        return [self.population.names[rank] for rank in self._ranks]

    def follow(self, policy: Policy) -> None:
        """Take up the tenants that this policy names, and drop those that it names no more (rule 1)."""
        if policy is self._policy:
            return
        self._policy = policy
        wanted, known = self._wanted(policy), list(self.population.names)
        has_place = {known[rank] for rank in self._ranks}
        added = [name for name in wanted if name not in has_place]
        known += [name for name in added if name not in known]
        new = iter([known.index(name) for name in added])
        places = (rank if known[rank] in wanted else next(new, None) for rank in self._ranks)
        self.population.follow(policy, known)
        self._ranks = (*(rank for rank in places if rank is not None), *new)

    def label(self, label: Label) -> Label:
        """Return a label of the workload with the tenant that sends it now.

        Tenants beyond the workload's number get an equal part each of its sessions, drawn by session.
        """
        ranks = self._ranks
        drawn = int(draw(self._spec.seed, "place", label.session) * len(ranks))
        return label._replace(tenant=ranks[label.tenant if drawn < self._spec.tenants else drawn])

    def name(self, label: Label) -> str:
        """Return the name of the tenant that sends a label of the workload now."""
        return self.population.names[self.label(label).tenant]

    def _wanted(self, policy: Policy) -> list[str]:
        return tenant_names(policy, max(self._spec.tenants, len(policy.tenants)))
