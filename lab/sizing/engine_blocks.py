"""How many blocks an engine with one page size makes of the same memory, by vLLM's rules for layers of several kinds.

    found = engine_blocks(layout, block_tokens=16, kv_bytes=60 << 30)
    found.blocks, found.bytes_per_block, found.tables

Our own pools give each group what it needs; vLLM has one pool of equal blocks, from which every group takes. Smaller
pages are padded or hold more tokens. Kinds with more layers have several block tables.

- The figures are vLLM's own (0.32): `tests/engines/vllm/adapter/test_sizing.py` compares them by architecture.
- With recurrent layers, the engine raises the tokens of a block until a state fits into a page, in steps of
  `KERNEL_TOKENS`. It then pads the state to the page. A block size that is already larger is kept.
"""

from __future__ import annotations

from typing import NamedTuple

from kvcustody.lab.sizing.attention_layers import Attention
from kvcustody.lab.sizing.hf_config import KvLayout, LayerGroup

KERNEL_TOKENS = 16


class EngineAllocation(NamedTuple):
    """The blocks of an engine's single pool. `tables`: each sequence's block tables, one per group of layers."""

    blocks: int
    block_tokens: int
    bytes_per_block: int
    tables: int
    layers_per_table: int


def engine_blocks(layout: KvLayout, *, block_tokens: int, kv_bytes: int) -> EngineAllocation:
    """Return vLLM's blocks for this layout."""
    block_tokens = _room_for_states(layout.groups, block_tokens)
    if _is_one_table(layout.groups):
        size = sum(group.bytes_per_block(block_tokens) for group in layout.groups)
        return EngineAllocation(kv_bytes // size, block_tokens, size, 1, layout.layers)
    pages = [group.bytes_per_block(block_tokens) // group.layers for group in layout.groups]
    page = max(pages)
    counts = [group.layers for group in layout.groups]
    fewest, most = min(counts), max(counts)
    together = most if most < fewest * 1.5 else fewest
    tables = sum(-(-count // together) for count in counts)
    size = page * together
    return EngineAllocation(kv_bytes // size, block_tokens, size, tables, together)


def _room_for_states(groups: tuple[LayerGroup, ...], block_tokens: int) -> int:
    """Return the block size at which the smallest page of tokens holds the largest state."""
    state = max(group.state_bytes for group in groups)
    tokens = [group.bytes_per_token // group.layers for group in groups if group.bytes_per_token]
    if not state or not tokens:
        return block_tokens
    needed = -(-state // (KERNEL_TOKENS * min(tokens))) * KERNEL_TOKENS
    return max(block_tokens, needed)


def _is_one_table(groups: tuple[LayerGroup, ...]) -> bool:
    """Return whether these layers share a table: layers that need the same tokens do, whatever they store for each."""
    kinds = {Attention.FULL if group.attention in _ALL_TOKENS else group.name for group in groups}
    return len(kinds) == 1


_ALL_TOKENS = (Attention.FULL, Attention.LATENT, Attention.INDEXER)
