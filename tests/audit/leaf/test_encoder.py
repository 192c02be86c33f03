"""Leaves and rows by column: the bytes and rows of one by one, for every kind of event."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import orjson
import pytest
import rfc8785
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcustody.audit.kinds import (
    KINDS,
    CustodyChanged,
    CustodyEnded,
    DecisionRecorded,
    Event,
    HitCounted,
    KeyEvent,
    ReceiptRecorded,
    ResidencyOpened,
    ResidencyReleased,
)
from kvcustody.audit.kinds.block_runs import EXACT, Run, Runs
from kvcustody.audit.leaf import LEAF_BYTES_MAX, Context, leaves, merkle
from kvcustody.audit.leaf.batch import LeafBatch, read_leaves
from kvcustody.audit.leaf.batch_encoder import BatchEncoder, encoded_of
from kvcustody.audit.leaf.block_run_text import run_texts
from kvcustody.audit.leaf.canonical_leaf import canonical
from kvcustody.audit.leaf.leaf_schema import FOLDED, plain_type
from kvcustody.audit.project import IncarnationRow, project, rows_of
from kvcustody.audit.write.append_leaves import leaf_hashes
from kvcustody.errors import LedgerError

CONTEXT = Context(
    "ab" * 16, 1_700_000_000_000_000, lambda tenant, subject, session="": f"name{len(subject)}é{len(session)}"
)
words = st.sampled_from(["acme", "labs", 'a "quote" \\', "naïve\n", "\u2028", "100 % d", ""])
numbers = st.integers(-(2**53) + 1, 2**53 - 1)
strange = st.one_of(  # right or wrong, but never what is declared
    st.sampled_from([2**53, -(2**60), True, 1.5, float("nan"), np.int64(7), None, b"bytes", "lone \ud800", []])
)
block_lists = st.one_of(
    st.lists(st.integers(0, 10**6), max_size=40).map(lambda found: np.array(found, np.int64)),
    st.builds(lambda first, count: np.arange(first, first + count), st.integers(0, 99), st.integers(0, 40)),
    st.lists(st.integers(0, 100), min_size=1, max_size=5).map(lambda found: np.array(found, np.int32)),
)
runs = st.builds(Run, block_lists, st.one_of(st.just(0), st.integers(1, 2**53 - 1)), st.sampled_from([0, 0, 0, 3]))
BY_TYPE: dict[Any, st.SearchStrategy[Any]] = {
    int: numbers,
    str: words,
    str | None: st.none() | words,
    bool: st.booleans(),
    float: st.floats(0, 1) | st.integers(0, 1),
    Runs: st.lists(runs, max_size=3).map(tuple),
    tuple[int, ...]: st.lists(numbers, max_size=3).map(tuple),
    tuple[str, ...]: st.lists(words, max_size=3).map(tuple),
}
OWN = [kind for kind in KINDS if kind is not HitCounted]


def held(kind: Any) -> st.SearchStrategy[Any]:
    """What may be an item of a leaf of acme's: of this process, without a trace."""
    fields = {field.name: BY_TYPE[plain_type(field.type)] for field in msgspec.structs.fields(kind)}
    own = {
        "incarnation": st.just(""),
        "trace": st.just(""),
        "tenant": st.just("acme"),
        "at_us": st.integers(0, 2**52),
    }
    fields |= {name: value for name, value in own.items() if name in fields}
    return st.lists(st.builds(kind, **fields), max_size=2).map(tuple)


BY_TYPE |= {tuple[kind, ...]: held(kind) for kind in FOLDED.values()}  # type: ignore[valid-type]


COUNTS = ("numbers", "blocks_each", "bytes_each")


@st.composite
def copies(draw: st.DrawFn, kind: Any, fields: dict[str, Any]) -> Any:
    """Lists of copies belong together, and mostly are of one length."""
    count = draw(st.integers(1, 3))
    lists = {name for name in fields if name in (*COUNTS, "names") or name in ("due_us", "stored_us", "ended_us")}
    lists |= {"destroyed_us"} & fields.keys()
    for name in lists if draw(st.integers(0, 5)) else ():
        copies_each = (
            st.sampled_from(["0f" * 32, "a1"])
            if name == "names"
            else st.integers(0, 2**53 - 1)
            if name in COUNTS
            else numbers
        )
        fields[name] = st.lists(copies_each, min_size=count, max_size=count).map(tuple)
    return draw(st.builds(kind, **fields))


