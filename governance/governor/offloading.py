"""Moves blocks between a Governor's pools and its tiers: evicted blocks go in sealed, missing ones come back.

    offload = Offloading(transfers, clock, block_tokens)
    offload.watch(manager)                         # what it evicts is offered to the tiers from now on
    restored = offload.restore(manager, sequence, limit)             # blocks that follow the hit, in the sequence's own

1. Only what a deadline has not ended goes: an eviction is the one end that makes nothing of a copy unlawful. It is due
   when the holds of its blocks would have lapsed, and what comes back of it lives no longer than they would have.
2. A restore fills blocks that the request was handed anyhow, and publishes them as if it had computed them. What does
   not come is computed; no request waits for a tier longer than the tier's own deadline.
3. A request that is preempted by swap leaves also its last block, which is not full, and comes back with it.
4. The first block that leaves takes those before it along that an object has room for, so that each is stored once,
   whole. What came from the first tier and is there still is not offered.

What is moved, and when that is worth it, is `tiers.run_transfers`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from typing import Protocol, cast

import numpy as np

from kvcustody.allocator.manager.block_manager import BlockManager
from kvcustody.allocator.pool.block_state import Blocks
from kvcustody.allocator.pool.memory_protocol import Memory
from kvcustody.allocator.prefix.longest_prefix import Prompt
from kvcustody.allocator.prefix.node import KEY_BYTES, Node, Offered
from kvcustody.allocator.prefix.sequence import RunningSequence, Span
from kvcustody.clock import Clock
from kvcustody.errors import ConfigError
from kvcustody.governance.decisions.access_plan import DomainLabel, label_of
from kvcustody.governance.tiers.copies.index import PublishedRun
from kvcustody.governance.tiers.run_transfers import CopyReader, RunTransfers, TierWay
from kvcustody.governance.tiers.tier import Found, Restored, SealedTier

_NO_KEY = bytes(KEY_BYTES)


class CopyableMemory(Memory, Protocol):
    """Memory whose blocks can be read and written from the host."""

    def read(self, shard: int, blocks: Blocks, into: memoryview) -> None:
        """Copy a shard's part of `blocks`, in order, into host memory; waits."""

    def write(self, shard: int, blocks: Blocks, data: memoryview) -> None:
        """Copy bytes from `read` into a shard's part of `blocks`."""

    def pin(self, address: int, size: int) -> Callable[[], None]:
        """Give the memory's devices access to `size` bytes of host memory; the returned function undoes it."""


