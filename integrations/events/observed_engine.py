"""An ungoverned engine as its event stream shows it: who holds blocks, until when, and what is overdue.

1. Everything here is observed, not enforced. Blocks enter no residency, custody end or receipt of the ledger; they are
   recorded as `observed-…` and count in no coverage. A removal is only the engine's statement that a block left its
   index. It is never evidence that memory was overwritten.
2. An observed residency is one chain: a block stored without a known parent, and everything stored after it. The
   policy's absolute limit runs from the root, as in governed custody. A residency is `overdue` exactly when its limit
   has passed and the engine has not reported that the blocks left. Uses are rarely in the stream, so idle time is
   reported as "no use seen".
3. A tenant comes from the salt, by a mapping that the operator gives. It comes from the scope of a stream of ours if
   that is trusted. Otherwise the chain is unattributed and has the obligations of the highest classification.
4. Memory is bounded by `blocks_max`. Four things are gaps: blocks beyond that bound, missed batches, batches that could
   not be read in full, and the removal of a block that was never reported. From a gap on the counts are unsure, and
   marked so, until the engine clears or restarts.
5. Hashes are kept in memory only; a leaf carries counts. Salts are not kept; their tenant is.
6. A residency's counts change only by the stream's events. Between two leaves they are added up. So the ledger gets one
   leaf for each residency and kind, however many blocks came and went.
7. An engine reports each copy of a key when it stores it and when it removes it. The stream does not show which copy
   left: the one reported first counts as held until the last removal. A run that is held completely from its root is a
   use, as vLLM reports it. Two copies of a whole prompt that were computed at once are reported alike, and the second
   removal then makes the counts unsure.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kvcustody.audit.kinds import Event, ObservationGap, ObservedOverdue, ObservedRemoved, ObservedStored
from kvcustody.clock import Clock
from kvcustody.errors import IdentityError
from kvcustody.governance.decisions.access_plan import owed_by
from kvcustody.governance.identity.principal import check_identifier, check_tenant_name
from kvcustody.integrations.events.incoming import (
    ClearedTenant,
    Hash,
    Payload,
    Removed,
    StoredBlocks,
    read,
)
from kvcustody.integrations.events.sequence_gaps import Arrival, Delivered, Missed
from kvcustody.policies.table.decision_table import DecisionTable


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
        """Note that blocks left, for a cause, in time or late."""
        self.blocks -= blocks
        self.removed_since[cause] = self.removed_since.get(cause, 0) + blocks
        if now_us > self.deadline_us:
            self.late_since[cause] = self.late_since.get(cause, 0) + blocks

    def changes(self, engine: str, now_us: int) -> list[Event]:
        """Return leaves about blocks stored and removed since the last call."""
        who = (engine, self.tenant, self.number)
        events: list[Event] = []
        if self.stored_since:
            how = (self.classification, self.attribution)
            events.append(ObservedStored(now_us, *who, *how, self.stored_since, self.deadline_us))
        for cause, blocks in self.removed_since.items():
            late = self.late_since.get(cause, 0)
            events.append(ObservedRemoved(now_us, *who, cause, blocks, late, self.blocks))
        self.stored_since = 0
        self.removed_since = {}
        self.late_since = {}
        return events

    def overdue(self, engine: str, now_us: int) -> ObservedOverdue:
        """Return the leaf that the engine holds these blocks past their deadline."""
        who = (engine, self.tenant, self.number, self.classification)
        return ObservedOverdue(now_us, *who, self.blocks, self.deadline_us)


class TenantShare(NamedTuple):
    """One tenant's observed blocks; `tenant` is None for unattributed blocks."""

    tenant: str | None
    residencies: int
    blocks: int
    overdue_residencies: int
    overdue_blocks: int


def shares_of(residencies: Iterable[ObservedResidency], now_us: int) -> tuple[TenantShare, ...]:
    """Return blocks by tenant in order of name, unattributed ones last."""
    sums: dict[str | None, list[int]] = {}
    for residency in residencies:
        late = residency.deadline_us < now_us
        row = sums.setdefault(residency.tenant, [0, 0, 0, 0])
        for at, amount in enumerate((1, residency.blocks, late, late * residency.blocks)):
            row[at] += amount
    order = sorted(sums, key=lambda tenant: (tenant is None, tenant or ""))
    return tuple(TenantShare(tenant, *sums[tenant]) for tenant in order)


