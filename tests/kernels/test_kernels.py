"""Scrub, verify and copy against a byte-level oracle, over layouts, dtypes and odd shapes (Z, V, Y, S).

The same file runs twice: on the torch path here, and on the Triton kernels under their interpreter, in the
process that `test_interpreter.py` starts.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcustody.errors import ConfigError, DeviceError
from kvcustody.kernels.checksum import ChecksumKeys, checksum, checksum_kernel, word_bytes
from kvcustody.kernels.copy import DIRECT_BYTES, copy, copy_in, copy_out, exchange
from kvcustody.kernels.entry import FAULT, IDLE, POSITION_SHIFT, READ_BACK, blocks_of, entries_of, position_of
from kvcustody.kernels.launch import launch, uses_triton
from kvcustody.kernels.scrub import launch_scrub, scrub, scrub_kernel
from kvcustody.kernels.segment import Layout, SegmentTable
from kvcustody.kernels.strategy import Strategy, default_strategy, group_max
from kvcustody.kernels.verify import verify, verify_kernel

DEVICE = os.environ.get("KVCUSTODY_TEST_DEVICE", "cpu")  # `cuda` runs the same cases on a real device
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TRITON = INTERPRETED or DEVICE == "cuda"
EXAMPLES = 12 if INTERPRETED else 60
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.uint8]
LAYOUTS = [
    "kv_blocks",
    "blocks_kv",
    "separate",
    "mla",
    "tokens",
    "heads_first",
    "kv_under_blocks",
    "padded",
    "scales",
]


def poisoned(shape, dtype, offset=0):
    """A tensor whose every byte, its storage's margins too, is 0xFF: NaN in each float format."""
    item = torch.empty(0, dtype=dtype).element_size()
    raw = torch.full((offset + int(np.prod(shape)) * item + 64,), 0xFF, dtype=torch.uint8, device=DEVICE)
    start = (-raw.data_ptr()) % 16 + offset
    return raw[start : start + int(np.prod(shape)) * item].view(dtype).view(shape)


def build(kind, dtype, blocks, tokens, heads, dim, layers=2):
    """(tensors as an engine holds them, layout, block_tokens, views whose first dimension counts blocks)."""
    nhd = (tokens, heads, dim)
    if kind == "kv_blocks":
        tensors = [poisoned((2, blocks, *nhd), dtype) for _ in range(layers)]
        return tensors, Layout.KV_BLOCKS, None, [t.transpose(0, 1) for t in tensors]
    if kind == "blocks_kv":
        tensors = [poisoned((blocks, 2, *nhd), dtype) for _ in range(layers)]
    elif kind == "separate":
        tensors = [poisoned((blocks, *nhd), dtype) for _ in range(2 * layers)]
    elif kind == "mla":
        tensors = [poisoned((blocks, tokens, dim), dtype) for _ in range(layers)]
    elif kind == "tokens":
        tensors = [poisoned((blocks * tokens, heads, dim), dtype) for _ in range(2 * layers)]
        return tensors, Layout.TOKENS, tokens, [t.view(blocks, *nhd) for t in tensors]
    elif kind == "heads_first":  # stored [2, blocks, heads, tokens, dim], seen as [2, blocks, tokens, heads, dim]
        tensors = [poisoned((2, blocks, heads, tokens, dim), dtype).transpose(2, 3) for _ in range(layers)]
        return tensors, Layout.KV_BLOCKS, None, [t.transpose(0, 1) for t in tensors]
    elif kind == "kv_under_blocks":  # seen as [blocks, 2, ...], stored [2, blocks, ...]
        tensors = [poisoned((2, blocks, *nhd), dtype).transpose(0, 1) for _ in range(layers)]
    elif kind == "padded":  # a gap after each block, and an odd start where the element allows one
        item = torch.empty(0, dtype=dtype).element_size()
        wide = [poisoned((blocks, tokens * heads * dim + 5), dtype, offset=item) for _ in range(layers)]
        tensors = [t[:, : tokens * heads * dim] for t in wide]
    else:  # scales: pieces of two sizes and dtypes
        tensors = [poisoned((blocks, *nhd), dtype), poisoned((blocks, tokens, heads), torch.float32)]
    return tensors, Layout.BLOCKS, None, tensors


def storages(tensors):
    return [raw_bytes(t).cpu().numpy().copy() for t in tensors]


