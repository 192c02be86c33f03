"""Real memory: one or several shards of layer tensors, scrubbed, verified and copied by the kernels.

- After `scrub`, each listed block of that shard is zero in every byte, or is named in `failed`.
- Which blocks a sampled verification reads cannot be told from outside: the seed is the operating system's.
- A new pool's bytes are whatever was there before: nothing is assumed zero until it has been scrubbed.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvcustody.allocator.pool.memory_protocol import NO_BLOCKS, ScrubResult
from kvcustody.clock import Clock, SystemClock
from kvcustody.errors import ConfigError, DeviceError
from kvcustody.kernels.checksum import ChecksumKeys, checksum
from kvcustody.kernels.copy import copy, copy_in, copy_out
from kvcustody.kernels.host import SMALL_BYTES
from kvcustody.kernels.launch import to_device, uses_triton
from kvcustody.kernels.prepare import prepare
from kvcustody.kernels.scrub import scrub, scrub_host
from kvcustody.kernels.segment import Layout, SegmentTable, block_list
from kvcustody.kernels.tuning import Tuning, tune
from kvcustody.kernels.verify import verify

_BY_EVERY_DEVICE = 1  # cudaHostRegisterPortable


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The shape of a cache to allocate: `layers` tensors of [2, blocks, block_tokens, kv_heads, head_dim].

    With `latent`, one [blocks, block_tokens, head_dim] tensor a layer instead (MLA).
    """

    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int = 16
    dtype: torch.dtype = torch.bfloat16
    latent: bool = False

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers."""
        return self.layers * math.prod(self.shape(1)) * self.dtype.itemsize

    def shape(self, blocks: int) -> tuple[int, ...]:
        """Return the shape of one layer's tensor."""
        if self.latent:
            return (blocks, self.block_tokens, self.head_dim)
        return (2, blocks, self.block_tokens, self.kv_heads, self.head_dim)


