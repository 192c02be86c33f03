"""Classify a request: its level and domain labels, from its tenant, route, verified claim and hint.

1. The effective level is the highest of the tenant's default, every matching route, the claim and the hint.
2. When neither tenant, route nor claim is known, it is the highest level of the policy. A hint does not count as known.
3. Routes, claims and hints only raise. An unknown claim or hint counts as the highest level. So does a route that
   cannot be interpreted safely (dot segments, escapes, empty segments).
4. Labels accumulate: every source that applies adds its own, so that labels only ever narrow a domain.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Protocol

from kvcustody.policies.document.model import EVERY_TENANT, ClassifyRule, Labels

_PLAIN_ROUTE = re.compile(r"(/[A-Za-z0-9._~@:{}!$&'()*+,=-]+)*/?\Z")
_Rule = tuple[ClassifyRule, tuple[str, ...]]  # with its route split into segments
_Rules = tuple[_Rule, ...]  # a tenant's own first


class _Named(Protocol):
    @property
    def id(self) -> str: ...


class Classifies(Protocol):
    """The parts of a policy that classify requests."""

    @property
    def classifications(self) -> tuple[str, ...]:
        """The classifications, low to high."""

    @property
    def tenants(self) -> Iterable[_Named]:
        """At least those tenants that a rule names."""

    @property
    def classify(self) -> tuple[ClassifyRule, ...]:
        """The classification rules."""


class Classifier:
    """Levels and labels for requests under one policy."""

    __slots__ = ("_by_tenant", "_highest", "_levels", "_others")

    def __init__(self, policy: Classifies) -> None:
        self._levels = {name: level for level, name in enumerate(policy.classifications)}
        self._highest = len(policy.classifications) - 1
        of_tenant: dict[str, list[_Rule]] = {tenant.id: [] for tenant in policy.tenants}
        every: list[_Rule] = []
        for rule in policy.classify:
            own = every if rule.tenant == EVERY_TENANT else of_tenant.get(rule.tenant, [])
            own.append((rule, _split(rule.route or "")))
        others = tuple(every)
        self._others = (_default(others), others)
        self._by_tenant = {
            tenant: (_default(rules), rules) if mine else self._others
            for tenant, mine in of_tenant.items()
            for rules in [(*mine, *others)]
        }

    def classify(self, tenant: str, route: str | None, claim: str | None, hint: str | None) -> int:
        """Return the effective level of a request; `claim` and `hint` are classification names."""
        default, rules = self._by_tenant.get(tenant, self._others)
        level = -1 if default is None else default
        for rule in self._matching(rules, route):
            if rule is None:
                level = self._highest
            elif rule.level is not None and rule.level > level:
                level = rule.level
        if claim is not None:
            level = max(level, self._levels.get(claim, self._highest))
        if level < 0:
            return self._highest
        return level if hint is None else max(level, self._levels.get(hint, self._highest))

    def labels(self, tenant: str, route: str | None, own: Labels) -> Labels:
        """Return the labels of a request's domains: the tenant's own and those of every matching rule."""
        _, rules = self._by_tenant.get(tenant, self._others)
        pairs = set(own)
        for rule, segments in rules:
            if rule.route is None or (route is not None and (not _trusted(route) or _matches(segments, _split(route)))):
                pairs.update(rule.labels)
        return tuple(sorted(pairs))

    def all_labels(self, tenant: str, own: Labels) -> Labels:
        """Return every label that some route gives the tenant's domains."""
        _, rules = self._by_tenant.get(tenant, self._others)
        return tuple(sorted({*own, *(pair for rule, _ in rules for pair in rule.labels)}))

    def _matching(self, rules: _Rules, route: str | None) -> tuple[ClassifyRule | None, ...]:
        """Return the matching route rules; None stands for an untrusted route."""
        if route is None or not rules:
            return ()
        if not _trusted(route):
            return (None,) if any(rule.route is not None for rule, _ in rules) else ()
        segments = _split(route)
        return tuple(rule for rule, pattern in rules if rule.route is not None and _matches(pattern, segments))


def _default(rules: _Rules) -> int | None:
    """Return the tenant's default level: its own rule without a route, or else the rule for all tenants."""
    return next((rule.level for rule, _ in rules if rule.route is None and rule.level is not None), None)


def _trusted(route: str) -> bool:
    """True for a plain absolute path without dot segments, empty segments or escapes."""
    if type(route) is not str or not route.startswith("/") or len(route) > 1024 or not _PLAIN_ROUTE.match(route):
        return False
    return not any(segment in (".", "..") for segment in route.split("/"))


def _split(route: str) -> tuple[str, ...]:
    return tuple(segment for segment in route.lower().split("/") if segment)


def _matches(pattern: tuple[str, ...], route: tuple[str, ...]) -> bool:
    """`*` is one segment; at the end, any number of them, none included."""
    if pattern and pattern[-1] == "*":
        pattern = pattern[:-1]
        route = route[: len(pattern)]
    return len(pattern) == len(route) and all(p in ("*", r) for p, r in zip(pattern, route, strict=True))
