"""The results of a search so far, by property.

1. The first counterexample of each property is kept; the others are counted.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvcustody.policies.table.model import Decision
from kvcustody.policies.workbench.prove.model import PROPERTIES, Counterexample, ProvedProperty
from kvcustody.policies.workbench.request import Request

_LEVELS, _DUTIES, _TIERS, _LABELS, _PLACES = "ISO-8", "ISO-9", "ISO-12", "ISO-13", "ISO-14"


class Findings:
    """Counts and counterexamples. `cells` and `permits` count decisions; the other kinds have counts of their own."""

    def __init__(self, classifications: tuple[str, ...]) -> None:
        self.cells = 0
        self.permits = 0
        self.levels_checked = 0
        self.duties_checked = 0
        self.tiers_checked = 0
        self.tiers_open = 0
        self.labels_checked = 0
        self.labels_open = 0
        self.places_checked = 0
        self.places_open = 0
        self._classifications = classifications
        self._first: dict[str, Counterexample] = {}
        self._broken: dict[str, int] = {}

    def breaks(self, property_id: str, request: Request, why: str, decision: Decision) -> None:
        """Record a decision that breaks a property."""
        reasons = ", ".join(decision.reasons) or "nothing"
        why = f"permitted by {reasons}; {why}"
        text = f"{request.text(self._classifications)}: {why}"
        self._add(property_id, Counterexample(request, why, text, request.data(self._classifications)))

    def says(self, property_id: str, why: str, said: Mapping[str, str | None]) -> None:
        """Record that something other than a decision breaks a property; `said` describes the question."""
        asked = ", ".join(f"{name} {value}" for name, value in said.items() if value is not None)
        self._add(property_id, Counterexample(None, why, f"{asked}: {why}", dict(said)))

    def _add(self, property_id: str, example: Counterexample) -> None:
        self._first.setdefault(property_id, example)
        self._broken[property_id] = self._broken.get(property_id, 0) + 1

    def properties(self, *, with_never: bool) -> tuple[ProvedProperty, ...]:
        """Return every property, in order; `ISO-11` only if the authors declared one, `ISO-14` only with placement
        rules.
        """
        own = {
            _LEVELS: (self.levels_checked, 0),
            _DUTIES: (self.duties_checked, 0),
            _TIERS: (self.tiers_checked, self.tiers_open),
            _LABELS: (self.labels_checked, self.labels_open),
            _PLACES: (self.places_checked, self.places_open),
        }
        left_out = {"ISO-11": not with_never, _PLACES: not self.places_checked}
        return tuple(
            ProvedProperty(
                name,
                *own.get(name, (self.cells, self.permits)),
                self._first.get(name),
                self._broken.get(name, 0),
            )
            for name in PROPERTIES
            if not left_out.get(name, False)
        )
