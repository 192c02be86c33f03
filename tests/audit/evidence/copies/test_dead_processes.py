"""Copies of a process that died: ended as unproven, and proved where the next one destroys what it left."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import copies_oracle
import orjson
import pytest
from sqlalchemy import Engine, func, select

from kvcustody.audit.evidence.copies import copy_rows
from kvcustody.audit.evidence.copies.copy_coverage import CopyCoverageRow, copies_from_leaves, copy_coverage
from kvcustody.audit.evidence.coverage.custody_units import CustodySelection
from kvcustody.audit.evidence.coverage.leaf_record import LeafRecord
from kvcustody.audit.evidence.coverage.recount_process import leaves_in_database
from kvcustody.audit.kinds import DECLARED, PROCESS_DEATH, Event, WorkerStarted
from kvcustody.audit.store.schema.leaf_tables import copy_steps
from kvcustody.audit.store.schema.ledger import events
from kvcustody.audit.verify.ledger.fsck_ledger import fsck
from kvcustody.audit.write.committer import closing_committer
from kvcustody.audit.write.crash_recovery import Closing, close_process
from kvcustody.clock import SystemClock
from kvcustody.governance.tiers.copy_event import CopyEvent
from kvcustody.governance.tiers.copy_leaves import copy_leaves
from kvcustody.governance.tiers.heirs import TierHolder
from standins.audit.copy_world import SECOND, Copy, CopyWorld

pytestmark = pytest.mark.system

WHY = Closing(DECLARED, 90, 0, "ops", "dpo", "host destroyed")
FAR = 2**50
EVER = 2**60


def record(writer: Any, events: list[Event]) -> None:
    writer.submit(events)
    assert writer.flush()


def start(worker: str) -> WorkerStarted:
    return WorkerStarted(1, worker, 64, 1, 4096, "cpu", "test")


def close(store: Engine, incarnation: str) -> bool:
    clock = SystemClock()
    with closing_committer(store, clock) as committer:
        return close_process(committer, store, clock, incarnation, WHY, "ops:closing")


def rows(store: Engine, as_of_us: int = FAR, **chosen: Any) -> dict[str, CopyCoverageRow]:
    """By tier; what rows give and what leaves give is the same."""
    with store.connect() as connection:
        asked = CustodySelection(**chosen)
        found = copy_coverage(connection, asked, as_of_us=as_of_us)
        alone = copies_from_leaves(LeafRecord(leaves_in_database(connection)), asked, as_of_us)
        assert found == alone and fsck(connection).problems == []
        return {row.tier: row for row in found.by_tier()}


def left_behind(world: CopyWorld, at_us: int) -> list[CopyEvent]:
    """What the next process finds in the store and destroys: it knows names and sizes."""
    return [
        CopyEvent("destroyed", copy.name, 0, "", "", 0, copy.size, at_us, 0, "unlinked")
        for copy in world.living.values()
    ]


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_rows, "_OPEN_LEAVES", 2)


@pytest.mark.usefixtures("small_steps")
def test_what_a_dead_process_held_is_ended_and_unproven(any_store: Engine, make_writer: Any) -> None:
    writer = make_writer(any_store, worker="gone")
    worlds = [CopyWorld(tier, 3).run(120) for tier in ("host", "nvme")]
    record(writer, [start("gone")])
    for world in worlds:
        for at in range(0, len(world.events), 5):
            record(writer, copy_leaves(world.tier, world.events[at : at + 5]))
    open_copies = sum(len(world.living) for world in worlds)
    before = rows(any_store)
    assert close(any_store, writer.incarnation) and open_copies > 10
    with any_store.connect() as connection:
        column = copy_steps.c
        closed = select(func.sum(column.copies)).where(column.cause == PROCESS_DEATH)
        assert connection.scalar(closed) == open_copies
    after = rows(any_store)
    for world in worlds:
        one, other = before[world.tier], after[world.tier]
        # What had ended is as it was; what was open and due, or lived, has no proof.
        assert other.unproven == len(world.living) and other.covered == one.covered
        assert other.open == len(world.waiting) == other.waiting


def test_what_the_next_process_destroys_in_time_is_proved(any_store: Engine, make_writer: Any, tmp_path: Path) -> None:
    writer = make_writer(any_store, worker="gone")
    world = CopyWorld("nvme", 4)
    for number in range(20):
        world.store(due_us=world.now + (5 if number % 2 else 500) * SECOND)
    record(writer, [start("gone"), *copy_leaves("nvme", world.events)])
    assert close(any_store, writer.incarnation) and rows(any_store)["nvme"].unproven == 20

    other = make_writer(any_store, worker="another")  # its store has objects of these names too: it is another store
    record(other, [start("another"), *copy_leaves("nvme", left_behind(world, world.now))])
    assert rows(any_store)["nvme"].unproven == 20

    heir = make_writer(any_store, worker="gone", spill_directory=tmp_path / "heir")
    found_us = world.now + 100 * SECOND + writer.offset_us - heir.offset_us
    record(heir, [start("gone"), *copy_leaves("nvme", left_behind(world, found_us))])
    with any_store.connect() as connection:  # the system log says so, which a tenant does not see
        [own] = copy_coverage(connection, as_of_us=FAR, with_system=False).by_tier()
        assert (own.covered, own.unproven) == (0, 20)
    [row] = rows(any_store).values()
    assert (row.covered, row.late, row.unproven, row.unlinked) == (10, 10, 0, 20)
    assert (
        sum(found["nvme"].covered for found in (rows(any_store, tenant="acme"), rows(any_store, tenant="labs"))) == 10
    )


def opened(world: CopyWorld, died: Any, worker: str, copies: list[Copy], tier: str = "nvme") -> list[Event]:
    """That an heir says that it opened a dead process's tier, and which copies it found there."""
    holder = TierHolder(worker, "east-1", died.incarnation)
    return copy_leaves(
        tier,
        [
            CopyEvent(
                "inherited", one.name, 0, one.tenant, one.classification, one.blocks, one.size,
                world.now, one.due_us, "restored", "", holder,
            )
            for one in copies
        ],
    )  # fmt: skip


