"""Custody of SGLang's KV slots: reports the engine's use of pages to the port, and applies the port's answers.

It knows no class of SGLang: pages, token arrays and request ids. A page is `page_size` slots; with a page size of one
it is a slot.

1. A request walks the tree only where its path says, and attaches what it found before anything else can end it.
2. What the engine hands out is read from its own rows, late: before a page comes back, before the port decides about it
   or ends it (`flush`), and once in `FLUSH_STEPS` steps. A page that is not zero is ordered with the step that first
   writes to it.
3. What a request computed enters the tree at its checkpoints, along its path; where the same is there already, the
   request takes that and gives its own back.
4. A request whose path was taken out of the tree publishes nothing more; so does one that an erasure covers.
5. Where there are tiers (`SlotTiers`), what is evicted is offered to them while it is still there. Restored content
   fills pages that are zero by then, and is in the tree before the request computes. A page that was handed out for it
   and not filled is returned as a used one.
6. Where somebody listens (`publish_to`), what enters and leaves the tree is told once a step (`SlotBlockEvents`).
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvcustody.allocator.external.scrub_queue import ScrubOrder
from kvcustody.allocator.pool.accounting import Domain
from kvcustody.errors import IsolationError
from kvcustody.governance.admission_outcome import AdmissionRefused
from kvcustody.governance.external.engine_control import EngineView
from kvcustody.governance.external.engine_port import EnginePort
from kvcustody.governance.external.namespace_keys import NamespaceSpan, Walked
from kvcustody.governance.identity.model_identity import ModelIdentity
from kvcustody.governance.identity.principal import Principal
from kvcustody.governance.request import NO_HINTS, Hints, Tokens
from kvcustody.integrations.sglang.page_tree import NO_PAGES, PageNode, Pages, PageTree
from kvcustody.integrations.sglang.slot_request import SlotRequest
from kvcustody.integrations.sglang.slot_tiers import SlotTiers
from kvcustody.logger import get_logger

if TYPE_CHECKING:
    from kvcustody.integrations.events.feed import BlockEventPublisher
    from kvcustody.integrations.sglang.slot_events import SlotBlockEvents

FLUSH_STEPS = 64  # a decode's pages are told at least once in so many steps
ROOM_SHARE = 128  # where there is no room, at least one page in so many is ended,
ROOM_PAGES = 1024  # and at least so many,
SMALL_ROOM_SHARE = 16  # though of a small pool no more than one in so many
EVICTED = "evicted"  # as events say why pages left
_log = get_logger(__name__)


class EngineRows(Protocol):
    """The engine's own books: its rows of slots, its free list, its queues."""

    def pages_of(self, request_id: str, first: int) -> Pages:
        """Return the allocated pages of a request's row from its `first` on."""

    def tokens_of(self, request_id: str) -> int:
        """Return the request's current number of tokens."""

    def free(self, pages: Pages) -> None:
        """Make these pages available for allocation again."""

    def end(self, request_ids: Sequence[str], cause: str) -> None:
        """End these requests as soon as the engine can; each then passes through `SlotCustody.release`."""

    def withhold(self, pages: Pages) -> None:
        """Never allocate these pages again."""

    def requests(self) -> frozenset[object]:
        """Return the requests that the engine knows."""

    def allocated(self) -> int:
        """Return the pages allocated since the start, by the engine's own count."""

    def scrub(self, order: ScrubOrder) -> None:
        """Zero these pages now and tell the port."""


class CheckpointResult(NamedTuple):
    """The result of a checkpoint: the request's node in the tree, and the pages [first, first + adopted) that it
    took.
    """

    node: PageNode
    first: int
    adopted: Pages
    returned: Pages
    published: int


