"""Conservation end to end (N1, V1): all recorded, all identities hold; one step lost, its identity breaks (R-LIF-2)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from sqlalchemy import Engine

from kvcustody.audit.evidence.coverage.summary import coverage
from kvcustody.audit.evidence.query.evidence_columns import read
from kvcustody.audit.kinds import (
    BlocksReleased,
    CustodyEnded,
    Event,
    ReceiptRecorded,
    ResidencyOpened,
    ResidencyReleased,
)
from kvcustody.audit.store.schema.leaf_tables import custody_ends
from kvcustody.clock import MICROSECONDS
from standins.robust.custody_world import BLOCK, SHARDS, CustodyWorld

Make = Callable[..., CustodyWorld]


@pytest.mark.parametrize("seed", range(1, 7))
def test_everything_recorded_holds_while_requests_run_and_after(make: Make, seed: int) -> None:
    world = make(seed=seed).run(250)
    assert world.governor.check() == []
    pool = world.governor.counts()
    assert world.lengths and pool.open_residencies and pool.live_blocks, "nothing is running"
    assert world.broken() == set()
    world.run(120)
    assert world.broken() == set()
    world.close()
    identities = world.identities()
    assert [item for item in identities if item.difference] == []
    assert len(identities) == 4 + 2 * SHARDS
    assert identities[0].left > 200 and all(world.seen[key] for key in ("hits", "forked", "aborted"))


def test_the_workload_meets_every_condition(make: Make) -> None:
    """What the identities are shown over: growth, quarantine on one shard, deferrals, expiry, eviction."""
    world = make(seed=3)
    grown = quarantined = 0
    for _ in range(40):
        world.run(10)
        counts = world.governor.counts()
        grown, quarantined = max(grown, counts.unreported), max(quarantined, counts.quarantined)
    pool = world.governor.stats().pools[0]
    assert grown and quarantined and world.seen["deferred"]
    assert pool.expired_residencies and pool.evicted and pool.scrubbed[0]
    assert world.broken() == set()


def first(kind: type, after: int, **facts: object) -> Callable[[], Callable[[Event], bool]]:
    """Chooses one event: the one numbered `after` of a kind with these facts."""

    def build() -> Callable[[Event], bool]:
        seen = 0

        def chosen(event: Event) -> bool:
            nonlocal seen
            if not isinstance(event, kind) or any(
                bool(value) != bool(getattr(event, name)) if isinstance(value, bool) else value != getattr(event, name)
                for name, value in facts.items()
            ):
                return False
            seen += 1
            return seen == after

        return chosen

    return build


ALLOCATED = "allocated = written, as openings and releases list + not yet listed by open residencies"
ENDED = "allocated = custody ended + live"
OPENED = "residencies opened = released + open"
SCRUBBED = tuple(
    f"custody ended = scrubbed on shard {shard} + failed there + pending + unproven" for shard in range(SHARDS)
)
DEVICE = tuple(f"receipts of shard {shard} = its device's counter" for shard in range(SHARDS))
DOUBTFUL = "blocks that failed to verify on any shard = quarantined"

STEPS = {
    "residency opened": (first(ResidencyOpened, 20, written=True), {OPENED, ALLOCATED}),
    "residency opened by a fork": (first(ResidencyOpened, 3, written=False), {OPENED}),
    "release with growth": (first(ResidencyReleased, 4, written=True), {OPENED, ALLOCATED}),
    "release without growth": (first(ResidencyReleased, 4, written=False), {OPENED}),
    "custody end": (first(CustodyEnded, 12), {ENDED, *SCRUBBED}),
    "receipt of shard 0": (
        first(ReceiptRecorded, 9, shard=0, tenant=True, result="ok"),
        {SCRUBBED[0], DEVICE[0]},
    ),
    "receipt of shard 1": (
        first(ReceiptRecorded, 9, shard=1, tenant=True, result="ok"),
        {SCRUBBED[1], DEVICE[1]},
    ),
    "boot receipt": (first(ReceiptRecorded, 1, shard=1, tenant=False), {DEVICE[1]}),
}


@pytest.mark.parametrize("step", STEPS)
def test_one_lost_recording_step_breaks_its_identity(make: Make, step: str) -> None:
    """The control is `test_everything_recorded_holds…`: the same workload with nothing lost breaks none."""
    chosen, expected = STEPS[step]
    world = make(seed=2, chosen=chosen()).run(250)
    assert len(world.ledger.dropped) == 1, "the step was not met"
    assert world.broken() == expected
    world.close()
    assert world.broken() == expected


def test_a_lost_receipt_of_a_failed_block_breaks_its_identities(make: Make) -> None:
    world = make(seed=3, chosen=first(ReceiptRecorded, 1, result="failed")())
    for _ in range(60):
        world.run(10)
    assert len(world.ledger.dropped) == 1
    shard = world.ledger.dropped[0].shard  # type: ignore[union-attr]
    assert world.broken() == {DOUBTFUL, SCRUBBED[shard], DEVICE[shard]}


def test_a_launch_that_left_no_receipt_at_all_breaks_both_shards(make: Make) -> None:
    launch: list[tuple[int, str | None]] = []

    def chosen(event: Event) -> bool:
        if not isinstance(event, ReceiptRecorded) or event.tenant is None or event.launch < 30:
            return False
        launch.append((event.launch, event.tenant))
        return event.tenant == launch[0][1] and event.launch in (launch[0][0], launch[0][0] + 1)

    world = make(seed=2, chosen=chosen).run(250)
    assert len({event.shard for event in world.ledger.dropped}) == SHARDS  # type: ignore[union-attr]
    assert world.broken() == {*SCRUBBED, *DEVICE}


@pytest.mark.parametrize("seed", [1, 2])
def test_coverage_of_the_same_run(make: Make, store: Engine, seed: int) -> None:
    """Every custody ended in time with evidence, except what refused to become zero."""
    world = make(seed=seed).run(300)
    world.settle()
    counts = world.governor.counts()
    assert world.broken() == set() and counts.live_blocks == counts.dirty == 0
    with store.connect() as connection:
        row = coverage(connection).total
    assert row.due == row.ended == SHARDS * counts.allocated_total
    assert (row.late, row.missing, row.unproven, row.overdue) == (0, 0, 0, 0)
    assert row.failed == SHARDS * counts.quarantined
    assert row.in_time == row.due - row.failed
    assert row.disputed == 0
    world.close()


@pytest.mark.parametrize("step", ["a copied tail", "nothing"])
def test_a_copied_tail_is_let_go_of_before_its_writer_ends(make: Make, store: Engine, step: str) -> None:
    """A fork's parent goes on with a copy; the tail ends with the child. Unrecorded, the last use is unknown."""
    lost = first(BlocksReleased, 1)() if step == "a copied tail" else None
    world = make(chosen=lost)
    parent = world.admit("alpha", np.arange(40, dtype=np.int32))
    assert parent is not None
    child = world.governor.fork(parent.request_id, "child")
    world.governor.extend_many([parent.request_id], [7])  # copies the partial block
    world.governor.abort(child.request_id)
    world.wait(4)
    world.governor.release(parent.request_id)
    world.lengths.clear()
    world.settle()
    assert world.broken() == set()
    with store.connect() as connection:
        row = coverage(connection).total
    assert (row.failed, row.disputed) == ((SHARDS, SHARDS) if lost else (0, 0))
    assert row.due == row.in_time + row.failed == SHARDS * 4