def test_what_an_heir_of_another_name_destroys_is_proved_where_its_leaf_says_so(
    store: Engine, make_writer: Any, tmp_path: Path
) -> None:
    """A copy of each of the first two thirds is named by the first heir's leaf, of the first third by the second's."""
    writer = make_writer(store, worker="gone")
    world = CopyWorld("nvme", 4)
    copies = [world.store(due_us=world.now + 500 * SECOND) for _ in range(9)]
    record(writer, [start("gone"), *copy_leaves("nvme", world.events)])
    assert rows(store, EVER)["nvme"].open == 9
    first = make_writer(store, worker="first", spill_directory=tmp_path / "first")
    record(first, [start("first"), *opened(world, writer, "gone", copies[:6])])
    second = make_writer(store, worker="second", spill_directory=tmp_path / "second")
    at_us = world.now + SECOND + writer.offset_us - second.offset_us
    record(second, [start("second"), *copy_leaves("nvme", left_behind(world, at_us))])
    assert rows(store, EVER)["nvme"].open == 9, "no leaf says whose tier the second one opened"
    record(second, opened(world, first, "first", copies, "host"))
    assert rows(store, EVER)["nvme"].open == 9, "the control: of another tier"
    record(second, opened(world, first, "first", copies[:3]))
    assert rows(store, EVER)["nvme"].open == 9, "its process may be at work: no other worker ends its copies"
    assert close(store, writer.incarnation)
    row = rows(store, EVER)["nvme"]
    assert (row.due, row.covered, row.unproven, row.unlinked) == (9, 3, 6, 3)
    record(second, opened(world, first, "first", copies))
    row = rows(store, EVER)["nvme"]
    assert (row.covered, row.unproven) == (6, 3), "what the first heir does not name is nobody's"
    with store.connect() as connection:
        bodies = [orjson.loads(leaf) for leaf in connection.scalars(select(events.c.leaf))]
    processes = {
        each.incarnation: copies_oracle.Process(each.offset_us, name)
        for each, name in ((writer, "gone"), (first, "first"), (second, "second"))
    }
    again = copies_oracle.judge_copies(bodies, processes, EVER, 0, EVER)
    assert Counter(one.verdict for one in again) == Counter({"covered": 6, "unproven": 3})


