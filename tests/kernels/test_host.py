"""Host memory written piece by piece: exact bytes, however the list is cut, and no short write passes (H1, H2)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvcustody.errors import DeviceError
from kvcustody.kernels import host
from kvcustody.kernels.scrub import scrub
from kvcustody.kernels.segment import SegmentTable

pytestmark = pytest.mark.skipif(not host.available(), reason="no preadv of /dev/zero on this system")


def pool(blocks=96, layers=3):
    """Half the segments touch block to block, half lie apart; every byte is 0xFF."""
    raw = [torch.full((2, blocks, 512), 0xFF, dtype=torch.uint8) for _ in range(layers)]
    wide = [torch.full((blocks, 700), 0xFF, dtype=torch.uint8) for _ in range(layers)]
    tensors = [*raw, *(one[:, :640] for one in wide)]
    table = SegmentTable.from_tensors(tensors, layout=["kv_blocks"] * layers + ["blocks"] * layers)
    return table, raw, wide


def expected(blocks, listed):
    kept = np.ones(blocks, dtype=bool)
    kept[listed] = False
    return torch.from_numpy(kept)


@pytest.mark.parametrize("pieces_per_call", [1, 7, 1024])
@pytest.mark.parametrize("call_bytes", [100, 4096, 1 << 30])
def test_every_listed_byte_and_no_other(monkeypatch, pieces_per_call, call_bytes):
    monkeypatch.setattr(host, "PIECES_PER_CALL", pieces_per_call)
    monkeypatch.setattr(host, "BYTES_PER_CALL_MAX", call_bytes)
    monkeypatch.setattr(host, "BYTES_PER_THREAD_MIN", 1000)  # several threads share this small list
    table, raw, wide = pool()
    listed = np.random.default_rng(3).permutation(96)[:41]
    assert scrub(table, listed) == 41 * table.bytes_per_block
    kept = expected(96, listed)
    for tensor in raw:
        assert torch.equal((tensor == 0xFF).all(dim=2), kept.expand(2, -1))
        assert torch.equal((tensor == 0).all(dim=2), ~kept.expand(2, -1))
    for tensor in wide:
        assert torch.equal((tensor[:, :640] == 0).all(dim=1), ~kept)
        assert bool((tensor[:, 640:] == 0xFF).all()), "padding was written"


def test_adjacent_blocks_are_one_piece():
    table, _, _ = pool()
    pieces = table.pieces(np.array([3, 4, 5, 9]))
    dense = 6 * 2  # two runs in each of the six segments that touch
    apart = 3 * 4
    assert len(pieces) == dense + apart
    assert int(pieces[:, 1].sum()) == 4 * table.bytes_per_block


@pytest.mark.parametrize("wrote", [0, 100, -1])
def test_a_short_write_never_passes_for_a_scrub(monkeypatch, wrote):
    monkeypatch.setattr(host, "_preadv", lambda: lambda *_: wrote)
    table, _, _ = pool()
    with pytest.raises(DeviceError, match="of `9984` bytes"):
        scrub(table, np.array([5, 6]))
    assert table.scrubbed() == 0


def test_a_failure_in_another_thread_is_raised_here(monkeypatch):
    monkeypatch.setattr(host, "BYTES_PER_THREAD_MIN", 1000)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    good, bad = np.zeros((1, 2), dtype=np.int64), np.zeros((1, 2), dtype=np.int64)
    memory = np.full(4096, 0xFF, dtype=np.uint8)
    good[0] = memory.ctypes.data, 4096
    bad[0] = 8, 4096  # no page of ours is there: the kernel refuses, and says so
    with pytest.raises(DeviceError, match="wrote `0` of `4096` bytes: Bad address"):
        host.zero_pieces(np.concatenate([good, bad]))
    assert not memory.any()


def test_without_the_system_call_torch_writes_the_same(monkeypatch):
    monkeypatch.setattr(host, "available", lambda: False)
    table, raw, wide = pool()
    listed = np.array([0, 1, 2, 3, 4, 5, 6, 7, 8, 20, 44, 95])
    scrub(table, listed)
    kept = expected(96, listed)
    assert all(torch.equal((tensor == 0xFF).all(dim=2), kept.expand(2, -1)) for tensor in raw)
    assert all(torch.equal((tensor[:, :640] == 0).all(dim=1), ~kept) for tensor in wide)
