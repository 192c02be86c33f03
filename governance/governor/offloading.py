"""From a Governor's pools to its tiers and back: what is evicted goes in sealed, what a prompt lacks comes back.

    offload = Offloading(tiers, cost, clock)
    offload.watch(manager)                         # what it evicts is offered to the tiers from now on
    restored = offload.restore(manager, sequence, limit, now_us)     # blocks that follow the hit, in the sequence's own

1. Only what a deadline has not ended goes: an eviction is the one end that makes nothing of a copy unlawful. It is due
   when the holds of its blocks would have lapsed, and what comes back of it lives no longer than they would have.
2. A restore fills blocks that the request was handed anyhow, and publishes them as if it had computed them. What does
   not come is computed; no request waits for a tier longer than the tier's own deadline.
3. Each movement, and each one that was decided against, is on record with what both ways were expected to take.
4. A tier that is slower than computing is left alone; between steps, now and then, one read says whether it still is.
5. A request that is preempted by swap leaves also its last block, which is not full, and comes back with it.
6. In one step of the engine no more than `step_bytes` leave the device: the rest of what is evicted is not kept.
7. The first block that leaves takes those before it along that an object has room for, so that each is stored once,
   whole. What a tier has already is not decided about; what came from the first and is there still is not offered.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter_ns
from typing import Protocol, cast

import numpy as np

from kvcustody.allocator.manager.block_manager import BlockManager
from kvcustody.allocator.pool.block_state import Blocks
from kvcustody.allocator.pool.memory_protocol import Memory
from kvcustody.allocator.prefix.longest_prefix import Prompt
from kvcustody.allocator.prefix.node import KEY_BYTES, Node, Offered
from kvcustody.allocator.prefix.sequence import RunningSequence, Span
from kvcustody.audit.coverage.conservation import TierCounts
from kvcustody.audit.events import Event, TransferDecided
from kvcustody.clock import Clock
from kvcustody.errors import ConfigError
from kvcustody.governance.decisions.access_plan import DomainLabel, label_of
from kvcustody.governance.observability.prefill_cost import RecomputeCost
from kvcustody.governance.tiers.copy_leaves import copy_leaves
from kvcustody.governance.tiers.tier import Found, PublishedRun, Restored, SealedTier
from kvcustody.governance.tiers.tier_link import (
    Moved,
    Outcome,
    TierLink,
    TransferChoice,
    decided,
    tier_figures,
)
from kvcustody.governance.tiers.transfer_rates import TierUse

STEP_BYTES_MAX = 256 << 20
_Read = Callable[[int, int, memoryview], None]
_NO_KEY = bytes(KEY_BYTES)


class CopyableMemory(Memory, Protocol):
    """Memory whose blocks can be read and written from the host."""

    def read(self, shard: int, blocks: Blocks, into: memoryview) -> None:
        """Copy a shard's part of `blocks`, one after the other, into host memory; waits."""

    def write(self, shard: int, blocks: Blocks, data: memoryview) -> None:
        """Copy what `read` made into a shard's part of `blocks`."""

    def pin(self, address: int, size: int) -> Callable[[], None]:
        """Let the memory's devices reach `size` bytes of the host's; what is returned undoes it."""


class _Way:
    """One tier with what its use has taken."""

    __slots__ = ("link", "tier")

    def __init__(self, tier: SealedTier, *, always: bool) -> None:
        self.tier = tier
        self.link = TierLink(always=always)