def raw_bytes(tensor):
    """Every byte of the tensor's storage, margins included."""
    return torch.tensor([], dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def same(first, second):
    return all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


shapes = st.tuples(
    st.sampled_from(LAYOUTS),
    st.sampled_from(DTYPES),
    st.integers(1, 24),
    st.integers(1, 5),
    st.integers(1, 3),
    st.sampled_from([1, 3, 7, 8, 16, 20]),
)


def table_of(shape):
    tensors, layout, block_tokens, views = build(*shape)
    table = SegmentTable.from_tensors(tensors, layout=layout, block_tokens=block_tokens)
    assert uses_triton(table) == TRITON
    return table, views


@settings(max_examples=EXAMPLES, deadline=None)
@given(shape=shapes, data=st.data())
def test_scrub_zeroes_listed_blocks_and_nothing_else(shape, data):
    table, views = table_of(shape)
    listed = data.draw(st.lists(st.integers(0, table.blocks - 1), unique=True))
    written = scrub(table, np.array(listed, dtype=data.draw(st.sampled_from([np.int32, np.int64]))))
    after = storages(table.tensors)
    # The oracle: poison everything again, zero the same blocks by torch's own indexing, compare every byte.
    for tensor in table.tensors:
        raw_bytes(tensor).fill_(0xFF)
    for view in views:
        for block in listed:
            view[block].zero_()
    assert same(after, storages(table.tensors))
    assert written == len(listed) * table.bytes_per_block
    assert table.scrubbed() == len(listed)


@settings(max_examples=EXAMPLES, deadline=None)
@given(shape=shapes, data=st.data())
def test_verify_finds_every_single_dirty_byte(shape, data):
    table, views = table_of(shape)
    everything = np.arange(table.blocks)
    assert verify(table, everything).dirty.tolist() == everything.tolist()
    scrub(table, everything)
    assert not len(verify(table, everything).dirty)
    view = data.draw(st.sampled_from(views))
    block = data.draw(st.integers(0, table.blocks - 1))
    raw = view[block].clone(memory_format=torch.contiguous_format).view(torch.uint8).flatten()
    raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.sampled_from([1, 0x80, 0xFF]))
    view[block] = raw.view(view.dtype).view(view[block].shape)
    order = data.draw(st.permutations(everything.tolist()))
    before = storages(table.tensors)
    assert verify(table, order).dirty.tolist() == [block]
    assert same(before, storages(table.tensors))


