"""Longest-prefix look-up over the domains a reader may read: segment, own, grants by id.

    found = find_longest_prefix(tree, ReadPlan(own, segment, segment_blocks, grants), prompt, now_us)
    found.hit_blocks, found.leaf           # how much to attach, and where
    found.spans                            # what the request will write, domain by domain

- Only chains that the caller gives a primed state for are searched; every other domain's keys cannot be computed.
- The longest match wins, ties go to the own domain; what a reader adds after a match is keyed in its own chain,
  seeded with the matched block's key.
- Every match is re-checked at attach: domain, openness, ceiling, deadline. A shorter valid prefix is a shorter hit.

Sliding-window layer groups have blocks of their own, and need only the last window of them:

- For each window group, a node keeps the blocks at its run's end, at most one window of them. A window group can
  therefore be reused from the ends of published runs.
- A path is reusable at a run's end when, for every window group, the last window before it is present (L7).
- Blocks that have slid out of a running sequence's window end at once, as custody of their own.
"""

from __future__ import annotations

from typing import NamedTuple

from kvcustody.allocator.pool.accounting import Account, Domain
from kvcustody.allocator.prefix.key_chain import Extras, HashState, Match, keys_of, search
from kvcustody.allocator.prefix.node import KEY_BYTES, Node
from kvcustody.allocator.prefix.sequence import Span
from kvcustody.allocator.prefix.tree import PrefixTree

ENDLESS = 1 << 40


class Chain(NamedTuple):
    """A domain with its primed hash state. `state` None: the domain is written but never searched or published."""

    domain: Domain
    state: HashState | None


class ReadPlan(NamedTuple):
    """What one request may read and where it writes. `segment_blocks` whole blocks belong to the segment's chain."""

    own: Chain
    segment: Chain | None = None
    segment_blocks: int = 0
    grants: tuple[Chain, ...] = ()


class PrefixMatch:
    """The result of a look-up: the path to attach, and the spans that this request will write."""

    __slots__ = (
        "checked_blocks",
        "hit_blocks",
        "leaf",
        "pending_key",
        "position",
        "spans",
        "stale_blocks",
        "via",
    )

    def __init__(self, leaf: Node | None, position: int, hit_blocks: int, via: Domain | None) -> None:
        self.leaf = leaf
        self.position = position
        self.hit_blocks = hit_blocks
        self.checked_blocks = 0  # of them, compared with their checksums
        self.stale_blocks = 0  # found behind them, past their time
        self.via = via
        self.spans: list[Span] = []
        self.pending_key: bytes | None = None


class Prompt(NamedTuple):
    """A prompt as int32-LE bytes. `limit` blocks may be attached, `whole` of them are whole."""

    data: bytes
    tokens: int
    whole: int
    limit: int
    block_bytes: int
    extras: Extras


def find_longest_prefix(tree: PrefixTree, plan: ReadPlan, prompt: Prompt, now_us: int) -> PrefixMatch:
    """Look up the prompt under `plan`. Costs one digest for 16 matched blocks of a domain; changes nothing."""
    own, state = plan.own
    if state is None:
        found = PrefixMatch(None, 0, 0, None)
        found.spans.append(Span(own, 0, ENDLESS, 0, b"", None))
        return found
    if plan.segment is not None and plan.segment_blocks:
        return _find_from_segment(tree, plan, prompt, now_us)
    match = _match(tree, own, state.copy(), prompt, 0, now_us, state)
    best = _found(None, 0, match)
    for chain in plan.grants:
        best = _match_through_grant(tree, best, plan, chain, prompt, 0, b"", None, now_us)
    return best


def _found(before: Node | None, first: int, match: Match) -> PrefixMatch:
    """Return the own chain's match from block `first`, after a path that ends with `before`."""
    hit = first + match.blocks
    leaf = match.node if match.node is not None else before
    position = match.position if match.node is not None else (before.length if before is not None else 0)
    found = PrefixMatch(leaf, position, hit, match.domain if match.node is not None else None)
    found.spans.append(Span(match.domain, hit, ENDLESS, match.blocks, b"", match.state))
    found.pending_key = match.next_key
    found.stale_blocks = match.stale
    return found


def _match(
    tree: PrefixTree,
    domain: Domain,
    state: HashState,
    prompt: Prompt,
    first: int,
    now_us: int,
    fresh: HashState,
) -> Match:
    """Return the longest valid match of one chain. `fresh` is the chain's state at block `first`, for a shorter hit."""
    match = search(tree.index, domain, state, prompt.data, first, prompt.limit, prompt.block_bytes, prompt.extras)
    node = match.node
    if node is None or (tree.attachable(node, domain, now_us) and not node.windows):
        return match
    while node is not None and node.domain.realm == domain.realm:
        if tree.attachable(node, domain, now_us):
            position = reusable(node, match.position if node is match.node else node.length)
            if position:
                break
        node = node.parent
    else:
        node, position = None, 0
    blocks = node.start + position if node is not None else 0
    if blocks == match.blocks:
        return match
    state = fresh.copy()
    keys_of(state, prompt.data, first, first + blocks, prompt.block_bytes, prompt.extras)
    shorter = Match(domain, node, position, blocks, state, None)
    shorter.stale = match.blocks - blocks
    return shorter


