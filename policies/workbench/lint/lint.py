"""Lint a policy: find parts that are valid but probably unintended, or that will soon stop working.

1. Lint never changes what is accepted: each finding is a `Problem` with a KVP7xx code and its place.
2. It reads no clock and no ledger: the instant, the ids in use, the known tenants and the scrub rate are arguments.
3. Everything reported is certain, but lint does not find everything superfluous.

Lint also finds identifiers that a reviewer may confuse, although the policy compares them byte for byte.

1. Identifiers are ASCII: the loader refuses bidirectional and invisible characters (KVP104 and KVP206). So confusion is
   between letters that look alike, case, and separators.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise, product

from kvcustody.policies.document.model import (
    Action,
    Grant,
    OnWorkerDeath,
    Policy,
    RuleEffect,
    SegmentRule,
    TenantPolicy,
    Via,
)
from kvcustody.policies.document.problems import PolicyRejected, Problem, Problems, SourceMark, quote
from kvcustody.policies.table.crossing import Barriers
from kvcustody.policies.table.decision_table import DecisionTable
from kvcustody.policies.table.model import AccessRequest
from kvcustody.policies.table.obligations import ObligationsOf
from kvcustody.policies.workbench.lint.dead_rules import Finding, lint_rules
from kvcustody.policies.workbench.lint.without_effect import PoolOwner, without_effect
from kvcustody.policies.workbench.prove.route_examples import RouteExamples
from kvcustody.policies.workbench.prove.specification import Declared
from kvcustody.policies.workbench.request import FRESH, SHARED, instant
from kvcustody.times import DAY_US, span

SOON_DAYS = 30
ERRORS = frozenset({"KVP716", "KVP775"})  # what its author did not mean, whatever that was


@dataclass(frozen=True, slots=True)
class ScrubRate:
    """One device's rate of overwriting and reading back, in bytes per second, and the bytes of its pool."""

    overwrite: float
    read_back: float
    pool_bytes: int

    def seconds(self, pool_bytes: float, verify: float) -> float:
        """Return how many seconds it takes to overwrite these bytes and to read a share of them back."""
        return pool_bytes / self.overwrite + pool_bytes * verify / self.read_back


def lint(
    table: DecisionTable,
    *,
    now_us: int,
    soon_days: int = SOON_DAYS,
    used: Collection[str] | None = None,
    known_tenants: Collection[str] | None = None,
    rate: ScrubRate | None = None,
    owner: PoolOwner | None = None,
    tiers: Collection[str] | None = None,
) -> tuple[Problem, ...]:
    """Return every finding in document order.

    `used`: grant and segment ids that the ledger has seen in use; `known_tenants`: those of the identity provider;
    `rate`: what the deployment's scrubber was measured at; `owner`: whose blocks are governed; `tiers`: those
    that workers have. Without them their checks are left out.
    """
    policy = table.policy
    problems = Problems(policy.file)
    findings: list[Finding] = [
        *lint_rules(policy),
        *_lint_reuse(policy),
        *_lint_sources(table, now_us, soon_days, used),
        *_lint_names(policy, known_tenants),
        *_lint_retention(policy),
        *_lint_quotas(policy),
        *_lint_scrub(policy, rate),
        *_lint_plain_copies(policy),
        *_lint_placement(table),
        *_lint_receipts(table),
        *without_effect(policy, owner, tiers),
    ]
    for mark, code, message in findings:
        problems.add(mark, code, message)
    try:
        problems.raise_if_any()
    except PolicyRejected as collected:
        return collected.problems
    return ()


def _lint_reuse(policy: Policy) -> Iterator[Finding]:
    permits = (rule for rule in policy.rules if rule.effect is RuleEffect.PERMIT)
    if not any(Action.REUSE in rule.actions for rule in permits):
        yield policy.mark, "KVP705", "no rule permits reuse: every request computes its whole prompt"