class _Walk:
    """One request's prompt in the tree (`NamespaceTree`)."""

    __slots__ = ("_custody", "_last", "_request", "_tokens", "last")

    def __init__(self, custody: SlotCustody, request: SlotRequest, tokens: array[int], last: int) -> None:
        self._custody = custody
        self._request = request
        self._tokens = tokens
        self._last = last
        self.last = Walked(None, NO_PAGES)  # where the last walk ended

    def walk(self, node: object, namespace: str, first: int, last: int) -> Walked:
        """Walk as `NamespaceTree` says."""
        assert node is None or isinstance(node, PageNode)
        name = self._request.name(namespace)
        at, runs = self._custody.tree.walk(node, name, self._tokens, first, min(last, self._last))
        self.last = Walked(at, _joined(runs))
        return self.last


class SlotCustody:
    """The scheduler's side (`EngineControl` for the port). Belongs to the scheduler's thread."""

    def __init__(self, tree: PageTree, rows: EngineRows) -> None:
        self.tree = tree
        self.rows = rows
        self.page_tokens = tree.page_tokens
        self.requests: dict[str, SlotRequest] = {}
        self._port: EnginePort | None = None
        self._tiers: SlotTiers | None = None
        self.events: SlotBlockEvents | None = None  # where somebody listens
        self._steps = 0  # since the last `flush` of all

    @property
    def port(self) -> EnginePort:
        """The open port."""
        assert self._port is not None, "no port yet"
        return self._port

    @port.setter
    def port(self, port: EnginePort) -> None:
        self._port = port
        port.defer_calls(self.flush, hand_outs_alone=True)
        port.count_tokens(lambda request_id: self.rows.tokens_of(str(request_id)))
        port.pool.is_held = self.tree.is_held

    @property
    def tiers(self) -> SlotTiers | None:
        """The tiers for pages off the device, or None."""
        return self._tiers

    @tiers.setter
    def tiers(self, tiers: SlotTiers) -> None:
        self._tiers = tiers
        self.port.pool.evicting = self._leave

    def publish_to(
        self,
        publisher: BlockEventPublisher,
        close: Callable[[], None] | None = None,
        *,
        with_tokens: bool = False,
    ) -> None:
        """Publish the block events of every step to `publisher` from now on.

        Raises `IsolationError` unless the tree is a `WatchedTree` with nothing in it.
        """
        from kvcustody.integrations.sglang.slot_events import SlotBlockEvents

        self.events = SlotBlockEvents(self.tree, self.port, publisher, with_tokens=with_tokens, close=close)
        self.port.event_figures = self.events.figures

    # -- requests -----------------------------------------------------------------------------------------------------

    def is_used(self, request_id: str) -> bool:
        """Return whether a request has this id; another one is then dropped, because its answer would reach the first
        client.
        """
        used = request_id in self.requests
        if used:
            self.port.attempts.note("id-in-use")
            _log.error("request dropped", request=request_id, reason="its id is another request's")
        return used

    def admit(
        self,
        request_id: str,
        principal: Principal | None,
        model: ModelIdentity,
        tokens: Sequence[int],
        *,
        hints: Hints = NO_HINTS,
        max_tokens: int = 0,
        keyed: bool = True,
        narrowed_by: str = "",
        trace: str = "",
    ) -> SlotRequest | AdmissionRefused:
        """Admit a new request. `keyed` False: its token ids do not describe all its content, so nothing is reused.

        `trace`: the W3C trace id that it came with.
        """
        answer = self.port.admit(
            principal,
            model,
            _as_numbers(tokens),
            request_id=request_id,
            hints=hints,
            max_tokens=max_tokens,
            keyed=keyed,
            trace=trace,
        )
        if isinstance(answer, AdmissionRefused):
            return answer
        request = SlotRequest(request_id, answer, narrowed_by, hints.latency, principal)
        self.requests[request_id] = request
        return request

    def may_start(self, request: SlotRequest) -> bool:
        """Return whether the request may start; False: only this request waits."""
        return self.port.may_start(request.residency) is None

    def look_up(self, request: SlotRequest, tokens: array[int], last: int) -> tuple[PageNode, Pages]:
        """Return the tree's node and the pages that the request may read, of the prompt's first `last` pages."""
        walk = _Walk(self, request, tokens, last)
        path = self.port.look_up_tree(request.residency, walk)
        request.path, request.found = path, path.blocks
        request.planned = None if self._tiers is None else self._tiers.plan(request, tokens, last)
        if len(path.spans) == 1 and len(walk.last.blocks) == len(path.blocks):
            assert walk.last.node is None or isinstance(walk.last.node, PageNode)
            return walk.last.node or self.tree.root, path.blocks
        node, _, _ = self._along(request, tokens, len(path.blocks))
        return node, path.blocks

    def _along(
        self,
        request: SlotRequest,
        tokens: array[int],
        last: int,
        start: PageNode | None = None,
        first: int = 0,
    ) -> tuple[PageNode, int, list[Pages]]:
        """Return how much of the request's path the tree has, up to page `last`, and its pages behind `start`.

        `start` ends with the first `first` of them.
        """
        node, at = start or self.tree.root, first
        runs: list[Pages] = []
        for span in request.path.spans:
            end = min(span.last, last)
            if at >= end:
                continue
            name = request.name(span.namespace)
            node, found = self.tree.walk(node, name, tokens, at, end)
            runs += found
            at += sum(map(len, found))
            if at < end:
                break
        return node, at, runs

    def begin(self, request: SlotRequest, pages: int) -> None:
        """Start the request behind its first `pages` found pages, which it has locked."""
        request.has_begun = True
        request.reported = request.published = request.cached = pages
        self.port.attached(request.residency, request.found[:pages])

    def restorable(self, request: SlotRequest) -> int:
        """Return how many pages tiers would load behind the last look-up's hit."""
        return 0 if request.planned is None else request.planned.pages

    def may_restore(self, request: SlotRequest, tokens: array[int], pages: int) -> bool:
        """Return whether that many pages can be loaded now; asked again after room was made for them."""
        tiers = self._tiers
        hit = len(request.found)
        _, there, _ = self._along(request, tokens, hit + pages)
        if tiers is None or there != hit:  # the same is in the tree, past its time
            return False
        request.planned = tiers.plan(request, tokens, hit + pages)
        return self.restorable(request) == pages

    def zero(self) -> None:
        """Zero ended pages before the step's own scrubs, so that a tier may fill them (rule 5)."""
        order = self.port.scrubs_now()
        if order is not None:
            self.rows.scrub(order)

    def restore(self, request: SlotRequest, tokens: array[int], pages: Pages) -> PageNode | None:
        """Fill these zero pages from tiers behind the hit; return where they end in the tree.

        None: some did not come. Those that did are in the tree; the request waits again, as one that was preempted.
        """
        tiers, plan, port = self._tiers, request.planned, self.port
        assert tiers is not None and plan is not None and plan.pages == len(pages), "restored as planned"
        if not port.pool.are_clean(pages.tolist()):
            raise IsolationError("a tier would fill pages that are not zero")
        hit = plan.hit
        self.begin(request, hit)
        self._tell(request, pages)
        came, born_us, ceiling_us = tiers.bring(request, plan, pages)
        node, _, _ = self._along(request, tokens, hit)
        if came:
            filled = pages[:came]
            port.restored(request.residency, filled.tolist(), born_us, ceiling_us)
            row = np.concatenate((request.found[:hit], filled))
            before = int(row[hit - 1]) if hit else -1
            node = self._insert(request, node, tokens, row, hit, hit + came)
            port.published(request.residency, filled, before)
        if came == len(pages):
            request.published, request.node, request.cached = hit + came, node, hit + came
            return node
        port.returned(request.residency, pages[came:])
        self.rows.free(pages[came:])
        return None

    def report(self, request: SlotRequest) -> None:
        """Report the pages allocated to the request since the last time (rule 2)."""
        if not request.has_begun:
            return
        self._tell(request, self.rows.pages_of(request.request_id, request.reported))

    def _tell(self, request: SlotRequest, pages: Pages) -> None:
        if len(pages):
            request.reported += len(pages)
            self.port.handed_out(request.residency, pages)

    def first_token(self, request: SlotRequest) -> None:
        """Take note of the first token, by which computing is measured."""
        if request.has_begun:
            self.port.first_token(request.residency, request.cached * self.page_tokens)

    def flush(self) -> None:
        """Report the pages allocated to every request."""
        for request in self.requests.values():
            self.report(request)

    def publish(self, request: SlotRequest, tokens: array[int], last: int) -> CheckpointResult | None:
        """Publish the first `last` computed pages of the row into the tree (rule 3). None: nothing enters."""
        port, residency = self.port, request.residency
        row = self.rows.pages_of(request.request_id, 0)
        if request.has_begun:
            self._tell(request, row[request.reported :])
        first = request.published
        if last <= first or not self._may_publish(request):
            return None
        start = request.node
        if start is not None and not self.tree.use(start):
            request.publishes = False  # what it continues has left the tree
            return None
        walked = 0 if start is None else first
        node, there, runs = self._along(request, tokens, last, start, walked)
        if there < max(first, residency.granted_blocks):
            request.publishes = False  # what it continues has left the tree
            return None
        adopted = _joined(runs)[first - walked :]
        if len(adopted):
            if port.attachable(residency, self.tree.path(node)) < there:
                request.publishes = False  # the same is there, and past its time: its own stays its own
                return None
            port.attached(residency, adopted)
            port.returned(residency, row[first:there])
        before = int(node.pages[-1]) if there else -1
        node = self._insert(request, node, tokens, row, there, last)
        port.published(residency, row[there:last], before)
        request.published, request.node = last, node
        return CheckpointResult(node, first, adopted, row[first:there], last)

    def _may_publish(self, request: SlotRequest) -> bool:
        return request.publishes and bool(request.path.spans) and self.port.may_publish(request.residency)

    def _insert(
        self, request: SlotRequest, node: PageNode, tokens: array[int], row: Pages, at: int, last: int
    ) -> PageNode:
        for span in request.path.spans:
            end = min(span.last, last)
            if at < end:
                name = request.name(span.namespace)
                node = self.tree.insert(node, name, tokens, row, at, end)
                if self.events is not None:
                    self.events.after_insert(request, _domain_of(request, span))
                at = end
        return node

    def release(self, request: SlotRequest, cause: str) -> None:
        """Release a request that has ended; the tree keeps what the policy permits."""
        self.requests.pop(request.request_id, None)
        self.port.release(request.residency, request.cause or cause)

    def preempted(self, request: SlotRequest, tokens: Sequence[int]) -> None:
        """Release a preempted request's row; it waits to run again with all its tokens."""
        self.port.release(request.residency, "preempted")
        again = self.port.resume(request.residency, _as_numbers(tokens))
        assert not isinstance(again, AdmissionRefused), "a released request's id is free"
        request.residency = again
        request.forget_row()

    # -- room ---------------------------------------------------------------------------------------------------------

    def make_room(self, pages: int) -> int:
        """End at least that many unheld pages in the policy's order; return how many became free.

        A share of the pool goes at once, so that a full pool does not end, scrub and record with every chunk and page.
        """
        if self.events is None:
            return self._make_room(pages)
        with self.events.because(EVICTED):
            return self._make_room(pages)

    def _make_room(self, pages: int) -> int:
        port, tree = self.port, self.tree
        at_once = max(tree.size // ROOM_SHARE, min(ROOM_PAGES, tree.size // SMALL_ROOM_SHARE))
        pages = max(pages, min(at_once, tree.evictable_pages))
        freed = 0
        if port.orders_victims:
            victims = port.victims(pages)
            freed = self._take_out(np.array(victims, dtype=np.int64))
        if freed < pages:
            nodes = tree.remove_oldest(pages - freed)
            self._offer([(node, 0) for node in nodes])
            oldest = _joined([node.pages for node in nodes])
            self.rows.free(oldest)
            port.unpublished(oldest)
            freed += len(oldest)
        return freed

    def clear(self) -> None:
        """Drop the whole cache."""
        chosen = np.flatnonzero(self.tree.indexed())
        if len(chosen):
            if self.events is not None:
                self.events.cleared("reset")
            self.rows.free(self.tree.remove(chosen))
            self.port.unpublished(chosen, "reset")

    def part_waiting(self) -> None:
        """Separate waiting requests from the old weights, for which they were admitted: they find and share nothing."""
        for request in self.requests.values():
            if not request.has_begun:
                request.narrowed_by = f"{request.narrowed_by}/{secrets.token_hex(16)}"
                request.forget_row()

    def _leave(self, pages: Pages) -> None:
        """Remove the pages that the policy gives up."""
        self._offer(self.tree.cuts(pages))

    def _offer(self, parts: list[tuple[PageNode, int]]) -> None:
        """Offer nodes that lose their pages from a place on to the tiers, before anything is zeroed."""
        tiers = self._tiers
        if tiers is not None:
            for node, keep in parts:
                tiers.offer(node, keep)

    def _take_out(self, pages: Pages) -> int:
        if not len(pages):
            return 0
        free = self.tree.remove(pages)
        self.rows.free(free)
        return len(free)

    # -- time ---------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Run what is due, and the scrubs before any write of a step; called before the engine computes and while
        idle.
        """
        self._steps += 1
        if self._steps >= FLUSH_STEPS:
            self._steps = 0
            self.flush()
        port = self._port
        assert port is not None, "no port yet"
        if self._tiers is not None:
            self._tiers.step()
        if port.has_work():
            order = port.step()
            if order is not None:
                self.rows.scrub(order)
        if self.events is not None:
            self.events.publish_pending()

    # -- EngineControl ------------------------------------------------------------------------------------------------

    def evict(self, blocks: Sequence[int]) -> None:
        """See `EngineControl`."""
        self._take_out(np.array(blocks, dtype=np.int64))

    def abort(self, request_ids: Sequence[object], cause: str) -> None:
        """See `EngineControl`."""
        ids = [str(one) for one in request_ids]
        for one in ids:
            if one in self.requests:
                self.requests[one].cause = cause
        self.rows.end(ids, cause)

    def withhold(self, blocks: Sequence[int]) -> None:
        """See `EngineControl`."""
        self.rows.withhold(np.array(blocks, dtype=np.int64))

    def wake(self) -> None:
        """See `EngineControl`: the scheduler's loop turns by itself."""

    def view(self) -> EngineView:
        """See `EngineControl`."""
        refs: NDArray[np.int64] = np.zeros(len(self.tree.indexed()), dtype=np.int64)
        for request in self.requests.values():
            if request.has_begun:
                np.add.at(refs, self.rows.pages_of(request.request_id, 0), 1)
        return EngineView(refs, self.tree.indexed(), self.rows.requests(), self.rows.allocated())


def _as_numbers(tokens: Sequence[int]) -> Tokens:
    """Return SGLang's arrays without a Python integer per token."""
    if isinstance(tokens, array) and tokens.typecode == "q":
        return np.frombuffer(tokens, dtype=np.int64)
    return tokens


def _domain_of(request: SlotRequest, span: NamespaceSpan) -> Domain:
    """Return the owner's domain of pages added to a span of the path: the segment's at its start, or the
    request's own.
    """
    residency = request.residency
    if residency.segment_domain is not None and span.last <= residency.segment_blocks:
        return residency.segment_domain
    return residency.domain


def _joined(runs: list[Pages]) -> Pages:
    if not runs:
        return NO_PAGES
    return runs[0] if len(runs) == 1 else np.concatenate(runs)