class Offloading:
    """The tiers (`transfers`) of one Governor's pools. Called on the owning thread."""

    def __init__(self, transfers: RunTransfers, clock: Clock, block_tokens: int) -> None:
        self.transfers = transfers
        self._clock = clock
        self._block_tokens = block_tokens
        self._object_blocks = self.transfers.object_blocks

    @property
    def tiers(self) -> list[SealedTier]:
        """The tiers in the order of look-up."""
        return self.transfers.tiers

    def watch(self, manager: BlockManager) -> None:
        """Offer this manager's evicted blocks from now on. Raises `ConfigError` where its blocks cannot be copied."""
        memory = cast(CopyableMemory, manager.pool.memory)
        if manager.options.windows:
            raise ConfigError("tiers: a pool with sliding-window groups is not copied; set no `tiers` for it")
        if not (hasattr(memory, "read") and hasattr(memory, "write")):
            raise ConfigError(f"tiers: blocks of `{type(memory).__name__}` cannot be read; set no `tiers` for it")
        for tier in self.tiers:
            tier.staging.pin(memory.pin)
        manager.tree.demote = partial(self._demote, manager)

    # -- out ------------------------------------------------------------------------------------------------------

    def _demote(self, manager: BlockManager, node: Node, keep: int) -> None:
        """`node` is about to lose its blocks from `keep` on: those of the object that they begin in go with them."""
        begin, until = node.start + keep, node.length
        before = node.offered
        if before is not None and self.transfers.tiers[before.taker].ended == before.ended:
            if begin >= before.begin:
                return
            until = min(until, before.begin - node.start)
        domain, now_us = node.domain, self._clock.now_us()
        due_us = min(node.deadline_us, node.ceiling_us)
        if not (node.keys and domain.may_be_copied and due_us > now_us):
            return
        label = label_of(domain)
        if label.is_monitored:
            return  # a copy is kept under the policy's keys, or not at all
        stays, begin = keep > 0, max(node.start, begin - begin % self._object_blocks)
        keep = begin - node.start
        memory = cast(CopyableMemory, manager.pool.memory)
        blocks, keys = node.blocks[keep:until], node.keys[KEY_BYTES * keep : KEY_BYTES * until]
        times = (node.born_us, node.ceiling_us, due_us)
        run = PublishedRun(label, keys, _key_before(node, keep), begin, *times)

        def read(first: int, count: int, into: memoryview) -> None:
            _read(memory, blocks[first : first + count], into)

        size = len(blocks) * memory.bytes_per_block * memory.shards
        taker = self.transfers.store(run, size, read)
        if stays or taker >= 0:  # what nobody took is not offered again block by block
            node.offered = Offered(begin, taker, self.transfers.tiers[taker].ended)

    # -- back -----------------------------------------------------------------------------------------------------

    def restore(self, manager: BlockManager, sequence: RunningSequence, limit: int, latency: str = "") -> int:
        """Restore the blocks after the sequence's hit, up to `limit` blocks of its prompt; returns their number.

        `latency` is the request's class. The sequence has its blocks already; what came is published. Raises
        `DeviceError` where the device failed.
        """
        restored = 0
        while sequence.spans:
            span = sequence.spans[0]
            first = span.first
            until = min(limit, span.last, first + len(span.keys) // KEY_BYTES)
            if until <= first or not span.domain.may_be_copied:
                break
            came = self._restore_span(manager, sequence, span, until - first, latency)
            restored += came
            if not came or first + came < span.last:
                break
        sequence.restored_blocks = restored
        return restored

    def _restore_span(
        self,
        manager: BlockManager,
        sequence: RunningSequence,
        span: Span,
        wanted: int,
        latency: str,
    ) -> int:
        label, start = label_of(span.domain), span.start
        if not self.transfers.admits(label):
            return 0
        before = _chain_before(sequence, span)
        if len(before) != KEY_BYTES * start:
            return 0
        most = start + wanted
        keys = before + span.keys[: KEY_BYTES * (wanted + self._object_blocks)]  # the last may have more of the prompt
        restored, tried = 0, set[TierWay]()
        while restored < wanted:
            way, found = self.transfers.best(label, keys, start + restored, most, tried)
            if way is None:
                break
            came = self._load(way, manager, sequence, label, keys, start + restored, found, latency)
            tried = {way} if came else tried | {way}  # it has told all that goes on from there
            now_us = self._clock.now_us()  # the load took time
            for one in came:
                manager.publish_restored(sequence, span.first + one.blocks, one.born_us, one.ceiling_us, now_us)
                leaf = sequence.leaf
                if way is self.transfers.ways[0] and leaf is not None and leaf.start >= start + restored:
                    leaf.offered = Offered(leaf.start, 0, way.tier.ended)
                restored += one.blocks
            if span.start != start + restored:
                break  # a key is taken by a node that cannot be attached: what comes is this request's alone
        return restored

    def _load(
        self,
        way: TierWay,
        manager: BlockManager,
        sequence: RunningSequence,
        label: DomainLabel,
        keys: bytes,
        depth: int,
        copies: list[Found],
        latency: str,
    ) -> list[Restored]:
        reader = CopyReader(label, sequence.residency.id, latency)
        choice = self.transfers.choose_restore(way, reader, depth, copies)
        if not choice.moves:
            return []
        memory = cast(CopyableMemory, manager.pool.memory)
        span = sequence.spans[0]
        shift = span.first - span.start

        def write(at: int, count: int, skip: int, data: memoryview) -> None:
            _write(memory, sequence.table[at + shift : at + shift + count], skip, data)

        return self.transfers.restore(way, reader, keys, depth, copies, choice, write)

    # -- swap -----------------------------------------------------------------------------------------------------

    def keep_tail(self, manager: BlockManager, sequence: RunningSequence) -> bool:
        """Store the block that the sequence has begun but not filled: it is never published, and no prompt finds it."""
        size, slot = self._block_tokens, sequence.slot
        whole, tokens = divmod(int(manager.decode.computed[slot]), size)
        if not (tokens and len(sequence.spans) == 1 and sequence.published == whole):
            return False
        span, memory = sequence.spans[0], cast(CopyableMemory, manager.pool.memory)
        domain, now_us = span.domain, self._clock.now_us()
        if not (domain.may_be_copied and sequence.residency.may_hold):
            return False
        before = sequence.leaf
        if before is not None and before.domain is not domain:
            before = None
        parent = before.keys[-KEY_BYTES:] if before is not None else _NO_KEY
        ceiling_us = min(now_us + domain.absolute_us, sequence.ceiling_us)
        if before is not None:
            ceiling_us = min(ceiling_us, before.ceiling_us)
        born_us = before.born_us if before is not None else now_us
        key = _tail_key(parent, manager.decode.pending[slot, :tokens].tobytes())
        label, block = label_of(domain), sequence.table[whole : whole + 1]
        due_us = min(ceiling_us, now_us + domain.idle_us)
        run = PublishedRun(label, key, parent, span.start, born_us, ceiling_us, due_us)

        def read(first: int, count: int, into: memoryview) -> None:
            _read(memory, block, into)

        return self.transfers.store(run, memory.bytes_per_block * memory.shards, read) >= 0

    def keep_path(self, manager: BlockManager, leaf: Node | None) -> None:
        """Store the published blocks of a path without references; they also stay in the pool while there is room."""
        while leaf is not None:
            if leaf.refs == 0:
                self._demote(manager, leaf, 0)
            leaf = leaf.parent

    def restore_tail(self, manager: BlockManager, sequence: RunningSequence, prompt: Prompt, latency: str = "") -> int:
        """Restore the unfilled block of a preempted request, for all but its last token; returns the number of
        tokens.
        """
        size = self._block_tokens
        whole, tokens = divmod(prompt.tokens - 1, size)
        if not (tokens and len(sequence.spans) == 1 and sequence.published == whole):
            return 0
        span = sequence.spans[0]
        before = _chain_before(sequence, span)
        parent = before[-KEY_BYTES:] or _NO_KEY
        data = prompt.data[4 * size * whole : 4 * (size * whole + tokens)]
        keys = before + _tail_key(parent, data)
        label = label_of(span.domain)
        if len(keys) != KEY_BYTES * (span.start + 1):
            return 0
        way, found = self.transfers.best(label, keys, span.start, span.start + 1)
        came = [] if way is None else self._load(way, manager, sequence, label, keys, span.start, found, latency)
        if not came:
            return 0
        sequence.ceiling_us = min(sequence.ceiling_us, came[0].ceiling_us)
        manager.decode.computed[sequence.slot] = whole * size + tokens
        sequence.tail_tokens = tokens
        return tokens


def _key_before(node: Node, position: int) -> bytes:
    """The key before the block at `position` in the same chain; zeros where it begins the chain."""
    if position:
        return node.keys[KEY_BYTES * (position - 1) : KEY_BYTES * position]
    parent = node.parent
    return parent.keys[-KEY_BYTES:] if parent is not None and parent.domain is node.domain else _NO_KEY


def _tail_key(parent: bytes, tokens: bytes) -> bytes:
    """The key of a block that is not full, after the block with the key `parent`: the key of no whole block."""
    return hashlib.blake2b(parent + tokens, digest_size=KEY_BYTES, person=b"kvcustody tail").digest()


def _chain_before(sequence: RunningSequence, span: Span) -> bytes:
    """The keys of the span's chain before it, as the path has them."""
    parts: list[bytes] = []
    node = sequence.leaf
    while node is not None and node.domain is span.domain:
        parts.append(node.keys)
        node = node.parent
    return b"".join(reversed(parts))


def _read(memory: CopyableMemory, blocks: Blocks, into: memoryview) -> None:
    """Every shard's part, one shard after the other."""
    size = len(blocks) * memory.bytes_per_block
    for shard in range(memory.shards):
        memory.read(shard, blocks, into[shard * size : (shard + 1) * size])


def _write(memory: CopyableMemory, blocks: Blocks, skip: int, data: memoryview) -> None:
    """Of what `_read` made of more blocks, those behind the first `skip`."""
    whole, part = len(data) // memory.shards, len(blocks) * memory.bytes_per_block
    targets = np.ascontiguousarray(blocks)
    for shard in range(memory.shards):
        begin = shard * whole + skip * memory.bytes_per_block
        memory.write(shard, targets, data[begin : begin + part])
