"""Coverage: every verdict by hand, then a world against a second reading (R-RET-4)."""

from __future__ import annotations

import random
from typing import Any

import pytest
from sqlalchemy import Engine

from kvcustody.audit.evidence.coverage.summary import CoverageSummary, coverage
from kvcustody.audit.kinds import (
    PROCESS_DEATH,
    BlocksAttached,
    BlocksReleased,
    CustodyEnded,
    ErasureRequested,
    Event,
    ReceiptRecorded,
    ResidencyOpened,
    ResidencyReleased,
    WorkerStarted,
)
from kvcustody.audit.kinds.block_runs import Run, flatten
from standins.audit.custody_story import BLOCKS, WITHIN, opened, runs, story

UNITS = 4 * 2  # four blocks, two shards


def measure(store: Engine, make_writer: Any, events: list[Event], **period: Any) -> CoverageSummary:
    writer = make_writer(store)
    writer.submit(events)
    assert writer.flush()
    with store.connect() as connection:
        return coverage(connection, **period)


def test_both_figures_of_a_good_custody(store: Engine, make_writer: Any) -> None:
    measured = measure(store, make_writer, story())
    assert measured.total == measured.rows[0]._replace(tenant="*", classification="*")
    row = measured.rows[0]
    assert (row.tenant, row.classification) == ("acme", "internal")
    assert (row.due, row.ended, row.ended_in_time, row.in_time) == (UNITS, UNITS, UNITS, UNITS)
    assert (row.full_bytes, row.reread_blocks, row.disputed, row.coverage) == (4096 * UNITS, UNITS, 0, 1.0)
    assert (measured.lag_us_p50, measured.lag_us_max) == (100, 100)


VERDICTS: dict[str, tuple[dict[str, Any], str]] = {
    "scrubbed too late": ({"receipt": {"ended_us": 500 + WITHIN + 1}}, "late"),
    "on the deadline": ({"receipt": {"ended_us": 500 + WITHIN}}, "in_time"),
    "one shard late": ({"last_receipt": {"ended_us": 500 + WITHIN + 1}}, "late"),
    "one shard's receipt dropped": ({"both": False}, "missing"),
    "verification failed": ({"last_receipt": {"result": "failed"}}, "failed"),
    "receipt before the last use": ({"receipt": {"started_us": 199}}, "failed"),
    "receipt before the fence retired": ({"retired_us": 560}, "failed"),
    "receipt that ends before it starts": ({"receipt": {"started_us": 700}}, "failed"),
    "receipt for other blocks": ({"receipt": {"runs": runs(9, 10, 11, 12)}}, "failed"),
    "receipt for another generation": ({"receipt": {"runs": runs(5, 6, 7, 8, generation=30)}}, "missing"),
    "claimed due extended": ({"due_us": 9000, "receipt": {"ended_us": 1501}}, "late"),
    "ceiling before the hold": ({"ceiling_us": 300, "receipt": {"ended_us": 1301}}, "late"),
    "fence retired late": (
        {"retired_us": 5000, "receipt": {"started_us": 5001, "ended_us": 6000}},
        "in_time",
    ),
    "evicted early": ({"ended_us": 250, "due_us": 250}, "in_time"),
    "never recorded as written": ({"written": ()}, "unproven"),
    "written elsewhere": ({"written": runs(1, 2, 3, 4)}, "failed"),  # the receipts are of other blocks
    "process death": ({"cause": PROCESS_DEATH}, "unproven"),
    "unknown level": ({"receipt": {"level": "hoped"}}, "failed"),
    "attached after the receipt": (
        {"more": (opened(2, BLOCKS, 650), ResidencyReleased(700, 2, "acme", "finish", (), 0))},
        "failed",
    ),
    "attached and never released": ({"more": (opened(2, BLOCKS, 300),)}, "failed"),
    "attached while running, and left in time": (
        {
            "more": (
                opened(2, (), 150),
                BlocksAttached(160, 2, "acme", BLOCKS),
                ResidencyReleased(480, 2, "acme", "finish", (), 0),
            )
        },
        "in_time",
    ),
    "attached while running, and left after the receipt": (
        {
            "more": (
                opened(2, (), 150),
                BlocksAttached(160, 2, "acme", BLOCKS),
                ResidencyReleased(700, 2, "acme", "finish", (), 0),
            )
        },
        "failed",
    ),
    "attached while running and never released": (
        {"more": (opened(2, (), 150), BlocksAttached(160, 2, "acme", BLOCKS))},
        "failed",
    ),
    "a second reader left in time": (
        {"more": (opened(2, BLOCKS, 150), ResidencyReleased(480, 2, "acme", "finish", (), 0))},
        "in_time",
    ),
    "a window let go of early": (
        {
            "more": (
                opened(2, BLOCKS, 150),
                BlocksReleased(300, 2, "acme", "window", BLOCKS, False, 0),
                ResidencyReleased(900, 2, "acme", "finish", (), 0),
            )
        },
        "in_time",
    ),
}


@pytest.mark.parametrize("case", VERDICTS)
def test_verdict(store: Engine, make_writer: Any, case: str) -> None:
    changes, verdict = VERDICTS[case]
    row = measure(store, make_writer, story(**changes)).total
    assert {name: getattr(row, name) for name in ("in_time", "late", "failed", "missing", "unproven")} == {
        **dict.fromkeys(("in_time", "late", "failed", "missing", "unproven"), 0),
        verdict: UNITS,
    }
    assert row.due == UNITS
    destroyed = row.full_bytes + row.sampled_bytes + row.retired_bytes + row.launched_bytes
    assert destroyed == (4096 * UNITS if verdict in ("in_time", "late") else 0)