def random_copy(shape, data):
    """A table of random content, and as many source blocks as targets, none of which is both."""
    table, views = table_of(shape)
    for view in views:
        view.copy_(torch.randn(view.shape).to(view.dtype))
    order = data.draw(st.permutations(range(table.blocks)))
    count = data.draw(st.integers(0, table.blocks // 2))
    return table, views, order[:count], order[count : 2 * count]


@settings(max_examples=EXAMPLES, deadline=None)
@given(shape=shapes, data=st.data())
def test_copy_moves_blocks_and_nothing_else(shape, data):
    table, views, source, target = random_copy(shape, data)
    before = [view.clone() for view in views]
    copy(table, source, target)
    for view, old in zip(views, before, strict=True):
        for one, other in zip(source, target, strict=True):
            old[other] = old[one]
        assert torch.equal(view.contiguous().view(torch.uint8), old.contiguous().view(torch.uint8))


@settings(max_examples=EXAMPLES, deadline=None)
@given(shape=shapes, data=st.data(), direct=st.sampled_from((0, DIRECT_BYTES)))
def test_what_is_copied_out_comes_back_into_other_blocks(shape, data, direct):
    """Through memory of the host, in any order, by the kernel itself or not; nothing but the targets changes."""
    table, views, source, target = random_copy(shape, data)
    before = [view.clone() for view in views]
    memory = memoryview(bytearray(len(source) * table.bytes_per_block))
    with mock.patch("kvcustody.kernels.copy.DIRECT_BYTES", direct):
        copy_out(table, source, memory)
        for view in views:
            for block in source:
                view[block] = 0
        copy_in(table, target, memory)
    for view, old in zip(views, before, strict=True):
        for one, other in zip(source, target, strict=True):
            old[other] = old[one]
        for one in source:
            old[one] = 0
        assert torch.equal(view.contiguous().view(torch.uint8), old.contiguous().view(torch.uint8))


@settings(max_examples=EXAMPLES, deadline=None)
@given(shape=shapes, data=st.data())
def test_rows_on_the_device_are_what_the_host_is_given_and_go_back(shape, data):
    """By the kernel where Triton serves the table, else by torch, which a device without Triton has."""
    table, views, source, target = random_copy(shape, data)
    memory = memoryview(bytearray(len(source) * table.bytes_per_block))
    copy_out(table, source, memory)
    rows = torch.zeros((len(source), table.bytes_per_block), dtype=torch.uint8, device=DEVICE)
    places = [torch.tensor(one, dtype=torch.int64, device=DEVICE) for one in (source, target)]
    if len(source):
        exchange(table, places[0], rows, out=True)
        assert rows.cpu().numpy().tobytes() == bytes(memory)
        exchange(table, places[1], rows, out=False)
    for view in views:
        for one, other in zip(source, target, strict=True):
            assert torch.equal(view[one].contiguous().view(torch.uint8), view[other].contiguous().view(torch.uint8))


def test_memory_of_another_length_is_refused():
    table = _small()
    for way in (copy_out, copy_in):
        with pytest.raises(DeviceError, match="bytes for"):
            way(table, [1, 2], memoryview(bytearray(table.bytes_per_block)))
        with pytest.raises(DeviceError, match="outside"):
            way(table, [9], memoryview(bytearray(table.bytes_per_block)))
    with pytest.raises(DeviceError, match="listed twice"):
        copy_in(table, [1, 1], memoryview(bytearray(2 * table.bytes_per_block)))


def _small():
    tensors, layout, tokens, _ = build("kv_blocks", torch.bfloat16, 6, 4, 2, 8)
    return SegmentTable.from_tensors(tensors, layout=layout, block_tokens=tokens)


@pytest.mark.parametrize("left_out", [0, 1])
def test_positive_control_a_forgotten_segment_is_seen(left_out):
    tensors, layout, _, views = build("kv_blocks", torch.bfloat16, 6, 4, 2, 8)
    whole = SegmentTable.from_tensors(tensors, layout=layout)
    kept = [s for s in whole.segments if s.tensor_index != left_out]
    scrub(SegmentTable(tensors, kept, whole.blocks), range(6))
    assert verify(whole, range(6)).dirty.tolist() == list(range(6))
    assert views[left_out].isnan().all()


def test_addresses_beyond_two_gibibytes():
    table = SegmentTable.from_tensors(
        [torch.empty(2100, 1 << 20, dtype=torch.uint8, device=DEVICE)]
    )  # untouched pages cost nothing
    (cache,) = table.tensors
    cache[2097:].fill_(0xFF)
    copy(table, [2097], [2])
    assert bool((cache[2] == 0xFF).all())
    scrub(table, [2, 2098])
    assert verify(table, [2, 2097, 2098, 2099]).dirty.tolist() == [2097, 2099]
    assert not cache[2098].any()


def small(blocks=16, **kinds):
    return SegmentTable.from_tensors([poisoned((blocks, 4, 2, 8), torch.float16) for _ in range(2)], **kinds)


def test_runs_and_scattered_blocks_in_one_list():
    table = small(64)
    listed = [*range(3, 20), 22, 30, *range(40, 49), 63]
    scrub(table, listed[::-1])
    assert verify(table, np.arange(64)).dirty.tolist() == sorted(set(range(64)) - set(listed))


def test_empty_list_does_nothing():
    table = small()
    assert scrub(table, []) == 0 == table.scrubbed() == copy(table, [], [])
    assert not len(verify(table, []).checked)
    assert len(verify(table, range(16)).dirty) == 16


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([-1], "block `-1` is outside 0..15"),
        ([0, 16], "block `16` is outside 0..15"),
        (np.array([2**40]), "is outside"),
        ([[1]], "one-dimensional"),
        ([0.5], "int32 or int64"),
        (np.array([True]), "int32 or int64"),
        (torch.tensor([1], dtype=torch.int16), "int32 or int64"),
    ],
)
def test_bad_lists_are_refused_before_anything_is_written(blocks, message):
    table = small()
    for call in (
        lambda: scrub(table, blocks),
        lambda: verify(table, blocks),
        lambda: copy(table, blocks, blocks),
    ):
        with pytest.raises(DeviceError, match=message):
            call()
    assert len(verify(table, range(16)).dirty) == 16


