"""One process's records of one tenant within a short time share a leaf, without losing anything of separate leaves."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from sqlalchemy import Engine, select

from kvcustody.audit.evidence.coverage.summary import coverage
from kvcustody.audit.kinds import (
    BlocksAttached,
    BlocksReleased,
    CustodyEnded,
    Event,
    HoldsNarrowed,
    ReceiptRecorded,
    ResidencyOpened,
    ResidencyReleased,
    WorkerStarted,
)
from kvcustody.audit.kinds.block_runs import Run
from kvcustody.audit.leaf.change_items import CHANGED, plain_bodies
from kvcustody.audit.store.schema.leaf_tables import custody_ends, receipts, releases
from kvcustody.audit.store.schema.ledger import events
from kvcustody.audit.verify.ledger.fsck_ledger import fsck
from kvcustody.audit.write.event_writer import EventWriter
from standins.builders import ledger

STARTED = WorkerStarted(1, "worker-1", 48, 1, 4096, "cpu", "test")


def runs(first: int, count: int = 3) -> tuple[Run, ...]:
    return (Run(np.arange(first, first + count), first),)


def opened(number: int, tenant: str = "acme") -> ResidencyOpened:
    return ResidencyOpened(10, number, tenant, None, None, False, "internal", (), (), (), 1, 99, runs(10 * number))


def life(number: int, tenant: str = "acme", **receipt: Any) -> list[Event]:
    """A request after its opening, from its release to the receipt of its blocks."""
    held = runs(10 * number)
    said = {"result": "ok", "runs": held} | receipt
    return [
        ResidencyReleased(20, number, tenant, "finish", (), 0),
        CustodyEnded(30, tenant, "internal", held, "expired", 20, 30, 25, 1_000_000),
        ReceiptRecorded(40, number, 0, tenant, "torch", "cpu", 768, 31, 39, "full", 1.0, 3, **said),
    ]


def leaves_of(engine: Engine) -> list[dict[str, Any]]:
    with engine.connect() as connection:
        query = select(events.c.leaf).order_by(events.c.sequence, events.c.part)
        return [orjson.loads(leaf) for leaf in connection.scalars(query)]


def kinds(engine: Engine) -> list[str]:
    return [body["kind"] for body in leaves_of(engine)]


def rows(engine: Engine) -> dict[str, list[tuple[Any, ...]]]:
    """Rows of these tables without where their leaf is, and without the part that a leaf is."""
    found = {}
    with engine.connect() as connection:
        for table in (releases, custody_ends, receipts):
            columns = [column for column in table.c if column.name not in ("log", "idx", "item", "incarnation")]
            found[table.name] = sorted(map(tuple, connection.execute(select(*columns))))
    return found


def test_shared_leaves_give_the_rows_and_the_verdict_of_leaves_of_their_own(
    any_store: Engine, make_writer: Any, migrated: Path, tmp_path: Path
) -> None:
    story = [event for number in range(1, 9) for event in life(number, ("acme", "labs")[number % 2])]
    opening = [STARTED, *(opened(number, ("acme", "labs")[number % 2]) for number in range(1, 9))]
    together = make_writer(any_store)
    together.submit([*opening, *story])
    assert together.flush()
    assert Counter(kinds(any_store)) == {"worker-started": 1, "residency-opened": 8, CHANGED: 2}
    with ledger(migrated, tmp_path / "alone.db") as alone_store:
        each_alone(alone_store, make_writer(alone_store, spill_directory=tmp_path / "other"), [*opening, *story])
        told = [{key: moved(value) for key, value in rows(store).items()} for store in (any_store, alone_store)]
        assert told[0] == told[1] and len(told[0]["custody_ends"]) == 8
        for store in (any_store, alone_store):
            with store.connect() as connection:
                total = coverage(connection).total
                assert (total.due, total.in_time, total.disputed) == (24, 24, 0)
                assert fsck(connection).ok


def each_alone(engine: Engine, writer: EventWriter, story: list[Event]) -> None:
    """One event a commit, so that none shares a leaf."""
    for event in story:
        writer.submit([event])
        assert writer.flush()
    assert CHANGED not in kinds(engine)


def moved(found: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Rows without moments in UTC, which are of their process's clock."""
    return [tuple(value for value in row if not (isinstance(value, int) and value > 10**14)) for row in found]


