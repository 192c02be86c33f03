"""The location of a block's pieces: every layer's strided run of pieces, as one table of 64-bit addresses.

A *segment* is a base address and a block stride; block `b` owns `piece_bytes` bytes at `address + b *
stride`. A block is the union of its pieces over all segments, so one table describes a whole cache in any of
the usual layouts.

- Two blocks never share a byte: pieces do not overlap, within a segment or between segments.
- The table owns every byte of its tensors that belongs to a block; bytes between pieces (padding) are never
  written.
- Every tensor is on one device and holds the same number of blocks.
- The tensors stay alive as long as the table does, so an address in it never dangles.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvcustody.errors import ConfigError, DeviceError
from kvcustody.kernels.host import HostRows

WIDE_BYTES = 16  # one 128-bit store or load
TILE_BYTES_WORDS = 16384  # bytes that one kernel program handles in 4-byte words or wider
TILE_BYTES_NARROW = 2048  # the same, byte by byte: more would spill registers
PIECES_PER_TENSOR_MAX = 64  # more means that the tensor is not stored block by block at all

_WORDS = {16: torch.complex128, 8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_WHOLE_BYTE = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int8,
    torch.int16,
)
_FLOAT8 = tuple(
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
    if hasattr(torch, name)
)
DTYPES = (*_WHOLE_BYTE, *_FLOAT8, torch.int32, torch.int64)


BlockIndices = torch.Tensor | NDArray[np.int64] | NDArray[np.int32] | Sequence[int]
"""How a caller may list blocks: int32 or int64, one dimension."""


class Layout(StrEnum):
    """The dimension of a layer's tensor that counts the blocks."""

    BLOCKS = "blocks"  # [blocks, ...]: separate K and V, [blocks, 2, ...], MLA's single tensor
    KV_BLOCKS = "kv_blocks"  # [2, blocks, ...]
    TOKENS = "tokens"  # [blocks * block_tokens, heads, head_dim]: transformers' paged cache


@dataclass(frozen=True, slots=True)
class MemorySegment:
    """One strided run of block pieces; all values in bytes."""

    address: int
    block_stride_bytes: int
    piece_bytes: int
    tensor_index: int


@dataclass(frozen=True, slots=True)
class PointerTable:
    """The kernels' pointer table: one row per (segment, offset), on the device, int64."""

    address: torch.Tensor
    stride: torch.Tensor
    bytes: torch.Tensor
    offset: torch.Tensor  # [count + 1]: where the row's bytes stand in a block's pieces, one after the other
    count: int
    bytes_max: int  # power of two; the constexpr tile size


