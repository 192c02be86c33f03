"""A real tier and a real ledger: what the tier says covers and conserves its copies, through restarts and crashes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine

from kvcustody.audit.evidence.copies.copy_coverage import CopyCoverageRow, copies_from_leaves, copy_coverage
from kvcustody.audit.evidence.coverage.conservation import PoolCounts, TierCounts, conservation
from kvcustody.audit.evidence.coverage.custody_units import CustodySelection
from kvcustody.audit.evidence.coverage.leaf_record import LeafRecord
from kvcustody.audit.evidence.coverage.recount_process import leaves_in_database
from kvcustody.audit.kinds import WorkerStarted, WorkerStopped
from kvcustody.audit.verify.ledger.fsck_ledger import fsck
from kvcustody.audit.write.event_writer import EventWriter
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.orphans.ledger_join import WriterJoin
from kvcustody.governance.orphans.scan_protocol import Held, TierCopies
from kvcustody.governance.orphans.scans import tier_findings
from kvcustody.governance.tiers.copy_leaves import copy_leaves
from standins import builders
from standins.governance.store_servers import VALKEY, StoreServer
from standins.governance.tier_place import ABSOLUTE_US, Place

SECOND = 1_000_000
BLOCK_BYTES = 256


class Recorded(Place):
    """A place whose every step goes on record."""

    def __init__(self, folder: Path, kind: str, store: Engine, server: StoreServer | None = None) -> None:
        self.database = store
        self.writers: list[EventWriter] = []
        super().__init__(folder, kind, server=server)

    def open(self) -> None:
        super().open()
        spill = self.folder / f"spill-{len(self.writers)}"
        self.writer = builders.writer(self.database, spill, worker="gpu-0", clock=self.world.clock)
        self.writers.append(self.writer)
        self.writer.submit([WorkerStarted(self.world.clock.now_us(), "gpu-0", 64, 1, BLOCK_BYTES, "cpu", "test")])
        self.told()

    def told(self) -> None:
        self.writer.submit(copy_leaves(self.tier.name, self.tier.take_events(), self.tier.within_us))
        assert self.writer.flush()

    def wait(self, seconds: float) -> None:
        self.world.clock.advance(round(seconds * SECOND))
        self.tier.expire()
        self.told()

    def stop(self) -> None:
        """In order: what outlives the process stays."""
        self.tier.close()
        self.told()
        self.writer.submit([WorkerStopped(self.world.clock.now_us(), "gpu-0", "closed", 0, (0,))])
        assert self.writer.flush()

    def broken(self) -> list[str]:
        """Identities that do not hold."""
        found = self.tier.counts
        counts = TierCounts(self.tier.name, *found[:8])
        empty = PoolCounts(0, 0, 0, 0, 0, 0, (), 0, (counts,))
        with self.database.connect() as connection:
            every = conservation(connection, self.writer.incarnation, empty)
        mine = [one for one in every if self.tier.name in one.name]
        assert len(mine) == 8
        return [one.name for one in mine if one.difference]

    def row(self) -> CopyCoverageRow:
        """What was due by now."""
        now_us = self.world.clock.utc_us()
        with self.database.connect() as connection:
            found = copy_coverage(connection, as_of_us=now_us)
            record = LeafRecord(leaves_in_database(connection))
            assert found == copies_from_leaves(record, CustodySelection(), now_us)
            assert fsck(connection).problems == []
        return next(iter(found.by_tier()), CopyCoverageRow("", "", ""))

    def orphans(self) -> list[str]:
        """What a scan finds."""
        tier, now_us = self.tier, self.world.clock.now_us()
        held = Held(frozenset(), {}, 0, (TierCopies(tier.name, tier.copies(), tier.destroy),))
        found = [*WriterJoin(self.writer).findings(held, now_us), *tier_findings([tier], now_us)]
        return [one.finding.orphan for one in found if "cop" in one.finding.orphan]


@pytest.fixture(params=["host", "nvme", VALKEY])
def recorded(
    request: pytest.FixtureRequest, store: Engine, tmp_path: Path, server: Callable[[str], StoreServer]
) -> Iterator[Recorded]:
    there = server(VALKEY) if request.param == VALKEY else None
    place = Recorded(tmp_path, request.param, store, there)
    yield place
    for writer in place.writers:
        writer.close()


def fill(place: Recorded, prompts: int = 6) -> None:
    for number in range(prompts):
        tenant = ("acme", "beta")[number % 2]
        subject = "ann" if number % 3 == 0 else None
        place.keep(place.label(tenant, subject), f"prompt {number}", 3 + number, lives_us=ABSOLUTE_US)
    place.told()


def test_copies_that_end_at_their_ceilings_are_covered(recorded: Recorded) -> None:
    fill(recorded)
    assert recorded.broken() == [] == recorded.orphans() and recorded.row().due == 0
    stored = recorded.tier.counts.stored
    for _ in range(2 * ABSOLUTE_US // SECOND):
        recorded.wait(1)
    row = recorded.row()
    assert (row.due, row.covered) == (stored, stored) and stored > 6
    assert recorded.broken() == [] == recorded.orphans() and len(recorded.tier) == 0


def test_an_erasure_is_covered_and_named(recorded: Recorded) -> None:
    fill(recorded)
    recorded.tier.erase("e-1", Selector("acme", "ann"), recorded.world.clock.now_us())
    ended = recorded.tier.counts.ended
    recorded.told()
    row = recorded.row()
    assert (row.due, row.covered) == (ended, ended) and ended > 0
    assert recorded.broken() == [] == recorded.orphans()


def test_what_the_tier_does_not_say_is_found(recorded: Recorded) -> None:
    """The control: of a tier whose events are lost, an identity breaks and a scan finds the copy."""
    fill(recorded)
    recorded.keep(recorded.label("acme"), "unsaid", 4)
    recorded.tier.take_events()
    assert "copies stored in" in " ".join(recorded.broken())
    assert recorded.orphans() == ["copy without custody"]


def test_a_restart_hands_what_is_in_files_over(store: Engine, tmp_path: Path) -> None:
    """Copies of before are indexed again as copies of the new process; their end proves that of both."""
    place = Recorded(tmp_path, "nvme", store)
    fill(place)
    before = place.tier.counts.stored
    place.stop()
    place.world.clock.advance(2 * SECOND)
    place.open()
    assert place.tier.counts.stored == before > 6 and place.broken() == [] == place.orphans()
    for _ in range(2 * ABSOLUTE_US // SECOND):
        place.wait(1)
    row = place.row()
    assert (row.due, row.covered) == (2 * before, 2 * before), row
    assert place.broken() == []
    for writer in place.writers:
        writer.close()


def test_what_a_stop_leaves_and_nobody_takes_over_is_open_once_it_is_due(store: Engine, tmp_path: Path) -> None:
    place = Recorded(tmp_path, "nvme", store)
    fill(place)
    stored = place.tier.counts.stored
    place.stop()
    assert place.row().due == 0
    place.world.clock.advance(2 * ABSOLUTE_US)
    row = place.row()
    assert (row.due, row.open, row.covered) == (stored, stored, 0)
    place.writer.close()


def test_a_crash_is_unproven_until_the_next_process_ends_what_it_left(store: Engine, tmp_path: Path) -> None:
    place = Recorded(tmp_path, "nvme", store)
    fill(place)
    before = place.tier.counts.stored
    dead = place.writer.incarnation
    place.store.close()  # its lock goes with the process; nothing else is done
    place.writer.close()
    place.world.clock.advance(2 * SECOND)
    place.open()
    place.writer.close_predecessors("gpu-0", place.writer.incarnation)
    assert place.writer.incarnation != dead
    row = place.row()
    assert row.unproven == before and row.covered == 0
    for _ in range(2 * ABSOLUTE_US // SECOND):
        place.wait(1)
    row = place.row()
    assert (row.due, row.covered, row.unproven) == (2 * before, 2 * before, 0), row
    for writer in place.writers:
        writer.close()