def _find_from_segment(tree: PrefixTree, plan: ReadPlan, prompt: Prompt, now_us: int) -> PrefixMatch:
    assert plan.segment is not None and plan.own.state is not None
    domain, state = plan.segment
    assert state is not None
    blocks = min(plan.segment_blocks, prompt.whole)
    bounded = prompt._replace(limit=min(blocks, prompt.limit))
    match = _match(tree, domain, state.copy(), bounded, 0, now_us, state)
    keys = match.next_key or b""
    made = match.blocks + len(keys) // KEY_BYTES
    keys += keys_of(match.state, prompt.data, made, blocks, prompt.block_bytes, prompt.extras)
    if keys:
        path = PrefixMatch(match.node, match.position, match.blocks, domain if match.node is not None else None)
        path.stale_blocks = match.stale
        path.spans.append(Span(domain, match.blocks, blocks, match.blocks, keys, None))
        own_state = plan.own.state.copy()
        own_state.update(keys[-KEY_BYTES:])
        path.spans.append(Span(plan.own.domain, blocks, ENDLESS, 0, b"", own_state))
        return path
    assert match.node is not None
    seed = key_at(match.node, match.position)
    own_state = plan.own.state.copy()
    own_state.update(seed)
    own = _match(tree, plan.own.domain, own_state.copy(), prompt, blocks, now_us, own_state)
    best = _found(match.node, blocks, own)
    if own.node is None:
        best.position, best.via = match.position, domain
    for chain in plan.grants:
        best = _match_through_grant(tree, best, plan, chain, prompt, blocks, seed, match.node, now_us)
    return best


def _match_through_grant(
    tree: PrefixTree,
    best: PrefixMatch,
    plan: ReadPlan,
    chain: Chain,
    prompt: Prompt,
    first: int,
    seed: bytes,
    before: Node | None,
    now_us: int,
) -> PrefixMatch:
    """`best`, or the match through a grant with this request's own continuation, where that is longer."""
    owner = chain.domain.owner
    assert chain.state is not None and plan.own.state is not None
    if owner.used_blocks >= owner.limit_blocks:
        return best  # the owner is at its cap: granted attaches miss
    state = chain.state.copy()
    if seed:
        state.update(seed)
    fresh = state.copy()
    match = _match(tree, chain.domain, state, prompt, first, now_us, fresh)
    if match.node is None or (before is not None and match.node.parent is None):
        return best
    if first + match.blocks <= best.hit_blocks or not _may_lend(owner, match.node):
        return best
    own_state = plan.own.state.copy()
    own_state.update(key_at(match.node, match.position))
    at = first + match.blocks
    own = _match(tree, plan.own.domain, own_state.copy(), prompt, at, now_us, own_state)
    found = _found(match.node, at, own)
    if own.node is None:
        found.position = match.position
    found.via = chain.domain
    return found


def _may_lend(owner: Account, leaf: Node) -> bool:
    """Return whether the path may become ACTIVE on the owner's charge without eating into a guarantee."""
    revived = 0
    node: Node | None = leaf
    while node is not None and node.refs == 0:
        if node.domain.owner is owner:
            revived += node.block_count
        node = node.parent
    partition, over = owner.partition, owner.over_blocks()
    after = max(0, owner.active_blocks + revived - owner.guaranteed_blocks)
    return after == over or partition.over_blocks - over + after <= partition.common_blocks


def key_at(node: Node, position: int) -> bytes:
    """Return the key at the end of the first `position` blocks of `node`."""
    return node.keys[KEY_BYTES * (position - 1) : KEY_BYTES * position]


# -- sliding-window layer groups ---------------------------------------------------------------------------------------


def reusable(node: Node, position: int) -> int:
    """Return the maximum number of blocks of `node` that can be attached, at most `position`; 0 if none can.

    Without window groups every position is reusable. With them, `node.windows[g]` must reach back a full window from
    the run's end, or to the run's start where the ancestors carry on.
    """
    if not node.windows:
        return position
    return node.length if position == node.length and complete(node) else 0


def complete(node: Node) -> bool:
    """Return whether every window group is present for a full window before the end of `node`."""
    for group, needed in enumerate(node.domain.windows):
        missing = min(needed, node.depth + node.length)
        at: Node | None = node
        while at is not None and missing > 0:
            held = len(at.windows[group]) if at.windows else 0
            if held < min(missing, at.length):
                return False
            missing -= at.length
            at = at.parent
        if missing > 0:
            return False
    return True
