"""Explain eviction: the priority of each part of one request's prompt, how long it lasts, and the line that sets it.

1. The priorities are those that both kinds of pools use (`document.token_priorities`); nothing is computed anew here.
2. Eviction never extends a deadline: what retention says of the tenant and the classification stands beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvcustody.errors import PolicyError
from kvcustody.policies.document.model import Eviction, EvictionKind, EvictionSignal
from kvcustody.policies.document.problems import did_you_mean, quote
from kvcustody.policies.document.token_priorities import KindRange, TokenPriority, token_priorities
from kvcustody.policies.reading.sections import percent
from kvcustody.policies.table.decision_table import DecisionTable

_BY_PRIORITY = (EvictionKind.PRIORITY, EvictionKind.COST, EvictionKind.VALUE)
_SIGNALS = {
    EvictionSignal.NEXT_TURN: "how likely a block is reused before its eviction, learned from blocks with equally "
    "long pauses",
    EvictionSignal.SCOPE: "who may reuse it: a session -4, a subject 0, a tenant +4, the readers of a segment +8",
    EvictionSignal.FRESHNESS: "the remaining part of its absolute time: all 0, half -4, a fourth or less -8",
    EvictionSignal.REUSE: "uses by later requests: none 0, one +4, three +8, fifteen or more +16",
    EvictionSignal.POSITION: "the cost of computing it again, by its depth: the first 0, the 512th block +4",
    EvictionSignal.PRESSURE: "the others count only while what is given up was used less than four long think "
    "times ago; else the least recently used goes first",
}
_ORDER = {
    EvictionKind.LRU: "the least recently used first",
    EvictionKind.FIFO: "the first in first; a prefix is as young as its youngest continuation",
    EvictionKind.LFU: "the least often used by later requests first, then the least recently used",
    EvictionKind.PRIORITY: "the lowest priority first, then the least recently used",
    EvictionKind.VALUE: "the least valuable first, by the signals below and the priority, with ageing",
    EvictionKind.COST: "the cheapest to compute again first: depth, uses by later requests and priority, with ageing",
}


class SignalExplanation(NamedTuple):
    """One signal's effect on a block's value, in quarter powers of two (+4 is twice as much)."""

    signal: str
    says: str


class EvictionExplanation(NamedTuple):
    """How one request's blocks are kept. `ranges` cover its prompt; they rank only among the tenant's own blocks."""

    tenant: str
    classification: str
    policy: str
    order: str
    line: int
    idle_us: int
    absolute_us: int
    ranges: tuple[TokenPriority, ...]
    signals: tuple[SignalExplanation, ...] = ()
    learned: str | None = None  # whose think times are learned from

    def data(self) -> dict[str, Any]:
        """Return the explanation as JSON data."""
        return self._asdict() | {
            "ranges": [each._asdict() for each in self.ranges],
            "signals": [each._asdict() for each in self.signals],
        }


def explain_eviction(
    table: DecisionTable,
    tenant: str,
    level: int,
    tokens: int,
    *,
    segment: str | None = None,
    kinds: Sequence[KindRange] = (),
) -> EvictionExplanation:
    """Explain the eviction of a prompt of so many tokens. Raises `PolicyError` for unknown names."""
    policy = table.policy
    if table.tenant(tenant) is None:
        raise PolicyError(f"tenant {quote(tenant)} is not admitted by the policy", tenant=tenant)
    known = {each.id: each for each in policy.segments if each.tenants is None or tenant in each.tenants}
    if segment is not None and segment not in known:
        hint = did_you_mean(segment, known) or f"its segments are {', '.join(known) or 'none'}"
        raise PolicyError(f"tenant {quote(tenant)} has no segment {quote(segment)}; {hint}", segment=segment)
    declared = {each.id for each in policy.eviction.kinds}
    for each in kinds:
        if each.kind not in declared:
            hint = did_you_mean(each.kind, declared) or f"kinds are {', '.join(sorted(declared)) or 'none'}"
            raise PolicyError(f"no kind of content {quote(each.kind)}; {hint}", kind=each.kind)
    owed = table.obligations(tenant, level)
    rule = None if segment is None else known[segment]
    ranges = [
        each._replace(until=tokens if each.until is None else min(each.until, tokens))
        for each in token_priorities(policy.eviction, rule, kinds)
        if each.first < tokens
    ]
    return EvictionExplanation(
        tenant,
        policy.classifications[level],
        policy.eviction.kind.value,
        _order(policy.eviction),
        policy.eviction.mark.line,
        owed.idle_us,
        owed.absolute_us,
        tuple(ranges) if policy.eviction.kind in _BY_PRIORITY else (),
        tuple(SignalExplanation(each.value, _SIGNALS[each]) for each in policy.eviction.signals),
        None if policy.eviction.learned is None else policy.eviction.learned.value,
    )


def _order(eviction: Eviction) -> str:
    if eviction.kind is not EvictionKind.SLRU:
        return _ORDER[eviction.kind]
    share = "all" if eviction.protected is None else percent(eviction.protected)
    return (
        f"what later requests used less than {eviction.hits} times first, then the rest, each the least recently used "
        f"first; at most {share} of a tenant's cached blocks are protected"
    )
