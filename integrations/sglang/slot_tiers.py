"""Pages of a governed SGLang on their way to tiers and back: what is evicted leaves sealed, and may return.

It knows no class of SGLang. A page may be one slot, and a copy for each slot would cost more than it saves: a *unit* is
as many pages as hold `UNIT_TOKENS` tokens, and is to a tier what a block is elsewhere.

1. A run leaves before its pages come free, so before anything zeroes them: whole units, from where an object begins,
   with the pages before it on its path that the object has room for. What left so and is there still is not offered
   again page by page. Only what is evicted goes: a deadline, an erasure or a policy ends what it ends.
2. A unit's key is a running digest under its domain's key over every token before its end, and over what narrowed the
   request; so who does not have the domain names no copy. A path that goes through another domain neither leaves nor
   returns.
3. What returns is as old as its copy and ends with it. All that SGLang was told of returns, or the request computes:
   a tier that has failed one is not asked for it again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvcustody.allocator.external.pool import ExternalPool
from kvcustody.allocator.pool.accounting import Domain
from kvcustody.allocator.pool.block_state import ACTIVE, CACHED
from kvcustody.allocator.prefix.key_chain import HashState, keys_of
from kvcustody.allocator.prefix.node import Offered
from kvcustody.errors import KeyringError
from kvcustody.governance.decisions.access_plan import DomainLabel, label_of
from kvcustody.governance.external.engine_port import EnginePort
from kvcustody.governance.tiers.run_transfers import CopyReader, RunTransfers
from kvcustody.governance.tiers.tier import KEY_BYTES, PublishedRun, Restored
from kvcustody.integrations.sglang.page_tree import PageNode, Pages
from kvcustody.integrations.sglang.slot_request import PlannedLeg, PlannedRestore, SlotRequest

UNIT_TOKENS = 16
_NO_KEY = bytes(KEY_BYTES)
_TOKEN_BYTES = 4
_NARROWED = b"narrowed"  # with its digest no multiple of a token: no prompt begins like it


class PageBytes(Protocol):
    """The pool's pages, as somebody copies them."""

    bytes_per_page: int

    def read(self, pages: Pages, into: memoryview) -> None:
        """Copy `pages`, one after the other, into host memory that is exactly as long; waits."""

    def write(self, pages: Pages, data: memoryview) -> None:
        """Copy what `read` made into `pages`."""


class Returned(NamedTuple):
    """So many pages came back, and what they have lived and may live."""

    pages: int
    born_us: int
    ceiling_us: int


