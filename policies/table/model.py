"""The parts of a decision table: decisions, their time intervals, and the rows of a compiled policy.

A caller of `DecisionTable.decide` reads `Decision` alone. The compiler fills `Tables`; a `DecisionTable` and its dense
form (`BatchTable`) read them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvcustody.policies.document.model import Action, Effect, Grant, Scope, SegmentRule, Via
from kvcustody.policies.table.obligations import Obligations

DEFAULT_DENY = "default-deny"
ALWAYS_US = -(1 << 63)
NEVER_US = (1 << 63) - 1
TENANT_LENGTH_MAX = 257


class Unlisted(Enum):
    """The key for unlisted tenants. No caller's string, nor None, equals it."""

    TENANT = 0


UNLISTED = Unlisted.TENANT


class AccessRequest(NamedTuple):
    """A question for one decision, without its instant: may `reader` act on `owner`'s domain, reached by `via`?

    `source` narrows a grant or segment to one id; without it any live one will do, and all are named. Where the same
    is asked again and again (a plan's requests), make it once.
    """

    action: Action
    reader: str
    owner: str
    level: int  # of classification
    scope: Scope
    via: Via
    source: str | None = None


Integers = NDArray[np.integer]
Tenants = TypeVar("Tenants", Sequence[str], Integers)


class AccessColumns(NamedTuple, Generic[Tenants]):
    """Many access requests by any source, one column for each field; tenants by name or by index
    (`BatchTable.intern`).
    """

    actions: Integers
    readers: Tenants
    owners: Tenants
    levels: Integers
    scopes: Integers
    vias: Integers


@dataclass(frozen=True, slots=True)
class Decision:
    """An effect, the ids that determined it, the policy's revision, and the errors met while deciding."""

    effect: Effect
    reasons: tuple[str, ...]
    revision: int
    errors: tuple[str, ...] = ()
    permitted: bool = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "permitted", self.effect is Effect.PERMIT)

    def __bool__(self) -> bool:
        return self.permitted


Row = tuple[Decision, ...]
"""A tenant's own decisions, ordered by action, level and scope."""


class ManySources:
    """Live sources and the decision through each, for cases in which a dict for each interval would use too much
    memory.

    `ids` are sorted; `decisions` has those of every piece of the timeline.
    """

    __slots__ = ("_decisions", "_ids")

    def __init__(self, ids: tuple[str, ...], decisions: Mapping[str, Decision]) -> None:
        self._ids = ids
        self._decisions = decisions

    def get(self, source: str, default: Decision) -> Decision:
        """Return the decision through this source; `default` if it is not live."""
        ids = self._ids
        place = bisect_left(ids, source)
        return self._decisions[source] if place < len(ids) and ids[place] == source else default

    def __iter__(self) -> Iterator[str]:
        return iter(self._ids)


class LiveInterval(NamedTuple):
    """An interval in which the same grants or segments are live, and the decision for it.

    `decision` is through any of them, `sources` has the decision through each.
    """

    start_us: int
    end_us: int  # exclusive
    decision: Decision
    sources: Mapping[str, Decision] | ManySources


Timeline = tuple[LiveInterval, ...]
"""Disjoint intervals; between them everything is denied by default."""


def source_edges(timelines: Iterable[Timeline]) -> dict[str, set[int]]:
    """Return by source the instants at which any timeline adds it, drops it, or starts or stops to permit it."""
    edges: dict[str, set[int]] = {}
    for timeline in {id(timeline): timeline for timeline in timelines}.values():
        until, live, permitted = ALWAYS_US, frozenset[str](), False
        for start, end, decision, sources in timeline:
            if start != until:
                _add(edges, live, until)
                live = frozenset()
            now = frozenset(sources)
            _add(edges, now ^ live if decision.permitted == permitted else now | live, start)
            until, live, permitted = end, now, decision.permitted
        _add(edges, live, until)
    return edges


def _add(edges: dict[str, set[int]], sources: Iterable[str], edge: int) -> None:
    for source in sources:
        edges.setdefault(source, set()).add(edge)


SegmentRow = Mapping[tuple[int, int, int, str | None], Timeline]
"""Decisions by (action, level, scope, segment id or None for any)."""


@dataclass(frozen=True, slots=True)
class Tables:
    """The compiler's result for a `DecisionTable`; every part is complete and never changes again."""

    own: dict[str, Row]
    unlisted: Row | None
    grants: dict[tuple[str, str], tuple[Timeline, ...]]
    segments: dict[tuple[str | Unlisted, str], SegmentRow]
    grants_by_reader: dict[str, tuple[Grant, ...]]
    segments_by_reader: dict[str | Unlisted, tuple[SegmentRule, ...]]
    obligations: dict[str | Unlisted, tuple[Obligations, ...]]
    ended: Obligations
    edges: tuple[int, ...]
