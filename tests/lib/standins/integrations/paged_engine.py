"""An engine in one process with SGLang's moves over pages: rows, a free list, chunks, checkpoints, preemption.

It computes nothing, and remembers of every page whose prefix was written into it: what a request attaches is compared
with that, and with nothing that governance says.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from kvcustody.allocator.external.pool import ExternalPool
from kvcustody.allocator.external.scrub_queue import ScrubOrder
from kvcustody.allocator.pool.memory_protocol import UnbackedMemory
from kvcustody.governance.admission_outcome import AdmissionRefused
from kvcustody.governance.external.engine_port import EnginePort
from kvcustody.governance.identity.principal import identify
from kvcustody.governance.request import Hints
from kvcustody.integrations.sglang.page_tree import Pages, PageTree
from kvcustody.integrations.sglang.slot_custody import SlotCustody
from kvcustody.integrations.sglang.slot_request import SlotRequest
from kvcustody.testkit.conformance.deployment import KeepingLedger, keyring, table, toy_model

Content = tuple[object, tuple[int, ...]]


class Running:
    """A request of the engine."""

    def __init__(self, request: SlotRequest, who: object, tokens: list[int]) -> None:
        self.request = request
        self.who = who
        self.tokens = tokens
        self.computed = 0
        self.row: list[int] = []
        self.node = None
        self.protected = 0


class PagedEngine:
    """`pages` pages of `page_tokens` tokens; page 0 is padding."""

    trees = PageTree

    def __init__(self, policy: str, clock, pages: int = 64, page_tokens: int = 1, keys=None) -> None:
        self.clock = clock
        self.page_tokens = page_tokens
        self.tree = self.trees(pages, page_tokens)
        self.custody = SlotCustody(self.tree, self)
        self.model = toy_model(page_tokens)
        self.memory = UnbackedMemory(pages, 0)
        self.ledger = KeepingLedger()
        self.custody.port = self.port = EnginePort(
            ExternalPool(pages, reserved=(0,)),
            self.custody,
            table(policy),
            keyring(clock) if keys is None else keys,
            self.ledger,
            clock=clock,
            block_tokens=page_tokens,
        )
        self.free_pages = list(range(1, pages))
        self.pages = pages
        self.handed = 0
        self.running: dict[str, Running] = {}
        self.waiting: dict[str, Running] = {}
        self.content: dict[int, Content] = {}  # by page, whose prefix it holds; absent: zero
        self.hits = 0
        self.number = 0
        self.ended: list[str] = []
        self.readers: set[str] = set()  # tenants that a segment is for
        self.custody.step()

    # -- requests -------------------------------------------------------------------------------------------------

    def ask(
        self, tenant: str | None, subject: str, tokens: list[int], narrowed_by: str = "", *, latency: str = ""
    ) -> str:
        """A request comes; what it may read in the end is its own, under these three."""
        self.number += 1
        rid = str(self.number)
        who = None if tenant is None else identify(issuer="idp", tenant=tenant, verified={"subject": subject})
        answer = self.custody.admit(
            rid,
            who,
            self.model,
            tokens,
            max_tokens=self.page_tokens,
            narrowed_by=narrowed_by,
            hints=Hints(latency=latency),
        )
        assert not isinstance(answer, AdmissionRefused), answer
        owner = rid if tenant is None else (tenant, subject, narrowed_by)
        self.waiting[rid] = Running(answer, owner, list(tokens))
        return rid

    def start(self, rid: str) -> bool:
        """Take a waiting request, where its quota lets it and there is room for its prompt."""
        running = self.waiting[rid]
        if not self.custody.may_start(running.request):
            return False
        size = self.page_tokens
        last = (len(running.tokens) - 1) // size
        node, attached = self.custody.look_up(running.request, array("q", running.tokens), last)
        for at, page in enumerate(attached.tolist()):
            assert self.content[page] == self._prefix(running, at), "what it attaches"
        self.tree.lock(node)
        if self.custody.restorable(running.request):
            brought = self._bring(rid, node)
            self.free(self.tree.unlock(node))
            if brought is None:
                return self.start(rid)  # as a scheduler's next turn
            node = brought
            attached = self.tree.path(node)
            for at, page in enumerate(attached.tolist()):
                assert self.content[page] == self._prefix(running, at), "what came"
            self.tree.lock(node)
        need = -(-len(running.tokens) // size) - len(attached)
        if need > len(self.free_pages):
            self.custody.make_room(need - len(self.free_pages))
        if need > len(self.free_pages):
            self.free(self.tree.unlock(node))
            return False
        del self.waiting[rid]
        self.running[rid] = running
        running.node, running.row, running.protected = node, attached.tolist(), len(attached)
        running.computed = len(attached) * size
        self.hits += len(attached)
        if not running.request.has_begun:
            self.custody.begin(running.request, len(attached))
        return True

    def _bring(self, rid: str, node):
        """As the backend does it: where what tiers have ends, the hit's own node, or None to ask again."""
        waiting, custody = self.waiting[rid], self.custody
        tokens, count = array("q", waiting.tokens), custody.restorable(waiting.request)
        if count > len(self.free_pages):
            custody.make_room(count - len(self.free_pages))
        custody.zero()
        if count > len(self.free_pages) or not custody.may_restore(waiting.request, tokens, count):
            return node
        pages = [self.free_pages.pop(0) for _ in range(count)]
        self.handed += count
        brought = custody.restore(waiting.request, tokens, np.array(pages, dtype=np.int64))
        if brought is None:
            custody.preempted(waiting.request, waiting.tokens)
        return brought

    def chunk(self, rid: str, tokens: int) -> None:
        """Compute so many more tokens of it, and publish what is whole."""
        running = self.running[rid]
        size = self.page_tokens
        upto = min(running.computed + tokens, len(running.tokens))
        while len(running.row) < -(-upto // size):
            running.row.append(self.free_pages.pop(0))
            self.handed += 1
        self.custody.step()  # before it writes
        for page in running.row[running.computed // size : -(-upto // size)]:
            at = running.row.index(page)
            whole = (at + 1) * size <= upto
            if at * size >= running.computed:
                assert page not in self.content, "a page that was not zero is written"
            self.content[page] = self._prefix(running, at) if whole else (running.who, ("part",))
        running.computed = upto
        self.checkpoint(running)

    def compute(self, rid: str, tokens: int) -> None:
        """A chunk, where there is room for it."""
        one, size = self.running[rid], self.page_tokens
        need = -(-min(one.computed + tokens, len(one.tokens)) // size) - len(one.row)
        if need > len(self.free_pages):
            self.custody.make_room(need - len(self.free_pages))
        if need <= len(self.free_pages):
            self.chunk(rid, tokens)

    def _prefix(self, running: Running, at: int) -> Content:
        """What the page at a place of its row holds: nobody's own, where it is of a segment for its tenant."""
        spans = running.request.path.spans
        shared = spans[0].last if len(spans) > 1 and not running.request.residency.granted_blocks else 0
        assert not shared or running.who[0] in self.readers, "a segment is for others"
        tokens = tuple(running.tokens[: (at + 1) * self.page_tokens])
        return ("segment" if at < shared else running.who), tokens

    def checkpoint(self, running: Running) -> None:
        """As the backend does it."""
        published = self.custody.publish(
            running.request, array("q", running.tokens), running.computed // self.page_tokens
        )
        if published is None:
            return
        running.row[published.first : published.first + len(published.adopted)] = published.adopted.tolist()
        self.tree.lock(published.node)
        self.free(self.tree.unlock(running.node))
        running.node, running.protected = published.node, published.published
        self.free(published.returned)

    def finish(self, rid: str, cause: str = "finished") -> None:
        """It is over, or preempted."""
        running = self.running.pop(rid)
        if cause == "finished":
            self.checkpoint(running)
        self.custody.report(running.request)
        rest = running.row[running.protected :]
        self.free(np.array(rest, dtype=np.int64))
        self.free(self.tree.unlock(running.node))
        running.row = []
        if cause == "preempted":
            self.custody.preempted(running.request, running.tokens)
            running.node, running.protected, running.computed = None, 0, 0
            self.waiting[rid] = running
        else:
            self.custody.release(running.request, cause)

    def run(self, tenant: str | None, subject: str, tokens: list[int], narrowed_by: str = "") -> int:
        """One request alone; how many pages it found. A first use is on record afterwards."""
        rid, before = self.ask(tenant, subject, tokens, narrowed_by), self.hits
        assert self.start(rid)
        self.chunk(rid, len(tokens))
        self.finish(rid)
        self.port.settle(60.0)
        return self.hits - before

    # -- EngineRows -----------------------------------------------------------------------------------------------

    def pages_of(self, request_id: str, first: int) -> Pages:
        one = self.running.get(request_id)
        return np.array(one.row[first:] if one is not None else [], dtype=np.int64)

    def tokens_of(self, request_id: str) -> int:
        one = self.running.get(request_id) or self.waiting.get(request_id)
        return len(one.tokens) if one is not None else 0

    def free(self, pages: Pages) -> None:
        for page in pages.tolist():
            assert page and page not in self.free_pages, "a page is freed twice"
            self.free_pages.append(page)

    def end(self, request_ids: Sequence[str], cause: str) -> None:
        for rid in request_ids:
            self.ended.append(rid)
            if rid in self.waiting:
                self.custody.release(self.waiting.pop(rid).request, "aborted")
            elif rid in self.running:
                self.finish(rid, "aborted")

    def withhold(self, pages: Pages) -> None:
        self.free_pages = [page for page in self.free_pages if page not in set(pages.tolist())]

    def requests(self) -> frozenset[object]:
        return frozenset([*self.waiting, *self.running])

    def allocated(self) -> int:
        return self.handed

    def scrub(self, order: ScrubOrder) -> None:
        for _, pages in order.batches:
            for page in pages.tolist():
                self.content.pop(page, None)
        results = [self.memory.scrub(0, pages, share) for share, pages in order.batches]
        self.port.scrubbed(order.number, 0, results, self.memory.scrubbed(0))

    # -- what must hold -------------------------------------------------------------------------------------------

    def problems(self) -> list[str]:
        """Every invariant, from the engine's own books."""
        wrong = self.port.check() + [str(one) for one in self.port.scan()]
        indexed = self.tree.indexed()
        if (indexed != self.port.pool.indexed).any():
            wrong.append("the tree and the port's books list other pages")
        rows: set[int] = set()
        for one in self.running.values():
            rows.update(one.row)
        free = set(self.free_pages)
        if free & rows or free & set(np.flatnonzero(indexed).tolist()):
            wrong.append("a free page is somebody's")
        if len(free | rows | set(np.flatnonzero(indexed).tolist())) != self.pages - 1:
            wrong.append("a page is nobody's and not free")
        held = self.tree.held_pages + self.tree.evictable_pages
        own = sum(len(one.row) - one.protected for one in self.running.values())
        if held + own + len(free) != self.pages - 1:
            wrong.append(f"{held} in the tree, {own} in rows, {len(free)} free")
        return wrong
