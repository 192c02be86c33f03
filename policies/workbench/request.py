"""One request in the workbench: the action, the reader, the owner, the way and the instant.

1. A request names levels by number, as the table does; `Names` turns it into words and instants for people.
2. `~unlisted-1` and `~unlisted-2` stand for tenants that no policy lists: no identifier starts with a `~`.
"""

from __future__ import annotations

import datetime as dt
from typing import Any, NamedTuple

from kvcustody.policies.document.model import Action, Scope, Via
from kvcustody.policies.table.decision_table import DecisionTable
from kvcustody.policies.table.model import ALWAYS_US, NEVER_US, AccessRequest, Decision
from kvcustody.times import DAY_US, iso, utc

FRESH = ("~unlisted-1", "~unlisted-2")
DOMAIN_ACTIONS = (Action.REUSE, Action.PUBLISH, Action.RETAIN, Action.OFFLOAD)
SHARED = (Scope.TENANT, Scope.GROUP, Scope.PUBLIC)
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


class Request(NamedTuple):
    """(action, reader, owner, level, scope, way, instant in UTC microseconds, source id or None for any)."""

    action: Action
    reader: str
    owner: str
    level: int
    scope: Scope
    via: Via
    now_us: int
    source: str | None = None

    def decide(self, table: DecisionTable) -> Decision:
        """Return the table's answer."""
        return table.decide(self.access, self.now_us)

    @property
    def access(self) -> AccessRequest:
        """The request without its instant, as a table takes it."""
        return AccessRequest(self.action, self.reader, self.owner, self.level, self.scope, self.via, self.source)

    def data(self, classifications: tuple[str, ...]) -> dict[str, Any]:
        """Return the request in words, as a test case or a reviewer writes it."""
        known = 0 <= self.level < len(classifications)
        return {
            "action": self.action.name.lower(),
            "reader": self.reader,
            "owner": self.owner,
            "classification": classifications[self.level] if known else str(self.level),
            "scope": self.scope.name.lower(),
            "via": self.via.name.lower(),
            "at": instant(self.now_us),
            "source": self.source,
        }

    def text(self, classifications: tuple[str, ...]) -> str:
        """Return the request as one line."""
        said = self.data(classifications)
        source = f" through {self.source}" if self.source else ""
        return (
            f"{self.reader}: {said['action']} {self.owner}'s {said['classification']} {said['scope']} blocks "
            f"via {said['via']}{source} at {said['at']}"
        )


def instant(utc_us: int) -> str:
    """Return an instant as ISO 8601, to the microsecond only where it has one; the ends of time as words."""
    if utc_us <= ALWAYS_US:
        return "always"
    if utc_us >= NEVER_US:
        return "never"
    try:
        return iso(utc_us) if utc_us % DAY_US else utc(utc_us).date().isoformat()
    except OverflowError:
        return f"{utc_us} us"