class Offloading:
    """The tiers of one Governor, in the order in which they are asked. Called on the owning thread."""

    def __init__(
        self,
        tiers: Sequence[SealedTier],
        cost: RecomputeCost,
        clock: Clock,
        block_tokens: int,
        *,
        step_bytes: int = STEP_BYTES_MAX,
        always: bool = False,
    ) -> None:
        """`always`: whatever is permitted is moved, whatever it takes."""
        self._ways = [_Way(tier, always=always) for tier in tiers]
        self._cost = cost
        self._clock = clock
        self._block_tokens = block_tokens
        self._step_bytes = self._left = step_bytes
        self._object_blocks = min((tier.object_blocks for tier in tiers), default=1)
        self._decisions: list[TransferDecided] = []

    @property
    def tiers(self) -> list[SealedTier]:
        """In the order in which they are asked."""
        return [way.tier for way in self._ways]

    def watch(self, manager: BlockManager) -> None:
        """What this manager evicts is offered from now on. Raises `ConfigError` where its blocks cannot be copied."""
        memory = cast(CopyableMemory, manager.pool.memory)
        if manager.options.windows:
            raise ConfigError("tiers: a pool with sliding-window groups is not copied; set no `tiers` for it")
        if not (hasattr(memory, "read") and hasattr(memory, "write")):
            raise ConfigError(
                f"tiers: blocks of `{type(memory).__name__}` cannot be read; set no `tiers` for it"
            )
        for tier in self.tiers:
            tier.staging.pin(memory.pin)
        manager.tree.demote = partial(self._demote, manager)

    # -- out ------------------------------------------------------------------------------------------------------

    def _demote(self, manager: BlockManager, node: Node, keep: int) -> None:
        """`node` is about to lose its blocks from `keep` on: those of the object that they begin in go with them."""
        begin, until = node.start + keep, node.length
        before = node.offered
        if before is not None and self._ways[before.taker].tier.ended == before.ended:
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

        taker = -1
        for number, way in enumerate(self._ways):
            if self._store(way, run, label, len(blocks), memory, read):
                taker = number
                break
        if stays or taker >= 0:  # what nobody took is not offered again block by block
            node.offered = Offered(begin, taker, self._ways[taker].tier.ended)

    def _store(
        self, way: _Way, run: PublishedRun, label: DomainLabel, blocks: int, memory: Memory, read: _Read
    ) -> bool:
        """Whether the tier has the run now. Of what is there already nothing is decided, and nothing moves."""
        if way.tier.has_run(label, run.keys, run.depth):
            return True
        if not way.tier.admits(label):
            return False
        size = blocks * memory.bytes_per_block * memory.shards
        recompute_us = self._recompute_us(blocks, run.depth)
        choice = way.link.choose_store(size, recompute_us, is_busy=size > self._left)
        record = self._recorder("store", way, label.tenant, 0, choice)
        if not choice.moves:
            record(blocks, size, "", 0)
            return False
        self._left -= size
        began_ns = perf_counter_ns()
        stored = way.tier.store(run, read)
        took_us = (perf_counter_ns() - began_ns) // 1000
        has = stored == blocks or way.tier.has(label, run.keys[-KEY_BYTES:])
        if stored:
            part = size * stored // blocks
            way.link.stored(part, stored, took_us)
            record(stored, part, "done", took_us)
        elif not has:  # no room, no buffer, or the store failed
            record(blocks, size, "failed", took_us)
        return has

    # -- back -----------------------------------------------------------------------------------------------------

    def restore(
        self, manager: BlockManager, sequence: RunningSequence, limit: int, now_us: int, latency: str = ""
    ) -> int:
        """Bring back what follows the sequence's hit, up to `limit` blocks of its prompt; how many came.

        `latency` is the request's class. The sequence has its blocks already; what came is published. Raises
        `DeviceError` where the device failed.
        """
        come = 0
        while sequence.spans:
            span = sequence.spans[0]
            first = span.first
            until = min(limit, span.last, first + len(span.keys) // KEY_BYTES)
            if until <= first or not span.domain.may_be_copied:
                break
            came = self._restore_span(manager, sequence, span, until - first, now_us, latency)
            come += came
            if not came or first + came < span.last:
                break
        sequence.restored_blocks = come
        return come

    def _restore_span(
        self,
        manager: BlockManager,
        sequence: RunningSequence,
        span: Span,
        wanted: int,
        now_us: int,
        latency: str,
    ) -> int:
        label, start = label_of(span.domain), span.start
        if not any(way.tier.admits(label) for way in self._ways):
            return 0
        before = _chain_before(sequence, span)
        if len(before) != KEY_BYTES * start:
            return 0
        most = start + wanted
        keys = (
            before + span.keys[: KEY_BYTES * (wanted + self._object_blocks)]
        )  # the last may have more of the prompt
        come, tried = 0, set[_Way]()
        while come < wanted:
            way, found = self._best(label, keys, start + come, most, tried)
            if way is None:
                break
            came = self._load(way, manager, sequence, label, keys, start + come, found, latency)
            tried = {way} if came else tried | {way}  # it has told all that goes on from there
            for one in came:
                manager.publish_restored(
                    sequence, span.first + one.blocks, one.born_us, one.ceiling_us, now_us
                )
                leaf = sequence.leaf
                if way is self._ways[0] and leaf is not None and leaf.start >= start + come:
                    leaf.offered = Offered(leaf.start, 0, way.tier.ended)
                come += one.blocks
            if span.start != start + come:
                break  # a key is taken by a node that cannot be attached: what comes is this request's alone
        return come

    def _best(
        self, label: DomainLabel, keys: bytes, depth: int, most: int, tried: set[_Way]
    ) -> tuple[_Way | None, list[Found]]:
        """Whoever brings most; of those alike, whoever is asked first."""
        best: tuple[_Way | None, list[Found]] = (None, [])
        farthest = 0
        for way in self._ways:
            found = way.tier.lookup(label, keys, depth, most) if way not in tried else []
            blocks = sum([one.blocks for one in found])
            if blocks > farthest:
                best, farthest = (way, found), blocks
        return best

    def _load(
        self,
        way: _Way,
        manager: BlockManager,
        sequence: RunningSequence,
        label: DomainLabel,
        keys: bytes,
        depth: int,
        found: list[Found],
        latency: str,
    ) -> list[Restored]:
        blocks, size = sum(one.blocks for one in found), sum(one.size for one in found)
        recompute_us = self._recompute_us(blocks, depth)
        choice = way.link.choose_restore(size, recompute_us, self._clock.now_us(), latency=latency)
        record = self._recorder("restore", way, label.tenant, sequence.residency.id, choice, latency)
        if not choice.moves:
            record(blocks, size, "", 0)
            return []
        memory = cast(CopyableMemory, manager.pool.memory)
        span = sequence.spans[0]
        shift = span.first - span.start

        def write(at: int, count: int, skip: int, data: memoryview) -> None:
            _write(memory, sequence.table[at + shift : at + shift + count], skip, data)

        began_ns = perf_counter_ns()
        came = way.tier.load(label, keys, depth, found, write)
        took_us = (perf_counter_ns() - began_ns) // 1000
        count = sum(one.blocks for one in came)
        way.link.restored(size, count, took_us, asked=blocks)
        if count == blocks:
            record(blocks, size, "done", took_us)
        else:
            record(blocks, size, "partial" if count else "failed", took_us, count)
        return came

    # -- swap -----------------------------------------------------------------------------------------------------

    def keep_tail(self, manager: BlockManager, sequence: RunningSequence) -> bool:
        """Keep the block that the sequence has begun and not filled: it is never published, and no prompt finds it."""
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

        return any(self._store(way, run, label, 1, memory, read) for way in self._ways)

    def keep_path(self, manager: BlockManager, leaf: Node | None) -> None:
        """Keep what was published of a path that nobody refers to now; it stays in the pool while there is room."""
        while leaf is not None:
            if leaf.refs == 0:
                self._demote(manager, leaf, 0)
            leaf = leaf.parent

    def restore_tail(
        self, manager: BlockManager, sequence: RunningSequence, prompt: Prompt, latency: str = ""
    ) -> int:
        """Bring back the block that a preempted request had begun, for all but its last token; how many tokens."""
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
        way, found = self._best(label, keys, span.start, span.start + 1, set())
        came = (
            [] if way is None else self._load(way, manager, sequence, label, keys, span.start, found, latency)
        )
        if not came:
            return 0
        sequence.ceiling_us = min(sequence.ceiling_us, came[0].ceiling_us)
        manager.decode.computed[sequence.slot] = whole * size + tokens
        sequence.tail_tokens = tokens
        return tokens

    # -- time -----------------------------------------------------------------------------------------------------

    def step(self, now_us: int) -> None:
        """Once an engine step: what is due ends, and a tier that is left alone is looked at."""
        self._left = self._step_bytes
        for way in self._ways:
            if way.tier.is_due(now_us):
                way.tier.expire()
        for way in self._ways:
            if way.link.watch.due(now_us):
                self._look(way)

    @staticmethod
    def _look(way: _Way) -> None:
        began_ns = perf_counter_ns()
        size = way.tier.probe()
        if size:
            way.link.restores.learn(size, (perf_counter_ns() - began_ns) // 1000)

    def narrow(self) -> None:
        """Policy or keys have changed: what may stay no longer ends."""
        for way in self._ways:
            way.tier.narrow()

    def forget_tenant(self, tenant: str) -> None:
        """A tenant that nobody listed has left: what it had in tiers ends."""
        for way in self._ways:
            way.tier.end_tenant(tenant)

    def leaves(self) -> list[Event]:
        """What began, ended and was decided since the last call, for the ledger."""
        found: list[Event] = []
        for way in self._ways:
            events = way.tier.take_events()
            if events:
                found += copy_leaves(way.tier.name, events, way.tier.within_us)
        if self._decisions:
            found += self.take_decisions()
        return found

    def take_decisions(self) -> list[TransferDecided]:
        """What was decided since the last call."""
        decisions, self._decisions = self._decisions, []
        return decisions

    def counts(self) -> tuple[TierCounts, ...]:
        """Each tier's own counters for conservation, when everything that happened was handed over."""
        return tuple(TierCounts(way.tier.name, *way.tier.counts[:-1]) for way in self._ways)

    def uses(self) -> list[TierUse]:
        """What each tier did."""
        return [way.link.use(way.tier.name) for way in self._ways]

    def figures(self) -> dict[str, float]:
        """Everything, by the keys of `metrics.MEASURES`."""
        found: dict[str, float] = {}
        for way in self._ways:
            tier = way.tier
            found |= tier_figures(way.link.use(tier.name), tier.counts, tier.capacity_bytes)
        return found

    def close(self) -> None:
        """End what does not outlive the process, and let the stores go."""
        for way in self._ways:
            way.tier.close()

    def _recompute_us(self, blocks: int, depth: int) -> float | None:
        """What computing these blocks again is expected to take; None where that is not known."""
        tokens = self._block_tokens
        return self._cost.seconds_of(blocks * tokens, depth * tokens) * 1e6 if self._cost.is_known else None

    def _recorder(
        self,
        action: str,
        way: _Way,
        tenant: str,
        residency: int,
        choice: TransferChoice,
        latency: str = "",
    ) -> Callable[..., None]:
        """Puts a decision on record: `record(blocks, size, outcome, actual_us)`."""

        def record(blocks: int, size: int, outcome: str, actual_us: int, part: int = 0) -> None:
            moved = Moved(way.tier.name, tenant, residency, blocks, size)
            cost = Outcome(outcome, actual_us, part)
            now_us = self._clock.now_us()
            self._decisions.append(decided(now_us, action, moved, choice, cost, latency))

        return record


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
