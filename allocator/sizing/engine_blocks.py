"""How many blocks an engine with one page size makes of the same memory: vLLM's way with layers of several kinds.

    found = engine_blocks(layout, block_tokens=16, kv_bytes=60 << 30)
    found.blocks, found.bytes_per_block, found.tables

Our own pools give each group what it needs; vLLM has one pool of equal blocks, from which every group takes. Pages that
are smaller are padded or hold more tokens, and kinds with more layers have several block tables.

- The figures are vLLM's own (0.32): `tests/engines/vllm/adapter/test_sizing.py` compares them by architecture.
- `block_tokens` is the engine's: beside recurrent layers it makes blocks so large that a state fits into a page.
"""

from __future__ import annotations

from typing import NamedTuple

from kvcustody.allocator.sizing.hf_config import Attention, KvLayout, LayerGroup
from kvcustody.errors import ConfigError


class EngineBlocks(NamedTuple):
    """Blocks of an engine's one pool. `tables`: block tables that each sequence has, one a group of layers."""

    blocks: int
    bytes_per_block: int
    tables: int
    layers_per_table: int


def engine_blocks(layout: KvLayout, *, block_tokens: int, kv_bytes: int) -> EngineBlocks:
    """vLLM's blocks for this layout. Raises `ConfigError` where its pages cannot be made equal."""
    if _is_one_table(layout.groups):
        size = sum(group.bytes_per_block(block_tokens) for group in layout.groups)
        return EngineBlocks(kv_bytes // size, size, 1, layout.layers)
    pages = [group.bytes_per_block(block_tokens) // group.layers for group in layout.groups]
    page = max(pages)
    for group, own in zip(layout.groups, pages, strict=True):
        if page % own and group.attention in (Attention.LATENT, Attention.INDEXER):
            raise ConfigError(
                f"a block of `{block_tokens}` tokens: a page of `{own}` bytes ({group.name}) does not divide the "
                f"largest, `{page}`, and a latent page cannot be padded; use the block size that the engine logs",
                block_tokens=block_tokens,
            )
    counts = [group.layers for group in layout.groups]
    fewest, most = min(counts), max(counts)
    together = most if most < fewest * 1.5 else fewest
    tables = sum(-(-count // together) for count in counts)
    size = page * together
    return EngineBlocks(kv_bytes // size, size, tables, together)


def _is_one_table(groups: tuple[LayerGroup, ...]) -> bool:
    """Layers that need the same tokens share a table, whatever they keep of each."""
    kinds = {Attention.FULL if group.attention in _ALL_TOKENS else group.name for group in groups}
    return len(kinds) == 1


_ALL_TOKENS = (Attention.FULL, Attention.LATENT, Attention.INDEXER)