def test_a_block_listed_twice_is_refused():
    table = small()
    with pytest.raises(DeviceError, match="block `3` is listed twice in blocks"):
        scrub(table, [3, 1, 3])
    with pytest.raises(DeviceError, match="block `3` is listed twice in target"):
        copy(table, [1, 2], [3, 3])
    with pytest.raises(DeviceError, match="block `2` is both a source and a target"):
        copy(table, [1, 2], [2, 3])
    with pytest.raises(DeviceError, match="`1` source blocks for `2` targets"):
        copy(table, [1], [2, 3])
    assert table.scrubbed() == 0


def test_sampling_follows_the_share_and_the_seed():
    table = small(512)
    first, again = (verify(table, np.arange(512), 0.25, seed=7) for _ in range(2))
    assert first.checked.tolist() == again.checked.tolist() == first.dirty.tolist()
    assert 60 <= len(first.checked) <= 200
    assert verify(table, np.arange(512), 0.25).checked.tolist() != first.checked.tolist()
    assert not len(verify(table, np.arange(512), 0.0).checked)
    with pytest.raises(ConfigError, match=r"outside 0\.\.1"):
        verify(table, [1], 1.5)


def expected_sum(table, keys, block):
    """By Python's own integers, byte for byte through the pointer table."""
    width = word_bytes(table)
    total = 0
    columns = (column.tolist() for column in (table.tiles.address, table.tiles.stride, table.tiles.bytes))
    for tile, (address, stride, size) in enumerate(zip(*columns, strict=True)):
        data = ctypes.string_at(address + block * stride, size)
        words = [int.from_bytes(data[at : at + width], "little", signed=width > 1) for at in range(0, size, width)]
        of_tile = sum(word * int(key) for word, key in zip(words, keys.host_words, strict=False))
        total += of_tile * int(keys.host_tiles[tile])
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)


def scramble(table):
    for at, tensor in enumerate(table.tensors):
        raw = raw_bytes(tensor)
        raw.copy_(torch.from_numpy(np.random.default_rng(at).integers(0, 256, len(raw), dtype=np.uint8)))


@pytest.mark.skipif(DEVICE == "cuda", reason="the oracle reads host memory")
@settings(max_examples=EXAMPLES, deadline=None)
@given(shape=shapes, data=st.data())
def test_a_checksum_is_the_sum_over_the_blocks_words(shape, data):
    table, _ = table_of(shape)
    scramble(table)
    keys = ChecksumKeys(table)
    listed = data.draw(st.lists(st.integers(0, table.blocks - 1), max_size=4))
    found = checksum(table, keys, np.array(listed, dtype=np.int64))
    assert found.tolist() == [expected_sum(table, keys, block) for block in listed]


@pytest.mark.parametrize("kind", ["kv_blocks", "padded", "scales"])
def test_every_flipped_bit_changes_the_checksum_of_its_block_alone(kind):
    table, _ = table_of((kind, torch.bfloat16, 4, 2, 1, 3))
    scramble(table)
    keys = ChecksumKeys(table)
    before, flips = checksum(table, keys, range(4)).clone(), 0
    rows = [words.view(torch.uint8) for words in table.words]
    for block in (0, 3):
        for piece in rows:
            for at in range(0, piece.shape[1], 1 + 2 * INTERPRETED):
                for bit in range(8) if not INTERPRETED else (0, 7):
                    piece[block, at] ^= 1 << bit
                    changed = (checksum(table, keys, range(4)) != before).nonzero().flatten()
                    assert changed.tolist() == [block], (block, at, bit)
                    piece[block, at] ^= 1 << bit
                    flips += 1
    assert flips > 20 and torch.equal(checksum(table, keys, range(4)), before)


def test_words_and_tiles_that_change_places_change_the_checksum():
    table = SegmentTable.from_tensors([torch.arange(2 * 8192, dtype=torch.int32, device=DEVICE).view(2, 8192)])
    keys = ChecksumKeys(table)
    assert table.tiles.count == 2
    before = checksum(table, keys, [0, 1]).tolist()
    row = table.tensors[0][0]
    for one, other in ((slice(0, 1), slice(1, 2)), (slice(0, 4096), slice(4096, 8192))):
        kept = row.clone()
        row[one], row[other] = kept[other], kept[one]
        assert checksum(table, keys, [0, 1]).tolist()[0] != before[0]
        row.copy_(kept)
    table.tensors[0][1].copy_(row)
    assert checksum(table, keys, [0, 1]).tolist() == [before[0]] * 2  # it is of the bytes, not of the place


