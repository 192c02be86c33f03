"""Look-up for an engine whose index is a tree of token ids, such as SGLang's: namespaces instead of block keys.

`EnginePort.look_up_tree` uses `look_up_tree` to decide which namespaces a request may walk, in which order, and how
far.

- A namespace's name is the digest of a domain's primed state. So nobody without the domain's key can name it, and two
  domains never share one. Inside it the engine compares token ids.
- A chain may continue in another domain. It is then in that domain's namespace, below the node where the previous part
  ended. So content below a granted or declared prefix is reached only through that prefix: the path does what a seeded
  key does elsewhere.
- The engine publishes along the same spans, and nowhere else.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvcustody.allocator.external.pool import ExternalPool
from kvcustody.allocator.external.residency import ExternalResidency
from kvcustody.allocator.pool.block_state import Blocks
from kvcustody.allocator.pool.memory_protocol import NO_BLOCKS
from kvcustody.allocator.prefix.longest_prefix import ENDLESS, Chain, Prompt, ReadPlan


class Walked(NamedTuple):
    """Where a walk ended, and the blocks on its way. `node` is the engine's own."""

    node: object
    blocks: Blocks


class NamespaceTree(Protocol):
    """The engine's index, as one request's prompt walks it."""

    def walk(self, node: object, namespace: str, first: int, last: int) -> Walked:
        """Go on from `node` (None: the root) with the prompt's blocks [first, last), as far as the namespace goes."""


class NamespaceSpan(NamedTuple):
    """Blocks [first, last) of a request's chain are in this namespace."""

    namespace: str
    first: int
    last: int


class TreePath(NamedTuple):
    """What a request may use of the engine's tree.

    spans: where its chain lies, block by block. blocks: the leading ones that it may read now. publishable: whether
    what it computes may enter the tree, along the spans.
    """

    spans: tuple[NamespaceSpan, ...]
    blocks: Blocks
    publishable: bool


NO_PATH = TreePath((), NO_BLOCKS, False)


def look_up_tree(
    residency: ExternalResidency,
    prompt: Prompt,
    read: ReadPlan,
    pool: ExternalPool,
    tree: NamespaceTree,
    now_us: int,
    *,
    single_group: bool,
) -> TreePath:
    """The request's path under `read`, and what its residency needs to know to attach and to be handed blocks."""
    residency.segment_blocks, residency.segment_domain, residency.granted_blocks = 0, None, 0
    own = read.own
    residency.expected = own.domain.tag
    if own.state is None:
        return NO_PATH
    if not single_group or not (read.segment is not None or read.grants):
        name = namespace_of(own)
        found = tree.walk(None, name, 0, prompt.limit).blocks
        return TreePath((NamespaceSpan(name, 0, ENDLESS),), found, True)
    return _several(residency, prompt, read, pool, tree, now_us)


def namespace_of(chain: Chain) -> str:
    """The name of a chain's domain in a tree."""
    assert chain.state is not None, "only domains that may be read have a namespace"
    return chain.state.digest().hex()


def _several(
    residency: ExternalResidency,
    prompt: Prompt,
    read: ReadPlan,
    pool: ExternalPool,
    tree: NamespaceTree,
    now_us: int,
) -> TreePath:
    """Segment, own, grants by id: the longest match wins, ties go to the own domain."""
    spans: list[NamespaceSpan] = []
    tags: list[int] = []
    start: object = None
    path_blocks = NO_BLOCKS
    first = 0
    own_name, own_tag = namespace_of(read.own), read.own.domain.tag
    segment = read.segment
    if segment is not None and segment.state is not None and read.segment_blocks:
        first = min(read.segment_blocks, prompt.whole)
        name = namespace_of(segment)
        start, path_blocks = tree.walk(None, name, 0, min(first, prompt.limit))
        spans.append(NamespaceSpan(name, 0, first))
        tags += [segment.domain.tag] * first
        residency.segment_blocks, residency.segment_domain = first, segment.domain
    if len(path_blocks) == first:  # what continues a segment is reached through all of it
        mine = tree.walk(start, own_name, first, prompt.limit).blocks
        best, through = _attachable(mine, own_tag, pool, now_us), None
        for grant in read.grants:
            owner = grant.domain.owner
            if grant.state is None or owner.used_blocks >= owner.limit_blocks:
                continue  # the owner is at its cap: granted attaches miss
            name = namespace_of(grant)
            theirs = tree.walk(start, name, first, prompt.limit).blocks
            matched = _attachable(theirs, grant.domain.tag, pool, now_us)
            if matched > best:
                best, through = matched, (name, grant.domain.tag, theirs[:matched])
        if through is not None:
            name, tag, mine = through
            spans.append(NamespaceSpan(name, first, first + best))
            tags += [tag] * best
            first += best
            residency.granted_blocks = first
            node = tree.walk(start, name, first - best, first).node
            mine = np.concatenate((mine, tree.walk(node, own_name, first, prompt.limit).blocks))
        path_blocks = np.concatenate((path_blocks, mine))
    spans.append(NamespaceSpan(own_name, first, ENDLESS))
    tags += [own_tag] * (prompt.whole - first)
    expected: NDArray[np.int32] = np.array(tags, dtype=np.int32)
    residency.expected = expected
    return TreePath(tuple(spans), path_blocks, True)


def _attachable(blocks: Blocks, tag: int, pool: ExternalPool, now_us: int) -> int:
    return pool.attachable(blocks, tag, now_us) if len(blocks) else 0