def _lint_sources(table: DecisionTable, now_us: int, soon_days: int, used: Collection[str] | None) -> Iterator[Finding]:
    """Grants and segments that are over, about to be, ineffective, covered by another, or not used."""
    policy, barriers = table.policy, Barriers(table.policy)
    for group in policy.groups:
        yield from _ends(f"group {quote(group.id)}", group.mark, group.until_us, now_us, soon_days)
    for pair in policy.group_grants():
        yield from _closed(barriers, pair, f"group {quote(pair.group or '')}", (pair.reader,))
    for grant in policy.grants:
        what = f"grant {quote(grant.id)}"
        yield from _ends(what, grant.mark, grant.until_us, now_us, soon_days)
        closed = [*_closed(barriers, grant, what, (grant.reader,))]
        yield from closed
        if not closed and not _grant_opens(table, grant):
            yield (
                grant.mark,
                "KVP713",
                f"{what} opens nothing: rules or retention rule out all that it covers",
            )
        if used is not None and grant.id not in used:
            yield grant.mark, "KVP715", f"{what} has not been used"
    for segment in policy.segments:
        what = f"segment {quote(segment.id)}"
        yield from _ends(what, segment.mark, segment.expires_us, now_us, soon_days)
        readers = segment.tenants if segment.tenants is not None else [tenant.id for tenant in policy.tenants]
        closed = [*_closed(barriers, segment, what, readers)]
        yield from closed
        if not closed and not _segment_opens(table, segment):
            yield (
                segment.mark,
                "KVP713",
                f"{what} opens nothing: rules or retention rule out all that it covers",
            )
        if used is not None and segment.id not in used:
            yield segment.mark, "KVP715", f"{what} has not been used"
    yield from _covered_grants(policy)


def _closed(barriers: Barriers, rule: Grant | SegmentRule, what: str, readers: Iterable[str]) -> Iterator[Finding]:
    """Yield the readers to whom a rule opens nothing, grouped by reason."""
    by_reason: dict[str, list[str]] = {}
    for reader in readers:
        for why in barriers.of(rule, reader):
            by_reason.setdefault(why, []).append(reader)
    for why, closed in by_reason.items():
        to = ", ".join(map(quote, closed))
        yield rule.mark, "KVP716", f"{what} opens nothing of {quote(rule.owner)} to {to}: {why}"


def _ends(what: str, mark: SourceMark, end_us: int | None, now_us: int, soon_days: int) -> Iterator[Finding]:
    if end_us is None:
        return
    if end_us <= now_us:
        yield mark, "KVP711", f"{what} ended on {instant(end_us)}"
    elif end_us - now_us <= soon_days * DAY_US:
        yield mark, "KVP712", f"{what} ends on {instant(end_us)}, in {-(-(end_us - now_us) // DAY_US)} days"


def _grant_opens(table: DecisionTable, grant: Grant) -> bool:
    """Return whether the grant permits anything that is kept long enough to be read."""
    starts = grant.from_us if grant.from_us is not None else (grant.until_us or 1) - 1
    return any(
        table.decide(
            AccessRequest(Action.REUSE, grant.reader, grant.owner, level, SHARED[0], Via.GRANT, grant.id),
            starts,
        ).permitted
        and table.obligations(grant.owner, level).cacheable
        for level in range(grant.at_most + 1)
    )


def _segment_opens(table: DecisionTable, segment: SegmentRule) -> bool:
    readers = segment.tenants if segment.tenants is not None else (segment.owner,)
    last = 0 if segment.expires_us is None else segment.expires_us - 1
    owner, level = segment.owner, segment.level
    asked = (
        AccessRequest(Action.REUSE, reader, owner, level, SHARED[0], Via.SEGMENT, segment.id) for reader in readers
    )
    return table.obligations(owner, level).cacheable and any(table.decide(one, last).permitted for one in asked)


def _covered_grants(policy: Policy) -> Iterator[Finding]:
    declared = Declared(policy)
    for grant in policy.grants:
        for other in declared.grants(grant.reader, grant.owner):
            if other.id == grant.id or not _covers(other, grant):
                continue
            if not _covers(grant, other) or other.id < grant.id or other.group is not None:
                message = f"grant {quote(grant.id)} adds nothing: {quote(other.group or other.id)} covers all of it"
                yield grant.mark, "KVP714", message
                break


