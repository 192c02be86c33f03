"""Conservation end to end (N1, V1): all recorded, all identities hold; one step lost, its identity breaks (R-LIF-2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from custody_world import SHARDS, CustodyWorld
from sqlalchemy import Engine

from kvcustody.audit.coverage import coverage
from kvcustody.audit.events import CustodyEnded, Event, ReceiptRecorded, ResidencyOpened, ResidencyReleased
from kvcustody.audit.store import open_store
from kvcustody.migrations.upgrade import upgrade

Make = Callable[..., CustodyWorld]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Engine]:
    engine = open_store(tmp_path / "ledger.db")
    upgrade(engine)
    yield engine
    engine.dispose()


@pytest.fixture
def make(store: Engine, tmp_path: Path) -> Iterator[Make]:
    made: list[CustodyWorld] = []

    def build(**options: object) -> CustodyWorld:
        world = CustodyWorld(options.pop("engine", store), tmp_path, **options)  # type: ignore[arg-type]
        made.append(world)
        return world

    yield build
    for world in made:
        world.writer.close(5.0)


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
                bool(value) != bool(getattr(event, name))
                if isinstance(value, bool)
                else value != getattr(event, name)
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