@pytest.mark.parametrize("held", ["by new requests", "by nobody"])
def test_a_block_attached_every_minute_ends_at_its_ceiling(make: Make, store: Engine, held: str) -> None:
    """`absolute: 10m`, `idle: 2m`. The control, attached by nobody, ends when it was idle for two minutes."""
    world = make()
    minutes, prompt = 0, np.arange(3 * BLOCK + 5, dtype=np.int32)
    begun_us = world.clock.now_us()
    hits = []
    for minutes in range(14):
        if minutes == 0 or held == "by new requests":
            answer = world.admit("alpha", prompt)
            assert answer is not None
            hits.append(answer.hit_tokens // BLOCK)
            world.governor.release(answer.request_id)
            world.lengths.clear()
        world.wait(60)
    with store.connect() as connection:
        assert world.broken() == set()
        ends = read(
            connection,
            custody_ends,
            (
                custody_ends.c.due_boot_us,
                custody_ends.c.ended_boot_us,
                custody_ends.c.ceiling_boot_us,
                custody_ends.c.cause,
            ),
            custody_ends.c.high > 0,
        )
        ceilings = {
            ends.row(row)["ceiling_boot_us"] - begun_us
            for row, generation in zip(ends.owner, ends.pairs.generations, strict=True)
            if generation <= 3
        }
        whole = [
            (ends.row(row)["due_boot_us"] - begun_us, ends.row(row)["ended_boot_us"] - begun_us)
            for row, generation in zip(ends.owner, ends.pairs.generations, strict=True)
            if generation <= 3
        ]
        total = coverage(connection, until_us=world.writer.offset_us + world.clock.now_us()).total
    expected_us = (600 if held == "by new requests" else 120) * MICROSECONDS
    assert len(whole) == 3, "three whole blocks of the first request"
    assert all(due == expected_us for due, _ in whole)
    assert ceilings == {600 * MICROSECONDS}, "their absolute end is on record, whatever ended them"
    assert all(expected_us <= ended <= expected_us + 2 * MICROSECONDS for _, ended in whole)
    if held == "by new requests":
        assert hits == [0, *(9 * [3]), 0, *(3 * [3])]  # at its ceiling it is computed again
    assert total.coverage == 1.0 and total.disputed == 0


def test_the_same_holds_on_postgresql(make: Make, postgres_store: Engine) -> None:
    world = make(engine=postgres_store, seed=5).run(200)
    assert world.broken() == set()
    world.settle()
    assert world.broken() == set()
    with postgres_store.connect() as connection:
        row = coverage(connection).total
    assert row.in_time == row.due - row.failed > 100
    world.close()
    assert world.broken() == set()


def test_a_mass_expiry_meets_its_deadline_with_one_step_a_second(make: Make, store: Engine) -> None:
    """Sixty blocks end at once, a launch takes eight, `within: 5s`: waiting for a launch a step would be late."""
    world = make()
    for number in range(12):
        answer = world.admit("alpha", np.arange(1000 * number, 1000 * number + 4 * BLOCK, dtype=np.int32))
        assert answer is not None
        world.governor.release(answer.request_id)
    world.lengths.clear()
    world.wait(150)
    with store.connect() as connection:
        assert world.broken() == set()
        found = coverage(connection)
    assert (found.total.due, found.total.in_time, found.total.late) == (12 * 4 * SHARDS, 12 * 4 * SHARDS, 0)
    assert found.lag_us_max <= 5 * MICROSECONDS