def _covers(wide: Grant, narrow: Grant) -> bool:
    starts = wide.from_us is None or (narrow.from_us is not None and wide.from_us <= narrow.from_us)
    ends = wide.until_us is None or (narrow.until_us is not None and narrow.until_us <= wide.until_us)
    return starts and ends and narrow.at_most <= wide.at_most


def _lint_names(policy: Policy, known_tenants: Collection[str] | None) -> Iterator[Finding]:
    marks = {tenant.id: tenant.mark for tenant in policy.tenants}
    for tenant, like in confused(marks):
        yield marks[tenant], "KVP722", f"tenant {quote(tenant)} looks like tenant {quote(like)}"
    sections = (policy.groups, policy.segments, policy.grants, policy.rules)
    ids = sorted((entry.mark, entry.id) for section in sections for entry in section)
    marks = {name: mark for mark, name in ids}
    for name, like in confused(marks):
        yield marks[name], "KVP722", f"identifier {quote(name)} looks like {quote(like)}"
    for listed in policy.tenants if known_tenants is not None else ():
        if listed.id not in (known_tenants or ()):
            yield listed.mark, "KVP721", f"tenant {quote(listed.id)} is not known to the identity provider"


def _lint_retention(policy: Policy) -> Iterator[Finding]:
    names = policy.classifications
    for (low, one), (high, two) in pairwise(enumerate(policy.retention)):
        for field in ("idle_us", "absolute_us", "active_max_us"):
            if getattr(two, field) > getattr(one, field):
                longer, least = span(getattr(two, field)), span(getattr(one, field))
                said = f"{field.removesuffix('_us')} `{longer}`, longer than `{least}`"
                yield two.mark, "KVP732", f"{names[high]} has {said} of {names[low]}"
    yield from _lint_parents(policy)


def _lint_parents(policy: Policy) -> Iterator[Finding]:
    """Yield findings for segments whose blocks live shorter than blocks built on them: a block ends with its parent."""
    owed_by = ObligationsOf(policy)
    owed = {tenant.id: owed_by(tenant) for tenant in policy.tenants}
    for segment in policy.segments:
        ceiling = owed[segment.owner][segment.level].absolute_us
        readers = owed if segment.tenants is None else segment.tenants
        longer = {
            policy.classifications[level]
            for reader in readers
            for level in range(segment.level, len(policy.classifications))
            if owed[reader][level].absolute_us > ceiling
        }
        if longer:
            said = f"`{span(ceiling)}`, so no {', '.join(sorted(longer))} block after it is kept longer"
            yield segment.mark, "KVP731", f"segment {quote(segment.id)} is kept {said}"


def _lint_quotas(policy: Policy) -> Iterator[Finding]:
    tenants = (*policy.tenants, *((policy.default,) if policy.default else ()))
    total = sum(tenant.guaranteed * (tenant.tenants_max or 1) for tenant in tenants)
    starved = [tenant for tenant in tenants if not tenant.guaranteed]
    if total == 1 and starved:
        message = f"guaranteed shares add up to `100%`: nothing is left for {quote(starved[0].id)}"
        yield starved[0].mark, "KVP741", message


def _lint_scrub(policy: Policy, rate: ScrubRate | None) -> Iterator[Finding]:
    """Yield a finding if the largest burst, one tenant's whole cap ended at once (by an erasure or a revision), takes
    too long.
    """
    if rate is None:
        return
    largest: TenantPolicy = max((*policy.tenants, *((policy.default,) if policy.default else ())), key=_cap)
    burst = float(largest.cap) * rate.pool_bytes
    for level, scrub in enumerate(policy.scrub):
        needed = rate.seconds(burst, float(scrub.verify))
        if needed * 1e6 > scrub.within_us:
            message = (
                f"{policy.classifications[level]} is to be scrubbed within `{span(scrub.within_us)}`, but the cap "
                f"of {quote(largest.id)} takes `{needed:.3g}s` at the measured rate"
            )
            yield scrub.mark, "KVP751", message


