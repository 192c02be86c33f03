"""Moves pages of a governed SGLang to tiers and back: evicted pages leave sealed and may return.

It knows no class of SGLang. A page may be one slot, and a copy for each slot would cost more than it saves. So a *unit*
is as many pages as hold `UNIT_TOKENS` tokens. A tier treats a unit as it treats a block elsewhere.

1. A run leaves before its pages become free, and so before anything zeroes them. It leaves in whole units from where an
   object begins, with the pages before it on its path for which the object has room. Pages that left so, and whose copy
   still exists, are not offered again page by page. Only evicted pages go: a deadline, an erasure or a policy ends its
   pages for good.
2. A unit's key is a running digest under its domain's key. It covers every token before the unit's end, what narrowed
   the request, and the segment that its path begins with. So nobody without the domain can name a copy.
3. A segment at the beginning of a prompt has its own copies, in its own domain; the pages behind it begin a chain. Its
   last unit may have fewer pages than the others. Pages read through a grant neither leave nor return.
4. A page that returns has the age of its copy and ends with it. Either all pages that were promised to SGLang return,
   or the request computes. A tier that failed a request is not asked for it again.
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
from kvcustody.allocator.prefix.longest_prefix import ENDLESS
from kvcustody.allocator.prefix.node import Offered
from kvcustody.errors import NoKeyError
from kvcustody.governance.decisions.access_plan import DomainLabel, label_of
from kvcustody.governance.decisions.segment_matcher import covered_blocks
from kvcustody.governance.external.engine_port import EnginePort
from kvcustody.governance.tiers.copies.index import KEY_BYTES, PublishedRun
from kvcustody.governance.tiers.run_transfers import CopyReader, RunTransfers
from kvcustody.governance.tiers.tier import Found, Restored, in_time
from kvcustody.integrations.sglang.page_tree import PageNode, Pages
from kvcustody.integrations.sglang.slot_request import (
    ChainPlace,
    PlannedLeg,
    PlannedRestore,
    SlotRequest,
    UnitChain,
)

UNIT_TOKENS = 16
_NO_KEY = bytes(KEY_BYTES)
_TOKEN_BYTES = 4
_NARROWED = b"narrowed"  # with its digest no multiple of a token: no prompt begins like it
_BEHIND = b"behind"  # and with its digest neither


class PageBytes(Protocol):
    """The pool's pages, for copies."""

    bytes_per_page: int

    def read(self, pages: Pages, into: memoryview) -> None:
        """Copy `pages` in order into host memory of exactly their size, and wait."""

    def write(self, pages: Pages, data: memoryview) -> None:
        """Copy what `read` made into `pages`."""


class Returned(NamedTuple):
    """The pages that came back, with their birth and ceiling."""

    pages: int
    born_us: int
    ceiling_us: int


