"""Runs: exact round trips, scalar and bulk, however the indices lie."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcustody.audit.kinds.block_runs import (
    UNNAMED,
    Run,
    decode,
    decode_flat,
    flatten,
    gather,
    name_blocks,
    plain_forms,
    split,
)
from kvcustody.audit.leaf.batch import extents as read_extents
from kvcustody.audit.leaf.block_run_text import run_texts, short_texts
from kvcustody.errors import LedgerError

indices = st.one_of(
    st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=60),
    st.builds(lambda first, length: list(range(first, first + length)), st.integers(0, 10**6), st.integers(1, 200)),
    st.builds(lambda a, b: a + b[::-1], *[st.lists(st.integers(0, 9), min_size=1, max_size=40)] * 2),
)
runs = st.builds(
    lambda blocks, generation, pool: Run(np.array(blocks, np.int64), generation, pool),
    indices,
    st.one_of(st.integers(0, 10**6), st.integers(2**53 - 5, 2**60)),
    st.integers(0, 3),
)


def encoded(*some: Run) -> list[Any]:
    """As a leaf has them."""
    found: list[Any] = orjson.loads(run_texts([some])[0][0])
    return found


@given(runs)
def test_round_trip_is_exact(run: Run) -> None:
    [found] = map(decode, encoded(run))
    assert found.blocks.tolist() == run.blocks.tolist()
    assert (found.generation, found.pool) == (run.generation, run.pool)


@given(st.lists(runs, max_size=8))
def test_bulk_decoding_equals_flattening(many: list[Run]) -> None:
    pairs, lengths = decode_flat(encoded(*many))
    expected = flatten(many)
    assert lengths.tolist() == [len(run.blocks) for run in many]
    for one, other in zip(pairs, expected, strict=True):
        assert one.tolist() == other.tolist()


@given(st.lists(st.lists(runs, max_size=4), min_size=1, max_size=4), st.booleans())
def test_a_shorter_form_holds_the_same_custodies(many: list[list[Run]], placed: bool) -> None:
    """Placed: the very blocks. Named: the generations, whose blocks are found where they were listed."""
    texts, extents = short_texts([tuple(some) for some in many], placed=placed)
    assert extents == read_extents([orjson.loads(text) for text in texts])
    for text, some in zip(texts, many, strict=True):
        flat, _ = decode_flat(orjson.loads(text))
        whole = flatten([run for run in some if len(run.blocks)])
        assert sorted(zip(*map(np.ndarray.tolist, (flat.pools, flat.generations)), strict=True)) == sorted(
            zip(*map(np.ndarray.tolist, (whole.pools, whole.generations)), strict=True)
        )
        if placed:
            assert sorted(map(tuple, np.column_stack(flat).tolist())) == sorted(
                map(tuple, np.column_stack(whole).tolist())
            )


@given(st.lists(st.tuples(st.lists(runs, min_size=1, max_size=4), st.integers(0, 2)), min_size=1, max_size=5))
def test_forms_may_be_mixed(many: list[tuple[list[Run], int]]) -> None:
    """All at once, or one by one by way of the first form: the same blocks, and as many of each."""
    items = []
    for some, form in many:
        lists = [tuple(some)]
        texts = run_texts(lists)[0] if form == 0 else short_texts(lists, placed=form == 2)[0]
        items += orjson.loads(texts[0])
    pairs, lengths = decode_flat(items)
    forms = [list(map(decode, plain_forms(item))) for item in items]
    assert lengths.tolist() == [sum(len(run.blocks) for run in each) for each in forms]
    whole = flatten([run for each in forms for run in each])
    for one, other in zip(pairs, whole, strict=True):
        assert one.tolist() == other.tolist()


def test_named_blocks_are_found_where_they_were_listed() -> None:
    keys, blocks = np.array([5, 7, 9, 7]), np.array([UNNAMED, 3, UNNAMED, UNNAMED])
    made = name_blocks(keys, blocks, np.array([9, 7]), np.array([4, 8]))
    assert made.tolist() == [
        UNNAMED,
        3,
        4,
        8,
    ]  # what nobody listed stays as it is; what is said is not replaced


@pytest.mark.parametrize(
    "item",
    [[0, 0, 1], [0, 5], [0, 5, 0], [-1, 5, 1], [0, 5, 1, -1, 1], [[0, 5, 2], [1], []], [[0, 5, 1], [-3], []]],
)
def test_malformed_shorter_forms_are_refused(item: list[object]) -> None:
    with pytest.raises(LedgerError):
        plain_forms(item)
    with pytest.raises(LedgerError):
        decode_flat([item])  # type: ignore[list-item]
    with pytest.raises(LedgerError):
        read_extents([[item]])


@given(runs, st.integers(1, 20))
def test_pieces_are_the_run(run: Run, tokens: int) -> None:
    pieces = [piece for piece in split(run, tokens) if len(piece.blocks)]
    whole = flatten([run] if len(run.blocks) else [])
    assert flatten(pieces).blocks.tolist() == whole.blocks.tolist()
    assert flatten(pieces).generations.tolist() == whole.generations.tolist()


@given(st.dictionaries(st.integers(0, 500), st.integers(0, 500), max_size=60))
def test_gather_keeps_every_pair(by_generation: dict[int, int]) -> None:
    generations, blocks = (
        np.array(list(by_generation), np.int64),
        np.array(list(by_generation.values()), np.int64),
    )
    made = flatten(gather(blocks, generations))
    assert dict(zip(made.generations.tolist(), made.blocks.tolist(), strict=True)) == by_generation


def test_a_run_at_generation_zero_is_memory_never_in_custody() -> None:
    pairs = flatten(gather(np.array([3, 4, 5]), np.zeros(3, np.int64)))
    assert pairs.generations.tolist() == [0, 0, 0] and pairs.blocks.tolist() == [3, 4, 5]


def test_contiguous_blocks_are_two_numbers() -> None:
    assert encoded(Run(np.arange(7, 1007), 12)) == [[12, [7, 1], [1, 999]]]


@pytest.mark.parametrize("item", [[1, [1, 2], [1]], [1, [1], [0]], [1, [-2], []], ["x", [1], []], [1], [-1, [1], []]])
def test_malformed_runs_are_refused(item: list[object]) -> None:
    with pytest.raises(LedgerError):
        decode(item)
