"""Barriers that keep a declared grant or segment from opening anything: the owner has no such domain, or labels differ.

1. A grant opens its owner's domain of the whole tenant. An owner whose private scope is narrower has none.
2. Blocks of different labels are shared only where the rule names the labels that it crosses. Which labels a request
   has depends on its route.

A rule whose labels differ on every route has no entry in the table. On which routes they are equal the table does not
know: whoever opens domains to a reader asks `DecisionTable.opens` first: a decision is recorded for what can be opened.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from kvcustody.policies.document.model import Grant, Labels, Policy, Scope, SegmentRule, TenantPolicy
from kvcustody.policies.table.classify import Classifier


def uncrossed(rule: Grant | SegmentRule, mine: Labels, theirs: Labels) -> tuple[str, ...]:
    """Return the labels that differ between the two sets and that the rule does not name."""
    differing = {name for name, _ in set(mine) ^ set(theirs)}
    return tuple(sorted(differing.difference(rule.crosses)))


def has_domain(rule: Grant | SegmentRule, owner: TenantPolicy | None) -> bool:
    """Return whether the rule's blocks can exist: a grant needs tenant-wide blocks; a segment has its own."""
    return isinstance(rule, SegmentRule) or (owner is not None and owner.scope >= Scope.TENANT)


def rules_without_effect(policy: Policy) -> Iterator[tuple[str, str]]:
    """Yield (id, reason) for each declared grant and segment that opens nothing to any reader it lists."""
    barriers = Barriers(policy)
    for rule in policy.openings():
        readers = (rule.reader,) if isinstance(rule, Grant) else rule.tenants
        if readers is None:
            readers = tuple(tenant.id for tenant in policy.tenants)
        why = [barriers.of(rule, reader) for reader in readers]
        if why and all(why):
            yield rule.id, "; ".join(dict.fromkeys(chain(*why)))


class Barriers:
    """The reasons why rules of one policy open nothing, independent of the route."""

    def __init__(self, policy: Policy) -> None:
        self._classifier = Classifier(policy)
        self._tenants = {tenant.id: tenant for tenant in policy.tenants}
        self._default = policy.default
        entries = (*policy.tenants, *((policy.default,) if policy.default is not None else ()))
        self._has_labels = any(entry.labels for entry in (*entries, *policy.classify))
        self._labels_of: dict[str, tuple[Labels, Labels]] = {}

    def of(self, rule: Grant | SegmentRule, reader: str) -> tuple[str, ...]:
        """Return in words why the rule opens nothing to this reader; empty if it may. An unlisted tenant is `""`."""
        barriers = []
        owner = self._tenants.get(rule.owner)
        if owner is not None and not has_domain(rule, owner):
            scope = owner.scope.name.lower()
            barriers.append(f"its owner's `scope` is `{scope}`, so no block is of the whole tenant")
        labels = self.never_equal(rule, reader)
        if labels:
            barriers.append(f"the labels `{'`, `'.join(labels)}` differ and are not in its `crosses`")
        return tuple(barriers)

    def never_equal(self, rule: Grant | SegmentRule, reader: str) -> tuple[str, ...]:
        """Return the labels that differ on every route and that the rule does not name.

        Labels add up with the route: the reader has at least those without one, and at most all of its rules'.
        """
        if not self._has_labels:
            return ()
        least, most = self._labels(reader)
        theirs, _ = self._labels(rule.owner)
        missing = set(theirs) - set(most)
        return uncrossed(rule, tuple(set(least) - set(theirs)), tuple(missing))

    def _labels(self, tenant: str) -> tuple[Labels, Labels]:
        if tenant not in self._labels_of:
            entry: TenantPolicy | None = self._tenants.get(tenant, self._default)
            own = () if entry is None else entry.labels
            least, most = self._classifier.labels(tenant, None, own), self._classifier.all_labels(tenant, own)
            self._labels_of[tenant] = least, most
        return self._labels_of[tenant]