def events_of(kind: Any) -> st.SearchStrategy[Any]:
    fields = {field.name: BY_TYPE[plain_type(field.type)] for field in msgspec.structs.fields(kind)}
    fields |= {"at_us": st.integers(0, 2**52)} | ({"tenant": st.just("acme")} if kind is CustodyChanged else {})
    if "names" in fields:
        return copies(kind, fields)
    return st.builds(kind, **fields)


def one_by_one(items: list[tuple[int, Event]]) -> list[Any]:
    """The definition: every leaf of every event that has one, in order."""
    all_leaves = []
    for sequence, event in items:
        try:
            all_leaves += leaves(event, CONTEXT, sequence)
        except Exception:
            continue
    return all_leaves


def projected(batch: LeafBatch) -> dict[str, dict[tuple[Any, ...], Any]]:
    """Every projected row, by table and place."""
    count = range(len(batch.data))
    made = project(batch, count, count, lambda uuid: IncarnationRow(5, CONTEXT.offset_us))
    return {  # by leaf, and item where there are any
        table.name: {row[1:3]: row for some in columns for row in rows_of(some)} for table, columns in made.items()
    }


def check(items: list[tuple[int, Event]]) -> None:
    """What the encoder makes is what the definition makes, and what the bytes alone give."""
    done = BatchEncoder(CONTEXT).encode(items)
    expected = one_by_one(items)
    assert list(done.batch.data) == [leaf.data for leaf in expected]
    again = read_leaves(done.batch.data)
    assert [list(column) for column in done.batch[:9]] == [list(column) for column in again[:9]]
    same_rows(done.batch, again)
    assert sum(done.widths) == len(done.batch.data) and len(done.widths) == len(done.items)
    assert len(done.items) + len(done.refused) == len(items)
    assert encoded_of(done.entries()).batch.data == done.batch.data


def same_rows(batch: LeafBatch, again: LeafBatch) -> None:
    """Equal projections; where a value cannot be projected at all, neither can, and the writer makes it a gap."""
    try:
        expected = projected(again)
    except (TypeError, ValueError):
        with pytest.raises((TypeError, ValueError)):
            projected(batch)
        return
    assert projected(batch) == expected


@pytest.mark.parametrize("kind", OWN, ids=lambda kind: kind.__name__)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_by_column_gives_the_bytes_and_rows_of_one_by_one(kind: Any, data: st.DataObject) -> None:
    events = data.draw(st.lists(events_of(kind), min_size=1, max_size=6))
    check(list(enumerate(events, 3)))
    for leaf in BatchEncoder(CONTEXT).encode(list(enumerate(events, 3))).batch.data:
        assert leaf == rfc8785.dumps(orjson.loads(leaf))


@pytest.mark.parametrize("value", [True, 1.5, None, b"bytes", [], [7], (7,)])
@pytest.mark.parametrize("key", FOLDED)
def test_a_shared_leaf_that_is_none_is_refused_and_hinders_no_other(key: str, value: Any) -> None:
    sound = CustodyChanged(5, "acme")
    check([(1, sound), (2, sound._replace(**{key: value})), (3, sound)])
    one = CustodyEnded(5, "acme", "internal", (Run(np.arange(3), 7),), "expired", 1, 2, 3, 4)
    check([(1, CustodyChanged(True, "acme", ended=(one, one))), (2, sound)])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_kinds_mixed_with_values_that_are_not_plain(data: st.DataObject) -> None:
    """A value of another type is written, or refused, as by the definition, and hinders no other."""
    events = data.draw(st.lists(st.sampled_from(OWN).flatmap(events_of), min_size=1, max_size=8))
    which = data.draw(st.integers(0, len(events) - 1))
    field = data.draw(st.sampled_from(events[which].__struct_fields__))
    events.insert(which, events[which]._replace(**{field: data.draw(strange)}))
    check(list(enumerate(events, 3)))


