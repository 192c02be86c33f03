"""Blocks of two tenants' subjects under erase epochs, and an index of blocks as an llm-d style reader builds it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvcustody.governance.edge.erase_epochs import (
    EpochScope,
    EpochTags,
    EraseEpochs,
    KnownEpochs,
    RaisedEpoch,
)
from kvcustody.governance.edge.named_requester import NamedRequester
from kvcustody.integrations.events import vllm_wire
from kvcustody.integrations.events.block_event import BlockEvent, EventScope, removed, stored
from kvcustody.integrations.jetstream.publisher import StreamLimits, ToldStream
from standins.integrations.router_names import lasting_names

ISSUER = "idp"
ANN, BOB, EVE = (
    NamedRequester(ISSUER, "acme", "ann"),
    NamedRequester(ISSUER, "acme", "bob"),
    NamedRequester(ISSUER, "globex", "eve"),
)
TAGS = EpochTags(bytes(32))
ACME, GLOBEX = (TAGS.of(EpochScope(ISSUER, one)).hex() for one in ("acme", "globex"))
BLOCK = 4
NAMES = lasting_names(bytes(range(32)))


def scope(whose: NamedRequester) -> EventScope:
    return EventScope(whose.tenant, "subject", "internal", sum(map(ord, whose.subject or "")), 1, whose)


def key(whose: NamedRequester, number: int) -> bytes:
    return f"{whose.subject}-{number}".encode().ljust(32, b"\0")


def store(whose: NamedRequester, first: int, count: int = 1) -> BlockEvent:
    """Blocks of one chain of a subject, from its number `first` on."""
    keys = b"".join(key(whose, first + at) for at in range(count))
    tokens = [first * BLOCK + at for at in range(count * BLOCK)]
    parent = key(whose, first - 1) if first else b""
    return stored(scope(whose), keys, residency=1, parent=parent, block_tokens=BLOCK, tokens=tokens)


def remove(whose: NamedRequester, *numbers: int) -> BlockEvent:
    return removed(scope(whose), b"".join(key(whose, one) for one in numbers), cause="expired")


def epochs(*raised: EpochScope, shortest_ceiling_us: int | None = 600_000_000) -> KnownEpochs:
    """Each of these scopes was raised once, in this order."""
    numbers = [RaisedEpoch(number, TAGS.of(one)) for number, one in enumerate(raised, 1)]
    made = EraseEpochs(numbers, version=len(numbers))
    return KnownEpochs(made, TAGS, 0, shortest_ceiling_us=shortest_ceiling_us)


def told_stream(worker: str = "gpu-1", **more: Any) -> ToldStream:
    more.setdefault("limits", StreamLimits(part_blocks=3, beat_seconds=0.1))
    return ToldStream(worker, NAMES, _encode, **more)


def _encode(events: Sequence[BlockEvent], at: float) -> bytes:
    return vllm_wire.payload_of(events, at, 0, "inc", tokens_published=True)


class LlmdIndex:
    """Blocks by worker and tenant, read with names of fields alone: each hash with its parent, tokens and namespace.

    It knows vLLM's form and nothing of ours.
    """

    def __init__(self) -> None:
        self.blocks: dict[tuple[str, str], dict[bytes, tuple[bytes | None, tuple[int, ...], str | None]]] = {}
        self.forgotten = 0

    def apply(self, worker: str, tenant: str, payload: bytes) -> None:
        held = self.blocks.setdefault((worker, tenant), {})
        for event in vllm_wire.decode(payload).events:
            if isinstance(event, vllm_wire.VllmAllBlocksCleared):
                held.clear()
            elif isinstance(event, vllm_wire.VllmBlockRemoved):
                for one in event.block_hashes:
                    held.pop(one, None)  # type: ignore[arg-type]
            else:
                self._store(held, event)

    @staticmethod
    def _store(held: dict[Any, Any], event: vllm_wire.VllmBlockStored) -> None:
        parent, size = event.parent_block_hash, event.block_size
        name = event.extra_keys[0][0] if event.extra_keys and event.extra_keys[0] else None
        for at, one in enumerate(event.block_hashes):
            above = held[parent][2] if parent in held else None
            held[one] = (parent, tuple(event.token_ids[at * size : (at + 1) * size]), name or above)
            parent = one

    def forget(self, worker: str, tenant: str) -> None:
        self.forgotten += 1
        self.blocks.pop((worker, tenant), None)

    def matched(self, worker: str, tenant: str, namespace: str, prompt: Sequence[int]) -> int:
        """Tokens of a prompt that a worker has under a namespace, from its first block on."""
        held = self.blocks.get((worker, tenant), {})
        parent, covered = None, 0
        for first in range(0, len(prompt) - BLOCK + 1, BLOCK):
            wanted = (parent, tuple(prompt[first : first + BLOCK]), namespace)
            parent = next((one for one, has in held.items() if has == wanted), None)
            if parent is None:
                return covered
            covered += BLOCK
        return covered
