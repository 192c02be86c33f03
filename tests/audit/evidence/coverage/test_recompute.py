"""Coverage by tables, from leaves alone, and by the oracle: the same to the row, and no falsification passes it."""

from __future__ import annotations

import ast
import random
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import coverage_oracle
import pytest
from sqlalchemy import Engine, update

from kvcustody.audit.evidence.coverage.custody_units import CustodySelection, units_of
from kvcustody.audit.evidence.coverage.leaf_record import LeafRecord
from kvcustody.audit.evidence.coverage.recount_process import RecountResult, differences, leaves_in_database
from kvcustody.audit.evidence.coverage.summary import coverage
from kvcustody.audit.kinds import (
    BlocksAttached,
    BlocksReleased,
    CustodyEnded,
    Event,
    ReceiptRecorded,
    ResidencyReleased,
)
from kvcustody.audit.leaf.batch import read_leaves
from kvcustody.audit.store.database.engine import WRITE
from kvcustody.audit.store.schema.leaf_tables import custody_ends
from kvcustody.audit.write.append_leaves import Appender
from kvcustody.errors import LedgerError
from standins.audit import falsified
from standins.audit.coverage_agreement import counted, disagreements
from standins.audit.custody_story import BLOCKS, opened, story

CASES = 500


def quiet(world: Any, seed: int, steps: int = 60) -> list[Event]:
    """A history in which everybody left and everything that ended was wiped."""
    played = world(seed, blocks=24, narrows=True).run(steps)
    while played.dirty:
        played.scrub()
    return list(played.events)


def forged(world: Any, case: int) -> tuple[str, list[Event], list[Event]]:
    """The name of a falsification, the history as it was, and as it was made."""
    names = list(falsified.FORGERIES)
    name, chance, seed = names[case % len(names)], random.Random(case), case
    while True:
        events = quiet(world, seed)
        units = falsified.covered_units(events)
        made = falsified.FORGERIES[name](events, chance.choice(units), chance) if units else events
        if made is not events:
            return name, events, made
        seed += CASES  # a short world in which nothing is due yet, or no due time is from a narrowing


def of(events: list[Event]) -> RecountResult:
    """What the product makes of the leaves of a history."""
    return counted(falsified.leaf_bytes(events, "ab" * 16))


def shows(clean: RecountResult, planted: RecountResult) -> bool:
    """Whether less is covered, more is due than covered, or something is no longer accounted for."""
    before, after = clean.figures.total, planted.figures.total
    return (
        after.covered < before.covered
        or after.due - after.covered > before.due - before.covered
        or not set(enumerate(planted.missing)) <= set(enumerate(clean.missing))
    )


def store_all(store: Engine, histories: Iterable[list[Event]]) -> None:
    """Each history as an incarnation of its own, by the ledger's own appending."""
    with store.connect().execution_options(**WRITE) as connection, connection.begin():
        appender = Appender()
        for number, events in enumerate(histories):
            appender.append(connection, read_leaves(falsified.leaf_bytes(events, f"{number:032x}")))


@pytest.mark.parametrize("cases", [range(72), pytest.param(range(72, CASES), marks=pytest.mark.soak)])
def test_every_falsification_is_reported_and_no_clean_history_is(world: Any, cases: range) -> None:
    unseen = []
    for case in cases:
        name, events, made = forged(world, case)
        clean = of(events)
        if not shows(clean, of(made)):
            unseen.append((case, name))
        total = clean.figures.total  # the world wipes late at times, and never wrongly
        assert total.failed == total.missing == total.unproven == total.disputed == 0, case
        assert clean.missing[::2] == (0, 0), case
    assert unseen == []


def test_without_the_rule_on_disputed_custody_an_extended_deadline_passes(world: Any) -> None:
    """The positive control: what the recorded due time says is compared with the holds, and that alone shows it."""
    passed = 0
    for case in range(7, 127, 12):
        name, events, made = forged(world, case)
        assert name == "extended deadline"
        before, after = of(events).figures.total, of(made).figures.total
        assert after.disputed > before.disputed
        passed += after.ended_in_time >= before.ended_in_time
    assert passed == 10, "the ends themselves look in time"


@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_tables_and_leaves_agree_on_falsified_histories(store: Engine, world: Any, part: int) -> None:
    cases = range(40) if part == 0 else range(CASES)
    store_all(store, (forged(world, case)[2] for case in cases))
    with store.connect() as connection:
        assert disagreements(connection) == []
        total = coverage(connection).total
    assert min(total.late, total.failed, total.missing, total.unproven, total.overdue, total.disputed) > 0


def test_a_row_that_its_leaf_does_not_give_is_found_by_the_leaves(store: Engine) -> None:
    """The control of reading twice: with its own columns alone, the ledger would believe the row."""
    store_all(store, [story()])
    with store.connect().execution_options(**WRITE) as connection, connection.begin():
        connection.execute(update(custody_ends).values(ended_boot_us=1, due_boot_us=1))
    with store.connect() as connection:
        again = counted(list(leaves_in_database(connection)))
        found = differences(coverage(connection), again.figures)
    assert again.figures.total.covered == 8
    assert {"covered", "disputed"} <= {item.figure for item in found}


SELECTIONS: dict[str, dict[str, Any]] = {
    "a tenant": {"tenant": "tenant-1"},
    "a classification": {"classification": "internal"},
    "another classification": {"classification": "secret"},
    "a model": {"model": "aaaa"},
    "no model": {"model": "unknown"},
    "device memory": {"tier": "device"},
    "a period": {"since_us": 8_000_000, "until_us": 20_000_000},
    "from a moment on": {"since_us": 12_345_678, "tenant": "tenant-0"},
}


