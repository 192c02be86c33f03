"""Mutants of the reference engine's own code: allocator, index, tier, events.

They show how an adapter writes its own: each replaces one method by what the historic bug made of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvcustody.integrations.events.block_event import BlockEvent, EventScope
from kvcustody.testkit.conformance.engines.reference_blocks import ReferenceBlocks
from kvcustody.testkit.conformance.engines.reference_engine import ReferenceControl, ReferenceEngine
from kvcustody.testkit.conformance.engines.reference_tier import ReferenceTier
from kvcustody.testkit.conformance.engines.toy_device import ToyDevice, ToyScrub
from kvcustody.testkit.conformance.engines.toy_engine import BLOCK_TOKENS, ToyEngine, ToyRequest
from kvcustody.testkit.conformance.mutants.governance import ANYWHERE, PORT
from kvcustody.testkit.conformance.mutants.runner import Mutant, constant, patch, together
from kvcustody.testkit.conformance.mutants.toys import (
    TOY,
    preempts_anybody,
    publishes_at_start,
    stalls_the_queue,
)


def _by_tokens(self: ReferenceEngine, request: ToyRequest, at: int, key: bytes) -> bytes:
    """Name blocks so that anyone can compute the name."""
    tokens = np.array(request.tokens[: (at + 1) * BLOCK_TOKENS], dtype="<i4")
    return hashlib.sha256(tokens.tobytes()).digest()


_store_blind = patch(ReferenceEngine, "store_name", lambda original: _by_tokens)
_load_blind = patch(ReferenceEngine, "load_name", lambda original: _by_tokens)
_NOBODY = EventScope("*", "request", "", 0, 0)


def _events(change: Any) -> Any:
    """Change every event on its way out of the engine."""

    def make(original: Any) -> Any:
        return lambda self: [change(event) for event in original(self)]

    return make


def _with_tokens(event: BlockEvent) -> BlockEvent:
    return event._replace(tokens=(7,) * event.block_tokens)


def _silent_forget(original: Any) -> Any:
    def evict(self: ReferenceControl, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._engine.blocks.forget(block)

    return evict


def _resumed_as_nobody(original: Any) -> Any:
    def arrive(self: ReferenceEngine, request: ToyRequest) -> None:
        if self.admitted.pop(request, None) is not None:
            request.principal = None
        original(self, request)

    return arrive


def _frees_twice(original: Any) -> Any:
    def release(self: ReferenceBlocks, block: int) -> None:
        original(self, block)
        if block in self.free and self.allocated % 3 == 0:
            self.free.append(block)

    return release


def _gives_back_again(original: Any) -> Any:
    """Give up a request's table at every end, even when it was given up before."""

    def give_back(self: ReferenceEngine, request: ToyRequest, cause: str) -> None:
        table = list(request.table) or self.__dict__.setdefault("tables", {}).get(request, [])
        self.__dict__.setdefault("tables", {})[request] = table
        request.table = []
        self.port.release(self.admitted[request].residency, cause)
        self.blocks.give_back(table)

    return give_back


def _ends_again(original: Any) -> Any:
    def end(self: ToyEngine, request: ToyRequest, state: str, cause: str) -> None:
        if request.is_over:
            self.give_back(request, cause)
        else:
            original(self, request, state, cause)

    return end


def _unpinned(original: Any) -> Any:
    """Pin nothing in transfers and steps, and open no fence."""

    def begin(self: ReferenceEngine, blocks: Sequence[int]) -> int:
        return 0

    return begin


def _ends_nothing(original: Any) -> Any:
    def end(self: ReferenceEngine, blocks: Sequence[int], fence: int) -> None:
        if fence:
            original(self, blocks, fence)

    return end


def _stores_unpinned(original: Any) -> Any:
    """Omit only the store's own pin; loads and steps are unchanged."""

    def store(self: ReferenceEngine, *args: Any) -> None:
        self.__dict__["begin_transfer"] = lambda blocks: 0
        try:
            original(self, *args)
        finally:
            del self.__dict__["begin_transfer"]

    return store


def _scrubs_last(original: Any) -> Any:
    def submit(self: ToyDevice, step: list[Any]) -> None:
        original(self, sorted(step, key=lambda work: isinstance(work, ToyScrub)))

    return submit


_pinless = together(
    patch(ReferenceEngine, "begin_transfer", _unpinned), patch(ReferenceEngine, "end_transfer", _ends_nothing)
)

MUTANTS: tuple[Mutant, ...] = (
    *ANYWHERE,
    *PORT,
    *TOY,
    Mutant("scope dropped at store", _store_blind),
    Mutant("scope dropped at prefetch", together(_store_blind, _load_blind)),
    Mutant(
        "scope dropped at event",
        patch(
            ReferenceEngine,
            "events",
            _events(lambda event: event._replace(scope=_NOBODY) if event.kind == "stored" else event),
        ),
    ),
    Mutant(
        "unscoped removal",
        patch(
            ReferenceEngine,
            "events",
            _events(lambda event: event._replace(scope=_NOBODY) if event.kind == "removed" else event),
        ),
    ),
    Mutant("removal not told", patch(ReferenceControl, "evict", _silent_forget)),
    Mutant(
        "tokens in events",
        patch(ReferenceEngine, "events", _events(_with_tokens)),
    ),
    Mutant("scope dropped at fork", constant(ReferenceEngine, "identity_of_fork", None)),
    Mutant("scope dropped after preemption", patch(ReferenceEngine, "arrive", _resumed_as_nobody)),
    Mutant("free while in flight", _pinless),
    Mutant(
        "async store of a re-used block",
        together(
            patch(ReferenceEngine, "store", _stores_unpinned),
            patch(ReferenceEngine, "end_transfer", _ends_nothing),
        ),
    ),
    Mutant("double free in one list", patch(ReferenceBlocks, "_release", _frees_twice)),
    Mutant(
        "release not idempotent",
        together(patch(ReferenceEngine, "give_back", _gives_back_again), patch(ToyEngine, "end", _ends_again)),
    ),
    Mutant("uncomputed block published", patch(ReferenceEngine, "start", publishes_at_start)),
    Mutant("order to forget ignored", constant(ReferenceControl, "evict", None)),
    Mutant("scrub after hand-out", patch(ToyDevice, "submit", _scrubs_last)),
    Mutant("failed block handed out", constant(ReferenceControl, "withhold", None)),
    Mutant("TTL does not fire while idle", constant(ReferenceEngine, "tick", None)),
    Mutant(
        "tier outlives the deadline",
        patch(
            ReferenceTier,
            "has",
            lambda original: lambda self, name, now_us: name in self.copies and self.copies[name].domain.is_open,
        ),
    ),
    Mutant(
        "erase misses the tier",
        patch(
            ReferenceTier,
            "has",
            lambda original: lambda self, name, now_us: name in self.copies and now_us < self.copies[name].until_us,
        ),
    ),
    Mutant("quota stalls others", patch(ReferenceEngine, "start", stalls_the_queue)),
    Mutant("quota preempts others", patch(ReferenceEngine, "start", preempts_anybody)),
)
