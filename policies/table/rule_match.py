"""The rules of a policy, evaluated for a pair of tenants into the forbids and permits of every cell.

- A forbid whose terms cannot be evaluated covers every cell; such a permit covers none. Either way the
   error is carried into the decision.
- The order of rules changes nothing: ids are reported sorted, and every matching rule is reported.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kvcustody.policies.document.model import Action, Policy, Relation, Rule, RuleEffect, Via


class Ruling(NamedTuple):
    """What the rules say of one cell: ids of the forbids and permits that match, and errors."""

    forbids: tuple[str, ...] = ()
    permits: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()


Rulings = dict[tuple[int, int], Ruling]
"""By (action, level); a cell that no rule matches is absent."""
NO_RULING = Ruling()


class RuleIndex:
    """The rules, indexed so that a pair of tenants costs only the rules that name one of them."""

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
        """What the rules say of this reader at this owner's domains, for every action and level."""
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
        """The cells that a rule covers; after an error all of them (and a permit then permits none)."""
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
    """Whether the tenants fit the names in the rule."""
    return (rule.readers is None or reader in rule.readers) and (rule.owners is None or owner in rule.owners)
