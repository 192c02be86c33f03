"""A proof: the properties by id, the finite domain that was searched, and a counterexample for each failure.

1. `Proof.data()` is deterministic: equal policies and versions give equal bytes (no clock, no host).
2. The claim and its limits travel with every proof.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass, field
from typing import Any

from kvcustody._version import __version__
from kvcustody.policies.workbench.request import Request

SCHEMA = "kvcustody/proof@1"
PROPERTIES = {
    "ISO-1": "every permit across a tenant boundary names a declared grant or segment that is live between the two",
    "ISO-2": "a grant only opens reuse, of tenant-level and wider domains, up to its level",
    "ISO-3": "a segment opens its own level and scope, to the readers that it lists",
    "ISO-4": "nothing that a rule forbids is permitted",
    "ISO-5": "in an isolating profile nothing crosses a tenant boundary",
    "ISO-6": "a tenant outside the policy gets what `tenants.default` gives, and nothing without it",
    "ISO-7": "a tenant reuses its own blocks only within its private scope",
    "ISO-8": "no hint, claim, route or tenant makes a classification lower than the policy declares",
    "ISO-9": "no obligation is looser than the policy's, and blocks that may not be kept are not",
    "ISO-10": "malformed requests are denied",
    "ISO-11": "nothing is permitted that the authors declared must never be",
    "ISO-12": "no copy exceeds what every source of the policy allows for its tier, encryption, place and time",
    "ISO-13": "a grant or segment opens nothing across a label that it does not name",
    "ISO-14": "a request only goes to workers that its placement rules name, and to none dedicated to others",
}
CLAIM = "no cross-tenant content or hit without a named grant or named segment"
LIMITS = (
    "decisions only: the governor's tests show that an engine asks before every reuse",
    "no timing, occupancy or eviction channel is covered; only `strict` and `dedicated` close those",
    "grants are taken as given: their owner decides whether they should exist",
)


@dataclass(frozen=True, slots=True)
class Counterexample:
    """A request that breaks a property, in the form in which it can be asked; `why` quotes the policy's declaration."""

    request: Request | None
    why: str
    text: str
    data: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ProvedProperty:
    """One property over the domain: the number of cells searched and of permits, and the breaches."""

    id: str
    cells: int
    permits: int
    counterexample: Counterexample | None = None
    broken: int = 0

    @property
    def title(self) -> str:
        """The property in words."""
        return PROPERTIES[self.id]

    @property
    def holds(self) -> bool:
        """Whether nothing in the domain breaks the property."""
        return self.counterexample is None


@dataclass(frozen=True, slots=True)
class Searched:
    """The finite domain. `fresh` tenants stand for all unlisted ones, because tenants are only compared for
    equality.
    """

    tenants: int
    fresh: int
    actions: int
    levels: int
    scopes: int
    vias: int
    instants: int
    cells: int
    absent_pairs: str


@dataclass(frozen=True, slots=True)
class Proof:
    """The verdict on one decision table."""

    policy: str
    digest: str
    table_digest: str
    revoked: tuple[str, ...]
    searched: Searched
    properties: tuple[ProvedProperty, ...]
    without_effect: tuple[tuple[str, str], ...] = ()  # declared, permitted, and why it opens nothing
    versions: dict[str, str] = field(
        default_factory=lambda: {
            "kvcustody": __version__,
            "python": platform.python_version(),
        }
    )

    @property
    def holds(self) -> bool:
        """Whether every property holds."""
        return all(found.holds for found in self.properties)

    @property
    def broken(self) -> tuple[ProvedProperty, ...]:
        """The properties that do not hold."""
        return tuple(found for found in self.properties if not found.holds)

    def data(self) -> dict[str, Any]:
        """Return the content of `proof.json`."""
        searched = {name: getattr(self.searched, name) for name in Searched.__slots__}
        return {
            "schema": SCHEMA,
            "policy": self.policy,
            "digest": self.digest,
            "table_digest": self.table_digest,
            "revoked": list(self.revoked),
            "holds": self.holds,
            "claim": CLAIM,
            "limits": list(LIMITS),
            "method": "exhaustive over the finite policy domain with two fresh tenants",
            "searched": searched,
            "properties": [_property_data(found) for found in self.properties],
            **({"without_effect": dict(self.without_effect)} if self.without_effect else {}),
            "versions": self.versions,
        }


def _property_data(proved: ProvedProperty) -> dict[str, Any]:
    example = proved.counterexample
    return {
        "id": proved.id,
        "title": proved.title,
        "holds": proved.holds,
        "cells": proved.cells,
        "permits": proved.permits,
        "broken": proved.broken,
        "counterexample": None if example is None else {"why": example.why, "request": example.data},
    }
