"""A worker's KV tensors as the bytes of each block, in every layout of vLLM, or a refusal.

vLLM hands over one view, or a list of them, for each layer. They may share one allocation: layers of different groups
overlay each other, packed layouts interleave layers, and attention kernels may split a block into smaller ones.

1. A block's bytes are the union of what the layers' views hold for its index. Nothing is listed twice or left out, and
   no byte belongs to two blocks. `kernels.segment` proves this from addresses and strides, or raises.
2. What cannot be read as blocks of one count is refused at start; nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from kvcustody.errors import ConfigError

CacheViews = Mapping[str, torch.Tensor | Sequence[torch.Tensor]]


class _Span(NamedTuple):
    """Bytes [start, end) of block 0 in one allocation, repeated every `stride` bytes."""

    storage: int
    stride: int
    start: int
    end: int


def block_tensors(caches: CacheViews, blocks: int) -> list[torch.Tensor]:
    """Return byte tensors of [blocks, bytes] that together are the cache.

    Raises:
        ConfigError: the layout is unknown (rule 2).
    """
    storages: dict[int, torch.UntypedStorage] = {}
    spans: set[_Span] = set()
    for layer, view in _views(caches):
        storage = view.untyped_storage()
        storages[storage.data_ptr()] = storage
        spans.update(_spans(layer, view, blocks))
    if not spans:
        raise ConfigError("the worker registered no KV cache tensor")
    return [_tensor(storages[span.storage], span, blocks) for span in _merged(spans)]


def _views(caches: CacheViews) -> Iterable[tuple[str, torch.Tensor]]:
    for layer, value in caches.items():
        for view in [value] if isinstance(value, torch.Tensor) else value:
            if not isinstance(view, torch.Tensor):
                raise ConfigError(f"layer `{layer}` registered a `{type(view).__name__}`, not a tensor", layer=layer)
            yield layer, view


def _spans(layer: str, view: torch.Tensor, blocks: int) -> Iterable[_Span]:
    """Return the dense runs of bytes of block 0 in one layer's view."""
    by_block = _by_block(layer, view, blocks)
    item = by_block.element_size()
    storage = by_block.untyped_storage().data_ptr()
    stride = by_block.stride(0) * item
    base = int(by_block.storage_offset()) * item
    inner = sorted(
        (step, size) for step, size in zip(by_block.stride()[1:], by_block.shape[1:], strict=True) if size > 1
    )
    run = 1
    while inner and inner[0][0] == run:
        run *= inner.pop(0)[1]
    starts = [0]
    for step, size in inner:
        if step < run:
            raise ConfigError(f"layer `{layer}`: dimensions of a block overlap in memory", layer=layer)
        starts = [start + step * at for start in starts for at in range(size)]
        if len(starts) > 4096:
            raise ConfigError(f"layer `{layer}`: a block lies in more than 4096 pieces", layer=layer)
    return [_Span(storage, stride, base + start * item, base + (start + run) * item) for start in starts]


def _by_block(layer: str, view: torch.Tensor, blocks: int) -> torch.Tensor:
    """Return `view` with the manager's blocks first; kernel blocks that split one become a dimension of it."""
    shape = tuple(view.shape)
    first = bool(shape) and shape[0] % blocks == 0 and shape[0] > 0
    second = len(shape) > 1 and shape[0] == 2 and shape[1] % blocks == 0
    if first and second:
        raise ConfigError(
            f"layer `{layer}`: shape `{shape}` may count its {blocks} blocks in either of two dimensions; "
            "use a pool of more than 2 blocks",
            layer=layer,
        )
    if not first and not second:
        raise ConfigError(f"layer `{layer}`: no dimension of `{shape}` counts `{blocks}` blocks", layer=layer)
    if second:
        view = view.transpose(0, 1)
    pieces = view.shape[0] // blocks
    return view if pieces == 1 else view.reshape(blocks, pieces, *view.shape[1:])


def _merged(spans: set[_Span]) -> list[_Span]:
    """Return spans of one stride that touch or overlap as one, because overlaid layers share bytes."""
    merged: list[_Span] = []
    for span in sorted(spans):
        last = merged[-1] if merged else None
        if last is not None and last[:2] == span[:2] and span.start <= last.end:
            merged[-1] = last._replace(end=max(last.end, span.end))
        else:
            merged.append(span)
    return merged


def _tensor(storage: torch.UntypedStorage, span: _Span, blocks: int) -> torch.Tensor:
    raw = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return torch.as_strided(raw, (blocks, span.end - span.start), (span.stride, 1), span.start)