def unit_pages(page_tokens: int) -> int:
    """Return how many pages with that many tokens form a unit."""
    return -(-UNIT_TOKENS // page_tokens)


class SlotTiers:
    """The tiers of one scheduler. Called on its thread."""

    def __init__(self, transfers: RunTransfers, port: EnginePort, memory: PageBytes, page_tokens: int) -> None:
        self.transfers = transfers
        self._port = port
        self._memory = memory
        self._page_tokens = page_tokens
        self._unit = unit_pages(page_tokens)
        self._unit_bytes = self._unit * memory.bytes_per_page
        port.erasures.tiers += transfers.tiers
        port.tiers.copies = transfers

    def step(self) -> None:
        """End what is due and record it; called before the engine computes and while idle."""
        self.transfers.step(self._port.clock.now_us())
        leaves = self.transfers.leaves()
        if leaves:
            self._port.record_copies(leaves)

    def close(self) -> None:
        """End what does not outlive the process."""
        self.transfers.close()

    # -- out ----------------------------------------------------------------------------------------------------------

    def offer(self, node: PageNode, keep: int) -> None:
        """Take `node`, which is about to lose its pages from `keep` on (rule 1)."""
        pool, now_us = self._port.pool, self._port.clock.now_us()
        domain = pool.domains.get(int(pool.tag[node.pages[keep]]))
        if domain is None or not domain.may_be_copied:
            return
        label = label_of(domain)
        if label.is_monitored or not self.transfers.admits(label):
            return
        path = _path(node)
        place = self._place(label, path)
        if place is None:
            return
        own = [one for one in path if one.name == node.name]
        total = min(sum(len(one.pages) for one in own), place.until - place.first)
        until = self._units(place, place.first + total)
        first = (sum(len(one.pages) for one in own[:-1]) + keep) // self._unit
        before = node.offered
        if isinstance(before, Offered) and self.transfers.tiers[before.taker].ended == before.ended:
            if first >= before.begin:
                return
            until = min(until, before.begin)
        begin = first - first % self.transfers.object_blocks
        if begin >= until:
            return
        pages = np.concatenate([one.pages for one in own])[:total][begin * self._unit : until * self._unit]
        if not _stays(pool, pages, domain):
            return
        due_us = int(np.minimum(pool.hold_until_us[pages], pool.ceiling_us[pages]).min())
        if due_us <= now_us:
            return
        keys = self._keys(label, place, _packed([one.tokens for one in path]), max(begin - 1, 0), until)
        if keys is None:
            return
        parent, keys = (keys[:KEY_BYTES], keys[KEY_BYTES:]) if begin else (_NO_KEY, keys)
        times = (int(pool.born_us[pages].min()), int(pool.ceiling_us[pages].min()), due_us)
        unit, memory = self._unit, self._memory

        def read(at: int, count: int, into: memoryview) -> None:
            listed = pages[at * unit : (at + count) * unit]
            size = len(listed) * memory.bytes_per_page
            memory.read(listed, into[:size])
            into[size:] = bytes(len(into) - size)  # of a segment's last unit

        size = (until - begin) * self._unit_bytes
        taker = self.transfers.store(PublishedRun(label, keys, parent, begin, *times), size, read)
        if keep or taker >= 0:
            node.offered = Offered(begin, taker, self.transfers.tiers[taker].ended)

    def _place(self, label: DomainLabel, path: Sequence[PageNode]) -> ChainPlace | None:
        """Return the place of the chain of a path's last node; None where it does not leave (rule 3)."""
        name, pool = path[-1].name, self._port.pool
        before = [one for one in path if one.name != name]
        if label.grant_or_segment:
            rules = self._port.table.policy.segments
            tokens = next((one.tokens for one in rules if one.id == label.grant_or_segment), 0)
            until = covered_blocks(tokens, self._page_tokens)
            return ChainPlace(name, 0, until) if until and not before else None
        if not before:
            return ChainPlace(name, 0, ENDLESS)
        shared = pool.domains.get(int(pool.tag[before[-1].pages[-1]]))
        is_one = before == path[: len(before)] and all(one.name == before[0].name for one in before)
        if not is_one or shared is None or not shared.is_segment:
            return None
        return ChainPlace(name, sum(len(one.pages) for one in before), ENDLESS, before[0].name)

    def _units(self, place: ChainPlace, last: int) -> int:
        """Return how many units of a place a path's first `last` pages fill."""
        first, until, _ = place[1:]
        return (last - first) // self._unit if last < until else -(-(until - first) // self._unit)

    # -- back ---------------------------------------------------------------------------------------------------------

    def plan(self, request: SlotRequest, tokens: Sequence[int], last: int) -> PlannedRestore | None:
        """Return what tiers would load behind the request's hit, of its prompt's first `last` pages."""
        hit = len(request.path.blocks)
        if hit >= last or not any(map(len, self.transfers.tiers)):
            return None
        if not self._port.may_publish(request.residency):
            return None
        legs, at = list[PlannedLeg](), hit
        for domain, place in self._places(request):
            if at >= place.until:
                continue
            whole, depth = self._units(place, last), (at - place.first) // self._unit
            chain = self._chain(request, domain, place, tokens) if depth < whole else None
            if chain is None:
                break
            found = self._legs(request, chain, depth, whole)
            legs += found
            for leg in found:
                at = self._end(leg, leg.found)
            if at < place.until:
                break
        return PlannedRestore(hit, at - hit, tuple(legs)) if legs else None

    def _places(self, request: SlotRequest) -> list[tuple[Domain, ChainPlace]]:
        """Return the places of the prompt's leading segment, if any, and of its own; none where it passes through a
        grant.
        """
        residency, spans = request.residency, request.path.spans
        domains = [residency.domain]
        if residency.segment_domain is not None:
            domains.insert(0, residency.segment_domain)
        if len(domains) != len(spans):
            return []
        names = [request.name(span.namespace) for span in spans]
        behind = ["", *names[:-1]]
        places = [
            ChainPlace(name, span.first, span.last, before)
            for name, span, before in zip(names, spans, behind, strict=True)
        ]
        return list(zip(domains, places, strict=True))

    def _chain(
        self, request: SlotRequest, domain: Domain, place: ChainPlace, tokens: Sequence[int]
    ) -> UnitChain | None:
        """Return the units of a place, where the request may read them now."""
        label, residency = label_of(domain), request.residency
        if not self._port.may_restore(residency, domain):
            return None
        if label.is_monitored or not self.transfers.admits(label):
            return None
        which = place, len(tokens)
        if which not in request.unit_keys:
            end = min(place.until, len(tokens) // self._page_tokens)
            request.unit_keys[which] = self._keys(label, place, _packed([tokens]), 0, self._units(place, end))
        keys = request.unit_keys[which]
        return None if keys is None else UnitChain(CopyReader(label, residency.id, request.latency), keys, place)

    def _legs(self, request: SlotRequest, chain: UnitChain, depth: int, whole: int) -> list[PlannedLeg]:
        """Return what tiers have of a chain's units [depth, whole), in order."""
        legs, tried, reader = list[PlannedLeg](), request.avoids, chain.reader
        while depth < whole:
            way, copies = self.transfers.best(reader.label, chain.keys, depth, whole, tried)
            if way is None:
                break
            choice = self.transfers.choose_restore(way, reader, depth, copies)
            if choice.moves:
                legs.append(PlannedLeg(chain, way, depth, copies, choice))
                depth += sum(one.blocks for one in copies)
                tried = request.avoids | {way}  # it has told all that goes on from there
            else:
                request.avoids = request.avoids | {way}
                tried = tried | {way}
        return legs

    def _end(self, leg: PlannedLeg, blocks: Sequence[Found | Restored]) -> int:
        """Return the page at the end of that much of a leg."""
        place = leg.chain.place
        units = leg.depth + sum(one.blocks for one in blocks)
        return min(place.first + units * self._unit, place.until)

    def bring(self, request: SlotRequest, plan: PlannedRestore, pages: Pages) -> Returned:
        """Fill `pages`, which the request was given and which are zero; return how many are filled (rule 4)."""
        came, at = list[Restored](), plan.hit
        for leg in plan.legs:
            written = self._bring(plan, leg, pages)
            came += written
            at = max(at, self._end(leg, written))
            if sum(one.blocks for one in written) < sum(one.blocks for one in leg.found):
                request.avoids = request.avoids | {leg.way}
                break
        if at == plan.hit or in_time(came, self._port.clock.now_us()) != came:
            return Returned(0, 0, 0)  # nothing came, or what came first is due since
        born_us, ceiling_us = min(one.born_us for one in came), min(one.ceiling_us for one in came)
        return Returned(at - plan.hit, born_us, ceiling_us)

    def _bring(self, plan: PlannedRestore, leg: PlannedLeg, pages: Pages) -> list[Restored]:
        unit, memory, hit, chain = self._unit, self._memory, plan.hit, leg.chain
        place = chain.place

        def write(at: int, count: int, skip: int, data: memoryview) -> None:
            begin = place.first + at * unit
            first, until = max(begin, hit), min(begin + count * unit, place.until)
            skipped = skip * self._unit_bytes + (first - begin) * memory.bytes_per_page
            size = (until - first) * memory.bytes_per_page  # the first unit may be there in part
            memory.write(pages[first - hit : until - hit], data[skipped : skipped + size])

        return self.transfers.restore(leg.way, chain.reader, chain.keys, leg.depth, leg.found, leg.choice, write)

    # -- keys (rule 2) ------------------------------------------------------------------------------------------------

    def _keys(self, label: DomainLabel, place: ChainPlace, data: bytes, first: int, last: int) -> bytes | None:
        """Return the keys of units [first, last) of a place, in a path of these tokens.

        None where its name is no namespace of that domain, or its keys are gone.
        """
        if label.spec is None:
            return None
        try:
            state: HashState = self._port.keyring.domains.state(label.spec).copy()
        except NoKeyError:
            return None
        namespace, _, narrowed_by = place.name.partition("/")
        if namespace != state.digest().hex():
            return None
        if narrowed_by:
            state.update(_NARROWED + hashlib.blake2b(narrowed_by.encode(), digest_size=33).digest())
        if place.behind:
            behind = f"{place.first}:{place.behind}".encode()
            state.update(_BEHIND + hashlib.blake2b(behind, digest_size=33).digest())
        page = self._page_tokens * _TOKEN_BYTES
        size = self._unit * page
        start, chain = place.first * page, data[place.first * page : place.until * page]
        if start or first:
            state.update(data[: start + first * size])
        whole = min(last, len(chain) // size)
        keys = keys_of(state, chain, first, whole, size)
        if whole < last:  # a segment's last unit
            state.update(chain[whole * size :])
            keys += state.digest()
        return keys


def _path(node: PageNode) -> list[PageNode]:
    """Return the nodes from below the root to `node`."""
    found: list[PageNode] = []
    at: PageNode | None = node
    while at is not None and at.parent is not None:
        found.append(at)
        at = at.parent
    return found[::-1]


def _stays(pool: ExternalPool, pages: Pages, domain: Domain) -> bool:
    """Return whether all of these are in the index of one domain, computed and not ended."""
    states = pool.state[pages]
    return bool(
        (pool.tag[pages] == domain.tag).all()
        and pool.indexed[pages].all()
        and ((states == CACHED) | (states == ACTIVE)).all()
    )


def _packed(runs: Sequence[Sequence[int]]) -> bytes:
    """Return token ids in the form in which prompts are hashed: int32 LE."""
    parts: list[NDArray[np.int32]] = [np.asarray(run).astype("<i4") for run in runs]
    return b"".join(part.tobytes() for part in parts)
