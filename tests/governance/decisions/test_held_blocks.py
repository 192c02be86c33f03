"""Who holds which blocks: one definition, by owner, which figures, the pool's charges and fsck agree on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from coverage_oracle import History, judge
from sqlalchemy import select

from kvcustody.audit.evidence.counters.read_figures import tenant_totals, uneven_lives
from kvcustody.audit.evidence.coverage.custody_units import (
    CustodySelection,
    last_event_us,
    read_units,
    units_of,
)
from kvcustody.audit.evidence.coverage.leaf_record import LeafRecord
from kvcustody.audit.evidence.coverage.recount_process import leaves_in_database
from kvcustody.audit.evidence.coverage.summary import summary
from kvcustody.audit.keep import uncount
from kvcustody.audit.kinds import CustodyEnded
from kvcustody.audit.kinds.block_runs import Run
from kvcustody.audit.kinds.ledger_events import GapRecorded
from kvcustody.audit.leaf.batch import read_leaves
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.schema.leaf_tables import custody_ends
from kvcustody.audit.store.schema.ledger import events
from kvcustody.audit.verify.ledger import held_rows
from kvcustody.audit.verify.ledger.fsck_ledger import fsck
from kvcustody.audit.write.committer import closing_committer
from kvcustody.audit.write.crash_recovery import Closing, close_process
from kvcustody.governance.governor import sequence_events
from kvcustody.times import DAY_US
from standins.governance.offload_world import BLOCKS, PREFIX, SHARED, SharedWorld, prompt


class Ledger:
    """What the ledger of a world says."""

    def __init__(self, folder: Path) -> None:
        self.store = open_store(f"sqlite:///{folder / 'ledger.db'}")

    def held(self) -> dict[str, int]:
        with self.store.connect() as connection:
            return {row.tenant: row.held_blocks or 0 for row in tenant_totals(connection)}

    def is_known(self) -> bool:
        with self.store.connect() as connection:
            return all(row.held_blocks is not None for row in tenant_totals(connection))

    def problems(self) -> list[str]:
        with self.store.connect() as connection:
            return [problem.what for problem in fsck(connection).problems]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[SharedWorld]:
    shared = SharedWorld(tmp_path, "")
    shared.serve("acme", prompt(99, 2))
    shared.share()
    yield shared
    shared.worker.close()


def charged(world: SharedWorld) -> dict[str, int]:
    """By the pool: what each tenant pays for, without what has ended and waits to be zeroed."""
    accounts = world.worker.governor._pools.managers[0].accounts
    return {name: one.used_blocks for name, one in accounts.items() if one.used_blocks}


def filled(world: SharedWorld) -> Ledger:
    """`beta` fills the segment of `acme`, and both run requests of their own."""
    world.serve("beta", SHARED + prompt(5, 1))  # a first use is put on record, and computed
    world.worker.governor.settle()
    assert world.worker.writer.flush()
    world.serve("beta", SHARED + prompt(6, 2))
    world.serve("acme", prompt(8, 2))
    assert world.worker.writer.flush()
    return Ledger(world.folder)


def test_a_segments_blocks_are_held_by_its_owner_whoever_filled_it(world: SharedWorld) -> None:
    ledger = filled(world)
    assert charged(world)["acme"] >= PREFIX - 1, "void: nothing of the segment is charged"
    assert {name: blocks for name, blocks in ledger.held().items() if blocks} == charged(world)
    assert sum(ledger.held().values()) <= BLOCKS
    assert ledger.problems() == []
    world.worker.close()
    assert set(ledger.held().values()) == {0} and ledger.problems() == []


def test_positive_control_without_the_record_of_the_owner_both_figures_are_wrong(
    world: SharedWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequence_events, "sequence_assigned", lambda *given: [])
    ledger = filled(world)
    assert ledger.held()["acme"] < charged(world)["acme"] and ledger.held()["beta"] > charged(world)["beta"]
    world.worker.close()
    assert any("ended as `acme`'s" in what for what in ledger.problems())
    assert ledger.held()["acme"] < 0 < ledger.held()["beta"]


@pytest.mark.parametrize("is_recorded", [True, False])
def test_some_generations_at_a_time_find_what_all_at_once_do(
    world: SharedWorld, monkeypatch: pytest.MonkeyPatch, *, is_recorded: bool
) -> None:
    """How many leaves are compared at once changes no finding. Control: one of the two ledgers has some."""
    if not is_recorded:
        monkeypatch.setattr(sequence_events, "sequence_assigned", lambda *given: [])
    ledger = filled(world)
    ended = CustodyEnded(1, "acme", "internal", (Run(np.array([0]), 1 << 40),), "evicted", 1, 1, 1, 1_000)
    world.worker.writer.submit([] if is_recorded else [ended])
    world.worker.close()
    monkeypatch.setattr(held_rows, "_LEAVES_AT_ONCE", 1 << 30)
    whole = ledger.problems()
    assert bool(whole) is not is_recorded
    for leaves in (1, 7, 20):
        monkeypatch.setattr(held_rows, "_LEAVES_AT_ONCE", leaves)
        assert ledger.problems() == whole


@pytest.mark.parametrize("is_recorded", [True, False])
def test_blocks_that_are_overdue_are_their_owners(
    world: SharedWorld, monkeypatch: pytest.MonkeyPatch, *, is_recorded: bool
) -> None:
    """Nobody ended them: by tables, by leaves and by the auditor's program they are of who owns the segment."""
    if not is_recorded:  # the control: they are counted under who was handed them
        monkeypatch.setattr(sequence_events, "sequence_assigned", lambda *given: [])
    ledger = filled(world)
    with ledger.store.connect() as connection:
        late_us = last_event_us(connection) + 10 * DAY_US
        leaves = [bytes(leaf) for leaf in leaves_in_database(connection)]
        tables = summary([*read_units(connection, CustodySelection(), now_us=late_us)])
        one = summary([*read_units(connection, CustodySelection(tenant="acme"), now_us=late_us)])
    again = summary([*units_of(LeafRecord(leaves), CustodySelection(), now_us=late_us)])
    oracle = Counter(item.tenant for item in judge(History(leaves), as_of_us=late_us) if item.verdict == "overdue")
    overdue = {row.tenant: row.overdue for row in tables.rows if row.overdue}
    assert overdue == {row.tenant: row.overdue for row in again.rows if row.overdue} == dict(oracle)
    assert sum(row.overdue for row in one.rows) == overdue["acme"]
    assert (overdue == charged(world)) is is_recorded, (overdue, charged(world))


