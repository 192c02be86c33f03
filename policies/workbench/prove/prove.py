"""Prove a decision table against its policy's declarations by asking it every distinguishable question.

1. Tenants are compared only for equality, so listed tenants plus two fresh ones are a complete domain. Time enters
   through the edges of grants and segments. Each edge is checked at its instant and one microsecond before. A cell is
   checked at the edges that can change its answer: those of the table and of the declarations. A cell without a
   timeline is denied at every instant by any source, and is checked once. The proof counts what these stand for too.
2. The table is asked through `decide`, as the governor asks it; what is right comes from `Declared`, which shares no
   code with the compiler.
3. Safety only: a table that denies more than its policy declares is not a leak.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcustody.policies.document.digest import digest
from kvcustody.policies.document.model import Action, Grant, Policy, Scope, SegmentRule, Tier, Via
from kvcustody.policies.table.crossing import rules_without_effect
from kvcustody.policies.table.decision_table import DecisionTable
from kvcustody.policies.table.model import (
    TENANT_LENGTH_MAX,
    UNLISTED,
    AccessColumns,
    AccessRequest,
    Decision,
    Unlisted,
    source_edges,
)
from kvcustody.policies.table.obligations import ObligationsOf
from kvcustody.policies.workbench.prove.counterexamples import Findings
from kvcustody.policies.workbench.prove.model import Proof, Searched
from kvcustody.policies.workbench.prove.obligation_checks import (
    check_duties,
    check_labels,
    check_levels,
    check_places,
    check_tiers,
)
from kvcustody.policies.workbench.prove.specification import Declared
from kvcustody.policies.workbench.request import DOMAIN_ACTIONS, FRESH, Request

ABSENT_EACH_MAX = 10_000
"""Pairs of tenants of which each is asked cell by cell; beyond it, those without an entry are asked in bulk."""
ABSENT_BULK_MAX = 100_000
_NO_SOURCE = "~no-such-source"
_AT_ANY_TIME = (0,)
Progress = Callable[[int, int], None]


class Never(NamedTuple):
    """A combination that authors declare must never be permitted; a part that is None stands for every value.

    A tenant's own blocks are meant only where reader and owner are both named. With `tier`, copies in it are meant and
    no requests: those of the tenant that is named, as reader or as owner.
    """

    reader: str | None = None
    owner: str | None = None
    action: Action | None = None
    level: int | None = None
    via: Via | None = None
    tier: Tier | None = None

    def names(self, request: Request) -> bool:
        """Return whether the request is one of these."""
        if self.tier is not None:
            return False
        if request.reader == request.owner and (self.reader is None or self.owner is None):
            return False
        return all(
            said is None or said == asked
            for said, asked in (
                (self.reader, request.reader),
                (self.owner, request.owner),
                (self.action, request.action),
                (self.level, request.level),
                (self.via, request.via),
            )
        )


def prove(
    table: DecisionTable,
    *,
    declared: Policy | None = None,
    never: Sequence[Never] = (),
    progress: Progress | None = None,
) -> Proof:
    """Prove that `table` permits nothing that `declared` (its own policy by default) does not declare.

    `progress` is called with (readers done, readers in all). Never raises for what the table answers.
    """
    search = _Search(table, declared or table.policy, never)
    search.run(progress)
    return search.proof()


class _Search:
    """The state of one search: the domain, the specification, and what was found."""

    def __init__(self, table: DecisionTable, policy: Policy, never: Sequence[Never]) -> None:
        self._table = table
        self._policy = policy
        self._declared = Declared(policy, table.revoked)
        self._never = never
        names = {tenant.id for tenant in (*policy.tenants, *table.policy.tenants)}
        self._tenants = (*sorted(names), *FRESH)
        self._levels = range(max(len(policy.classifications), len(table.policy.classifications)))
        self._findings = Findings(policy.classifications)
        owed = ObligationsOf(policy)
        self._owed = {tenant.id: owed(tenant) for tenant in policy.tenants}
        self._instants: set[int] = set()
        self._owners: dict[str | Unlisted, set[str]] = {}
        for reader, owner in table.entries():
            self._owners.setdefault(reader, set()).add(owner)
        self._absent = "each asked"
        self._compared: dict[tuple[int, int], tuple[Decision, frozenset[str], bool]] = {}  # of one pair, by identity
        self._own_cells = list(product(Action, self._levels, Scope))

    def run(self, progress: Progress | None) -> None:
        """Ask everything."""
        pairs = len(self._tenants) ** 2
        if pairs > ABSENT_BULK_MAX:
            self._absent = f"{pairs} pairs: a pair without an entry always misses, so not every one was asked"
        elif pairs > ABSENT_EACH_MAX:
            self._absent = "each asked, in bulk"
        for done, reader in enumerate(self._tenants):
            self._own(reader)
            owners = self._tenants if pairs <= ABSENT_EACH_MAX else self._opened_to(reader)
            for owner in owners if pairs > ABSENT_BULK_MAX else {reader: None, **dict.fromkeys(owners)}:
                self._across(reader, owner, tuple(Via) if reader != owner else (Via.GRANT, Via.SEGMENT))
            if ABSENT_EACH_MAX < pairs <= ABSENT_BULK_MAX:
                self._bulk(reader)
            if progress is not None:
                progress(done + 1, len(self._tenants))
        self._malformed()
        check_levels(self._table, self._declared, self._tenants, self._findings)
        check_duties(self._table, self._declared, self._tenants, self._findings)
        check_tiers(self._table, self._declared, self._tenants, self._findings)
        check_labels(self._table, self._declared, self._tenants, self._findings)
        check_places(self._table, self._declared, self._tenants, self._findings)
        for said in self._never:
            if said.tier is not None:
                self._never_in(said, said.tier)

    def _never_in(self, said: Never, tier: Tier) -> None:
        """No copy that the authors speak of may be in the tier."""
        names = self._policy.classifications
        for tenant, level in product(self._tenants, range(len(names))):
            about = {said.reader, said.owner} - {None}
            if (about and about != {tenant}) or said.level not in (None, level):
                continue
            duty = self._table.tier_duty(tenant, level, tier)
            if duty.absolute_us or duty.running_us:
                asked = {"tenant": tenant, "classification": names[level], "tier": tier.value}
                why = f"allowed by {', '.join(duty.reasons)}; the authors say never"
                self._findings.says("ISO-11", why, asked)

    def _opened_to(self, reader: str) -> list[str]:
        """Return the owners for which the table or the declaration has an entry with this reader."""
        listed = self._owners.get(reader, set()) | self._owners.get(UNLISTED, set())
        return sorted(listed | self._declared.owners(reader))

    def _bulk(self, reader: str) -> None:
        """One reader and every owner, at the epoch, in one call: what is permitted is judged one by one."""
        owners, *columns = self._columns
        batch, mine = self._table.batch(), self._tenants.index(reader)
        indices, _ = batch.intern(self._tenants, ())
        readers = np.full(len(owners), indices[mine])
        mask = batch.permits(AccessColumns(columns[0], readers, indices[owners], columns[1], columns[2], columns[3]), 0)
        self._findings.cells += len(mask)
        for place in np.flatnonzero(mask & (owners != mine)):
            action, level, scope, via = (int(column[place]) for column in columns)
            request = Request(Action(action), reader, self._tenants[owners[place]], level, Scope(scope), Via(via), 0)
            self._judge_crossing(request, request.decide(self._table))

    @cached_property
    def _columns(self) -> tuple[NDArray[np.int64], ...]:
        """(owner, action, level, scope, way) of every cell of one reader, as columns of indices."""
        sizes = (len(self._tenants), len(Action), len(self._levels), len(Scope), len(Via))
        return tuple(column.ravel() for column in np.indices(sizes))

    def _own(self, tenant: str) -> None:
        """A tenant's own domains; such an answer does not depend on time, so one instant is asked."""
        decide, findings = self._table.decide, self._findings
        findings.cells += len(self._own_cells)
        for action, level, scope in self._own_cells:
            decision = decide(AccessRequest(action, tenant, tenant, level, scope, Via.OWN), 0)
            if decision.permitted:
                self._judge_own(Request(action, tenant, tenant, level, scope, Via.OWN, 0), decision)

    def _across(self, reader: str, owner: str, vias: tuple[Via, ...]) -> None:
        """Every cell of a pair, at each instant that either side can tell apart, by each source and by any."""
        self._compared.clear()
        timelines = self._table.timelines(reader, owner)
        edges, declared = source_edges(timelines), self._declared.edges(reader, owner)
        every = {edge for each in (*edges.values(), *declared.values()) for edge in each}
        instants = _around(every)
        self._instants.update(instants)
        named = {_NO_SOURCE: instants} if timelines or every else {}
        for source, own in edges.items():
            named[source] = _around(own | declared.get(source, set()))
        decide, timeline, findings = self._table.decide, self._table.timeline, self._findings
        others = sum(via is not Via.OWN for via in vias) * len(named)
        findings.cells += len(self._own_cells) * len(instants) * (len(vias) + others)
        in_segment = Via.SEGMENT  # a name of an enumeration is a look-up, and this loop is most of a proof
        for action, level, scope in self._own_cells:
            for via in vias:
                access = AccessRequest(action, reader, owner, level, scope, via)
                opens = timelines and timeline(access)
                for now_us in instants if opens else _AT_ANY_TIME:
                    decision = decide(access, now_us)
                    if decision.permitted:
                        request = Request(action, reader, owner, level, scope, via, now_us)
                        self._judge_crossing(request, decision)
                if not named or not (opens or via is in_segment):
                    continue
                for source, at in named.items():
                    access = AccessRequest(action, reader, owner, level, scope, via, source)
                    for now_us in at if opens or timeline(access) else ():
                        decision = decide(access, now_us)
                        if decision.permitted:
                            request = Request(action, reader, owner, level, scope, via, now_us, source)
                            self._judge_crossing(request, decision)

    def _judge_own(self, request: Request, decision: Decision) -> None:
        findings, declared = self._findings, self._declared
        findings.permits += 1
        entry = declared.admitted(request.reader)
        if entry is None:
            findings.breaks("ISO-6", request, "no entry admits this tenant", decision)
            return
        widest = entry.scope if request.action in DOMAIN_ACTIONS else Scope.TENANT
        if request.scope > widest:
            findings.breaks("ISO-7", request, f"its scope is `{widest.name.lower()}`", decision)
        self._judge_rules(request, decision)

    def _judge_rules(self, request: Request, decision: Decision) -> None:
        forbids = self._declared.forbids(request)
        if forbids:
            self._findings.breaks("ISO-4", request, f"`{forbids[0]}` forbids it", decision)
        if any(said.names(request) for said in self._never):
            self._findings.breaks("ISO-11", request, "the authors say never", decision)

    def _judge_crossing(self, request: Request, decision: Decision) -> None:
        findings, declared = self._findings, self._declared
        findings.permits += 1
        if declared.admitted(request.reader) is None or request.owner not in declared.tenants:
            findings.breaks("ISO-6", request, "one of the two is not in the policy", decision)
        if request.reader != request.owner and self._policy.profile.isolating:
            findings.breaks("ISO-5", request, f"the profile is `{self._policy.profile}`", decision)
        named = declared.open(request)
        if not named or not self._are_named(request, decision, named):
            findings.breaks(self._which(request, decision), request, self._instead(request), decision)
        if not self._may_be_kept(request):
            findings.breaks("ISO-9", request, "the owner's obligations rule it out", decision)
        self._judge_rules(request, decision)

    def _are_named(self, request: Request, decision: Decision, named: frozenset[str]) -> bool:
        """Return whether everything that a decision names is declared. Cached: many grants compare the same sets
        again.
        """
        if request.source is not None:
            return named.issuperset(decision.reasons)
        pair = (id(decision), id(named))
        if pair not in self._compared:
            self._compared[pair] = decision, named, named.issuperset(decision.reasons)
        return self._compared[pair][-1]

    def _may_be_kept(self, request: Request) -> bool:
        """Return whether the owner's obligations leave room for publishing, retaining or offloading."""
        levels = self._owed.get(request.owner, ())
        if request.action is Action.REUSE or request.level >= len(levels):
            return True  # a missing owner or level has been told by another property
        owed = levels[request.level]
        return bool(owed.tiers) if request.action is Action.OFFLOAD else owed.cacheable

    def _which(self, request: Request, decision: Decision) -> str:
        """Return the property that a permit without a live source breaks, depending on whether its named source
        exists.
        """
        pair = (request.reader, request.owner)
        declared: list[Grant | SegmentRule] = [
            *self._declared.grants(*pair),
            *self._declared.segments(*pair),
        ]
        named = [rule for rule in declared if rule.id in decision.reasons]
        if any(self._declared.apart(rule, request.reader) for rule in named):
            return "ISO-13"
        if set(decision.reasons) <= {grant.id for grant in self._declared.grants(*pair)}:
            narrow = request.action is not Action.REUSE or request.scope < Scope.TENANT
            levels = [grant.at_most for grant in self._declared.grants(*pair)]
            return "ISO-2" if narrow or request.level > max(levels, default=-1) else "ISO-1"
        mine = {segment.id: segment for segment in self._declared.segments(*pair)}
        if decision.reasons and set(decision.reasons) <= set(mine):
            segments = [mine[reason] for reason in decision.reasons]
            alive = any(s.expires_us is None or request.now_us < s.expires_us for s in segments)
            return "ISO-3" if alive else "ISO-1"
        return "ISO-1"

    def _instead(self, request: Request) -> str:
        live = sorted(self._declared.open(request))
        if live:
            return f"declared and live here: {', '.join(live)}"
        known = [grant.id for grant in self._declared.grants(request.reader, request.owner)]
        known += [segment.id for segment in self._declared.segments(request.reader, request.owner)]
        listed = f"of {', '.join(sorted(known))}, none is live and covers this" if known else "nothing between the two"
        return f"declared: {listed}"

    def _malformed(self) -> None:
        """What is out of range, and what is no tenant, is denied."""
        for request in _malformed(self._tenants, len(self._levels)):
            self._findings.cells += 1
            decision = request.decide(self._table)
            if decision.permitted:
                self._findings.breaks("ISO-10", request, "the request is malformed", decision)

    def proof(self) -> Proof:
        """Everything that was found."""
        searched = Searched(
            tenants=len(self._tenants) - len(FRESH),
            fresh=len(FRESH),
            actions=len(Action),
            levels=len(self._levels),
            scopes=len(Scope),
            vias=len(Via),
            instants=len(self._instants),
            cells=self._findings.cells,
            absent_pairs=self._absent,
        )
        return Proof(
            policy=self._policy.name,
            digest=digest(self._policy),
            table_digest=self._table.digest,
            revoked=tuple(sorted(self._table.revoked)),
            searched=searched,
            properties=self._findings.properties(with_never=bool(self._never)),
            without_effect=tuple(rules_without_effect(self._table.policy)),
        )


def _around(edges: Collection[int]) -> list[int]:
    """Return instants that represent all times between the given edges."""
    return sorted({0, *edges, *(edge - 1 for edge in edges)})


def _malformed(tenants: Sequence[str], levels: int) -> Iterator[Request]:
    reader, owner = tenants[0], tenants[1]
    for via, (first, second) in product(Via, ((reader, reader), (reader, owner))):
        for action, level, scope in (
            (Action.REUSE, -1, Scope.TENANT),
            (Action.REUSE, levels, Scope.TENANT),
            (Action.REUSE, 0, 9),
            (99, 0, Scope.TENANT),
        ):
            yield Request(action, first, second, level, scope, via, 0)  # type: ignore[arg-type]
    for nobody in ("", "x" * (TENANT_LENGTH_MAX + 1)):
        for via in Via:
            yield Request(Action.REUSE, nobody, nobody, 0, Scope.SESSION, via, 0)
