"""Routes that policies can distinguish: one example for every set of patterns that some route matches.

1. The examples are complete. A classification depends on a route only through the patterns that it matches. Segment by
   segment, only the patterns that can still match matter. So one example of each reachable set stands for all routes.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvcustody.policies.document.model import EVERY_TENANT, Policy

_FRESH = "~other"


class RouteExamples:
    """The routes that some policies can distinguish, by tenant."""

    def __init__(self, policies: Iterable[Policy]) -> None:
        self._patterns: dict[str, set[str]] = {}
        for policy in policies:
            for rule in policy.classify:
                if rule.route is not None:
                    self._patterns.setdefault(rule.tenant, set()).add(rule.route.lower())
        self._everyone = self._routes(set())

    def of(self, tenant: str) -> list[str | None]:
        """Return None (no route), and one route for each possible set of this tenant's patterns; sorted."""
        own = self._patterns.get(tenant)
        return self._everyone if own is None else self._routes(own)

    def _routes(self, own: set[str]) -> list[str | None]:
        return [None, *sorted(_examples(sorted(own | self._patterns.get(EVERY_TENANT, set()))))]


def _examples(patterns: list[str]) -> set[str]:
    """Walk all patterns at once; a state is the depth and the patterns that the segments so far fit."""
    split = [tuple(part for part in pattern.removesuffix("/*").split("/") if part) for pattern in patterns]
    ends_open = [pattern.endswith("/*") for pattern in patterns]
    deepest = max((len(parts) for parts in split), default=0) + 1
    examples: set[str] = set()
    frontier: dict[frozenset[int], tuple[str, ...]] = {frozenset(range(len(patterns))): ()}
    for depth in range(deepest + 1):
        examples.update("/" + "/".join(route) for route in frontier.values())
        coming: dict[frozenset[int], tuple[str, ...]] = {}
        for alive, route in frontier.items():
            words = {split[i][depth] for i in alive if depth < len(split[i])} - {"*"}
            for word in (*sorted(words), _FRESH):
                fits = frozenset(i for i in alive if _goes_on(split[i], ends_open[i], depth, word))
                coming.setdefault(fits, (*route, word))
        frontier = coming
    return examples


def _goes_on(parts: tuple[str, ...], ends_open: bool, depth: int, word: str) -> bool:
    return parts[depth] in ("*", word) if depth < len(parts) else ends_open
