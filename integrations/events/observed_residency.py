"""One chain of blocks in an observed engine, and what of it goes on record.

R1  A residency's counts change only by what the stream said; between two leaves they are added up, so the ledger gets
    one leaf a residency and kind, however many blocks came and went.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from kvcustody.audit.events import Event, ObservedOverdue, ObservedRemoved, ObservedStored


@dataclass(slots=True, eq=False)
class ObservedResidency:
    """One chain of blocks. Times are boot-time microseconds of the observer; `…_since` counts since the last leaf."""

    number: int
    tenant: str | None
    attribution: str
    classification: str
    deadline_us: int
    idle_us: int
    used_us: int
    blocks: int = 0
    stored_since: int = 0
    removed_since: dict[str, int] = field(default_factory=dict)
    late_since: dict[str, int] = field(default_factory=dict)

    def leave(self, blocks: int, cause: str, now_us: int) -> None:
        """Blocks left, for a cause, in time or late."""
        self.blocks -= blocks
        self.removed_since[cause] = self.removed_since.get(cause, 0) + blocks
        if now_us > self.deadline_us:
            self.late_since[cause] = self.late_since.get(cause, 0) + blocks

    def changes(self, engine: str, now_us: int) -> list[Event]:
        """Leaves about what came and went since the last call."""
        who = (engine, self.tenant, self.number)
        made: list[Event] = []
        if self.stored_since:
            how = (self.classification, self.attribution)
            made.append(ObservedStored(now_us, *who, *how, self.stored_since, self.deadline_us))
        for cause, blocks in self.removed_since.items():
            late = self.late_since.get(cause, 0)
            made.append(ObservedRemoved(now_us, *who, cause, blocks, late, self.blocks))
        self.stored_since = 0
        self.removed_since = {}
        self.late_since = {}
        return made

    def overdue(self, engine: str, now_us: int) -> ObservedOverdue:
        """The leaf that says that the engine holds these blocks past their deadline."""
        who = (engine, self.tenant, self.number, self.classification)
        return ObservedOverdue(now_us, *who, self.blocks, self.deadline_us)


class TenantShare(NamedTuple):
    """One tenant's observed blocks; `tenant` is None for what nothing attributes."""

    tenant: str | None
    residencies: int
    blocks: int
    overdue_residencies: int
    overdue_blocks: int


def shares_of(residencies: Iterable[ObservedResidency], now_us: int) -> tuple[TenantShare, ...]:
    """Blocks by tenant in name order, unattributed ones last."""
    sums: dict[str | None, list[int]] = {}
    for residency in residencies:
        late = residency.deadline_us < now_us
        row = sums.setdefault(residency.tenant, [0, 0, 0, 0])
        for at, amount in enumerate((1, residency.blocks, late, late * residency.blocks)):
            row[at] += amount
    order = sorted(sums, key=lambda tenant: (tenant is None, tenant or ""))
    return tuple(TenantShare(tenant, *sums[tenant]) for tenant in order)