def unit_pages(page_tokens: int) -> int:
    """How many pages of so many tokens are a unit."""
    return -(-UNIT_TOKENS // page_tokens)


class SlotTiers:
    """The tiers of one scheduler. Called on its thread."""

    def __init__(
        self, transfers: RunTransfers, port: EnginePort, memory: PageBytes, page_tokens: int
    ) -> None:
        self.transfers = transfers
        self._port = port
        self._memory = memory
        self._page_tokens = page_tokens
        self._unit = unit_pages(page_tokens)
        self._unit_bytes = self._unit * memory.bytes_per_page
        port.erasures.tiers += transfers.tiers
        port.tier_counts, port.tier_figures = transfers.counts, transfers.figures
        port.tier_leaves, port.tiers_narrow = transfers.leaves, transfers.narrow
        port.tenant_left = transfers.forget_tenant

    def step(self) -> None:
        """Before the engine computes, and while it is idle: what is due ends, and is on its way to the ledger."""
        self.transfers.step(self._port.clock.now_us())
        leaves = self.transfers.leaves()
        if leaves:
            self._port.record_copies(leaves)

    def close(self) -> None:
        """End what does not outlive the process."""
        self.transfers.close()

    # -- out ----------------------------------------------------------------------------------------------------------

    def offer(self, node: PageNode, keep: int) -> None:
        """`node` is about to lose its pages from `keep` on (rule 1)."""
        pool, now_us = self._port.pool, self._port.clock.now_us()
        domain = pool.domains.get(int(pool.tag[node.pages[keep]]))
        if domain is None or not domain.may_be_copied:
            return
        label = label_of(domain)
        if label.is_monitored or label.grant_or_segment or not self.transfers.admits(label):
            return
        path = _path(node)
        if any(one.name != node.name for one in path):
            return  # it continues what is in another domain
        until = sum(len(one.pages) for one in path) // self._unit
        first = (sum(len(one.pages) for one in path[:-1]) + keep) // self._unit
        before = node.offered
        if isinstance(before, Offered) and self.transfers.tiers[before.taker].ended == before.ended:
            if first >= before.begin:
                return
            until = min(until, before.begin)
        begin = first - first % self.transfers.object_blocks
        if begin >= until:
            return
        pages = np.concatenate([one.pages for one in path])[begin * self._unit : until * self._unit]
        if not _stays(pool, pages, domain):
            return
        due_us = int(np.minimum(pool.hold_until_us[pages], pool.ceiling_us[pages]).min())
        if due_us <= now_us:
            return
        keys = self._keys(label, node.name, _packed([one.tokens for one in path]), max(begin - 1, 0), until)
        if keys is None:
            return
        parent, keys = (keys[:KEY_BYTES], keys[KEY_BYTES:]) if begin else (_NO_KEY, keys)
        times = (int(pool.born_us[pages].min()), int(pool.ceiling_us[pages].min()), due_us)
        unit, memory = self._unit, self._memory

        def read(at: int, count: int, into: memoryview) -> None:
            memory.read(pages[at * unit : (at + count) * unit], into)

        size = (until - begin) * self._unit_bytes
        taker = self.transfers.store(PublishedRun(label, keys, parent, begin, *times), size, read)
        if keep or taker >= 0:
            node.offered = Offered(begin, taker, self.transfers.tiers[taker].ended)

    # -- back ---------------------------------------------------------------------------------------------------------

    def plan(self, request: SlotRequest, tokens: Sequence[int], last: int) -> PlannedRestore | None:
        """What would come behind the request's hit, of its prompt's first `last` pages."""
        residency, path = request.residency, request.path
        hit, domain = len(path.blocks), residency.domain
        depth, most = hit // self._unit, last // self._unit
        if most <= depth or len(path.spans) != 1 or not any(map(len, self.transfers.tiers)):
            return None
        if not domain.may_be_copied or not self._port.may_publish(residency):
            return None
        label = label_of(domain)
        if label.is_monitored or not self.transfers.admits(label):
            return None
        keys = self._prompt_keys(request, label, tokens)
        if keys is None:
            return None
        reader, legs, at = CopyReader(label, residency.id, request.latency), list[PlannedLeg](), depth
        while at < most:
            tried = request.avoids | {legs[-1].way} if legs else request.avoids
            way, found = self.transfers.best(label, keys, at, most, tried)
            if way is None:
                break
            choice = self.transfers.choose_restore(way, reader, at, found)
            if not choice.moves:
                request.avoids = request.avoids | {way}
                continue
            legs.append(PlannedLeg(way, at, found, choice))
            at += sum(one.blocks for one in found)
        return PlannedRestore(reader, keys, hit, at * self._unit - hit, tuple(legs)) if legs else None

    def bring(self, request: SlotRequest, plan: PlannedRestore, pages: Pages) -> Returned:
        """Fill `pages`, which the request was handed and which are zero; how many of them are filled (rule 3)."""
        came = list[Restored]()
        for leg in plan.legs:
            written = self._bring(plan, leg, pages)
            came += written
            if sum(one.blocks for one in written) < sum(one.blocks for one in leg.found):
                request.avoids = request.avoids | {leg.way}
                break
        units = plan.legs[0].depth + sum(one.blocks for one in came)
        if not came or units * self._unit <= plan.hit:
            return Returned(0, 0, 0)
        born_us, ceiling_us = min(one.born_us for one in came), min(one.ceiling_us for one in came)
        return Returned(units * self._unit - plan.hit, born_us, ceiling_us)

    def _bring(self, plan: PlannedRestore, leg: PlannedLeg, pages: Pages) -> list[Restored]:
        unit, memory, hit = self._unit, self._memory, plan.hit

        def write(at: int, count: int, skip: int, data: memoryview) -> None:
            first, until = max(at * unit, hit), (at + count) * unit  # the first unit may be there in part
            begin = skip * self._unit_bytes + (first - at * unit) * memory.bytes_per_page
            end = begin + (until - first) * memory.bytes_per_page
            memory.write(pages[first - hit : until - hit], data[begin:end])

        return self.transfers.restore(
            leg.way, plan.reader, plan.keys, leg.depth, leg.found, leg.choice, write
        )

    # -- keys (rule 2) ------------------------------------------------------------------------------------------------

    def _prompt_keys(self, request: SlotRequest, label: DomainLabel, tokens: Sequence[int]) -> bytes | None:
        """Of the request's whole units, made once for as many tokens."""
        known = request.unit_keys
        name = request.path.spans[0].namespace
        if known is None or known[:2] != (name, len(tokens)):
            units = len(tokens) // (self._unit * self._page_tokens)
            name_here = f"{name}/{request.narrowed_by}" if request.narrowed_by else name
            keys = self._keys(label, name_here, _packed([tokens]), 0, units)
            known = request.unit_keys = (name, len(tokens), keys)
        return known[2]

    def _keys(self, label: DomainLabel, name: str, data: bytes, first: int, last: int) -> bytes | None:
        """The keys of units [first, last); None where `name` is no namespace of that domain, or its keys are gone."""
        if label.spec is None:
            return None
        try:
            state: HashState = self._port.keyring.domains.state(label.spec).copy()
        except KeyringError:
            return None
        namespace, _, narrowed_by = name.partition("/")
        if namespace != state.digest().hex():
            return None
        if narrowed_by:
            state.update(_NARROWED + hashlib.blake2b(narrowed_by.encode(), digest_size=33).digest())
        size = self._unit * self._page_tokens * _TOKEN_BYTES
        if first:
            state.update(data[: first * size])
        return keys_of(state, data, first, last, size)


def _path(node: PageNode) -> list[PageNode]:
    """From below the root to `node`."""
    found: list[PageNode] = []
    at: PageNode | None = node
    while at is not None and at.parent is not None:
        found.append(at)
        at = at.parent
    return found[::-1]


def _stays(pool: ExternalPool, pages: Pages, domain: Domain) -> bool:
    """Whether all of these are in the index of one domain, computed and not ended."""
    states = pool.state[pages]
    return bool(
        (pool.tag[pages] == domain.tag).all()
        and pool.indexed[pages].all()
        and ((states == CACHED) | (states == ACTIVE)).all()
    )


def _packed(runs: Sequence[Sequence[int]]) -> bytes:
    """Token ids as prompts are hashed: int32 LE."""
    parts: list[NDArray[np.int32]] = [np.asarray(run).astype("<i4") for run in runs]
    return b"".join(part.tobytes() for part in parts)