def test_keys_are_the_same_in_every_process():
    keys = ChecksumKeys(small())
    assert (keys.host_words & 1).all() and (keys.host_tiles & 1).all()
    assert keys.host_words[:2].tolist() == ChecksumKeys(small(512)).host_words[:2].tolist()


@pytest.mark.skipif(not TRITON, reason="the torch path cannot index outside a tensor")
def test_a_checksum_of_an_index_outside_the_pool_is_zero():
    table = small()
    keys = ChecksumKeys(table)
    sums = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    listed = torch.tensor([-1, 2, 10**12], device=DEVICE)
    launch(checksum_kernel, table, (listed,), constants=(keys.words, keys.tiles), flags=sums)
    assert sums.tolist() == [0, *checksum(table, keys, [2]).tolist(), 0] and sums[1]


@pytest.mark.skipif(not TRITON, reason="the torch path cannot index outside a tensor")
def test_the_kernels_themselves_skip_an_index_outside_the_pool():
    table = small()
    flags = torch.zeros(6, dtype=torch.int32, device=DEVICE)
    good = entries_of(np.array([2]), 1, read_back=True)
    far = entries_of(np.array([10**9]), 1, read_back=True) + (1 << POSITION_SHIFT)
    beyond = entries_of(np.array([15, 16]), 2, read_back=True) + (2 << POSITION_SHIFT)  # 16 is one too many
    listed = torch.tensor([*good.tolist(), *far.tolist(), *beyond.tolist(), IDLE], device=DEVICE)
    launch_scrub(table, listed, strategy=default_strategy(table), flags=flags)
    assert table.scrubbed() == 1
    assert flags.tolist() == [0, 1, 1, 1, 0, 0]  # what was asked for and not read is never called clean
    flags = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    launch(verify_kernel, table, (torch.tensor([-1, 2, 10**12], device=DEVICE),), flags=flags)
    assert flags.tolist() == [1, 0, 1]


@pytest.mark.skipif(not TRITON, reason="one launch is a Triton matter")
def test_launches_are_split_only_at_the_grid_limit(monkeypatch):
    table, grids = small(), []

    class Spy:
        def __init__(self, launched):
            self.launched = launched

        def __getitem__(self, grid):
            grids.append(grid[0])
            return self.launched[grid]

        def warmup(self, *arguments, **constants):  # on a device launches go by the handle that this gives
            return Spy(self.launched.warmup(*arguments, **constants))

    monkeypatch.setattr("kvcustody.kernels.scrub.scrub_kernel", Spy(scrub_kernel))
    entries = torch.from_numpy(entries_of(np.arange(7), 1)).to(DEVICE)
    launch_scrub(table, entries, strategy=Strategy())
    launch_scrub(table, entries, strategy=Strategy(), pairs_max=3 * table.tiles.count)
    assert grids == [7 * table.tiles.count, *[n * table.tiles.count for n in (3, 3, 1)]]
    assert table.scrubbed() == 14


@pytest.mark.skipif(not TRITON, reason="strategies are of the Triton path")
@pytest.mark.parametrize("kind", ["kv_blocks", "separate", "padded", "scales"])
@pytest.mark.parametrize(
    "strategy",
    [Strategy(), Strategy(group=4), Strategy(programs=3), Strategy(group=2, programs=5, streaming=True)],
    ids=["grid", "grouped", "persistent", "persistent-streaming"],
)
def test_a_strategy_changes_speed_only(kind, strategy):
    tensors, layout, block_tokens, views = build(kind, torch.uint8, 24, 4, 2, 8)
    table = SegmentTable.from_tensors(tensors, layout=layout, block_tokens=block_tokens)
    strategy = replace(strategy, group=min(strategy.group, group_max(table)))
    listed = np.array([0, 1, 2, 3, 4, 5, 9, 11, 12, 23])
    flags = torch.zeros(len(listed), dtype=torch.int32, device=DEVICE)
    entries = torch.from_numpy(entries_of(listed, strategy.group, read_back=True)).to(DEVICE)
    launch_scrub(table, entries, strategy=strategy, flags=flags)
    assert table.scrubbed() == len(listed)
    assert not flags.any()
    for view in views:
        for block in range(24):
            inside = view[block].clone().reshape(-1).view(torch.uint8)
            assert bool((inside == (0 if block in listed else 0xFF)).all()), block