class SegmentTable:
    """A cache's tensors as blocks. Build it with `from_tensors`; pass it to `scrub`, `verify` and `copy`.

    `words` holds one [blocks, words of a piece] view per segment for the torch path. `counter` is the
    device's own count of bytes that scrubs stored; `scrubbed()` reads it as blocks. `tally` is that count, and the
    kernel's own count of programs that have ended; `variants` are the kernels compiled for this table.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], segments: Sequence[MemorySegment], blocks: int) -> None:
        self.tensors = tuple(tensors)
        self.segments = tuple(segments)
        self.blocks = blocks
        self.device = self.tensors[0].device
        self.piece_bytes = [segment.piece_bytes for segment in self.segments]
        self.bytes_per_block = sum(self.piece_bytes)
        self.alignment_bytes = alignment_of(self.segments)
        self.words = tuple(self._view(segment) for segment in self.segments)
        self.tiles = self._tile()
        self.tally = torch.zeros(2, dtype=torch.int64, device=self.device)
        self.counter = self.tally[:1]
        self.scratch = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.variants: dict[Hashable, Any] = {}

    @classmethod
    def from_tensors(
        cls,
        tensors: Sequence[torch.Tensor],
        *,
        layout: Layout | str | Sequence[Layout | str] = Layout.BLOCKS,
        block_tokens: int | None = None,
    ) -> SegmentTable:
        """Describe `tensors` (one or two per layer, any order) as blocks.

        layout: one for all tensors, or one per tensor. block_tokens: needed by `Layout.TOKENS`.
        Raises `ConfigError` where the tensors do not describe one cache, `DeviceError` where memory would be
        shared between blocks.
        """
        layouts = _layouts(layout, len(tensors))
        _check_tensors(tensors)
        segments: list[MemorySegment] = []
        counts: list[int] = []
        for index, (tensor, one) in enumerate(zip(tensors, layouts, strict=True)):
            by_block = _by_block(tensor, one, block_tokens, index)
            counts.append(by_block.shape[0])
            segments += _decompose(by_block, index)
        if len(set(counts)) != 1:
            raise ConfigError(f"tensors disagree on the number of blocks: `{sorted(set(counts))}`", counts=counts)
        merged = _merge(segments)
        _check_disjoint(merged, counts[0])
        return cls(tensors, merged, counts[0])

    def scrubbed(self) -> int:
        """Return the number of blocks that the device counted as fully written; waits for the current stream."""
        return int(self.counter.item()) // self.bytes_per_block

    @cached_property
    def rows(self) -> HostRows:
        """The rows of these tensors in host memory, which a small scrub writes."""
        return HostRows(self.words)

    @cached_property
    def host_pieces(self) -> tuple[torch.Tensor, ...]:
        """The segments of these tensors in host memory: uint8 [blocks, `piece_bytes` of the segment]."""
        return tuple(words.view(torch.uint8) for words in self.words)

    @cached_property
    def host_arrays(self) -> tuple[NDArray[np.uint8], ...]:
        """`host_pieces` as arrays over the same memory."""
        return tuple(pieces.numpy() for pieces in self.host_pieces)

    @cached_property
    def host_counter(self) -> NDArray[np.int64]:
        """`counter` of host memory, as an array over the same memory."""
        counter: NDArray[np.int64] = self.counter.numpy()
        return counter

    def _view(self, segment: MemorySegment) -> torch.Tensor:
        """[blocks, words of a piece] over the segment's storage; the widest word that divides everything."""
        unit = alignment_of((segment,))
        tensor = self.tensors[segment.tensor_index].detach()
        offset = segment.address - tensor.untyped_storage().data_ptr()
        if offset % unit:
            unit = 1
        empty = torch.empty(0, dtype=_WORDS[unit], device=self.device)
        shape = (self.blocks, segment.piece_bytes // unit)
        stride = (segment.block_stride_bytes // unit, 1)
        return empty.set_(tensor.untyped_storage(), offset // unit, shape, stride)

    def _tile(self) -> PointerTable:
        longest = max(segment.piece_bytes for segment in self.segments)
        step = min(tile_bytes_max(self.alignment_bytes), max(WIDE_BYTES, 1 << (longest - 1).bit_length()))
        rows = [
            (segment.address + offset, segment.block_stride_bytes, min(step, segment.piece_bytes - offset))
            for segment in self.segments
            for offset in range(0, segment.piece_bytes, step)
        ]
        columns = torch.tensor(rows, dtype=torch.int64, device=self.device).t().contiguous()
        offset = torch.zeros(len(rows) + 1, dtype=torch.int64, device=self.device)
        torch.cumsum(columns[2], 0, out=offset[1:])
        return PointerTable(columns[0], columns[1], columns[2], offset, len(rows), step)


def alignment_of(segments: Sequence[MemorySegment]) -> int:
    """Return the largest power of two, at most 16, that divides every address, stride and piece."""
    bits = WIDE_BYTES
    for segment in segments:
        bits |= segment.address | segment.block_stride_bytes | segment.piece_bytes
    return bits & -bits


def tile_bytes_max(alignment_bytes: int) -> int:
    """Return the largest tile of one kernel program at this alignment."""
    return TILE_BYTES_WORDS if alignment_bytes >= 4 else TILE_BYTES_NARROW


def block_list(table: SegmentTable, blocks: BlockIndices, *, name: str = "blocks") -> NDArray[np.int64]:
    """Return `blocks` as a checked int64 array on the host; raises `DeviceError` on a bad type, shape or index."""
    array = np.asarray(blocks.cpu() if isinstance(blocks, torch.Tensor) else blocks)
    if array.size == 0:
        return np.empty(0, dtype=np.int64)
    if array.ndim != 1 or array.dtype not in (np.int64, np.int32):
        raise DeviceError(
            f"{name} must be one-dimensional int32 or int64, got `{array.dtype}` of shape `{array.shape}`",
            dtype=str(array.dtype),
            shape=array.shape,
        )
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= table.blocks:
        bad = low if low < 0 else high
        raise DeviceError(f"block `{bad}` is outside 0..{table.blocks - 1}", block=bad, blocks=table.blocks)
    return array.astype(np.int64, copy=False)


def ascending(blocks: NDArray[np.int64], *, name: str = "blocks") -> NDArray[np.int64]:
    """Return `blocks` in ascending order; raises `DeviceError` if one is listed twice."""
    if len(blocks) < 2 or bool((blocks[1:] > blocks[:-1]).all()):
        return blocks
    ordered = np.sort(blocks)
    twice = np.flatnonzero(ordered[1:] == ordered[:-1])
    if len(twice):
        block = int(ordered[twice[0]])
        raise DeviceError(f"block `{block}` is listed twice in {name}", block=block)
    return ordered


def _layouts(layout: Layout | str | Sequence[Layout | str], count: int) -> list[Layout]:
    given = [layout] * count if isinstance(layout, str) else list(layout)
    if len(given) != count:
        raise ConfigError(f"`{len(given)}` layouts for `{count}` tensors", layouts=len(given), tensors=count)
    try:
        return [Layout(one) for one in given]
    except ValueError as error:
        names = ", ".join(Layout)
        raise ConfigError(f"unknown layout: {error}; use one of {names}", layout=str(layout)) from error


def _check_tensors(tensors: Sequence[torch.Tensor]) -> None:
    if not tensors:
        raise ConfigError("a cache needs at least one tensor")
    device = tensors[0].device
    for index, tensor in enumerate(tensors):
        if tensor.device != device or tensor.device.type == "meta":
            raise ConfigError(
                f"tensor `{index}` is on `{tensor.device}`, the others on `{device}`; build one table per device",
                index=index,
                device=str(tensor.device),
            )
        if tensor.layout != torch.strided or tensor.dtype not in DTYPES or tensor.is_quantized:
            raise ConfigError(
                f"tensor `{index}` has dtype `{tensor.dtype}` and storage `{tensor.layout}`; "
                "a cache holds dense floats or integers",
                index=index,
                dtype=str(tensor.dtype),
            )
        if tensor.numel() == 0:
            raise ConfigError(f"tensor `{index}` is empty", index=index)
        if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            raise DeviceError(f"tensor `{index}` is expanded: several indices share one byte", index=index)


def _by_block(tensor: torch.Tensor, layout: Layout, block_tokens: int | None, index: int) -> torch.Tensor:
    """Return a view of `tensor` whose first dimension counts blocks."""
    if layout is Layout.BLOCKS:
        return tensor
    if layout is Layout.KV_BLOCKS:
        if tensor.dim() < 2 or tensor.shape[0] != 2:
            raise ConfigError(f"tensor `{index}` of shape `{tuple(tensor.shape)}` is not [2, blocks, ...]", index=index)
        return tensor.transpose(0, 1)
    if block_tokens is None or block_tokens < 1:
        raise ConfigError("layout `tokens` needs `block_tokens` >= 1", block_tokens=block_tokens)
    if tensor.shape[0] % block_tokens:
        raise ConfigError(
            f"tensor `{index}` holds `{tensor.shape[0]}` tokens, not a multiple of block_tokens `{block_tokens}`",
            index=index,
            tokens=tensor.shape[0],
            block_tokens=block_tokens,
        )
    shape = (tensor.shape[0] // block_tokens, block_tokens, *tensor.shape[1:])
    return tensor.as_strided(shape, (tensor.stride(0) * block_tokens, *tensor.stride()))


def _decompose(by_block: torch.Tensor, index: int) -> list[MemorySegment]:
    """Split a block into contiguous pieces: dense inner dimensions form a piece, outer ones enumerate."""
    item = by_block.element_size()
    inner = sorted(
        (stride, size) for stride, size in zip(by_block.stride()[1:], by_block.shape[1:], strict=True) if size > 1
    )
    piece = 1
    while inner and inner[0][0] == piece:
        piece *= inner.pop(0)[1]
    count = math.prod(size for _, size in inner)
    if count > PIECES_PER_TENSOR_MAX:
        raise ConfigError(
            f"a block of tensor `{index}` lies in `{count}` separate pieces, "
            f"more than {PIECES_PER_TENSOR_MAX}; name the dimension that counts blocks with `layout`",
            index=index,
            pieces=count,
        )
    block_stride = by_block.stride(0) if by_block.shape[0] > 1 else piece
    steps = [range(0, stride * size, stride) for stride, size in inner]
    return [
        MemorySegment(by_block.data_ptr() + sum(offsets) * item, block_stride * item, piece * item, index)
        for offsets in product(*steps)
    ]


def _merge(segments: list[MemorySegment]) -> list[MemorySegment]:
    """Drop a segment named twice (layers that share a cache) and join pieces that touch."""
    unique = {(s.address, s.block_stride_bytes, s.piece_bytes): s for s in reversed(segments)}
    ordered = sorted(unique.values(), key=lambda s: (s.block_stride_bytes, s.tensor_index, s.address))
    merged: list[MemorySegment] = []
    for segment in ordered:
        last = merged[-1] if merged else None
        if (
            last
            and last.block_stride_bytes == segment.block_stride_bytes
            and last.tensor_index == segment.tensor_index
            and last.address + last.piece_bytes == segment.address
            and last.piece_bytes + segment.piece_bytes <= segment.block_stride_bytes
        ):
            joined = last.piece_bytes + segment.piece_bytes
            merged[-1] = MemorySegment(last.address, last.block_stride_bytes, joined, last.tensor_index)
        else:
            merged.append(segment)
    return sorted(merged, key=lambda s: s.address)


def _check_disjoint(segments: list[MemorySegment], blocks: int) -> None:
    """Raises `DeviceError` where a byte would belong to two blocks or to two pieces."""
    for segment in segments:
        if blocks > 1 and segment.block_stride_bytes < segment.piece_bytes:
            raise DeviceError(
                f"blocks of tensor `{segment.tensor_index}` overlap: "
                f"a piece of `{segment.piece_bytes}` bytes every `{segment.block_stride_bytes}`",
                tensor=segment.tensor_index,
            )
    ends: list[tuple[int, MemorySegment]] = []  # segments whose span may reach the next address
    for segment in segments:
        ends = [(end, other) for end, other in ends if end > segment.address]
        for _, other in ends:
            if not _interleaved(other, segment):
                raise DeviceError(
                    f"tensors `{other.tensor_index}` and `{segment.tensor_index}` overlap in memory",
                    tensors=(other.tensor_index, segment.tensor_index),
                )
        span = (blocks - 1) * segment.block_stride_bytes + segment.piece_bytes
        ends.append((segment.address + span, segment))


def _interleaved(first: MemorySegment, second: MemorySegment) -> bool:
    """Two segments whose spans meet share no byte: equal strides, and each piece in the other's gap."""
    stride = first.block_stride_bytes
    if stride != second.block_stride_bytes:
        return False
    gap = (second.address - first.address) % stride
    return gap >= first.piece_bytes and gap + second.piece_bytes <= stride
