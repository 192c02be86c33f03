"""Dynamo's own radix tree and hash, in this process: the namespace that we send is the one that a router looks in."""

from __future__ import annotations

import json

from dynamo._core import RadixTree, compute_block_hash_for_seq

from kvcustody.integrations.events.block_event import BlockEvent
from kvcustody.integrations.events.dynamo_wire import DynamoRemoved, DynamoStored, DynamoWire
from kvcustody.integrations.events.names.told_blocks import ToldBlocks
from standins.engines.dynamo.router_world import (
    ACME,
    BLOCK,
    BLOCKS,
    GLOBEX,
    namespaces,
    prompt,
    some_removed,
    some_stored,
)

NAMES = namespaces()
WIRE = DynamoWire(tokens_published=True)
NAMED = ToldBlocks(NAMES)


def looked_up(tree: RadixTree, number: int, namespace: str | None) -> int:
    sequence = compute_block_hash_for_seq(prompt(number), BLOCK, cache_namespace=namespace)
    return max(tree.find_matches(sequence).scores.values(), default=0)


def apply(tree: RadixTree, number: int, event: BlockEvent, *, scoped: bool = True) -> None:
    """What Dynamo's relay makes of one of our events: hashes of the tokens, in the namespace that it names."""
    (named,) = NAMED.tell([event])
    form = WIRE.event_of(named, "inc")
    if isinstance(form, DynamoRemoved):
        data: dict[str, object] = {"removed": {"block_hashes": [_unsigned(one) for one in form.block_hashes]}}
    else:
        assert isinstance(form, DynamoStored)
        space = form.cache_salt if scoped else None
        local = compute_block_hash_for_seq(form.token_ids, form.block_size, cache_namespace=space)
        pairs = zip(form.block_hashes, local, strict=True)
        blocks = [{"block_hash": _unsigned(outer), "tokens_hash": inner} for outer, inner in pairs]
        data = {"stored": {"parent_hash": None, "blocks": blocks}}
    tree.apply_event(1, json.dumps({"event_id": number, "dp_rank": 0, "data": data}).encode())


def _unsigned(value: int) -> int:
    return value & (2**64 - 1)


def test_two_tenants_one_prompt() -> None:
    acme, globex = (NAMES.of(*scope.owner) for scope in (ACME, GLOBEX))  # type: ignore[misc]
    tree = RadixTree()
    apply(tree, 1, some_stored(1, ACME))
    assert [looked_up(tree, 1, each) for each in (acme, globex, None)] == [BLOCKS, 0, 0]
    apply(tree, 2, some_stored(1, GLOBEX))
    apply(tree, 3, some_removed(1, ACME))
    assert [looked_up(tree, 1, each) for each in (acme, globex, None)] == [0, BLOCKS, 0]
    unscoped = RadixTree()  # the control: the same events, the namespace dropped
    apply(unscoped, 1, some_stored(1, ACME), scoped=False)
    assert looked_up(unscoped, 1, None) == BLOCKS