@pytest.mark.skipif(not TRITON, reason="the read-back of a launch is of the Triton path")
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("asked", [True, False])
def test_a_planted_fault_is_seen_exactly_where_it_was_asked_to_look(group, asked):
    table = small()
    entries = entries_of(np.array([1, 2, 3, 8, 14]), group, read_back=asked)
    entries[-2] |= FAULT
    flags = torch.zeros(5, dtype=torch.int32, device=DEVICE)
    launch_scrub(table, torch.from_numpy(entries).to(DEVICE), strategy=Strategy(group), flags=flags, faulty=True)
    assert flags.tolist() == [0, 0, 0, int(asked), 0]
    assert verify(table, [8]).dirty.tolist() == [8]


@pytest.mark.skipif(not TRITON, reason="the read-back of a launch is of the Triton path")
@pytest.mark.parametrize("place", [0, 3])
def test_one_block_of_a_run_does_not_verify_and_its_neighbours_are_innocent(place):
    """Four blocks in one program: the fault is planted in the first, and only its flag is set."""
    table = small()
    entries = entries_of(np.array([4, 5, 6, 7]), 4, read_back=True) | FAULT
    flags = torch.zeros(8, dtype=torch.int32, device=DEVICE)
    listed = torch.from_numpy(entries + (place << POSITION_SHIFT)).to(DEVICE)
    launch_scrub(table, listed, strategy=Strategy(4), flags=flags, faulty=True)
    assert flags.nonzero().flatten().tolist() == [place]


@pytest.mark.skipif(not TRITON, reason="lanes are of the Triton path")
@pytest.mark.parametrize("read_back", [True, False])
def test_the_count_is_of_lanes_that_were_stored_not_of_what_the_list_says(read_back):
    """A launch whose programs reach half of each piece: the old count would have been of whole pieces."""
    table = small()
    whole = table.tiles.bytes_max
    table.tiles = replace(table.tiles, bytes_max=whole // 2)
    entries = torch.from_numpy(entries_of(np.arange(4), 1, read_back=read_back)).to(DEVICE)
    flags = torch.zeros(4, dtype=torch.int32, device=DEVICE) if read_back else None
    launch_scrub(table, entries, strategy=Strategy(), flags=flags)
    assert 0 < int(table.counter) < 4 * table.bytes_per_block


@pytest.mark.skipif(not TRITON, reason="one launch is a Triton matter")
@pytest.mark.parametrize("strategy", [Strategy(), Strategy(programs=3)])
def test_the_last_program_of_each_launch_tells_the_count(strategy):
    table = small()
    told = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    for launches in (1, 2, 3):
        entries = torch.from_numpy(entries_of(np.arange(5), 1)).to(DEVICE)
        launch_scrub(table, entries, strategy=strategy, published=told)
        assert int(told) == launches * 5 * table.bytes_per_block
    assert table.tally.tolist() == [15 * table.bytes_per_block, 0]


def _runs_of(ordered):
    """(first, behind the last) of every run of adjacent blocks."""
    cuts = np.flatnonzero(np.diff(ordered) != 1) + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in np.split(ordered, cuts)]


@given(
    listed=st.sets(st.integers(0, 300), max_size=60).map(sorted),
    group=st.sampled_from([1, 2, 3, 8, 64]),
    marked=st.sets(st.integers(0, 300), max_size=8),
)
def test_entries_name_each_block_once_and_mark_what_is_asked(listed, group, marked):
    ordered = np.array(listed, dtype=np.int64)
    asked = np.isin(ordered, list(marked))
    entries = entries_of(ordered, group, read_back=asked)
    named = [blocks_of(int(entry)) for entry in entries]
    assert np.concatenate([*named, np.empty(0, dtype=np.int64)]).tolist() == listed
    assert all(1 <= len(one) <= group for one in named)
    starts = [position_of(int(entry)) for entry in entries]
    assert not asked.any() or [ordered[at] for at in starts] == [int(one[0]) for one in named]
    assert [{block in marked for block in one.tolist()} for one in named] == [
        {bool(entry & READ_BACK)} for entry in entries.tolist()
    ]
    parts = [_runs_of(ordered[asked == mark]) for mark in (True, False) if (asked == mark).any()]
    assert len(entries) >= sum(-(-(last - first) // group) for runs in parts for first, last in runs)
