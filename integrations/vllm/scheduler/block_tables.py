"""A layer group's block tables: the managers in vLLM that the adapter can follow, and how their tables change.

1. A manager is refused at start unless its tables are known to change in one of three ways:
   - appended to;
   - appended to, with leading or inner blocks replaced by the null block;
   - changed in place, where whole tables are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvcustody.errors import ConfigError

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

_APPENDED = frozenset({"FullAttentionManager", "CrossAttentionManager"})
_WINDOWED = frozenset({"SlidingWindowManager", "ChunkedLocalAttentionManager"})
_IN_PLACE = frozenset({"MambaManager", "RSWAManager"})
_EMPTY: list[Any] = []


class KnownTable(list[int]):
    """A table as the port knows it; blocks before `floor` have left the window."""

    floor = 0


class GroupTable:
    """The block tables of one layer group.

    drops: entries may become null while a request runs. chains: a block is reachable only through the one before it.
    """

    def __init__(self, manager: Any, null: int, key_tokens: int, *, drops: bool, in_place: bool) -> None:
        self.block_tokens: int = manager.block_size
        self._keys_per_block = manager.block_size // key_tokens
        self.drops = drops
        self.chains = not drops
        self._in_place = in_place
        self.tables: dict[str, list[KVCacheBlock]] = manager.req_to_blocks  # the engine's own
        self._null = null

    def blocks(self, request_id: str) -> Sequence[KVCacheBlock]:
        """Return the engine's table of a request."""
        table: Sequence[KVCacheBlock] = self.tables.get(request_id, _EMPTY)
        return table

    def positions(self, places: list[int]) -> list[int] | None:
        """Return, by position, the key by which the block was found: its last one. None where the key is the
        position.
        """
        return None if self._keys_per_block == 1 and not self.drops else self.depths(places)

    def depths(self, places: list[int]) -> list[int]:
        """Return, by position, where the block ends in the prompt, in keys."""
        count = self._keys_per_block
        return [(place + 1) * count - 1 for place in places]

    def take_new(self, request_id: str, known: KnownTable) -> list[int]:
        """Return blocks that joined the table since `known`, and update `known`."""
        table = self.blocks(request_id)
        if not self._in_place:
            if len(table) == len(known):
                return _EMPTY
            added = [block.block_id for block in table[len(known) :]]
            known += added
            return [block for block in added if block != self._null] if self.drops else added
        before = set(known)
        known[:] = [block.block_id for block in table]
        return [block for block in known if block not in before and block != self._null]

    def take_gone(self, request_id: str, known: KnownTable) -> list[int]:
        """Return blocks that left the table since `known`, and update `known`."""
        table = self.blocks(request_id)
        null = self._null
        if self._in_place:
            now = {block.block_id for block in table}
            gone = [block for block in known if block != null and block not in now]
            known[:] = [block if block in now else null for block in known]
            return gone
        gone, at, end = [], known.floor, min(len(known), len(table))
        while at < end and table[at].is_null:
            if known[at] != null:
                gone.append(known[at])
                known[at] = null
            at += 1
        known.floor = at
        return gone


def group_tables(manager: KVCacheManager) -> list[GroupTable]:
    """Return one per layer group.

    Raises:
        ConfigError: a manager is unknown (rule 1).
    """
    null = manager.block_pool.null_block.block_id
    key_tokens = manager.block_pool.hash_block_size
    groups = []
    for single in manager.coordinator.single_type_managers:
        name = type(single).__name__
        if name not in _APPENDED | _WINDOWED | _IN_PLACE or not type(single).__module__.startswith("vllm."):
            raise ConfigError(
                f"layer group {single.kv_cache_group_id} is managed by `{name}`, whose block tables this kvcustody "
                "cannot follow; run this model without kvcustody",
                manager=name,
            )
        groups.append(GroupTable(single, null, key_tokens, drops=name not in _APPENDED, in_place=name in _IN_PLACE))
    return groups