SALT, SCOPE, NOBODY = "salt", "scope", "none"
REMOVED, CLEARED, RESTARTED = "removed", "cleared", "engine-restarted"
_GPU = "GPU"
_STALE_DEADLINES = 1024
_COUNT_MAX = 1 << 53  # numbers come from the stream, and a hostile one may jump as far as it likes
_GAPS_MAX = 10  # leaves about gaps between two drains

Place = tuple[str, int, Hash]  # medium, group, hash


class ObservedStats(NamedTuple):
    """A snapshot; `unsure` says why the counts may be wrong (empty: they are what the engine reported)."""

    blocks: int
    residencies: int
    overdue_residencies: int
    overdue_blocks: int
    unused_residencies: int
    unattributed_blocks: int
    batches: int
    missed_batches: int
    restarts: int
    malformed: int
    unknown: int
    untracked_blocks: int
    unmatched_removals: int
    unsure: str


class ObservedEngine:
    """The state of one engine's cache as its stream shows it; `arrive` takes input, `drain` returns events for the
    ledger.
    """

    def __init__(
        self,
        name: str,
        table: DecisionTable,
        clock: Clock,
        *,
        tenants_by_salt: Mapping[str, str] | None = None,
        scope_trusted: bool = False,
        unattributed_as: str | None = None,
        blocks_max: int = 1_000_000,
    ) -> None:
        self.name = check_identifier("engine", name)
        self._table = table
        self._clock = clock
        self._tenants = dict(tenants_by_salt or {})
        for tenant in self._tenants.values():
            check_tenant_name(tenant)
        self._scope_trusted = scope_trusted
        levels = table.policy.classifications
        self._unattributed_level = len(levels) - 1 if unattributed_as is None else table.level(unattributed_as)
        self._blocks_max = blocks_max
        self._held: dict[Place, ObservedResidency] = {}  # the first copy of each key
        self._copies: dict[Place, list[ObservedResidency]] = {}  # its further ones (rule 7)
        self._copy_count = 0
        self._live: dict[int, ObservedResidency] = {}
        self._touched: dict[int, ObservedResidency] = {}
        self._deadlines: list[tuple[int, int]] = []
        self._gaps: list[Event] = []
        self._overdue: list[Event] = []
        self._number = 0
        self._unsure = ""
        self._batches = self._missed = self._restarts = 0
        self._malformed = self._unknown = self._untracked = self._unmatched = 0

    # -- the stream ---------------------------------------------------------------------------------------------------

    def arrive(self, arrival: Arrival) -> None:
        """Take a batch, gap or restart, in the order of the stream."""
        now_us = self._clock.now_us()
        self._expire(now_us)
        if isinstance(arrival, Delivered):
            self._batches += 1
            self._apply(arrival, read(arrival.payload), now_us)
        elif isinstance(arrival, Missed):
            self._missed = min(_COUNT_MAX, self._missed + arrival.last - arrival.first + 1)
            self._gap(arrival.cause, arrival.first, arrival.last, now_us)
        else:
            self._restarts += 1
            self._clear(RESTARTED, now_us)

    def _expire(self, now_us: int) -> None:
        """Note overdue blocks before anything else happens to them: blocks that left late were overdue."""
        while self._deadlines and self._deadlines[0][0] < now_us:
            due = self._live.get(heapq.heappop(self._deadlines)[1])
            if due is not None:
                self._overdue.append(due.overdue(self.name, now_us))

    def _apply(self, arrival: Delivered, payload: Payload, now_us: int) -> None:
        at_us = self._boot_us(payload.utc_us, now_us)
        for event in payload.events:
            if isinstance(event, StoredBlocks):
                self._store(event, arrival.sequence, at_us, now_us)
            elif isinstance(event, Removed):
                self._remove(event, arrival.sequence, now_us)
            elif isinstance(event, ClearedTenant):
                self._clear_tenant(event, arrival.sequence, now_us)
            else:
                self._clear(CLEARED, now_us)
        if payload.malformed or payload.unknown:
            self._malformed += payload.malformed
            self._unknown += payload.unknown
            self._gap("a batch that cannot be read in full", arrival.sequence, arrival.sequence, now_us)

    def _boot_us(self, utc_us: int, now_us: int) -> int:
        """Return an engine's own time on our boot clock: never in the future, and now where it gave none."""
        age_us = self._clock.utc_us() - utc_us if utc_us else 0
        return max(1, now_us - max(0, age_us))

    def _store(self, event: StoredBlocks, sequence: int, at_us: int, now_us: int) -> None:
        if not event.hashes:
            return
        room = self._blocks_max - self._block_count
        residency = self._residency_of(event)
        if residency is None:
            if room <= 0:
                self._overflow(len(event.hashes), sequence, now_us)
                return
            residency = self._open(event, at_us)
        residency.used_us = max(residency.used_us, at_us)
        if event.parent is None and all((event.medium, event.group, one) in self._held for one in event.hashes):
            return
        for one in event.hashes:
            place = (event.medium, event.group, one)
            if room <= 0:
                self._overflow(1, sequence, now_us)
                continue
            room -= 1
            if place in self._held:
                self._copies.setdefault(place, []).append(residency)
                self._copy_count += 1
            else:
                self._held[place] = residency
            residency.blocks += 1
            residency.stored_since += 1
        if residency.blocks:
            self._live[residency.number] = residency
        self._touched[residency.number] = residency

    def _residency_of(self, event: StoredBlocks) -> ObservedResidency | None:
        """Return the chain in which these blocks are known or which they continue; a copy in another tier is in the
        same chain.
        """
        held = self._held
        for one in (event.hashes[0], event.parent):
            if one is None:
                continue
            found = held.get((event.medium, event.group, one)) or held.get((_GPU, 0, one))
            if found is not None:
                return found
        return None

    def _open(self, event: StoredBlocks, at_us: int) -> ObservedResidency:
        tenant, attribution = self._attribute(event)
        table = self._table
        if tenant is None:
            level = self._unattributed_level
            limits = table.policy.retention[level]
            idle_us, absolute_us = limits.idle_us, limits.absolute_us
        else:
            claim = event.custody.classification if attribution == SCOPE and event.custody else None
            level = table.classify(tenant, None, claim, None)
            owed = owed_by(table, tenant, level)
            idle_us, absolute_us = owed.idle_us, owed.absolute_us
        self._number += 1
        residency = ObservedResidency(
            self._number,
            tenant,
            attribution,
            table.policy.classifications[level],
            at_us + absolute_us,
            idle_us,
            at_us,
        )
        heapq.heappush(self._deadlines, (residency.deadline_us, residency.number))
        return residency

    def _attribute(self, event: StoredBlocks | ClearedTenant) -> tuple[str | None, str]:
        """Return a new chain's tenant, and how it is known (rule 3)."""
        for salt in event.salts:
            tenant = self._tenants.get(salt)
            if tenant is not None:
                return tenant, SALT
        if self._scope_trusted and event.custody is not None:
            try:
                return check_tenant_name(event.custody.tenant), SCOPE
            except IdentityError:
                return None, NOBODY
        return None, NOBODY

    @property
    def _block_count(self) -> int:
        return len(self._held) + self._copy_count

    def _remove(self, event: Removed, sequence: int, now_us: int) -> None:
        for one in event.hashes:
            residency = self._take((event.medium, event.group, one))
            if residency is not None:
                self._leave(residency, 1, REMOVED, now_us)
                continue
            self._unmatched += 1
            if not self._unsure:
                self._gap("a removal of a block that nobody told of", sequence, sequence, now_us)

    def _take(self, place: Place) -> ObservedResidency | None:
        """Return the owner of the copy that left (rule 7)."""
        copies = self._copies.get(place)
        if copies is None:
            return self._held.pop(place, None)
        self._copy_count -= 1
        residency = copies.pop()
        if not copies:
            del self._copies[place]
        return residency

    def _clear(self, cause: str, now_us: int) -> None:
        """Note that nothing is held any more, which settles all doubts about it (rule 4)."""
        for residency in list(self._live.values()):
            self._leave(residency, residency.blocks, cause, now_us)
        self._held.clear()
        self._copies.clear()
        self._copy_count = 0
        self._unsure = ""

    def _clear_tenant(self, event: ClearedTenant, sequence: int, now_us: int) -> None:
        """Note that one tenant's blocks left one medium. Blocks of unknown tenants are not tracked, so counts are
        unsure.
        """
        tenant, _ = self._attribute(event)
        if tenant is None:
            if any(residency.tenant is None for residency in self._live.values()):
                self._gap("a clear of an unknown tenant's blocks", sequence, sequence, now_us)
            return
        for place in [place for place in self._held if place[0] == event.medium]:
            held = [self._held.pop(place), *self._copies.pop(place, ())]
            self._copy_count -= len(held) - 1
            kept = [residency for residency in held if residency.tenant != tenant]
            for residency in held:
                if residency.tenant == tenant:
                    self._leave(residency, 1, CLEARED, now_us)
            if kept:
                self._held[place] = kept[0]
            if len(kept) > 1:
                self._copies[place] = kept[1:]
                self._copy_count += len(kept) - 1

    def _leave(self, residency: ObservedResidency, blocks: int, cause: str, now_us: int) -> None:
        residency.leave(blocks, cause, now_us)
        self._touched[residency.number] = residency
        if not residency.blocks:
            self._live.pop(residency.number, None)

    def _overflow(self, blocks: int, sequence: int, now_us: int) -> None:
        if not self._untracked:
            self._gap(f"more than {self._blocks_max} blocks", sequence, sequence, now_us)
        self._untracked += blocks
        self._unsure = self._unsure or f"more than {self._blocks_max} blocks"

    def _gap(self, cause: str, first: int, last: int, now_us: int) -> None:
        self._unsure = cause
        if len(self._gaps) < _GAPS_MAX:
            self._gaps.append(ObservationGap(now_us, self.name, cause, first, last))
        else:  # one more of the same says nothing new: the last leaf grows
            kept = self._gaps[-1]
            assert isinstance(kept, ObservationGap)
            self._gaps[-1] = kept._replace(last_batch=max(last, kept.last_batch))

    # -- the ledger ---------------------------------------------------------------------------------------------------

    def drain(self) -> list[Event]:
        """Return what happened since the last call, one leaf per residency and kind, and what became overdue."""
        now_us = self._clock.now_us()
        self._expire(now_us)
        events, self._gaps, overdue, self._overdue = self._gaps, [], self._overdue, []
        for residency in self._touched.values():
            events += residency.changes(self.name, now_us)
        self._touched.clear()
        events += overdue
        if len(self._deadlines) > 2 * len(self._live) + _STALE_DEADLINES:
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._live]
            heapq.heapify(self._deadlines)
        return events

    # -- what is shown ------------------------------------------------------------------------------------------------

    def overdue(self) -> list[ObservedResidency]:
        """Return chains past their deadline that the engine still holds, the most overdue first."""
        now_us = self._clock.now_us()
        late = [residency for residency in self._live.values() if residency.deadline_us < now_us]
        return sorted(late, key=lambda residency: residency.deadline_us)

    def shares(self) -> tuple[TenantShare, ...]:
        """Return observed blocks by tenant, unattributed ones last."""
        return shares_of(self._live.values(), self._clock.now_us())

    def stats(self) -> ObservedStats:
        """Return a snapshot of all counters."""
        now_us = self._clock.now_us()
        shares = self.shares()
        return ObservedStats(
            blocks=self._block_count,
            residencies=len(self._live),
            overdue_residencies=sum(share.overdue_residencies for share in shares),
            overdue_blocks=sum(share.overdue_blocks for share in shares),
            unused_residencies=sum(residency.used_us + residency.idle_us < now_us for residency in self._live.values()),
            unattributed_blocks=sum(share.blocks for share in shares if share.tenant is None),
            batches=self._batches,
            missed_batches=self._missed,
            restarts=self._restarts,
            malformed=self._malformed,
            unknown=self._unknown,
            untracked_blocks=self._untracked,
            unmatched_removals=self._unmatched,
            unsure=self._unsure,
        )