def test_what_comes_later_has_a_later_sequence(store: Engine, make_writer: Any) -> None:
    """A narrowing is held against releases by sequence: one before it is in a leaf before it."""
    writer = make_writer(store)
    writer.submit([STARTED, opened(1), opened(2), life(1)[0]])
    writer.submit([HoldsNarrowed(21, "acme", 2, (), ()), life(2)[0], opened(3), life(1)[1]])
    assert writer.flush()
    order = kinds(store)
    assert order == [
        "worker-started",
        "residency-opened",
        "residency-opened",
        "residency-released",
        "holds-narrowed",
        "residency-opened",  # passes what waits: nothing told of it can be among that
        CHANGED,
    ]


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (life(1, result="failed")[2], "what failed is seen by its kind"),
        (life(1, runs=runs(10, 400))[2], "its list is long"),
        (ResidencyReleased(20, 1, "acme", "finish", (), 0, "f" * 32), "another process's"),
        (ResidencyReleased(20, 1, "acme", "finish", (), 0, trace="ab" * 16), "a trace is found by its leaf"),
        (BlocksReleased(20, 1, "acme", "passed", runs(10), True, 0, trace="ab" * 16), "the same"),
    ],
)
def test_what_has_a_leaf_of_its_own(event: Event, why: str, store: Engine, make_writer: Any) -> None:
    writer = make_writer(store)
    if getattr(event, "incarnation", ""):
        event = event._replace(incarnation=writer.incarnation)  # any that the ledger knows
    writer.submit([STARTED, opened(1), opened(2), *life(2), event])
    assert writer.flush()
    kind = str(type(event).__struct_config__.tag)
    assert Counter(kinds(store))[kind] == 1, why
    shared = [body for body in leaves_of(store) if body["kind"] == CHANGED]
    assert sum(len(list(plain_bodies(body))) for body in shared) == 3


def test_a_leaf_is_shared_by_so_many_and_no_more(store: Engine, make_writer: Any) -> None:
    writer = make_writer(store)
    writer.submit([STARTED, *(life(number)[0] for number in range(1, 101))])
    assert writer.flush()
    sizes = [len(list(plain_bodies(body))) for body in leaves_of(store) if body["kind"] == CHANGED]
    assert sizes == [64, 36]


def test_a_join_is_on_record_before_its_release(store: Engine, make_writer: Any) -> None:
    writer = make_writer(store)
    writer.submit([STARTED, opened(1), life(2)[0], BlocksAttached(15, 1, "acme", runs(10)), life(1)[0]])
    assert writer.flush()
    assert kinds(store)[-2:] == ["blocks-attached", CHANGED]


def test_one_that_cannot_be_written_takes_none_along(store: Engine, make_writer: Any) -> None:
    """It is a gap, and the others of the leaf that it would have shared are on record."""
    writer = make_writer(store)
    strange = CustodyEnded(30, "acme", 7, runs(10), "expired", 20, 30, 25, 1_000_000)  # type: ignore[arg-type]
    writer.submit([STARTED, opened(1), opened(2, "labs"), *life(1), strange, *life(2, "labs")])
    assert writer.flush() and writer.flush()  # the gap is told once the others are on record
    assert Counter(kinds(store)) == {"worker-started": 1, "residency-opened": 2, CHANGED: 2, "gap": 1}
    shared = [body for body in leaves_of(store) if body["kind"] == CHANGED]
    assert [len(list(plain_bodies(body))) for body in shared] == [3, 3]


@pytest.mark.parametrize("change", [{"runs": 7}, {"tenant": ["acme"]}, {"at_us": None}])
def test_a_value_of_another_type_stops_neither_engine_nor_writer(
    change: dict[str, Any], store: Engine, make_writer: Any
) -> None:
    writer = make_writer(store)
    writer.submit([STARTED, opened(1), *life(1)[:2], life(1)[1]._replace(**change), life(1)[2]])
    assert writer.flush() and writer.flush()
    assert Counter(kinds(store)) == {
        "worker-started": 1,
        "residency-opened": 1,
        CHANGED: 1,
        "gap": 1,
        "receipt": 1,
    }
