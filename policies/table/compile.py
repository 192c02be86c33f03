"""Compile a policy into its decision table.

- Every cell is computed here, once; deciding only looks up. Equal cells are one object.
- Revoked ids (grants, segments, groups, or one pair of a group) take no part; a forbid is not revocable.
- A grant or segment whose labels differ from the reader's on every route (`crossing`) has no entry for it.
- Grants are not composed: a pair of tenants without a grant of its own has no entry.
- If a rule's terms cannot be evaluated, a forbid covers every cell and a permit covers none. The decision carries the
  error.
- The order of rules changes nothing: ids are reported sorted, and every matching rule is reported.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable
from itertools import chain, pairwise
from typing import NamedTuple

from kvcustody.policies.document.digest import digest
from kvcustody.policies.document.model import (
    Action,
    Effect,
    Grant,
    Policy,
    Relation,
    Rule,
    RuleEffect,
    Scope,
    SegmentRule,
    TenantPolicy,
    Via,
)
from kvcustody.policies.table.crossing import Barriers
from kvcustody.policies.table.decision_table import DecisionTable
from kvcustody.policies.table.model import (
    ALWAYS_US,
    DEFAULT_DENY,
    NEVER_US,
    UNLISTED,
    Decision,
    LiveInterval,
    ManySources,
    Row,
    SegmentRow,
    Tables,
    Timeline,
    Unlisted,
)
from kvcustody.policies.table.obligations import Obligations, ObligationsOf, ended

_LISTED_MAX = 16  # live sources of a piece of time that have a dict of their own
_DOMAIN_ACTIONS = (Action.REUSE, Action.PUBLISH, Action.RETAIN, Action.OFFLOAD)


class SourcePeriod(NamedTuple):
    """When a grant or segment opens, when it closes (exclusive), and its id."""

    start_us: int
    end_us: int
    id: str


def compile_policy(policy: Policy, *, revision: int, revoked: frozenset[str] = frozenset()) -> DecisionTable:
    """Return the decision table of a policy revision, without the `revoked` ids."""
    compiled = _Compiler(policy, revision, revoked).tables()
    return DecisionTable(policy, compiled, revision=revision, digest=digest(policy), revoked=revoked)


class _Compiler:
    """Builds the tables; equal decisions, timelines and rows are shared."""

    def __init__(self, policy: Policy, revision: int, revoked: frozenset[str]) -> None:
        self._policy = policy
        self._revision = revision
        self._rules = RuleIndex(policy)
        self._groups = {tenant.id: tenant.group for tenant in policy.tenants}
        self._levels = range(len(policy.classifications))
        owed = ObligationsOf(policy)
        self._obligations: dict[str | Unlisted, tuple[Obligations, ...]] = {
            tenant.id: owed(tenant) for tenant in policy.tenants
        }
        if policy.default is not None:
            self._obligations[UNLISTED] = owed(policy.default)
        self._ended = ended(owed(None))
        grants = (*policy.grants, *policy.group_grants())
        self._barriers = Barriers(policy)
        self._grants = [
            grant
            for grant in grants
            if not {grant.id, grant.group} & revoked and not self._barriers.never_equal(grant, grant.reader)
        ]
        self._segments = [s for s in policy.segments if s.id not in revoked]
        self._decisions: dict[tuple[object, ...], Decision] = {}
        # Decisions are interned and kept by `_decisions`, so their identities stand for them.
        self._own_cells: dict[tuple[int, Scope], tuple[Decision, ...]] = {}
        # Rulings and obligations are kept too, by `_rules` and `_obligations`.
        self._own_levels: dict[tuple[Action, Scope, int, int], tuple[Decision, ...]] = {}

    def tables(self) -> Tables:
        """Return every table, complete."""
        policy = self._policy
        readers: list[str | Unlisted] = [tenant.id for tenant in policy.tenants]
        if policy.default is not None:
            readers.append(UNLISTED)
        by_reader = {reader: self._segments_of(reader) for reader in readers}
        return Tables(
            own={tenant.id: self._own_row(tenant, tenant.id) for tenant in policy.tenants},
            unlisted=None if policy.default is None else self._own_row(policy.default, UNLISTED),
            grants=self._grant_table(),
            segments=self._segment_table(by_reader),
            grants_by_reader=_grouped(self._grants),
            segments_by_reader=by_reader,
            obligations=self._obligations,
            ended=self._ended,
            edges=self._edges(),
        )

    def _decision(self, effect: Effect, reasons: tuple[str, ...], errors: tuple[str, ...] = ()) -> Decision:
        key = (effect, reasons, errors)
        if key not in self._decisions:
            self._decisions[key] = Decision(effect, reasons, self._revision, errors)
        return self._decisions[key]

    def _deny(self, ruling: Ruling) -> Decision:
        return self._decision(Effect.DENY, ruling.forbids or (DEFAULT_DENY,), ruling.errors)

    # Own domains

    def _own_row(self, tenant: TenantPolicy, key: str | Unlisted) -> Row:
        """Every cell, in the order of `places`."""
        name = "" if key is UNLISTED else tenant.id
        rulings = self._rules.rulings(name, name, Via.OWN, same_group=True)
        owed = self._obligations[key]
        row: list[Decision] = []
        for action in Action:
            alike = (action, tenant.scope, id(rulings), id(owed))
            cells = self._own_levels.get(alike)
            if cells is None:
                found = (
                    self._own_scopes(action, tenant, rulings.get((action, level), NO_RULING), level, owed[level])
                    for level in self._levels
                )
                cells = tuple(chain.from_iterable(found))
                if action is not Action.ADMIT:  # whose decision names the tenant
                    self._own_levels[alike] = cells
            row += cells
        return tuple(row)

    def _own_scopes(
        self, action: Action, tenant: TenantPolicy, ruling: Ruling, level: int, owed: Obligations
    ) -> tuple[Decision, ...]:
        """Return the cells of one action and level, narrow to wide. Tenants with equal decisions share one object."""
        widest = tenant.scope if action in _DOMAIN_ACTIONS else Scope.TENANT
        inside = self._own_decision(action, tenant, ruling, level, owed)
        marks = (id(inside), widest)
        if marks not in self._own_cells:
            outside = self._decision(Effect.DENY, (DEFAULT_DENY,))
            self._own_cells[marks] = tuple(inside if scope <= widest else outside for scope in Scope)
        return self._own_cells[marks]

    def _own_decision(
        self, action: Action, tenant: TenantPolicy, ruling: Ruling, level: int, owed: Obligations
    ) -> Decision:
        if ruling.forbids:
            return self._deny(ruling)
        if action is Action.ADMIT:
            return self._decision(Effect.PERMIT, (f"tenants:{tenant.id}",), ruling.errors)
        section = self._section(action, level, owed)
        if section is not None:
            effect, reason = section
            return self._decision(effect, (reason,), ruling.errors)
        if ruling.permits:
            return self._decision(Effect.PERMIT, ruling.permits, ruling.errors)
        return self._deny(ruling)

    def _section(self, action: Action, level: int, owed: Obligations) -> tuple[Effect, str] | None:
        """What the obligations say of publishing, retaining and offloading; None for the other actions."""
        name = self._policy.classifications[level]
        if action in (Action.PUBLISH, Action.RETAIN):
            return (Effect.PERMIT if owed.cacheable else Effect.DENY), f"retention:{name}"
        if action is Action.OFFLOAD:
            return (Effect.PERMIT if owed.tiers else Effect.DENY), f"offload:{name}"
        return None

    # Across tenants

    def _same_group(self, reader: str, owner: str) -> bool:
        group = self._groups.get(reader)
        return group is not None and group == self._groups.get(owner)

    def _grant_table(self) -> dict[tuple[str, str], tuple[Timeline, ...]]:
        pairs: dict[tuple[str, str], list[Grant]] = {}
        for grant in self._grants:
            pairs.setdefault((grant.reader, grant.owner), []).append(grant)
        return {pair: self._grant_levels(pair, grants) for pair, grants in pairs.items()}

    def _grant_levels(self, pair: tuple[str, str], grants: list[Grant]) -> tuple[Timeline, ...]:
        reader, owner = pair
        rulings = self._rules.rulings(reader, owner, Via.GRANT, same_group=self._same_group(reader, owner))
        known: dict[tuple[object, ...], Timeline] = {}
        levels = []
        for level in self._levels:
            ruling = rulings.get((Action.REUSE, level), NO_RULING)
            open_at = tuple(grant for grant in grants if level <= grant.at_most)
            key = (ruling, *(grant.id for grant in open_at))
            if key not in known:
                known[key] = _timeline(map(_grant_period, open_at), self._opened(ruling, None))
            levels.append(known[key])
        return tuple(levels)

    def _opened(self, ruling: Ruling, section: tuple[Effect, str] | None) -> Callable[[tuple[str, ...]], Decision]:
        """Return the decision while sources are live: a rule may forbid it, or an obligation may rule it out."""

        def decision(ids: tuple[str, ...]) -> Decision:
            if ruling.forbids:
                return self._deny(ruling)
            if section is not None and section[0] is Effect.DENY:
                return self._decision(Effect.DENY, (section[1],), ruling.errors)
            return self._decision(Effect.PERMIT, ids, ruling.errors)

        return decision

    def _segments_of(self, reader: str | Unlisted) -> tuple[SegmentRule, ...]:
        name = "" if isinstance(reader, Unlisted) else reader
        mine = [
            segment
            for segment in self._segments
            if (segment.tenants is None or reader in segment.tenants) and not self._barriers.never_equal(segment, name)
        ]
        return tuple(sorted(mine, key=lambda segment: segment.id))

    def _segment_table(
        self, by_reader: dict[str | Unlisted, tuple[SegmentRule, ...]]
    ) -> dict[tuple[str | Unlisted, str], SegmentRow]:
        known: dict[tuple[object, ...], SegmentRow] = {}
        table: dict[tuple[str | Unlisted, str], SegmentRow] = {}
        for reader, segments in by_reader.items():
            for owner in {segment.owner for segment in segments}:
                of_owner = tuple(segment for segment in segments if segment.owner == owner)
                name = "" if isinstance(reader, Unlisted) else reader
                rulings = self._rules.rulings(name, owner, Via.SEGMENT, same_group=self._same_group(name, owner))
                key = (id(rulings), owner, tuple(segment.id for segment in of_owner))
                if key not in known:
                    known[key] = self._segment_row(of_owner, rulings, self._obligations[owner])
                table[reader, owner] = known[key]
        return table

    def _segment_row(
        self, segments: tuple[SegmentRule, ...], rulings: Rulings, owed: tuple[Obligations, ...]
    ) -> SegmentRow:
        row: dict[tuple[int, int, int, str | None], Timeline] = {}
        for level in {segment.level for segment in segments}:
            for action in _DOMAIN_ACTIONS:
                opened = self._opened(
                    rulings.get((action, level), NO_RULING), self._section(action, level, owed[level])
                )
                for scope in (Scope.TENANT, Scope.GROUP, Scope.PUBLIC):
                    here = [s for s in segments if s.level == level and scope <= s.scope]
                    if here:
                        row[action, level, scope, None] = _timeline(map(_segment_period, here), opened)
                    for segment in here:
                        row[action, level, scope, segment.id] = _timeline((_segment_period(segment),), opened)
        return row

    def _edges(self) -> tuple[int, ...]:
        ends = [end for segment in self._segments if (end := segment.expires_us) is not None]
        grants = [edge for grant in self._grants for edge in (grant.from_us, grant.until_us) if edge is not None]
        return tuple(sorted({*ends, *grants}))


def _grant_period(grant: Grant) -> SourcePeriod:
    start = ALWAYS_US if grant.from_us is None else grant.from_us
    return SourcePeriod(start, NEVER_US if grant.until_us is None else grant.until_us, grant.id)


def _segment_period(segment: SegmentRule) -> SourcePeriod:
    end = NEVER_US if segment.expires_us is None else segment.expires_us
    return SourcePeriod(ALWAYS_US, end, segment.id)


def _timeline(periods: Iterable[SourcePeriod], decision: Callable[[tuple[str, ...]], Decision]) -> Timeline:
    """Cut time at every edge; each piece with a live source gets its decision, and that through each source."""
    decisions: dict[str, Decision] = {}
    begins: dict[int, list[str]] = {}
    ends: dict[int, list[str]] = {}
    for period in periods:
        if period.start_us < period.end_us:
            decisions[period.id] = decision((period.id,))
            begins.setdefault(period.start_us, []).append(period.id)
            ends.setdefault(period.end_us, []).append(period.id)
    live: list[str] = []
    pieces = []
    for start, end in pairwise(sorted({*begins, *ends})):
        for source in ends.get(start, ()):
            live.remove(source)
        for source in begins.get(start, ()):
            insort(live, source)
        if live:
            ids = tuple(live)
            each = ManySources(ids, decisions) if len(ids) > _LISTED_MAX else {one: decisions[one] for one in ids}
            pieces.append(LiveInterval(start, end, decision(ids), each))
    return tuple(pieces)


def _grouped(grants: list[Grant]) -> dict[str, tuple[Grant, ...]]:
    by_reader: dict[str, list[Grant]] = {}
    for grant in sorted(grants, key=lambda grant: grant.id):
        by_reader.setdefault(grant.reader, []).append(grant)
    return {reader: tuple(mine) for reader, mine in by_reader.items()}


# -- the rules, evaluated for a pair of tenants into the forbids and permits of every cell -----------------------------


class Ruling(NamedTuple):
    """The rules' verdict on one cell: ids of the forbids and permits that match, and errors."""

    forbids: tuple[str, ...] = ()
    permits: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()


