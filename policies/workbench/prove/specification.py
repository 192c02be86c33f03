"""A policy's declarations, read directly from its typed form: the specification against which a table is proved.

1. Nothing here uses the compiler, the rulebook or the table: a fault in one of them is not repeated here.
2. Every answer is evaluated from the declarations. They are looked up by tenant, and what two requests share is kept:
   the openings of a pair at one instant, and what the rules say of all tenants that no rule names.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from typing import NamedTuple

from kvcustody.policies.document.model import (
    EVERY_TENANT,
    Action,
    ClassifyRule,
    Grant,
    Policy,
    Relation,
    Rule,
    RuleEffect,
    Scope,
    SegmentRule,
    TenantPolicy,
    Tier,
    Via,
)
from kvcustody.policies.workbench.request import Request

Label = tuple[str, str]


class DeclaredCopies(NamedTuple):
    """What all sources of the policy together allow for copies in one tier; times are 0 if copies are not allowed."""

    absolute_us: int
    within_us: int
    running_us: int
    encrypt: bool
    match: frozenset[str]


class _Between(NamedTuple):
    """The grants of one pair that are live between two of their edges, by the edge before; which open a level."""

    pair: tuple[str, str]
    edges: list[int]
    live: dict[int, list[Grant]]
    open: dict[tuple[int, int], frozenset[str]]


class Declared:
    """The grants, segments, rules and levels that a policy declares, without revoked ones."""

    def __init__(self, policy: Policy, revoked: frozenset[str] = frozenset()) -> None:
        self.policy = policy
        self.tenants = {tenant.id: tenant for tenant in policy.tenants}
        self._grants: dict[tuple[str, str], list[Grant]] = {}
        self._named_grants: dict[tuple[str, str, str], list[Grant]] = {}
        self._owners: dict[str, set[str]] = {}
        for grant in (*policy.grants, *policy.group_grants()):
            if grant.id not in revoked and grant.group not in revoked:
                self._grants.setdefault((grant.reader, grant.owner), []).append(grant)
                self._named_grants.setdefault((grant.reader, grant.owner, grant.id), []).append(grant)
                self._owners.setdefault(grant.reader, set()).add(grant.owner)
        self._segments: dict[str, list[SegmentRule]] = {}
        for segment in policy.segments:
            if segment.id not in revoked:
                self._segments.setdefault(segment.owner, []).append(segment)
        self._classify: dict[str, list[ClassifyRule]] = {}
        for classified in {rule.tenant for rule in policy.classify} | {EVERY_TENANT}:
            at = (classified, EVERY_TENANT)
            self._classify[classified] = [rule for rule in policy.classify if rule.tenant in at]
        self._labels: dict[str, tuple[frozenset[Label], frozenset[Label]]] = {}
        self._forbids = [rule for rule in policy.rules if rule.effect is RuleEffect.FORBID]
        self._forbids_of: dict[str | None, list[int]] = {}
        for place, forbid in enumerate(self._forbids):
            named = {*(forbid.readers or ()), *(forbid.owners or ())}
            for name in named or (None,):
                self._forbids_of.setdefault(name, []).append(place)
        self._forbidden_by: dict[tuple[object, ...], list[str]] = {}
        self._declared_copies: dict[tuple[object, ...], DeclaredCopies] = {}
        self._between = _Between(("", ""), [], {}, {})

    def admitted(self, tenant: str) -> TenantPolicy | None:
        """Return the tenant's entry, or the entry for unlisted tenants; None if the tenant is refused."""
        return self.tenants.get(tenant, self.policy.default)

    def grants(self, reader: str, owner: str) -> list[Grant]:
        """Return every declared grant between the two tenants, live or not."""
        return self._grants.get((reader, owner), [])

    def segments(self, reader: str, owner: str) -> list[SegmentRule]:
        """Return every declared segment of `owner` that lists the reader, live or not."""
        if self.admitted(reader) is None:
            return []
        return [s for s in self._segments.get(owner, []) if s.tenants is None or reader in s.tenants]

    def rules(self) -> list[Grant | SegmentRule]:
        """Return every declared grant and segment."""
        grants = [grant for pair in self._grants.values() for grant in pair]
        return [*grants, *(segment for own in self._segments.values() for segment in own)]

    def owners(self, reader: str) -> set[str]:
        """Return every owner of a declared grant or segment for this reader."""
        segments = {owner for owner in self._segments if self.segments(reader, owner)}
        return self._owners.get(reader, set()) | segments

    def edges(self, reader: str, owner: str) -> dict[str, set[int]]:
        """Return the instants at which any declaration between the two tenants begins or ends."""
        declared = {grant.id: {grant.from_us, grant.until_us} for grant in self.grants(reader, owner)}
        declared |= {segment.id: {segment.expires_us} for segment in self.segments(reader, owner)}
        return {source: {edge for edge in edges if edge is not None} for source, edges in declared.items()}

    def open(self, request: Request) -> frozenset[str]:
        """Return the ids of the grants and segments that are live for this request and open it.

        Equal answers to requests without a source are one object, for the pair that was asked about last.
        """
        if request.via is Via.GRANT and request.source is not None:
            named = self._named_grants.get((request.reader, request.owner, request.source), [])
            return frozenset(
                grant.id for grant in named if _opens(grant, request) and not self.apart(grant, request.reader)
            )
        if request.via is Via.GRANT:
            return self._open_grants(request)
        if request.via is Via.SEGMENT:
            mine = self.segments(request.reader, request.owner)
            return frozenset(
                segment.id for segment in mine if _shows(segment, request) and not self.apart(segment, request.reader)
            )
        return frozenset()

    def _open_grants(self, request: Request) -> frozenset[str]:
        """Return the grants of a pair that open the request. Cached: between two edges they are the same."""
        if request.action is not Action.REUSE or request.scope < Scope.TENANT or request.level < 0:
            return frozenset()
        pair = (request.reader, request.owner)
        if self._between.pair != pair:
            edges = {edge for each in self.grants(*pair) for edge in (each.from_us, each.until_us)}
            self._between = _Between(pair, sorted(edge for edge in edges if edge is not None), {}, {})
        between = self._between
        place = bisect_right(between.edges, request.now_us)
        if place not in between.live:
            between.live[place] = [
                grant
                for grant in self.grants(*pair)
                if _is_live(grant, request.now_us) and not self.apart(grant, request.reader)
            ]
        if (place, request.level) not in between.open:
            live = between.live[place]
            ids = frozenset(grant.id for grant in live if request.level <= grant.at_most)
            between.open[place, request.level] = ids
        return between.open[place, request.level]

    def apart(self, rule: Grant | SegmentRule, reader: str) -> frozenset[str]:
        """Return the labels that the rule does not name and in which every request of the reader differs from the
        blocks.
        """
        (least, most), (theirs, _) = self._label_bounds(reader), self._label_bounds(rule.owner)
        differing = (least - theirs) | (theirs - most)
        return frozenset(name for name, _ in differing).difference(rule.crosses)

    def _label_bounds(self, tenant: str) -> tuple[frozenset[Label], frozenset[Label]]:
        """Return the labels that all requests of a tenant have, and those that at least one of them may have."""
        if tenant not in self._labels:
            least = self.labels(tenant, None)
            by_route = (rule.labels for rule in self.classify_rules(tenant))
            self._labels[tenant] = least, least.union(*by_route)
        return self._labels[tenant]

    def labels(self, tenant: str, route: str | None) -> frozenset[Label]:
        """Return the labels of a request with a plain route (or none): its tenant's and those of each matching rule."""
        entry = self.admitted(tenant)
        found = set(() if entry is None else entry.labels)
        for rule in self.classify_rules(tenant):
            if rule.route is None or (route is not None and route_matches(rule.route, route)):
                found.update(rule.labels)
        return frozenset(found)

    def differing(self, rule: Grant | SegmentRule, reader: str, route: str | None) -> set[str]:
        """Return the labels in which a reader's request differs from the owner's blocks and that the rule does not
        name.
        """
        pairs = self.labels(reader, route) ^ self.labels(rule.owner, None)
        return {name for name, _ in pairs} - set(rule.crosses)

    def serves(self, group: str, tenant: str, level: int, labels: frozenset[Label]) -> bool:
        """Return whether workers of a group may serve a tenant's request of this level with these labels."""
        for rule in self.policy.placement:
            is_theirs = rule.tenants is None or tenant in rule.tenants
            fits = is_theirs and labels >= {*rule.labels} and level in (rule.levels or (level,))
            if (fits and group not in rule.groups) or (rule.dedicated and not is_theirs and group in rule.groups):
                return False
        return True

    def every_label(self, tenant: str) -> frozenset[Label]:
        """Return the labels that any request of a tenant may have."""
        return self._label_bounds(tenant)[1]

    def forbids(self, request: Request) -> list[str]:
        """Return the ids of the rules that forbid the request."""
        reader, owner = request.reader, request.owner
        named = (*self._forbids_of.get(reader, ()), *self._forbids_of.get(owner, ()))
        near = reader == owner or self._same_group(reader, owner)
        told = (reader, owner) if named else (reader == owner, near)
        key = (request.action, request.level, request.via, told)
        if key not in self._forbidden_by:
            places = sorted({*self._forbids_of.get(None, ()), *named})
            rules = (self._forbids[place] for place in places)
            self._forbidden_by[key] = [rule.id for rule in rules if self.matches(rule, request)]
        return self._forbidden_by[key]

    def classify_rules(self, tenant: str) -> list[ClassifyRule]:
        """Return the classify rules for a tenant, in the order of the document."""
        return self._classify.get(tenant, self._classify[EVERY_TENANT])

    def copies(self, tenant: str, level: int, tier: Tier) -> DeclaredCopies:
        """Return what the declarations allow for copies of a tenant's blocks in a tier."""
        entry = self.admitted(tenant)
        own = None if entry is None else (entry.retention, entry.offload)
        key = (own, tenant if tenant in self._forbids_of else None, level, tier)
        if key not in self._declared_copies:
            self._declared_copies[key] = self._copies(entry, tenant, level, tier)
        return self._declared_copies[key]

    def _copies(self, entry: TenantPolicy | None, tenant: str, level: int, tier: Tier) -> DeclaredCopies:
        policy = self.policy
        if entry is None:
            return DeclaredCopies(0, 0, 0, True, frozenset())
        offloads = [policy.offload[level], *(own for at, own in entry.offload if at == level)]
        retentions = [policy.retention[level], *(own for at, own in entry.retention if at == level)]
        limits = [limit for offload in offloads for limit in offload.limits if limit.tier is tier]
        times = [limit.absolute_us for limit in limits] + [each.absolute_us for each in retentions]
        encrypt = tier is not Tier.HOST or any(offload.encrypt for offload in offloads)
        match = frozenset(name for offload in offloads for name in offload.match)
        if len(limits) < len(offloads) or self._forbidden(Action.OFFLOAD, tenant, level):
            return DeclaredCopies(0, 0, 0, encrypt, match)
        held = all(each.idle_us and each.absolute_us for each in retentions) and not (
            self._forbidden(Action.PUBLISH, tenant, level) or self._forbidden(Action.RETAIN, tenant, level)
        )
        running = [each.active_max_us for each in retentions] + [time for time in times if time]
        within = min(limit.within_us for limit in limits)
        return DeclaredCopies(min(times) if held else 0, within, min(running), encrypt, match)

    def _forbidden(self, action: Action, tenant: str, level: int) -> bool:
        return bool(self.forbids(Request(action, tenant, tenant, level, Scope.SESSION, Via.OWN, 0)))

    def matches(self, rule: Rule, request: Request) -> bool:
        """Return whether every term of the rule fits."""
        return not self.failing(rule, request)

    def failing(self, rule: Rule, request: Request) -> list[str]:
        """Return the terms of the rule that do not fit the request, by their names in the policy language."""
        near = request.reader == request.owner or self._same_group(request.reader, request.owner)
        fits = {
            "action": request.action in rule.actions,
            "reader": (rule.readers is None or request.reader in rule.readers)
            and (rule.relation is not Relation.OWNER or request.reader == request.owner)
            and (rule.relation is not Relation.SAME_GROUP or near),
            "owner": rule.owners is None or request.owner in rule.owners,
            "classification": rule.levels is None or request.level in rule.levels,
            "via": rule.via is None or request.via in rule.via,
        }
        return [term for term, fit in fits.items() if not fit]

    def _same_group(self, reader: str, owner: str) -> bool:
        one, other = self.tenants.get(reader), self.tenants.get(owner)
        return one is not None and other is not None and one.group is not None and one.group == other.group

    def level(self, tenant: str, route: str | None, claim: str | None, hint: str | None) -> int:
        """Return the declared classification of a request with a plain route (or none)."""
        names = self.policy.classifications
        top = len(names) - 1
        rules = self.classify_rules(tenant)
        own = [r.level for r in rules if r.route is None and r.level is not None and r.tenant == tenant]
        every = [r.level for r in rules if r.route is None and r.level is not None]
        levels = (own or every)[:1]
        for rule in rules:
            if rule.route is not None and rule.level is not None and route is not None:
                levels += [rule.level] if route_matches(rule.route, route) else []
        levels += [] if claim is None else [names.index(claim) if claim in names else top]
        if not levels:
            return top
        levels += [] if hint is None else [names.index(hint) if hint in names else top]
        return max(levels)


