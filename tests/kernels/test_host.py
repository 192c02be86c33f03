"""Host memory: exact bytes for any list, and a count of the written bytes."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from kvcustody.kernels import host
from kvcustody.kernels import scrub as zeroing
from kvcustody.kernels.scrub import scrub, scrub_reference, scrub_torch
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
@pytest.mark.parametrize("small_bytes", [0, 1 << 30])
@pytest.mark.parametrize("row_bytes", [7, 100, 512, 1 << 15])
def test_every_listed_byte_and_no_other(monkeypatch, name, run_bytes, small_bytes, row_bytes):
    """However a list is cut: rows for a small one, slices and indexed fills for a large one."""
    monkeypatch.setattr(zeroing, "RUN_BYTES_MIN", run_bytes)
    monkeypatch.setattr(zeroing, "SMALL_BYTES", small_bytes)
    monkeypatch.setattr(host, "ROW_BYTES_MAX", row_bytes)
    table, raw, wide = pool()
    assert scrub(table, LISTS[name]) == len(LISTS[name]) * table.bytes_per_block
    assert table.scrubbed() == len(LISTS[name])
    exactly(LISTS[name], raw, wide)


@pytest.mark.parametrize("small_bytes", [0, 1 << 30])
def test_the_count_is_of_what_was_written(monkeypatch, small_bytes):
    """A writer that forgot a segment may not claim it."""
    monkeypatch.setattr(zeroing, "SMALL_BYTES", small_bytes)
    table, _, _ = pool()
    forgotten = table.words[-1][0].nbytes
    del table.rows._rows[-1]
    table.words = table.words[:-1]
    scrub_reference(table, np.arange(96))
    assert int(table.counter) == 96 * (table.bytes_per_block - forgotten)


def test_a_failure_counts_nothing(monkeypatch):
    monkeypatch.setattr(zeroing, "SMALL_BYTES", 0)
    table, _, _ = pool()
    table.words = (*table.words[:-1], None)
    with pytest.raises(AttributeError):
        scrub_reference(table, np.arange(90))
    assert table.scrubbed() == 0  # nothing is counted that is not known to be zero


def test_a_device_without_triton_writes_the_same():
    table, raw, wide = pool()
    listed = np.array([0, 1, 2, 3, 4, 5, 6, 7, 8, 20, 44, 95])
    scrub_torch(table, listed)
    exactly(listed, raw, wide)


WITHOUT_TRITON = """
import importlib.util, pkgutil, sys
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "triton" else found(name, package)
sys.modules["triton"] = None
import torch
import kvcustody.kernels
for module in pkgutil.iter_modules(kvcustody.kernels.__path__):
    importlib.import_module(f"kvcustody.kernels.{module.name}")
from kvcustody.kernels.prepare import prepare
from kvcustody.kernels.scrub import scrub
from kvcustody.kernels.segment import SegmentTable
memory = torch.full((8, 512), 255, dtype=torch.uint8)
table = SegmentTable.from_tensors([memory], layout=["blocks"])
prepare(table)
scrub(table, [3])
print(int(memory[3].sum()), int(memory[2].sum()))
"""


@pytest.mark.system("a machine without Triton cannot import the kernels")
def test_without_triton_every_module_is_there_and_host_memory_is_scrubbed():
    """As `kvcustody[engine]` installs it; the tests' own environment has Triton."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0", str(512 * 255)]