Rulings = dict[tuple[int, int], Ruling]
"""By (action, level); a cell that no rule matches is absent."""
NO_RULING = Ruling()


class RuleIndex:
    """The rules, indexed so that a pair of tenants only costs the rules that name one of them."""

    def __init__(self, policy: Policy) -> None:
        self._levels = len(policy.classifications)
        self._every = [(int(action), level) for action in Action for level in range(self._levels)]
        self._failed: dict[str, tuple[Rule, str]] = {}
        self._named: dict[str, list[Rule]] = {}
        self._general: list[Rule] = []
        for rule in policy.rules:
            try:
                names = {*(rule.readers or ()), *(rule.owners or ())}
            except Exception as error:
                self._failed[rule.id] = (rule, f"{rule.id}: {type(error).__name__}")
                continue
            if rule.readers is None and rule.owners is None:
                self._general.append(rule)
            for name in names:
                self._named.setdefault(name, []).append(rule)
        self._known: dict[tuple[object, ...], Rulings] = {}

    def rulings(self, reader: str, owner: str, via: Via, *, same_group: bool) -> Rulings:
        """Return the rulings for this reader at this owner's domains, for every action and level."""
        own = reader == owner
        named, failed = [], dict(self._failed)
        for rule in {rule.id: rule for name in (reader, owner) for rule in self._named.get(name, ())}.values():
            try:
                if _names_match(rule, reader, owner):
                    named.append(rule)
            except Exception as error:
                failed[rule.id] = (rule, f"{rule.id}: {type(error).__name__}")
        near = own or same_group
        key = (own, near, via, tuple(sorted(rule.id for rule in named)), tuple(sorted(failed)))
        if key not in self._known:
            covered = [(rule, *self._covered(rule, own, near, via)) for rule in (*self._general, *named)]
            covered.extend((rule, self._every, (error,)) for rule, error in failed.values())
            self._known[key] = _collect(covered)
        return self._known[key]

    def _covered(self, rule: Rule, own: bool, near: bool, via: Via) -> tuple[list[tuple[int, int]], tuple[str, ...]]:
        """Return the cells that a rule covers; all cells after an error (a failing permit then permits nothing)."""
        try:
            if rule.via is not None and via not in rule.via:
                return [], ()
            if rule.relation is Relation.OWNER and not own:
                return [], ()
            if rule.relation is Relation.SAME_GROUP and not near:
                return [], ()
            levels = range(self._levels) if rule.levels is None else rule.levels
            return [(int(action), int(level)) for action in rule.actions for level in levels], ()
        except Exception as error:
            return self._every, (f"{rule.id}: {type(error).__name__}",)


def _collect(covered: Iterable[tuple[Rule, list[tuple[int, int]], tuple[str, ...]]]) -> Rulings:
    """Rulings by cell, from the cells that each rule covers."""
    cells: dict[tuple[int, int], tuple[list[str], list[str], list[str]]] = {}
    for rule, places, errors in covered:
        for cell in places:
            forbids, permits, failed = cells.setdefault(cell, ([], [], []))
            failed.extend(errors)
            if rule.effect is RuleEffect.PERMIT:
                permits.extend(() if errors else (rule.id,))
            else:
                forbids.append(rule.id)
    return {
        cell: Ruling(tuple(sorted(forbids)), tuple(sorted(permits)), tuple(sorted(failed)))
        for cell, (forbids, permits, failed) in cells.items()
    }


def _names_match(rule: Rule, reader: str, owner: str) -> bool:
    """Return whether the tenants fit the names in the rule."""
    return (rule.readers is None or reader in rule.readers) and (rule.owners is None or owner in rule.owners)
