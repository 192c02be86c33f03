"""Mutants of the Governor's block manager under the native toy engine: the same faults in the other kind of adapter."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvcustody.allocator.pool.memory_protocol import NO_BLOCKS
from kvcustody.allocator.pool.pool import Pool
from kvcustody.allocator.pool.tensor_memory import TensorMemory
from kvcustody.allocator.prefix.node import Node
from kvcustody.allocator.prefix.tree import PrefixTree
from kvcustody.governance.governor import pool_books as erasure
from kvcustody.testkit.conformance.engines.native_engine import NativeEngine
from kvcustody.testkit.conformance.engines.toy_engine import ToyRequest
from kvcustody.testkit.conformance.mutants.governance import ANYWHERE, unscoped_keys
from kvcustody.testkit.conformance.mutants.runner import Mutant, patch, together, without
from kvcustody.testkit.conformance.mutants.toys import (
    TOY,
    partial_scrub,
    preempts_anybody,
    publishes_at_start,
    stalls_the_queue,
)
from kvcustody.testkit.conformance.policy import ABSOLUTE_US


def _attachable(*, domain: bool = True, deadline: bool = True, ceiling: bool = True) -> Any:
    """Skip one comparison when a block is checked again at attach."""

    def attachable(node: Node, wanted: Any, now_us: int) -> bool:
        return (
            (node.domain is wanted or not domain)
            and (now_us < node.ceiling_us or not ceiling)
            and (node.refs > 0 or now_us < node.deadline_us or not deadline)
        )

    return lambda original: staticmethod(attachable)


def _path(leaf: Node | None) -> list[Node]:
    nodes = []
    while leaf is not None:
        nodes.append(leaf)
        leaf = leaf.parent
    return nodes


def _sliding(original: Any) -> Any:
    def attach(self: PrefixTree, leaf: Node, now_us: int) -> Any:
        for node in _path(leaf):
            node.ceiling_us = now_us + ABSOLUTE_US
        return original(self, leaf, now_us)

    return attach


def _renews(original: Any) -> Any:
    def release(self: PrefixTree, leaf: Node, hold: Any, now_us: int, *rest: Any) -> Any:
        path = _path(leaf)
        answer = original(self, leaf, hold, now_us, *rest)
        for node in path:
            node.deadline_us = now_us + node.domain.idle_us
        return answer

    return release


def _fence_that_retires(original: Any) -> Any:
    def fence(self: NativeEngine) -> int:
        number = int(original(self))
        self.governor.retire(number)
        return number

    return fence


def _only_the_clock(original: Any) -> Any:
    def idle(self: NativeEngine, microseconds: int) -> None:
        self.clock.advance(microseconds)

    return idle


def _same_generation(original: Any) -> Any:
    def hand_out(self: Pool, *args: Any) -> Any:
        blocks = original(self, *args)
        self.generation[blocks] = np.arange(1, len(blocks) + 1)
        return blocks

    return hand_out


def _pushes_twice(original: Any) -> Any:
    def push(partition: Any, blocks: Any) -> None:
        original.__func__(partition, blocks)
        if partition.clean_count + len(blocks) <= partition.size and len(blocks) < partition.size // 4:
            original.__func__(partition, blocks)

    return staticmethod(push)


def _never_fails(original: Any) -> Any:
    def scrub(self: TensorMemory, *args: Any) -> Any:
        return original(self, *args)._replace(failed=NO_BLOCKS)

    return scrub


def _resumed_as_nobody(original: Any) -> Any:
    def restart(self: ToyRequest) -> None:
        self.principal = None
        original(self)

    return restart


MUTANTS: tuple[Mutant, ...] = (
    *ANYWHERE,
    *TOY,
    Mutant(
        "scope dropped at look-up",
        together(unscoped_keys, patch(PrefixTree, "attachable", _attachable(domain=False))),
    ),
    Mutant("scope dropped after preemption", patch(ToyRequest, "restart", _resumed_as_nobody)),
    Mutant("free while in flight", patch(NativeEngine, "fence", _fence_that_retires)),
    Mutant("double free in one list", patch(Pool, "push_clean", _pushes_twice)),
    Mutant("generation not bumped", patch(Pool, "hand_out", _same_generation)),
    Mutant("uncomputed block published", patch(NativeEngine, "start", publishes_at_start)),
    Mutant("scrub skips the tail", patch(TensorMemory, "scrub", partial_scrub(blocks=slice(0, -1)))),
    Mutant("failed block handed out", patch(TensorMemory, "scrub", _never_fails)),
    Mutant("late sweep serves the expired", patch(PrefixTree, "attachable", _attachable(deadline=False))),
    Mutant("TTL does not fire while idle", patch(NativeEngine, "idle", _only_the_clock)),
    Mutant("ceiling moved by attach", patch(PrefixTree, "attach", _sliding)),
    Mutant("running block past its ceiling attached", patch(PrefixTree, "attachable", _attachable(ceiling=False))),
    Mutant("hold renewed by foreign reader", patch(PrefixTree, "release", _renews)),
    Mutant("erase misses cached", patch(erasure._Covered, "__init__", without("holds", "domains", "inside"))),
    Mutant("erase misses running", patch(erasure._Covered, "__init__", without("sequences"))),
    Mutant("quota stalls others", patch(NativeEngine, "start", stalls_the_queue)),
    Mutant("quota preempts others", patch(NativeEngine, "start", preempts_anybody)),
)
_NO_TIER = "our block manager has no external tier yet"
_NO_EVENTS = "our block manager publishes no block events yet"
NOT_APPLICABLE: dict[str, str] = {
    "scope dropped at store": _NO_TIER,
    "scope dropped at prefetch": _NO_TIER,
    "async store of a re-used block": _NO_TIER,
    "tier outlives the deadline": _NO_TIER,
    "erase misses the tier": _NO_TIER,
    "scope dropped at event": _NO_EVENTS,
    "unscoped removal": _NO_EVENTS,
    "removal not told": _NO_EVENTS,
    "tokens in events": _NO_EVENTS,
    "scope dropped at fork": "the Governor forks: a child takes its parent's residency, not an identity",
    "release not idempotent": "the Governor forgets a request at its first release and keeps no second list",
    "order to forget ignored": "the index is the block manager's own; there is nobody to order",
    "scrub after hand-out": "clean-first: only blocks that are CLEAN are in the ring that is handed out",
}
