"""Copies off the device through a real writer: rows, coverage by tier and conservation; one step less is found."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from sqlalchemy import Engine, func, select

from kvcustody.audit.evidence.copies.copy_coverage import CopyCoverage, copies_from_leaves, copy_coverage
from kvcustody.audit.evidence.copies.copy_rows import copy_totals, transfers_of
from kvcustody.audit.evidence.counters.read_figures import tier_totals
from kvcustody.audit.evidence.coverage.conservation import ConservationIdentity, PoolCounts, conservation
from kvcustody.audit.evidence.coverage.custody_units import CustodySelection
from kvcustody.audit.evidence.coverage.leaf_record import LeafRecord
from kvcustody.audit.evidence.coverage.recount_process import leaves_in_database
from kvcustody.audit.evidence.coverage.summary import coverage
from kvcustody.audit.kinds import Event, TransferDecided, WorkerStarted
from kvcustody.audit.leaf import LEAF_BYTES_MAX, Context, leaves
from kvcustody.audit.leaf.batch import read_leaves
from kvcustody.audit.store.schema.leaf_tables import copy_steps
from kvcustody.audit.verify.ledger.fsck_ledger import fsck
from kvcustody.errors import LedgerError
from kvcustody.governance.tiers.copy_event import CopyEvent
from kvcustody.governance.tiers.copy_leaves import COPIES_A_LEAF, copy_leaves
from standins.audit.copy_world import SECOND, CopyWorld, expected

CONTEXT = Context("ab" * 16, 0, lambda tenant, subject, session="": "p" * 24)
NOTHING = PoolCounts(0, 0, 0, 0, 0, 0, (), 0)
START = WorkerStarted(1, "worker-1", 64, 1, 4096, "cpu", "test")
TIERS = ("host", "nvme")


def told(worlds: list[CopyWorld], step: int = 7) -> list[Event]:
    """What the worlds put on record, as a process drains them: some steps at a time."""
    made: list[Event] = [START]
    for world in worlds:
        for start in range(0, len(world.events), step):
            made += copy_leaves(world.tier, world.events[start : start + step])
    return made


def record(store: Engine, writer: Any, events: list[Event]) -> None:
    writer.submit(events)
    assert writer.flush()


def both(store: Engine, chosen: CustodySelection, as_of_us: int | None = None) -> tuple[CopyCoverage, CopyCoverage]:
    """By the rows, and from leaves alone."""
    with store.connect() as connection:
        record_ = LeafRecord(leaves_in_database(connection))
        now_us = record_.last_us if as_of_us is None else as_of_us
        return (
            copy_coverage(connection, chosen, as_of_us=as_of_us),
            copies_from_leaves(record_, chosen, now_us),
        )


def as_counts(found: CopyCoverage) -> dict[tuple[str, str, str], dict[str, int]]:
    counts = {}
    for row in found.rows:
        values = row._asdict()
        for name in ("tier", "tenant", "classification", "lag_us_max"):
            values.pop(name)
        counts[row[:3]] = {name: value for name, value in values.items() if value}
    return counts


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_verdicts_by_tier_are_those_of_what_happened(any_store: Engine, make_writer: Any, seed: int) -> None:
    worlds = [CopyWorld(tier, seed).run(300) for tier in TIERS]
    writer = make_writer(any_store)
    record(any_store, writer, told(worlds))
    now_us = max(world.now for world in worlds)
    want = expected(worlds, now_us)
    want = {key: {name: value for name, value in row.items() if value} for key, row in want.items()}
    rows, alone = both(any_store, CustodySelection(), now_us + writer.offset_us)
    assert as_counts(rows) == want and rows == alone
    assert {verdict for row in want.values() for verdict in row} >= {"covered", "late", "open", "waiting"}
    for key in want:
        selection = CustodySelection(tier=key[0], tenant=key[1], classification=key[2])
        rows, alone = both(any_store, selection, now_us + writer.offset_us)
        assert as_counts(rows) == {key: want[key]} and rows == alone
    middle = min(world.now for world in worlds) // 2 + writer.offset_us
    halves = [CustodySelection(until_us=middle), CustodySelection(since_us=middle)]
    parts = [both(any_store, half, now_us + writer.offset_us) for half in halves]
    assert all(selection == other and selection.rows for selection, other in parts)
    assert sum(row.due for selection, _ in parts for row in selection.rows) == sum(row["due"] for row in want.values())
    with any_store.connect() as connection:
        assert fsck(connection).problems == []


def test_the_coverage_of_blocks_is_as_it_was(store: Engine, make_writer: Any, world: Any) -> None:
    writer = make_writer(store)
    record(store, writer, world(3).run(200).events)
    with store.connect() as connection:
        before = coverage(connection)
    record(store, writer, told([CopyWorld("host").run(50)])[1:])
    with store.connect() as connection:
        assert coverage(connection) == before and before.total.due > 50
        assert coverage(connection, tier="device") == before
        assert copy_coverage(connection, CustodySelection(tier="device")).rows == ()
        assert copy_coverage(connection, CustodySelection(model="unknown")).rows == ()
        with pytest.raises(LedgerError, match="none of: device, host, nvme, remote"):
            copy_coverage(connection, CustodySelection(tier="hots"))


# -- one copy at a time -----------------------------------------------------------------------------------------------

DUE = 20 * SECOND


def steps(*said: tuple[str, int, str]) -> list[CopyEvent]:
    """Steps of one copy that was due at `DUE`: what, when, and why or by which evidence."""
    name = bytes(range(32))
    return [CopyEvent(step, name, 1, "acme", "low", 4, 100, at, DUE, cause) for step, at, cause in said]


STORED = ("stored", 15 * SECOND, "")
ENDED = ("ended", DUE, "ceiling")
CASES: dict[str, tuple[str, list[CopyEvent]]] = {
    "zeroed at once": ("covered", steps(STORED, ENDED, ("destroyed", DUE + 1, "zeroed"))),
    "unlinked in time": ("covered", steps(STORED, ENDED, ("destroyed", DUE + SECOND, "unlinked"))),
    "its key first, unlinked an hour later": (
        "covered",
        steps(
            STORED,
            ENDED,
            ("destroyed", DUE + 1, "key-destroyed"),
            ("destroyed", DUE + 3600 * SECOND, "unlinked"),
        ),
    ),
    "unlinked too late": ("late", steps(STORED, ENDED, ("destroyed", DUE + SECOND + 1, "unlinked"))),
    "found for too long": (
        "late",
        steps(STORED, ("destroyed", DUE, "key-destroyed"), ("ended", DUE + 2 * SECOND, "ceiling")),
    ),
    "waiting": ("open", steps(STORED, ENDED)),
    "never ended": ("open", steps(STORED)),
    "destroyed and never ended": ("open", steps(STORED, ("destroyed", DUE, "zeroed"))),
    "never stored": ("unproven", steps(ENDED, ("destroyed", DUE + 1, "zeroed"))),
    "ended before its time": (
        "late",
        [
            *steps(STORED),
            *(event._replace(due_us=16 * SECOND) for event in steps(("ended", 16 * SECOND, "erased"))),
            *steps(("destroyed", 18 * SECOND, "zeroed")),
        ],
    ),
    "a due time that was put off": (
        "disputed",
        [
            *steps(STORED),
            *(event._replace(due_us=DUE + 9 * SECOND) for event in steps(("ended", DUE + 8 * SECOND, "ceiling"))),
            *steps(("destroyed", DUE + 8 * SECOND, "zeroed")),
        ],
    ),
    "evidence of another name": (
        "open",
        [
            *steps(STORED, ENDED),
            *(event._replace(name=bytes(32)) for event in steps(("destroyed", DUE, "zeroed"))),
        ],
    ),
    "evidence of another copy": (
        "open",
        [
            *steps(STORED, ENDED),
            *(event._replace(number=2) for event in steps(("destroyed", DUE, "zeroed"))),
        ],
    ),
    "words that are no evidence": ("open", steps(STORED, ENDED, ("destroyed", DUE, "promised"))),
}


@pytest.mark.parametrize("case", CASES)
def test_each_copy_has_one_verdict(store: Engine, make_writer: Any, case: str) -> None:
    verdict, events = CASES[case]
    record(store, make_writer(store), [START, *copy_leaves("host", events)])
    rows, alone = both(store, CustodySelection(), 2**60)
    [row] = rows.rows
    assert rows == alone and (row.due, getattr(row, verdict)) == (1, 1), row
    assert row.covered + row.late + row.open + row.unproven + row.disputed == row.due


def test_what_lives_and_is_not_due_is_in_no_figure(store: Engine, make_writer: Any) -> None:
    writer = make_writer(store)
    record(store, writer, [START, *copy_leaves("host", steps(STORED))])
    for now_us, due in ((DUE, 0), (DUE + 1, 1)):
        rows, alone = both(store, CustodySelection(), now_us + writer.offset_us)
        assert rows == alone and sum(row.due for row in rows.rows) == due


def test_a_digest_differs_where_one_verdict_does(store: Engine, make_writer: Any, any_store: Engine) -> None:
    writer = make_writer(store)
    record(store, writer, [START, *copy_leaves("host", CASES["zeroed at once"][1])])
    before = both(store, CustodySelection())[0].digest
    assert before == both(store, CustodySelection())[1].digest
    other = [event._replace(number=9) for event in CASES["unlinked too late"][1]]
    record(store, writer, copy_leaves("host", other))
    assert both(store, CustodySelection())[0].digest != before


# -- conservation -----------------------------------------------------------------------------------------------------


def identities(store: Engine, writer: Any, worlds: list[CopyWorld], events: list[Event]) -> list[ConservationIdentity]:
    record(store, writer, events)
    counts = NOTHING._replace(tiers=tuple(world.counts() for world in worlds))
    with store.connect() as connection:
        found = conservation(connection, writer.incarnation, counts)
    return [item for item in found if any(tier in item.name for tier in TIERS)]


def test_every_identity_of_every_tier_holds(any_store: Engine, make_writer: Any) -> None:
    worlds = [CopyWorld(tier, 5).run(200) for tier in TIERS]
    assert all(world.living and world.waiting and world.destroyed for world in worlds)
    found = identities(any_store, make_writer(any_store), worlds, told(worlds))
    assert len(found) == 16 and [item for item in found if item.difference] == []
    assert min(item.left for item in found) > 0


DROPPED = {
    "stored": "copies stored in nvme = ended + living",
    "ended": "copies ended in nvme = destroyed + waiting",
    "key-destroyed": "pieces of evidence in nvme = the tier's counter",
    "unlinked": "pieces of evidence in nvme = the tier's counter",
}


@pytest.mark.parametrize("step", DROPPED)
def test_one_removed_recording_breaks_a_named_identity(store: Engine, make_writer: Any, step: str) -> None:
    worlds = [CopyWorld(tier, 6).run(200) for tier in TIERS]
    counts = [world.counts() for world in worlds]
    events = worlds[1].events
    chosen = [number for number, event in enumerate(events) if step in (event.step, event.cause)]
    del events[chosen[len(chosen) // 2]]
    writer = make_writer(store)
    record(store, writer, told(worlds))
    with store.connect() as connection:
        found = conservation(connection, writer.incarnation, NOTHING._replace(tiers=tuple(counts)))
    broken = {item.name for item in found if item.difference}
    assert DROPPED[step] in broken and all("nvme" in name for name in broken)


def test_the_only_evidence_of_a_copy_is_missed_twice(store: Engine, make_writer: Any) -> None:
    world = CopyWorld("host", 6).run(200)
    counts = world.counts()
    place = next(number for number, event in enumerate(world.events) if event.step == "destroyed")
    size = world.events.pop(place).size
    writer = make_writer(store)
    record(store, writer, told([world]))
    with store.connect() as connection:
        found = conservation(connection, writer.incarnation, NOTHING._replace(tiers=(counts,)))
    broken = {item.name: item.difference for item in found if item.difference}
    assert broken["copies ended in host = destroyed + waiting"] == 1
    assert broken["bytes ended in host = bytes destroyed + bytes waiting"] == size


def test_a_copy_that_is_said_twice_breaks_one_too(store: Engine, make_writer: Any) -> None:
    world = CopyWorld("host", 6).run(50)
    counts = world.counts()
    world.events.insert(1, world.events[0])
    writer = make_writer(store)
    record(store, writer, told([world]))
    with store.connect() as connection:
        found = conservation(connection, writer.incarnation, NOTHING._replace(tiers=(counts,)))
    assert "copies stored in host = ended + living" in {item.name for item in found if item.difference}


# -- leaves and rows --------------------------------------------------------------------------------------------------


def test_the_longest_lists_fit_a_leaf() -> None:
    most = 2**53 - 1
    name = "t" * 256
    events = [
        CopyEvent("ended", bytes(32), most, name, name, most, most, 2**52, most, "c" * 64, "e" * 64)
        for _ in range(3 * COPIES_A_LEAF + 1)
    ]
    made = copy_leaves("remote", events)
    assert [len(event.numbers) for event in made] == [COPIES_A_LEAF] * 3 + [1]  # type: ignore[attr-defined]
    sizes = [len(leaf.data) for event in made for leaf in leaves(event, CONTEXT, 1)]
    assert len(sizes) == len(made) and LEAF_BYTES_MAX - 1500 < max(sizes) <= LEAF_BYTES_MAX


def test_what_belongs_together_is_one_leaf_and_a_step_is_never_lost() -> None:
    world = CopyWorld("host", 8).run(200)
    made = copy_leaves("host", world.events)
    listed = sum(len(event.numbers) for event in made)  # type: ignore[attr-defined]
    assert listed == len(world.events) and len(made) < listed / 8
    assert [type(event).__name__ for event in made] == sorted(
        (type(event).__name__ for event in made), key=["CopiesStored", "CopiesEnded", "CopiesDestroyed"].index
    )
    with pytest.raises(AssertionError):
        copy_leaves("host", [world.events[0]._replace(step="sotred")])


@pytest.mark.parametrize(
    "change",
    [
        {"names": []},
        {"names": ["é" * 64]},
        {"names": ["a" * 65]},
        {"names": [""]},
        {"numbers": [1, 2]},
        {"due_boot_us": []},
        {"bytes_each": [-1]},
        {"blocks_each": ["4"]},
        {key: [] for key in ("names", "numbers", "blocks_each", "bytes_each", "due_boot_us", "stored_boot_us")},
    ],
)
def test_lists_that_do_not_belong_together_are_no_leaf(change: dict[str, Any]) -> None:
    [event] = copy_leaves("host", steps(STORED))
    body = orjson.loads(leaves(event, CONTEXT, 1)[0].data)
    good = orjson.dumps(body, option=orjson.OPT_SORT_KEYS)
    assert read_leaves([good], canonical=True).kinds == ["copies-stored"]
    with pytest.raises(LedgerError):
        read_leaves([orjson.dumps(body | change, option=orjson.OPT_SORT_KEYS)], canonical=True)


def test_decisions_are_found_by_their_request(any_store: Engine, make_writer: Any) -> None:
    decisions = [
        TransferDecided(10, "restore", "nvme", "acme", 7, 48, 3 << 20, 812, 40_312, "transfer", "done", 799, "faster"),
        TransferDecided(11, "restore", "host", "labs", 7, 1, 99, 900, 200, "recompute", "", 0, "tier is slow"),
        TransferDecided(12, "store", "host", "acme", 0, 4, 400, 1, 2, "none", "", 0, "no samples yet"),
    ]
    writer = make_writer(any_store)
    record(any_store, writer, [START, *decisions])
    with any_store.connect() as connection:
        found = transfers_of(connection, writer.incarnation, 7)
        assert [(one.tier, one.transfer_us, one.recompute_us, one.choice, one.actual_us) for one in found] == [
            ("nvme", 812, 40_312, "transfer", 799),
            ("host", 900, 200, "recompute", 0),
        ]
        assert found[0].at_us == 10 + writer.offset_us and found[0].bytes == 3 << 20
        assert [one.tier for one in transfers_of(connection, writer.incarnation, 7, tenant="labs")] == ["host"]
        assert [one.reason for one in transfers_of(connection, writer.incarnation, 0)] == ["no samples yet"]
        assert fsck(connection).problems == []


def test_rows_say_what_their_leaves_list(any_store: Engine, make_writer: Any) -> None:
    worlds = [CopyWorld(tier, 9).run(120) for tier in TIERS]
    writer = make_writer(any_store)
    record(any_store, writer, told(worlds))
    with any_store.connect() as connection:
        life = connection.scalar(select(copy_steps.c.incarnation).limit(1))
        assert life is not None
        totals = copy_totals(connection, life)
        for world in worlds:
            steps_ = [event for event in world.events if event.step == "stored"]
            assert totals[world.tier].stored == len(steps_)
            assert totals[world.tier].stored_bytes == sum(event.size for event in steps_)
        count = connection.scalar(select(func.count()).select_from(copy_steps))
        assert count == sum(
            len(copy_leaves(world.tier, list(some)))
            for world in worlds
            for some in (world.events[at : at + 7] for at in range(0, len(world.events), 7))
        )


def test_figures_by_tier_are_kept_without_reading_a_leaf(any_store: Engine, make_writer: Any) -> None:
    worlds = [CopyWorld(tier, 9).run(150) for tier in TIERS]
    record(any_store, make_writer(any_store), told(worlds))
    with any_store.connect() as connection:
        found = {each.tier: each for each in tier_totals(connection)}
        parts = [each for who in ("acme", "labs") for each in tier_totals(connection, tenant=who)]
    for world in worlds:
        counts, totals = world.counts(), found[world.tier]
        assert totals[1:] == (
            counts.stored,
            sum(event.size for event in world.events if event.step == "stored"),
            counts.ended,
            totals.stored_bytes - counts.living_bytes,
            counts.evidence,
        )
        assert totals.living == counts.living == sum(each.living for each in parts if each.tier == world.tier)
