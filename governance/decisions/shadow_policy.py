"""A candidate policy in a running governor: it decides every request beside the active one, for the record only.

1. The candidate's answer changes no admission, no look-up and no obligation; only the disagreements are kept.
2. What is kept is bounded: counts by reader, owner, classification, way and source, at most `KINDS_MAX` of them; each
   is logged the first time it is seen.
3. A candidate that fails is a deny of the candidate, counted as such.
"""

from __future__ import annotations

from typing import NamedTuple

from kvcustody.logger import get_logger
from kvcustody.policies.document.model import Scope, Via
from kvcustody.policies.table.decision_table import DecisionTable
from kvcustody.policies.table.model import AccessRequest, Decision

KINDS_MAX = 10_000
_log = get_logger(__name__)


class Disagreement(NamedTuple):
    """One kind of request that the two revisions decide differently; effects are `permit` and `deny`."""

    reader: str
    owner: str
    classification: str
    scope: str
    via: str
    source: str
    active: str
    candidate: str
    candidate_by: tuple[str, ...]
    requests: int


class ShadowReport(NamedTuple):
    """What a shadow has decided: decisions asked of both, and their differences, most requests first."""

    candidate_digest: str
    candidate_revision: int
    decisions: int
    disagreements: tuple[Disagreement, ...]
    not_kept: int


class ShadowPolicy:
    """Asks the candidate what the active revision was just asked. Belongs to the governor's thread."""

    def __init__(self, candidate: DecisionTable) -> None:
        self._candidate = candidate
        self._levels = {name: level for level, name in enumerate(candidate.policy.classifications)}
        self._counts: dict[tuple[str, str, str, Scope, Via, str, bool, tuple[str, ...]], int] = {}
        self._decisions = 0
        self._not_kept = 0

    def compare(
        self,
        active: Decision,
        request: AccessRequest,
        classification: str,
        utc_us: int,
    ) -> None:
        """Ask the candidate about one reuse of a named classification; never raises, whatever it answers."""
        self._decisions += 1
        level = self._levels.get(classification, -1)  # unknown to the candidate: a malformed request, denied
        answer = self._candidate.decide(request._replace(level=level), utc_us)
        if answer.permitted == active.permitted:
            return
        _, reader, owner, _, scope, via, source = request
        key = (reader, owner, classification, scope, via, source or "", active.permitted, answer.reasons)
        known = self._counts.get(key)
        if known is None and len(self._counts) >= KINDS_MAX:
            self._not_kept += 1
            return
        self._counts[key] = (known or 0) + 1
        if known is None:
            _log.info("shadow policy disagrees", **_disagreement(key, 1)._asdict())

    def report(self) -> ShadowReport:
        """Everything seen so far."""
        found = sorted(self._counts.items(), key=lambda entry: (-entry[1], repr(entry[0])))
        return ShadowReport(
            self._candidate.digest,
            self._candidate.revision,
            self._decisions,
            tuple(_disagreement(key, count) for key, count in found),
            self._not_kept,
        )


def _disagreement(key: tuple[str, str, str, Scope, Via, str, bool, tuple[str, ...]], requests: int) -> Disagreement:
    reader, owner, classification, scope, via, source, permitted, reasons = key
    effects = ("permit", "deny") if permitted else ("deny", "permit")
    return Disagreement(
        reader,
        owner,
        classification,
        scope.name.lower(),
        via.name.lower(),
        source,
        *effects,
        reasons,
        requests,
    )