class TensorMemory:
    """Blocks backed by tensors: build it with `allocate` (our own) or `wrap` (an engine's).

    `stuck` is for fault injection in tests: (shard, block) pairs that refuse to become zero.
    """

    def __init__(self, tables: Sequence[SegmentTable], *, clock: Clock | None = None) -> None:
        if not tables:
            raise ConfigError("a memory needs at least one shard")
        sizes = {(table.blocks, table.bytes_per_block) for table in tables}
        if len(sizes) != 1:
            raise ConfigError(f"shards disagree on (blocks, bytes per block): `{sorted(sizes)}`", sizes=sizes)
        self.tables = tuple(tables)
        self.shards = len(self.tables)
        self.blocks = tables[0].blocks
        self.bytes_per_block = tables[0].bytes_per_block
        self.stuck: set[tuple[int, int]] = set()
        self._clock = clock or SystemClock()
        self._sums: list[tuple[ChecksumKeys, torch.Tensor]] = []  # by shard, where its blocks are
        self._random = np.random.default_rng()  # seeded by the operating system

    @classmethod
    def allocate(
        cls,
        blocks: int,
        spec: TensorSpec,
        device: str | torch.device = "cpu",
        shards: int = 1,
        *,
        clock: Clock | None = None,
    ) -> TensorMemory:
        """Allocate every shard, uninitialised, on `device` (`cuda` alone means one device for each shard)."""
        if blocks < 1 or shards < 1:
            raise ConfigError(f"cannot allocate `{blocks}` blocks on `{shards}` shards", blocks=blocks, shards=shards)
        layout = Layout.BLOCKS if spec.latent else Layout.KV_BLOCKS
        tables = []
        for shard in range(shards):
            place = torch.device(f"cuda:{shard}") if str(device) == "cuda" and shards > 1 else torch.device(device)
            try:
                make = _on_host if place.type == "cpu" else partial(torch.empty, device=place)
                tensors = [make(spec.shape(blocks), dtype=spec.dtype) for _ in range(spec.layers)]
            except (RuntimeError, AssertionError, OSError, OverflowError) as error:
                size = blocks * spec.bytes_per_block
                raise DeviceError(
                    f"cannot allocate `{size}` bytes on `{place}`: {str(error).splitlines()[0]}",
                    bytes=size,
                    device=str(place),
                ) from error
            tables.append(SegmentTable.from_tensors(tensors, layout=layout))
        return cls(tables, clock=clock)

    @classmethod
    def wrap(
        cls,
        shards: Sequence[Sequence[torch.Tensor]],
        *,
        layout: Layout | str | Sequence[Layout | str] = Layout.BLOCKS,
        block_tokens: int | None = None,
        clock: Clock | None = None,
    ) -> TensorMemory:
        """Manage an engine's own tensors: for each shard, the tensors of all its layers."""
        tables = [SegmentTable.from_tensors(one, layout=layout, block_tokens=block_tokens) for one in shards]
        return cls(tables, clock=clock)

    def prepare(self, file: Path | None) -> list[Tuning]:
        """Prepare for use: measure how each device scrubs best, kept in `file`, and compile all kernels for serving.

        Returns what was chosen; nothing on the host, where there is one way. Takes seconds where nothing was kept, and
        zeroes some blocks.
        """
        found = [tune(table, file=file) for table in self.tables if table.device.type == "cuda"]
        for table in self.tables:
            prepare(table)
        return found

    def scrub(self, shard: int, blocks: NDArray[np.int64], verify_share: float) -> ScrubResult:
        """Zero `blocks` on `shard`, wait, read back the requested share, and name blocks that did not become zero.

        Raises `DeviceError` on an index outside the pool or listed twice, or where the device itself failed.
        """
        table = self.tables[shard]
        started = self._clock.now_us()
        level, verified, failed = "retired", 0, NO_BLOCKS
        with _device_faults("scrub", table.device):
            written = scrub(table, blocks)
            if table.device.type == "cuda":
                torch.cuda.current_stream(table.device).synchronize()  # an asynchronous fault surfaces here
            if self.stuck:
                self._poison(shard, blocks)
            if verify_share > 0:
                level = "full" if verify_share >= 1 else "sampled"
                verification = verify(table, blocks, verify_share, generator=self._random)
                verified, failed = len(verification.checked), verification.dirty
        method = "triton" if uses_triton(table) else "torch"
        ended = self._clock.now_us()
        return ScrubResult(method, str(table.device), written, started, ended, level, verified, failed)

    def scrub_each(self, shard: int, batches: Sequence[tuple[float, NDArray[np.int64]]]) -> list[ScrubResult]:
        """Scrub several (share to read back, blocks) at the cost of one; return a result for each."""
        table = self.tables[shard]
        blocks = np.concatenate([listed for _, listed in batches])
        is_on_host = table.device.type == "cpu" and not uses_triton(table)
        is_small = is_on_host and len(blocks) * table.bytes_per_block < SMALL_BYTES
        together = blocks if is_small else np.sort(blocks)
        is_twice = not is_small and bool((together[1:] == together[:-1]).any())  # one launch takes each once
        if self.stuck or is_twice or (len(batches) == 1 and not is_small):
            return [self.scrub(shard, listed, share) for share, listed in batches]
        started = self._clock.now_us()
        shares = [share for share, _ in batches]
        each = np.repeat(shares, [len(listed) for _, listed in batches]) if len(set(shares)) > 1 else shares[0]
        drawn = self._random.random(len(blocks)) < each  # in [0, 1): none of a share of 0, all of 1
        checked = blocks[drawn]
        if is_small:
            dirty = checked[scrub_host(table, together, checked)]
        else:
            with _device_faults("scrub", table.device):
                scrub(table, together)
                if table.device.type == "cuda":
                    torch.cuda.current_stream(table.device).synchronize()
                dirty = verify(table, checked).dirty
        method = "triton" if uses_triton(table) else "torch"
        device, ended, first = str(table.device), self._clock.now_us(), 0
        results: list[ScrubResult] = []
        for share, listed in batches:
            count = len(listed)
            read = int(np.count_nonzero(drawn[first : first + count]))
            first += count
            failed = np.intersect1d(dirty, listed) if len(dirty) else NO_BLOCKS
            level = ("full" if share >= 1 else "sampled") if share > 0 else "retired"
            written = count * table.bytes_per_block
            results.append(ScrubResult(method, device, written, started, ended, level, read, failed))
        return results

    def copy(self, source: NDArray[np.int64], target: NDArray[np.int64]) -> None:
        """Copy block `source[i]` to `target[i]` on every shard; raises `DeviceError` on bad lists or faults."""
        for table in self.tables:
            with _device_faults("copy", table.device):
                copy(table, source, target)

    def read(self, shard: int, blocks: NDArray[np.int64], into: memoryview) -> None:
        """Copy a shard's part of `blocks`, one after the other, into host memory of exactly that length; waits."""
        with _device_faults("read", self.tables[shard].device):
            copy_out(self.tables[shard], blocks, into)

    def write(self, shard: int, blocks: NDArray[np.int64], data: memoryview) -> None:
        """Copy data that `read` produced into a shard's part of `blocks`."""
        with _device_faults("write", self.tables[shard].device):
            copy_in(self.tables[shard], blocks, data)

    def pin(self, address: int, size: int) -> Callable[[], None]:
        """Make `size` bytes of host memory reachable by this memory's devices; call the result to undo it.

        Nothing to do where all of it is the host's. Raises `DeviceError` where the driver refuses.
        """
        on_device = next((table.device for table in self.tables if table.device.type == "cuda"), None)
        if on_device is None:
            return lambda: None
        with _device_faults("pin", on_device), torch.cuda.device(on_device):
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            code = runtime.cudaHostRegister(address, size, _BY_EVERY_DEVICE)
            if int(code):
                raise DeviceError(f"the driver does not pin `{size}` bytes of the host: {code}", bytes=size)

        def undo() -> None:
            runtime.cudaHostUnregister(address)

        return undo

    def keep_sums(self) -> None:
        """Allocate a checksum for every block of every shard, and compile the kernels now."""
        for table in self.tables[len(self._sums) :]:
            keys = ChecksumKeys(table)
            self._sums.append((keys, torch.zeros(table.blocks, dtype=torch.int64, device=keys.device)))
            checksum(table, keys, NO_BLOCKS if table.device.type == "cpu" else [0])

    def record_sums(self, blocks: NDArray[np.int64]) -> None:
        """Store the checksums of `blocks`, computed after the work of the current stream; does not wait."""
        for table, (keys, kept) in zip(self.tables, self._sums, strict=True):
            with _device_faults("checksum", table.device):
                kept.index_copy_(0, to_device(blocks, keys.device), checksum(table, keys, blocks))

    def differing(self, blocks: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return by block whether it differs from its recorded sum on any shard; reads each whole, and waits."""
        differs: NDArray[np.bool_] = np.zeros(len(blocks), dtype=np.bool_)
        for table, (keys, kept) in zip(self.tables, self._sums, strict=True):
            with _device_faults("checksum", table.device):
                expected = kept.index_select(0, to_device(blocks, keys.device))
                differs |= (checksum(table, keys, blocks) != expected).cpu().numpy()
        return differs

    def scrubbed(self, shard: int) -> int:
        """Return the number of blocks scrubbed on `shard`, as counted by its device; waits for the device."""
        return self.tables[shard].scrubbed()

    def nonzero_bytes(self, blocks: NDArray[np.int64]) -> int:
        """Return the number of nonzero bytes in `blocks` over all shards: the check at hand-out. Reads everything."""
        total = 0
        for table in self.tables:
            index = torch.tensor(block_list(table, blocks), device=table.device)
            for words in table.words:
                total += int(torch.count_nonzero(words.index_select(0, index).view(torch.uint8)))
        return total

    def fill(self, blocks: NDArray[np.int64], byte: int) -> None:
        """Write `byte` everywhere in `blocks` on all shards, as a tenant's data in tests and replays."""
        for table in self.tables:
            index = torch.tensor(block_list(table, blocks), device=table.device)
            for words in table.words:
                words.view(torch.uint8).index_fill_(0, index, byte)

    def _poison(self, shard: int, blocks: NDArray[np.int64]) -> None:
        words = self.tables[shard].words[-1]
        for block in set(np.asarray(blocks).tolist()):
            if (shard, block) in self.stuck:
                words.view(torch.uint8)[block, -1] = 1


def _on_host(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor in large pages if the system has them: blocks lie far apart, so each would miss the TLB."""
    size = math.prod(shape) * dtype.itemsize
    held = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        held.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(held, dtype=dtype).view(shape)


@contextmanager
def _device_faults(what: str, device: torch.device) -> Iterator[None]:
    """A fault of the device, wherever it surfaces, as `DeviceError`."""
    try:
        yield
    except RuntimeError as error:
        raise DeviceError(f"{what} failed on `{device}`: {str(error).splitlines()[0]}", device=str(device)) from error