def test_a_dead_process_ends_what_it_held_as_its_owners(world: SharedWorld) -> None:
    ledger = filled(world)
    life, clock = world.worker.writer.incarnation, world.clock
    silent = Closing("silence", 90, 60, "control-plane")
    with closing_committer(ledger.store, clock) as committer:
        assert close_process(committer, ledger.store, clock, life, silent, "test:closing")
    with ledger.store.connect() as connection:
        assert "unproven: process death" in set(connection.scalars(select(custody_ends.c.cause)))
    assert set(ledger.held().values()) == {0} and ledger.problems() == []


def test_a_recorded_gap_is_no_damage(world: SharedWorld) -> None:
    """What a worker lost is on record as lost. Control: without that record the same ledger does not add up."""
    ledger = filled(world)
    end = CustodyEnded(
        1, "acme", "internal", (Run(np.array([0]), 1 << 40),), "evicted", 1, 1, 1, 1_000
    )  # its hand-out was lost
    world.worker.writer.submit([end])
    assert world.worker.writer.flush()
    assert any(" holds " in what for what in ledger.problems()), "control"
    world.worker.writer.submit([GapRecorded(1, "spill lost", 1 << 41, 1 << 41)])
    assert world.worker.writer.flush()
    with ledger.store.connect() as connection:
        report = fsck(connection)
    assert not any(" holds " in problem.what for problem in report.problems)
    assert any("runs and lost leaves" in what for what in report.unproved)
    assert not ledger.is_known(), "what was lost may have been a hand-out to anybody"
    world.worker.close()
    assert ledger.is_known() and set(ledger.held().values()) == {0} and ledger.problems() == []


@pytest.mark.parametrize("is_about", [True, False])
def test_ends_that_another_process_said_leave_with_the_life_that_they_are_about(
    world: SharedWorld, monkeypatch: pytest.MonkeyPatch, *, is_about: bool
) -> None:
    """A process that lost leaves holds nothing once it ended, whichever of its leaves are dropped.

    Control: where an end counts for the process that said it, less than nothing is carried on.
    """
    ledger = filled(world)
    world.worker.writer.submit([GapRecorded(1, "spill lost", 1 << 41, 1 << 41)])
    assert world.worker.writer.flush()
    life, silent = world.worker.writer.incarnation, Closing("silence", 90, 60, "control-plane")
    with closing_committer(ledger.store, world.clock) as committer:
        assert close_process(committer, ledger.store, world.clock, life, silent, "test:closing")
    with ledger.store.connect() as connection:
        uneven = frozenset(each.uuid for each in uneven_lives(connection))
        rows = connection.execute(select(events.c.leaf, events.c.log)).all()
    if not is_about:
        monkeypatch.setattr(uncount, "_about", lambda batch: list(batch.incarnations))
    batch = read_leaves([bytes(row.leaf) for row in rows], hashed=False, keys=uncount.COUNTED_KEYS)
    off = uncount.taken_off(batch, [row.log for row in rows], uneven)
    carried = [figures[uncount.CARRIED] for figures in off.values() if uncount.CARRIED in figures]
    assert uneven == {life} and len(set(batch.incarnations)) > 1, "void: nobody else said anything"
    if is_about:
        assert carried == []
    else:
        assert sum(carried) < 0
