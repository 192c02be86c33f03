"""What a table accepts and refuses."""

from __future__ import annotations

import gc

import pytest
import torch

from kvcustody.errors import ConfigError, DeviceError
from kvcustody.kernels.scrub import scrub
from kvcustody.kernels.segment import Layout, MemorySegment, SegmentTable, alignment_of

from_tensors = SegmentTable.from_tensors


def test_pieces_of_the_usual_layouts():
    table = from_tensors([torch.zeros(2, 10, 16, 8, 64, dtype=torch.bfloat16)], layout="kv_blocks")
    piece = 16 * 8 * 64 * 2
    assert [(s.block_stride_bytes, s.piece_bytes) for s in table.segments] == [(piece, piece)] * 2
    table = from_tensors([torch.zeros(10, 2, 16, 8, 64, dtype=torch.bfloat16)])
    assert [(s.block_stride_bytes, s.piece_bytes) for s in table.segments] == [(2 * piece, 2 * piece)]
    table = from_tensors([torch.zeros(160, 8, 64, dtype=torch.bfloat16)] * 1, layout=Layout.TOKENS, block_tokens=16)
    assert (table.blocks, table.bytes_per_block) == (10, piece)
    both = [torch.zeros(2, 10, 16), torch.zeros(10, 16)]
    assert from_tensors(both, layout=["kv_blocks", "blocks"]).bytes_per_block == 3 * 64


def test_layers_that_share_a_cache_are_scrubbed_once():
    tensor = torch.ones(4, 8)
    table = from_tensors([tensor, tensor])
    assert len(table.segments) == 1
    assert table.bytes_per_block == 32


def test_one_block_is_a_cache_too():
    tensor = torch.ones(2, 1, 3)
    scrub(from_tensors([tensor], layout="kv_blocks"), [0])
    assert not tensor.any()


@pytest.mark.parametrize(
    ("segment", "alignment"),
    [
        (MemorySegment(64, 32, 16, 0), 16),
        (MemorySegment(64, 24, 16, 0), 8),
        (MemorySegment(68, 32, 16, 0), 4),
        (MemorySegment(64, 32, 6, 0), 2),
        (MemorySegment(65, 32, 16, 0), 1),
    ],
)
def test_alignment_is_the_least_of_address_stride_and_piece(segment, alignment):
    assert alignment_of([segment]) == alignment
    assert alignment_of([MemorySegment(0, 4096, 4096, 0), segment]) == alignment


@pytest.mark.parametrize(
    ("tensors", "options", "message"),
    [
        ([], {}, "at least one tensor"),
        ([torch.zeros(4, 2), torch.zeros(5, 2)], {}, r"disagree on the number of blocks: `\[4, 5\]`"),
        ([torch.zeros(3, 4)], {"layout": "kv_blocks"}, r"is not \[2, blocks"),
        ([torch.zeros(30, 4)], {"layout": "tokens"}, "needs `block_tokens`"),
        ([torch.zeros(30, 4)], {"layout": "tokens", "block_tokens": 16}, "not a multiple"),
        ([torch.zeros(4, 4)], {"layout": "rows"}, "use one of blocks, kv_blocks, tokens"),
        ([torch.zeros(4, 4)], {"layout": ["blocks", "blocks"]}, "`2` layouts for `1` tensors"),
        ([torch.zeros(0, 4)], {}, "is empty"),
        ([torch.zeros(4, 4, dtype=torch.complex64)], {}, "complex64"),
        ([torch.zeros(4, 4).to_sparse()], {}, "sparse"),
        ([torch.zeros(4, 4, device="meta")], {}, "meta"),
        ([torch.zeros(4, 4), torch.zeros(4, 4, device="meta")], {}, "build one table per device"),
        ([torch.zeros(100, 7, 4).transpose(0, 2)], {}, "separate pieces"),
    ],
)
def test_what_is_not_one_cache_is_refused(tensors, options, message):
    with pytest.raises(ConfigError, match=message):
        from_tensors(tensors, **options)


def test_memory_shared_between_blocks_is_refused():
    raw = torch.zeros(100)
    with pytest.raises(DeviceError, match="blocks of tensor `0` overlap"):
        from_tensors([raw.as_strided((10, 8), (4, 1))])
    with pytest.raises(DeviceError, match="tensors `0` and `1` overlap"):
        from_tensors([raw[:40].view(10, 4), raw[2:42].view(10, 4)])
    with pytest.raises(DeviceError, match="overlap"):
        from_tensors([raw[:40].view(10, 4), raw[20:40].view(10, 2)])
    with pytest.raises(DeviceError, match="expanded"):
        from_tensors([torch.zeros(1, 4).expand(10, 4)])


def test_interleaved_caches_are_allowed():
    raw = torch.ones(10, 8)
    table = from_tensors([raw[:, 4:], raw[:, :3]])
    scrub(table, [2])
    assert raw[2].tolist() == [0, 0, 0, 1, 0, 0, 0, 0]
    assert raw.sum() == 9 * 8 + 1


def test_the_table_keeps_its_memory_alive():
    table = from_tensors([torch.ones(4, 1024)])
    gc.collect()
    scrub(table, [0, 1, 2, 3])
    assert not table.tensors[0].any()