@pytest.mark.parametrize("selection", SELECTIONS)
def test_every_selection_agrees(any_store: Engine, world: Any, selection: str) -> None:
    chance = random.Random(7)
    histories = []
    for seed in range(4):
        events = [e for e in world(seed).run(120).events if chance.random() < 0.97]
        histories.append(
            [e._replace(model=chance.choice(["aaaa", "bbbb", ""])) if hasattr(e, "model") else e for e in events]
        )
    store_all(any_store, histories)
    chosen = dict(SELECTIONS[selection])
    for name in ("since_us", "until_us"):
        if name in chosen:
            chosen[name] += falsified.OFFSET_US
    with any_store.connect() as connection:
        whole, part = coverage(connection), coverage(connection, **chosen)
        assert disagreements(connection, **chosen) == []
    assert (part.total.due > 0) == (selection != "another classification")
    assert selection in ("a classification", "device memory") or part.total.due < whole.total.due


def test_parts_add_up_to_the_whole(store: Engine, world: Any) -> None:
    store_all(store, [world(3).run(150).events])
    with store.connect() as connection:
        whole = coverage(connection).total
        middle = falsified.OFFSET_US + 15_000_000
        halves = [coverage(connection, until_us=middle).total, coverage(connection, since_us=middle).total]
    assert halves[0].due and halves[1].due
    assert [a + b for a, b in zip(halves[0][2:-1], halves[1][2:-1], strict=True)] == list(whole[2:-1])


def test_a_tier_that_there_is_none_of_is_an_error(store: Engine) -> None:
    with store.connect() as connection:
        with pytest.raises(LedgerError, match="tier `hots` is none of"):
            coverage(connection, tier="hots")
        with pytest.raises(LedgerError, match="tier `hots` is none of"):
            list(units_of(LeafRecord(()), CustodySelection(tier="hots"), now_us=0))
        assert coverage(connection, tier="host").rows == ()  # blocks are in no tier off the device


def test_what_was_let_go_of_and_attached_again_was_used_until_the_second_time(store: Engine) -> None:
    """Attached, let go of, attached again after the wipe: the wipe proves nothing."""
    again = (
        opened(2, BLOCKS, 150),
        BlocksReleased(300, 2, "acme", "window", BLOCKS, False, 0),
        BlocksAttached(650, 2, "acme", BLOCKS),
        ResidencyReleased(700, 2, "acme", "finish", (), 0),
    )
    for more, verdict in ((again[:2] + again[3:], "in_time"), (again, "failed")):
        total = of(story(more=more)).figures.total
        assert getattr(total, verdict) == total.due == 8, verdict
    store_all(store, [story(more=again)])
    with store.connect() as connection:
        assert coverage(connection).total.failed == 8


@pytest.mark.parametrize("recorded", [True, False], ids=["ceiling on record", "control: no ceiling"])
def test_custody_past_its_ceiling_shows_though_every_other_time_was_moved_along(store: Engine, recorded: bool) -> None:
    """Hold, due time, end and receipts agree with each other: the ceiling in its end alone tells."""
    moved = {"hold_us": 9000, "due_us": 9000, "ended_us": 9000, "retired_us": 200}
    events = story(**moved, ceiling_us=900 if recorded else 0, receipt={"started_us": 9001, "ended_us": 9100})
    total = of(events).figures.total
    assert (total.covered, total.late, total.disputed) == ((0, 8, 8) if recorded else (8, 0, 0))
    store_all(store, [events])
    with store.connect() as connection:
        assert disagreements(connection) == []


def test_of_two_ends_the_first_counts(store: Engine) -> None:
    events = story()
    twice = [
        *events,
        next(e for e in events if isinstance(e, CustodyEnded))._replace(ended_us=9000, due_us=9000),
    ]
    store_all(store, [twice])
    with store.connect() as connection:
        assert disagreements(connection) == []
        found = coverage(connection)
    assert (found.total.due, found.total.covered) == (8, 8)


def test_completeness_names_what_nothing_accounts_for(world: Any) -> None:
    events = quiet(world, 5)
    assert of(events).missing.residencies == 0
    opening = next(e for e in events if type(e).__name__ == "ResidencyOpened" and e.written)
    found = of([e for e in events if e is not opening]).missing
    assert found.residencies == 1 and found.generations >= 1 and not found.is_empty
    end = next(e for e in events if isinstance(e, CustodyEnded))
    assert of([e for e in events if e is not end]).missing.receipts == len(falsified.pairs(end.runs))


def test_leaves_that_are_none_are_refused() -> None:
    for data in (b"{}", b"[1]", b"\xff", b'{"kind":"receipt"}'):
        with pytest.raises(LedgerError, match="leaf cannot be read"):
            LeafRecord([data])
    broken = next(e for e in [ReceiptRecorded(1, 1, 0, "a", "m", "d", 1, 1, 1, "full", 1.0, 1, "ok", ())])
    data = falsified.leaf_bytes([broken], "ab" * 16)[0].replace(b'"runs":[]', b'"runs":[[1,[1,2],[3]]]')
    with pytest.raises(LedgerError):
        LeafRecord([data])


def test_the_oracle_shares_no_code_with_the_product() -> None:
    tree = ast.parse(Path(coverage_oracle.__file__).read_text())
    names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    names |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert {str(name).split(".")[0] for name in names} <= set(sys.stdlib_module_names)