def _lint_plain_copies(policy: Policy) -> Iterator[Finding]:
    """Copies in clear, which the policy allows in memory of the host alone."""
    names = policy.classifications
    for level, offload in enumerate(policy.offload):
        if offload.tiers and not offload.encrypt:
            yield (
                offload.mark,
                "KVP752",
                f"offload of {quote(names[level])}: copies in host memory may be plain",
            )


def _lint_placement(table: DecisionTable) -> Iterator[Finding]:
    """Requests that no group may serve, told of the last rule that says so; groups dedicated twice; death by tiers."""
    policy, placement = table.policy, table.placement
    rules = {rule.id: rule for rule in policy.placement}
    examples, reported = RouteExamples((policy,)), set[str]()
    names = [tenant.id for tenant in policy.tenants] + ([FRESH[0]] if policy.default else [])
    for tenant in names if rules else ():
        for route, hint in product(examples.of(tenant), (None, *policy.classifications)):
            demand = placement.demand(tenant, route, None, hint)
            if demand.only is not None and not demand.among(demand.only) and demand.by[-1] not in reported:
                reported.add(demand.by[-1])
                whose = "unlisted tenants" if tenant in FRESH else f"tenant {quote(tenant)}"
                asked = policy.classifications[table.classify(tenant, route, None, hint)]
                what = f"requests of {whose} as {quote(asked)}"
                yield (
                    rules[demand.by[-1]].mark,
                    "KVP771",
                    f"no group may serve {what}: {', '.join(demand.by)}",
                )
    owners: dict[str, str] = {}
    for rule in policy.placement:
        for group in rule.groups if rule.dedicated else ():
            if owners.setdefault(group, rule.id) != rule.id:
                both = f"{quote(owners[group])} and {quote(rule.id)}"
                yield (
                    rule.mark,
                    "KVP772",
                    f"group {quote(group)} is dedicated by {both}: it serves what both list",
                )
    for level, name in enumerate(policy.classifications):
        outlives = any(tier.must_encrypt for tier in policy.offload[level].tiers)
        is_said = len({*policy.on_worker_death}) > 1  # of single classifications
        if is_said and policy.after_death(level) is OnWorkerDeath.RECOMPUTE and not outlives:
            yield (
                policy.mark,
                "KVP773",
                f"`on_worker_death` of {quote(name)} is `recompute`, and no tier keeps copies past a worker's death",
            )


def _lint_receipts(table: DecisionTable) -> Iterator[Finding]:
    """Shares of single tenants that change nothing: all their requests have receipts."""
    for tenant in table.policy.tenants:
        if tenant.route_receipts and table.placement.policy.receipts.is_opened(tenant.id):
            yield (
                tenant.mark,
                "KVP774",
                f"`route_receipts` of {quote(tenant.id)} has no effect: a grant or a segment opens the tenant",
            )


def _cap(tenant: TenantPolicy) -> float:
    return float(tenant.cap)


_PAIRS = (("rn", "m"), ("vv", "w"), ("cl", "d"))
_LETTERS = str.maketrans({"1": "l", "i": "l", "0": "o", "5": "s", "-": "", "_": "", ".": "", "@": "a"})


def skeleton(identifier: str) -> str:
    """Return an identifier with look-alike characters made equal."""
    text = identifier.lower()
    for pair, letter in _PAIRS:
        text = text.replace(pair, letter)
    return text.translate(_LETTERS)


def confused(identifiers: Iterable[str]) -> list[tuple[str, str]]:
    """Return (identifier, the earlier one that it resembles), in the given order."""
    seen: dict[str, str] = {}
    pairs = []
    for identifier in identifiers:
        shape = skeleton(identifier)
        if shape in seen and seen[shape] != identifier:
            pairs.append((identifier, seen[shape]))
        seen.setdefault(shape, identifier)
    return pairs
