"""Host memory written row by row: exact bytes, however the list is cut, and a failed thread is heard (H1, H2)."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from kvcustody.kernels import host
from kvcustody.kernels.scrub import scrub, scrub_torch
from kvcustody.kernels.segment import SegmentTable


def pool(blocks=96, layers=3):
    """Half the segments touch block to block, half lie apart; every byte is 0xFF."""
    raw = [torch.full((2, blocks, 512), 0xFF, dtype=torch.uint8) for _ in range(layers)]
    wide = [torch.full((blocks, 700), 0xFF, dtype=torch.uint8) for _ in range(layers)]
    tensors = [*raw, *(one[:, :637] for one in wide)]
    table = SegmentTable.from_tensors(tensors, layout=["kv_blocks"] * layers + ["blocks"] * layers)
    return table, raw, wide


def exactly(listed, raw, wide):
    """The listed blocks are zero, everything else and all padding as it was."""
    kept = torch.ones(raw[0].shape[1], dtype=torch.bool)
    kept[torch.as_tensor(listed)] = False
    for tensor in raw:
        assert torch.equal((tensor == 0xFF).all(dim=2), kept.expand(2, -1))
        assert torch.equal((tensor == 0).all(dim=2), ~kept.expand(2, -1))
    for tensor in wide:
        assert torch.equal((tensor[:, :637] == 0).all(dim=1), ~kept)
        assert torch.equal((tensor[:, :637] == 0xFF).all(dim=1), kept)
        assert bool((tensor[:, 637:] == 0xFF).all()), "padding was written"


LISTS = {
    "scattered": np.random.default_rng(3).permutation(96)[:41],
    "one": np.array([95]),
    "all": np.arange(96),
    "runs and single blocks": np.array([*range(20), 22, 40, *range(44, 61), 95]),
}


@pytest.mark.parametrize("name", sorted(LISTS))
@pytest.mark.parametrize("run_bytes", [1, 4096, 1 << 20])
@pytest.mark.parametrize("row_bytes", [7, 100, 512, 1 << 15])
@pytest.mark.parametrize("threads", [1, 3])
def test_every_listed_byte_and_no_other(monkeypatch, name, run_bytes, row_bytes, threads):
    monkeypatch.setattr(host, "RUN_BYTES_MIN", run_bytes)
    monkeypatch.setattr(host, "ROW_BYTES_MAX", row_bytes)
    monkeypatch.setattr(host, "BYTES_PER_THREAD_MIN", 1000)  # several threads share this small list
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    table, raw, wide = pool()
    assert scrub(table, LISTS[name]) == len(LISTS[name]) * table.bytes_per_block
    assert table.scrubbed() == len(LISTS[name])
    exactly(LISTS[name], raw, wide)


def test_long_runs_are_one_memset_a_segment(monkeypatch):
    calls = []
    real = host.ctypes.memset
    monkeypatch.setattr(host.ctypes, "memset", lambda *call: calls.append(call) or real(*call))
    monkeypatch.setattr(host, "RUN_BYTES_MIN", 10 * 512)
    table, raw, wide = pool()
    listed = np.array([*range(4, 14), 20, 21])
    scrub(table, listed)
    assert sorted(calls) == sorted((half.data_ptr() + 4 * 512, 0, 5120) for one in raw for half in one)
    exactly(listed, raw, wide)


def test_the_count_is_of_what_was_written(monkeypatch):
    """A thread that wrote half its rows may not claim the rest (H2)."""
    table, _, _ = pool()
    del table.rows._rows[1:]  # the writer forgets two of three segments that lie apart
    scrub(table, np.arange(96))
    assert int(table.counter) == 96 * (6 * 512 + 637)


def test_a_failure_in_another_thread_is_raised_here_after_all_have_stopped(monkeypatch):
    monkeypatch.setattr(host, "BYTES_PER_THREAD_MIN", 1000)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    table, raw, wide = pool()
    real, here = host._assign, threading.get_ident()

    def failing(rows, blocks):
        if threading.get_ident() != here:
            raise MemoryError("no room")
        return real(rows, blocks)

    monkeypatch.setattr(host, "_assign", failing)
    with pytest.raises(MemoryError, match="no room"):
        scrub(table, np.arange(96))
    assert table.scrubbed() == 0  # nothing is counted that is not known to be zero
    exactly(np.arange(48), raw, wide)


def test_a_device_without_triton_writes_the_same():
    table, raw, wide = pool()
    listed = np.array([0, 1, 2, 3, 4, 5, 6, 7, 8, 20, 44, 95])
    scrub_torch(table, listed)
    exactly(listed, raw, wide)