def route_matches(pattern: str, route: str) -> bool:
    """Return whether a plain route fits a pattern; an independent implementation, by regular expression."""
    open_ended = pattern.endswith("/*")
    parts = [part for part in pattern.removesuffix("/*").split("/") if part]
    body = "".join("/[^/]+" if part == "*" else "/" + re.escape(part) for part in parts)
    return re.fullmatch(body + ("(/.*)?" if open_ended else "/?"), route, re.IGNORECASE) is not None


def _is_live(grant: Grant, now_us: int) -> bool:
    return (grant.from_us is None or grant.from_us <= now_us) and (grant.until_us is None or now_us < grant.until_us)


def _opens(grant: Grant, request: Request) -> bool:
    return (
        request.action is Action.REUSE
        and request.scope >= Scope.TENANT
        and 0 <= request.level <= grant.at_most
        and _is_live(grant, request.now_us)
    )


def _shows(segment: SegmentRule, request: Request) -> bool:
    return (
        request.action in (Action.REUSE, Action.PUBLISH, Action.RETAIN, Action.OFFLOAD)
        and Scope.TENANT <= request.scope <= segment.scope
        and request.level == segment.level
        and (segment.expires_us is None or request.now_us < segment.expires_us)
        and request.source in (None, segment.id)
    )