def test_a_claimed_due_time_decides_nothing_and_is_shown(store: Engine, make_writer: Any) -> None:
    assert measure(store, make_writer, story(due_us=9000)).total.disputed == UNITS


def test_the_weakest_shard_names_the_level(store: Engine, make_writer: Any) -> None:
    row = measure(store, make_writer, story(last_receipt={"level": "sampled"})).total
    assert (row.sampled_bytes, row.full_bytes, row.reread_blocks) == (4096 * UNITS, 0, 0)


@pytest.mark.parametrize(
    ("selector", "subject", "verdict"),
    [
        ("subject", "alice", "late"),
        ("tenant", None, "late"),
        ("subject", "bob", "in_time"),
    ],
)
def test_an_erasure_ends_the_holds_it_selects(
    store: Engine, make_writer: Any, selector: str, subject: str | None, verdict: str
) -> None:
    events = story(receipt={"started_us": 1300, "ended_us": 1400})
    events.append(ErasureRequested(300, "e1", "acme", selector, subject, None, 9000, "dpo"))
    row = measure(store, make_writer, events).total
    assert getattr(row, verdict) == UNITS


def test_overdue_custody_is_due_and_not_ended(store: Engine, make_writer: Any) -> None:
    events = [event for event in story() if not isinstance(event, (CustodyEnded, ReceiptRecorded))]
    row = measure(store, make_writer, [*events, WorkerStarted(501, "worker-1", 64, 2, 4096, "cpu", "test")]).total
    assert (row.due, row.ended, row.overdue, row.in_time, row.coverage) == (UNITS, 0, UNITS, 0, 0.0)


def second_reading(events: list[Event], shards: int) -> dict[str, int]:
    """The definition once more, one (block, generation) at a time, in plain Python."""
    release: dict[int, tuple[int, int]] = {
        e.residency: (e.at_us, e.hold_us) for e in events if isinstance(e, ResidencyReleased)
    }
    uses: dict[tuple[int, int], list[tuple[int, int]]] = {}
    written: set[tuple[int, int]] = set()
    proofs: dict[tuple[int, int, int], list[ReceiptRecorded]] = {}

    def pairs(of: tuple[Run, ...]) -> list[tuple[int, int]]:
        flat = flatten(of)
        return list(zip(flat.blocks.tolist(), flat.generations.tolist(), strict=True))

    for event in events:
        if isinstance(event, ResidencyOpened):
            written.update(pairs(event.written))
            for unit in pairs(event.attached) + pairs(event.written):
                uses.setdefault(unit, []).append(release.get(event.residency, (2**62, 0)))
        elif isinstance(event, BlocksAttached):
            for unit in pairs(event.runs):
                uses.setdefault(unit, []).append(release.get(event.residency, (2**62, 0)))
        elif isinstance(event, ResidencyReleased):
            written.update(pairs(event.written))
            for unit in pairs(event.written):
                uses.setdefault(unit, []).append((event.at_us, event.hold_us))
        elif isinstance(event, ReceiptRecorded):
            for unit in pairs(event.runs):
                proofs.setdefault((*unit, event.shard), []).append(event)
    totals = dict.fromkeys(("in_time", "late", "failed", "missing", "unproven"), 0)
    for event in events:
        if not isinstance(event, CustodyEnded):
            continue
        for unit in pairs(event.runs):
            known = uses.get(unit, [])
            last = max((at for at, _ in known), default=0)
            hold = max((max(at, until) for at, until in known), default=0)
            due = max(last, min(event.ceiling_us, hold, event.ended_us))
            ends = []
            verdict = "in_time"
            for shard in range(shards):
                found = proofs.get((*unit, shard), [])
                good = [r.ended_us for r in found if r.result == "ok" and r.started_us >= max(last, event.retired_us)]
                if good:
                    ends.append(min(good))
                elif found:
                    verdict = "failed"
                elif verdict != "failed":
                    verdict = "missing"
            if unit not in written:
                verdict = "unproven"
            elif verdict == "in_time" and max(ends) > max(due, event.retired_us) + event.scrub_within_us:
                verdict = "late"
            totals[verdict] += shards
    return totals


@pytest.mark.parametrize("seed", range(6))
def test_a_world_agrees_with_a_second_reading(store: Engine, make_writer: Any, world: Any, seed: int) -> None:
    """Seed 0 records everything; the others lose a twentieth of the receipts and releases."""
    played = world(seed).run(300)
    chance = random.Random(seed)
    events = [
        event
        for event in played.events
        if not (seed and isinstance(event, (ReceiptRecorded, ResidencyReleased)) and chance.random() < 0.05)
    ]
    row = measure(store, make_writer, events).total
    expected = second_reading(events, played.shards)
    assert {name: getattr(row, name) for name in expected} == expected
    assert row.in_time and sum(expected.values()) > 60
    assert row.due - row.overdue == sum(expected.values())
    if seed == 0:
        assert row.failed == row.unproven == row.disputed == 0


def test_a_period_takes_custody_by_its_due_time(store: Engine, make_writer: Any) -> None:
    writer = make_writer(store)
    writer.submit(story())
    assert writer.flush()
    due = writer.offset_us + 500
    with store.connect() as connection:
        assert coverage(connection, since_us=due, until_us=due + 1).total.in_time == UNITS
        assert coverage(connection, since_us=due + 1).total.due == 0
        assert coverage(connection, until_us=due).total.due == 0
        assert coverage(connection, since_us=due, tenant="other").total.due == 0
        assert coverage(connection, since_us=due, classification="internal").total.due == UNITS


def test_without_a_recorded_shard_count_nothing_is_proved(store: Engine, make_writer: Any) -> None:
    row = measure(store, make_writer, story()[1:]).total
    assert row.unproven == row.due == 4
