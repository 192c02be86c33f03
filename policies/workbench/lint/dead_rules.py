"""Rules without effect: rules that can never match, and rules that others make superfluous.

1. A rule is a product of sets (actions, levels, ways, relation, readers, owners). It is packed into one integer, so
   that "covers" is one operation. Everything reported is certain, but for forbids not everything superfluous is found.
2. A guard (a forbid of something that nothing opens today) is not a finding: it is there for later edits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from kvcustody.policies.document.model import Action, Policy, Relation, Rule, RuleEffect, Via
from kvcustody.policies.document.problems import SourceMark, quote
from kvcustody.policies.workbench.request import DOMAIN_ACTIONS

_OWN, _GROUP, _OTHER = 1, 2, 4
Finding = tuple[SourceMark, str, str]
"""Where, which code, and what."""


class _Packed(NamedTuple):
    rule: Rule
    bits: int
    cells: tuple[int, int, int, int, int, int]


def lint_rules(policy: Policy) -> Iterator[Finding]:
    """Yield vacuous, shadowed, overridden and redundant rules."""
    sizes = _Sizes(policy)
    packed = []
    for rule in policy.rules:
        cells = sizes.cells(rule)
        if not all(cells):
            yield rule.mark, "KVP701", f"rule {quote(rule.id)} can never match: {_why(rule)}"
        else:
            packed.append(_Packed(rule, sizes.pack(cells), cells))
    superfluous: set[str] = set()
    for finding, rule in _covered(packed):
        superfluous.add(rule.id)
        yield finding
    yield from _redundant(packed, superfluous)


class _Sizes:
    """The widths of the six sets of a rule, and a tenant's bit."""

    def __init__(self, policy: Policy) -> None:
        self._tenants = {tenant.id: 1 << place for place, tenant in enumerate(policy.tenants)}
        self._everyone = (1 << (len(self._tenants) + 1)) - 1  # the last bit: every unlisted tenant
        self._levels = (1 << len(policy.classifications)) - 1
        groups = Counter(tenant.group for tenant in policy.tenants if tenant.group is not None)
        self._has_families = any(count > 1 for count in groups.values())

    def cells(self, rule: Rule) -> tuple[int, int, int, int, int, int]:
        """(actions, levels, ways, relations, readers, owners) as bit sets, less what excludes itself."""
        actions = sum(1 << action for action in rule.actions)
        levels = self._levels if rule.levels is None else sum(1 << level for level in rule.levels)
        relations = _OWN | _GROUP | _OTHER
        if rule.relation is not None:
            relations = _OWN if rule.relation is Relation.OWNER else _OWN | _GROUP
        readers, owners = self._set(rule.readers), self._set(rule.owners)
        if not readers & owners:
            relations &= ~_OWN
        if not self._has_families:
            relations &= ~_GROUP
        if relations == _OWN:
            readers = owners = readers & owners
        ways = 7 if rule.via is None else sum(1 << via for via in rule.via)
        ways &= _ways_of(rule.actions)
        if not relations & (_GROUP | _OTHER):
            ways &= ~(1 << Via.GRANT)
        if not relations & _OWN:
            ways &= ~(1 << Via.OWN)
        if ways == 1 << Via.OWN:
            relations &= _OWN
            readers = owners = readers & owners
        return actions, levels, ways, relations, readers, owners

    def _set(self, tenants: tuple[str, ...] | None) -> int:
        return self._everyone if tenants is None else sum(self._tenants.get(tenant, 0) for tenant in tenants)

    def pack(self, cells: tuple[int, ...]) -> int:
        """Return the six sets side by side."""
        packed = 0
        for part in cells:
            packed = packed << max(16, len(self._tenants) + 1) | part
        return packed


def _ways_of(actions: tuple[Action, ...]) -> int:
    """Return the ways by which at least one of the actions can be reached."""
    ways = 1 << Via.OWN
    if Action.REUSE in actions:
        ways |= 1 << Via.GRANT
    if any(action in DOMAIN_ACTIONS for action in actions):
        ways |= 1 << Via.SEGMENT
    return ways


def _why(rule: Rule) -> str:
    if rule.via is not None and not sum(1 << via for via in rule.via) & _ways_of(rule.actions):
        return f"{', '.join(a.name.lower() for a in rule.actions)} is not reached via {rule.via[0].name.lower()}"
    if rule.relation is not None:
        return "no tenant is its own reader by this way"
    return "no tenant is both the reader and the owner that it names"


def _covered(packed: list[_Packed]) -> Iterator[tuple[Finding, Rule]]:
    """Rules that one other rule covers whole: of two equal ones the later is told."""
    for place, (rule, bits, _) in enumerate(packed):
        for other_place, (other, other_bits, _) in enumerate(packed):
            if bits & ~other_bits or place == other_place:
                continue
            if other.effect is RuleEffect.FORBID and rule.effect is RuleEffect.PERMIT:
                message = f"permit {quote(rule.id)} never takes effect: forbid {quote(other.id)} covers all of it"
                yield (rule.mark, "KVP703", message), rule
                break
            if other.effect is rule.effect and (bits != other_bits or other_place < place):
                message = f"{rule.effect} {quote(rule.id)} adds nothing: {quote(other.id)} covers all of it"
                yield (rule.mark, "KVP702", message), rule
                break


def _redundant(packed: list[_Packed], known: set[str]) -> Iterator[Finding]:
    """Permits whose every cell other permits give, or a forbid takes, though no single rule covers them."""
    permits = [entry for entry in packed if entry.rule.effect is RuleEffect.PERMIT and entry.rule.id not in known]
    forbids = [entry for entry in packed if entry.rule.effect is RuleEffect.FORBID]
    cells: Counter[tuple[int, int, int]] = Counter()
    mine: list[tuple[_Packed, list[tuple[int, int, int]]]] = []
    for entry in permits:
        actions, levels, _, _, readers, _ = entry.cells
        covered = list(product(_ones(actions), _ones(levels), _ones(readers)))
        cells.update(covered)
        mine.append((entry, covered))
    for entry, covered in mine:
        if all(cells[cell] > 1 or _forbidden(cell, forbids) for cell in covered):
            cells.subtract(covered)  # of several that cover each other, one has to stay
            message = f"permit {quote(entry.rule.id)} adds nothing: other rules decide all of it"
            yield entry.rule.mark, "KVP704", message


def _forbidden(cell: tuple[int, int, int], forbids: list[_Packed]) -> bool:
    action, level, tenant = cell
    return any(
        actions >> action & 1
        and levels >> level & 1
        and ways >> Via.OWN & 1
        and relations & _OWN
        and readers >> tenant & 1
        and owners >> tenant & 1
        for _, _, (actions, levels, ways, relations, readers, owners) in forbids
    )


def _ones(bits: int) -> list[int]:
    return [place for place, bit in enumerate(reversed(bin(bits)[2:])) if bit == "1"]