def test_memory_has_no_evidence_but_its_own(store: Engine, make_writer: Any, tmp_path: Path) -> None:
    """A zeroed copy of a dead process stays proved; names in another tier prove nothing."""
    writer = make_writer(store, worker="gone")
    world = CopyWorld("host", 4)
    first, _ = world.store(), world.store()
    world.end(first)
    world.destroy(first)
    record(writer, [start("gone"), *copy_leaves("host", world.events)])
    assert close(store, writer.incarnation)
    heir = make_writer(store, worker="gone", spill_directory=tmp_path / "heir")
    record(heir, [start("gone"), *copy_leaves("nvme", left_behind(world, world.now))])
    row = rows(store)["host"]
    assert (row.due, row.covered, row.unproven, row.zeroed) == (2, 1, 1, 1)


def test_a_process_that_lives_says_itself_when_its_copies_ended(store: Engine, make_writer: Any) -> None:
    writer = make_writer(store, worker="slow")
    world = CopyWorld("host", 4)
    copy = world.store(due_us=world.now + 9 * SECOND)
    record(writer, [start("slow"), *copy_leaves("host", world.events)])
    assert close(store, writer.incarnation) and rows(store)["host"].unproven == 1
    count = len(world.events)
    world.now += 9 * SECOND
    world.end(copy)
    world.destroy(copy)
    record(writer, copy_leaves("host", world.events[count:]))
    row = rows(store)["host"]
    assert (row.due, row.covered) == (1, 1)


def test_closing_again_closes_nothing_twice(store: Engine, make_writer: Any) -> None:
    writer = make_writer(store, worker="gone")
    world = CopyWorld("host", 4)
    for _ in range(5):
        world.store()
    record(writer, [start("gone"), *copy_leaves("host", world.events)])
    for _ in range(2):
        assert close(store, writer.incarnation)
        with store.connect() as connection:
            closed = select(func.sum(copy_steps.c.copies)).where(copy_steps.c.cause == PROCESS_DEATH)
            assert connection.scalar(closed) == 5
            died = select(copy_steps.c.erasure).where(copy_steps.c.cause == PROCESS_DEATH)
            assert set(connection.scalars(died)) == {""}


@pytest.mark.usefixtures("small_steps")
def test_a_closing_that_is_interrupted_goes_on_where_it_was(store: Engine, make_writer: Any) -> None:
    writer = make_writer(store, worker="gone")
    world = CopyWorld("host", 4)
    record(writer, [start("gone")])
    for _ in range(9):
        count = len(world.events)
        world.store()
        record(writer, copy_leaves("host", world.events[count:]))

    def closed() -> int:
        with store.connect() as connection:
            column = copy_steps.c
            found = select(func.sum(column.copies)).where(column.cause == PROCESS_DEATH)
            return int(connection.scalar(found) or 0)

    turns = iter([False, False, True])
    clock = SystemClock()
    with closing_committer(store, clock) as committer:
        rest = (writer.incarnation, WHY, "ops:closing")
        assert not close_process(committer, store, clock, *rest, stop=lambda: next(turns))
    assert closed() == 4
    assert close(store, writer.incarnation) and closed() == 9
    with store.connect() as connection:
        died = connection.scalar(select(events.c.leaf).where(events.c.kind == "worker-died"))
        assert died is not None and orjson.loads(died)["copies"] == 9
