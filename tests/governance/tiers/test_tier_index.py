"""The index of a tier against a dictionary; its size and its look-up at a million objects are bounds of the design."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from kvcustody.governance.tiers.tier_index import IndexRow, TierIndex, last_of


def add(index: TierIndex, name: bytes, **changed: int) -> int:
    values = {
        "number": 8, "size": 100, "domain": 1, "subject": 2, "bucket": 3, "born_us": 4, "ceiling_us": 5,
        "due_us": 9, "sealed_due_us": 9,
        "depth": 6, "blocks": 7,
    } | changed  # fmt: skip
    return index.add(name, IndexRow(**values))


def test_it_is_as_a_dictionary_has_it() -> None:
    """Names that begin alike (so that probes run into each other), added, removed and added again."""
    drawn, index, held = random.Random(5), TierIndex(), dict[bytes, int]()
    for at in range(6_000):
        name = bytes([drawn.randrange(3), 0, 0, 0, 0, 0, 0, 0]) + drawn.randrange(400).to_bytes(24, "big")
        row = index.find(name)
        assert (row >= 0) == (name in held)
        if row < 0:
            add(index, name, size=at)
            held[name] = at
        elif drawn.random() < 0.6:
            assert index.value("size", row) == held[name] and index.name(row) == name
            index.remove(row)
            del held[name]
    assert len(index) == len(held) and index.size == sum(held.values())
    assert {name: index.value("size", row) for name, row in index.names()} == held


def test_rows_are_chosen_by_their_values_and_by_use() -> None:
    index = TierIndex()
    rows = [add(index, bytes([at]) * 32, ceiling_us=at, domain=at % 2) for at in range(1, 11)]
    assert index.rows(index.column("ceiling_us") <= 3) == rows[:3]
    index.remove(rows[1])
    assert index.rows(index.column("ceiling_us") <= 3) == [rows[0], rows[2]]
    index.note_use(rows[0])
    assert index.least_used(3) == [rows[2], rows[3], rows[4]]
    assert index.least_used(100)[-1] == rows[0] and len(index.least_used(100)) == 9
    assert bytes([2]) * 32 not in bytes(index._names), "an ended object's name is not kept"


def test_an_end_that_is_there_is_never_denied_and_few_others_are_let_through() -> None:
    """Against a dictionary, over rebuilds, with many objects that end with one key, and with a counter that is full."""
    drawn, index, held = random.Random(6), TierIndex(), dict[bytes, bytes]()
    keys = [drawn.randbytes(32) for _ in range(4000)]
    for at in range(6_000):
        key, name = keys[drawn.randrange(3000) if at % 3 else 0], drawn.randbytes(32)
        add(index, name, last=last_of(key))
        held[name] = key
        if at % 2 or len(held) > 4000:
            name = next(iter(held))
            index.remove(index.find(name))
            del held[name]
    ends, there = index.ends_among(b"".join(keys)), set(held.values())
    assert {at + 1 for at, key in enumerate(keys) if key in there} <= set(ends) and ends == sorted(ends)
    assert len([at for at in ends if keys[at - 1] not in there]) < len(keys) / 8
    for name in held:
        index.remove(index.find(name))
    assert len(index.ends_among(b"".join(keys))) <= 1, "but for the counter that was full"
    assert not any(index._columns["last"]), "of an ended object nothing is kept"
    assert index.ends_among(b"") == []


@pytest.mark.parametrize("objects", [10_000, pytest.param(1_000_000, marks=pytest.mark.soak)])
def test_an_object_costs_at_most_two_hundred_bytes(objects: int) -> None:
    names = [random.Random(at).randbytes(32) for at in range(objects)]
    tracemalloc.start()
    index = TierIndex()
    for name in names:
        add(index, name, last=last_of(name))
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert all(index.find(name) >= 0 for name in names[::97]) and len(index) == objects
    assert taken / objects <= 200