@pytest.mark.parametrize(
    "change",
    [
        {"shard": True},
        {"tenant": 1},
        {"verified": 1.0},
        {"level": None},
        {"share": float("nan")},
        {"runs": 7},
    ],
)
def test_a_value_that_its_kind_does_not_take_is_refused_and_one_of_numpy_is_not(
    change: dict[str, Any],
) -> None:
    event = ReceiptRecorded(1, 1, 0, "a", "memset", "cpu", 8, 1, 2, "full", 1.0, 1, "ok", (Run(np.arange(3), 1),))
    with pytest.raises(LedgerError, match="cannot be written"):
        leaves(event._replace(**change), CONTEXT, 9)
    numbers = event._replace(shard=np.int64(0), launch=np.int32(1), runs=(Run(np.arange(3), np.int64(1)),))  # type: ignore[arg-type]
    assert leaves(numbers, CONTEXT, 9) == leaves(event, CONTEXT, 9)


def test_continued_and_two_log_leaves_keep_the_order_of_their_events() -> None:
    scattered = (Run(np.random.default_rng(1).permutation(5_000), 40),)
    events: list[Event] = [
        KeyEvent(1, "acme", "made", 1, "operator"),
        ResidencyReleased(2, 1, "acme", "finish", scattered, 0),
        DecisionRecorded(3, "reuse", "permit", "labs", "acme", "internal", ("grant",), 3),
        ResidencyReleased(4, 2, "acme", "finish", (Run(np.arange(4), 6_000),), 0),
        ResidencyReleased(5, 3, "acme", "finish", scattered, 1.5),  # type: ignore[arg-type]
        ResidencyOpened(6, 4, "acme", "alice", None, False, "internal", (), scattered, ("own",), 1, 9, scattered),
    ]
    items = list(enumerate(events, 1))
    check(items)
    done = BatchEncoder(CONTEXT).encode(items)
    assert [item[0] for item in done.items] == [1, 2, 3, 4, 6] and done.refused[0].sequence == 5
    assert done.widths[0] == done.widths[3] == 1 and done.widths[2] == 2 and min(done.widths[1], done.widths[4]) > 3
    assert max(map(len, done.batch.data)) <= LEAF_BYTES_MAX
    assert list(done.batch.sequences) == sorted(done.batch.sequences)


def test_more_events_than_a_chunk_holds() -> None:
    events: list[Event] = [KeyEvent(number, f"tenant-{number % 7}", "made", number, "op") for number in range(1000)]
    check(list(enumerate(events, 1)))


def test_many_blocks_are_taken_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    lists = [(Run(np.arange(number, number + 50), number + 1),) for number in range(40)]
    whole = run_texts(lists)
    monkeypatch.setattr("kvcustody.audit.leaf.block_run_text._BLOCKS_AT_ONCE", 120)
    assert run_texts(lists) == whole


@pytest.mark.parametrize(
    "run",
    [
        Run(np.arange(2), -1),
        Run(np.arange(2), 1.5),  # type: ignore[arg-type]
        Run(np.arange(2.0), 3),
        Run(np.arange(2), 3, EXACT),
    ],
)
def test_runs_that_are_none_are_refused(run: Run) -> None:
    with pytest.raises(LedgerError):
        run_texts([(run,)])


def test_a_leaf_of_an_earlier_version_has_no_written_list() -> None:
    event = ResidencyOpened(1, 1, "acme", None, None, False, "internal", (), (Run(np.arange(3), 4),), ("own",), 1, 9)
    body = orjson.loads(leaves(event, CONTEXT, 1)[0].data)
    older = {key: value for key, value in body.items() if not key.startswith("written")}
    assert projected(read_leaves([canonical(older)])) == projected(read_leaves([canonical(body)]))


def test_hashes_by_log_are_those_of_the_leaves() -> None:
    events: list[Event] = [KeyEvent(1, tenant, "made", 1, "op") for tenant in ("a", "b", "a", None)]
    batch = BatchEncoder(CONTEXT).encode(list(enumerate(events, 1))).batch
    first, second, third, fourth = map(merkle.leaf_hash, batch.data)
    assert leaf_hashes(batch) == {"tenant/a": [first, third], "tenant/b": [second], "system": [fourth]}
