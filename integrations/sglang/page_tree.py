"""The index: a radix tree of token ids in namespaces, whose nodes are runs of KV pages.

It knows neither SGLang nor governance: token arrays and page numbers in, page numbers out.

1. A namespace is part of every edge. Who cannot name it walks past what lies in it, and pays the same.
2. A node splits where a walk, an insert or an end cuts it; pages belong to one node at a time.
3. What is taken out while requests hold it is reached by nobody any more and stays theirs: its pages come free when the
   last of them unlocks it.
"""

from __future__ import annotations

import heapq
from array import array

import numpy as np
from numpy.typing import NDArray

Pages = NDArray[np.int64]
NO_PAGES: Pages = np.empty(0, dtype=np.int64)


class PageNode:
    """A run of pages of one chain. `locks`: requests that hold the node, or one below it."""

    __slots__ = (
        "children",
        "is_cut_off",
        "locks",
        "name",
        "number",
        "offered",
        "pages",
        "parent",
        "tokens",
        "used",
    )

    def __init__(self, number: int, parent: PageNode | None, name: str, tokens: array[int], pages: Pages) -> None:
        self.number = number
        self.parent = parent
        self.name = name
        self.tokens = tokens
        self.pages = pages
        self.children: dict[tuple[str, int | bytes], PageNode] = {}
        self.locks = 0
        self.used = 0
        self.is_cut_off = False  # taken out of the tree (rule 3)
        self.offered: object = None  # what somebody who copies pages noted of it; both halves of a split keep it


class PageTree:
    """The chains of all namespaces. `pages`: one more than the highest page number."""

    def __init__(self, pages: int, page_tokens: int) -> None:
        self.size = pages
        self.page_tokens = page_tokens
        self._numbers = 0
        self._uses = 0
        self.root = PageNode(0, None, "", array("q"), NO_PAGES)
        self.root.locks = 1
        self._nodes: dict[int, PageNode] = {}
        self._owner: NDArray[np.int64] = np.zeros(pages, dtype=np.int64)  # the node that has a page; 0: none
        self.evictable_pages = 0
        self.held_pages = 0  # locked, in the tree or cut off

    # -- walking ------------------------------------------------------------------------------------------------------

    def walk(
        self, node: PageNode | None, name: str, tokens: array[int], first: int, last: int
    ) -> tuple[PageNode, list[Pages]]:
        """Follow `tokens`' pages [first, last) from `node`, or the root; split the node in which they end."""
        self._uses += 1
        at, pages = node or self.root, []
        while first < last:
            child = at.children.get(self._edge(name, tokens, first))
            if child is None:
                break
            matched = self._match(child, tokens, first, last)
            if matched < len(child.pages):
                child = self._split(child, matched)
            child.used = self._uses
            pages.append(child.pages)
            at, first = child, first + matched
        return at, pages

    def insert(
        self, node: PageNode | None, name: str, tokens: array[int], pages: Pages, first: int, last: int
    ) -> PageNode:
        """Add `pages[first:last]` below `node` as one new node; no child begins alike (after `walk`)."""
        at = node or self.root
        if first == last:
            return at
        self._numbers += 1
        size = self.page_tokens
        child = PageNode(self._numbers, at, name, tokens[first * size : last * size], pages[first:last].copy())
        child.used = self._uses
        edge = self._edge(name, tokens, first)
        assert edge not in at.children, "inserted beside what begins alike"
        at.children[edge] = child
        self._nodes[child.number] = child
        self._owner[child.pages] = child.number
        self.evictable_pages += len(child.pages)
        return child

    def path(self, node: PageNode) -> Pages:
        """Return the pages from the root to `node`."""
        runs: list[Pages] = []
        at: PageNode | None = node
        while at is not None:
            runs.append(at.pages)
            at = at.parent
        return np.concatenate(runs[::-1])

    def _edge(self, name: str, tokens: array[int], page: int) -> tuple[str, int | bytes]:
        size = self.page_tokens
        if size == 1:
            return name, tokens[page]
        return name, tokens[page * size : (page + 1) * size].tobytes()

    def _match(self, child: PageNode, tokens: array[int], first: int, last: int) -> int:
        """Return how many leading pages of `child` match the tokens' pages [first, last); the first one does."""
        size = self.page_tokens
        count = min(len(child.pages), last - first) * size
        own, start = child.tokens, first * size
        if own[:count] == tokens[start : start + count]:
            return count // size
        low, high = 0, count  # [0, low) agree, [0, high) do not
        while high - low > 1:
            middle = (low + high) // 2
            if own[low:middle] == tokens[start + low : start + middle]:
                low = middle
            else:
                high = middle
        return low // size

    def _split(self, node: PageNode, at: int) -> PageNode:
        """Make `node`'s first `at` pages its parent, held by its holders as well, and return that parent."""
        parent, size = node.parent, self.page_tokens
        assert parent is not None and 0 < at < len(node.pages)
        self._numbers += 1
        upper = PageNode(self._numbers, parent, node.name, node.tokens[: at * size], node.pages[:at].copy())
        upper.locks, upper.used, upper.offered = node.locks, node.used, node.offered
        parent.children[self._edge(node.name, node.tokens, 0)] = upper
        upper.children[self._edge(node.name, node.tokens, at)] = node
        node.parent = upper
        node.tokens, node.pages = node.tokens[at * size :], node.pages[at:].copy()
        self._nodes[upper.number] = upper
        self._owner[upper.pages] = upper.number
        return upper

    # -- holding ------------------------------------------------------------------------------------------------------

    def lock(self, node: PageNode) -> None:
        """Lock `node` and everything above it for a request."""
        at = node
        while at.parent is not None:
            if not at.locks:
                self.evictable_pages -= len(at.pages)
                self.held_pages += len(at.pages)
            at.locks += 1
            at = at.parent

    def unlock(self, node: PageNode) -> Pages:
        """Unlock the path; return the pages that become free, which had been removed meanwhile (rule 3)."""
        free: list[Pages] = []
        at = node
        while at.parent is not None:
            assert at.locks > 0, "unlocked more often than locked"
            at.locks -= 1
            if not at.locks:
                self.held_pages -= len(at.pages)
                if at.is_cut_off:
                    free.append(at.pages)
                else:
                    self.evictable_pages += len(at.pages)
            at = at.parent
        return np.concatenate(free) if free else NO_PAGES

    def use(self, node: PageNode) -> bool:
        """Mark the path to `node` as used now; return False where a part of it was removed."""
        self._uses += 1
        at = node
        while at.parent is not None:
            if at.is_cut_off:
                return False
            at.used = self._uses
            at = at.parent
        return True

    # -- ending -------------------------------------------------------------------------------------------------------

    def remove(self, pages: Pages) -> Pages:
        """Remove these, and whatever follows them in their nodes; return the pages that become free now."""
        free: list[Pages] = []
        for node, cut in self.cuts(pages):
            if cut:
                self._split(node, cut)  # `node` is what lies behind the cut now
            free += self._cut_off(node)
        return np.concatenate(free) if free else NO_PAGES

    def cuts(self, pages: Pages) -> list[tuple[PageNode, int]]:
        """Return the nodes with these pages, each with the position of its first one."""
        numbers = self._owner[pages]
        nodes = [self._nodes[number] for number in np.unique(numbers[numbers > 0]).tolist()]
        return [(node, int(np.isin(node.pages, pages).argmax())) for node in nodes]

    def _cut_off(self, node: PageNode) -> list[Pages]:
        parent = node.parent
        assert parent is not None
        edge = self._edge(node.name, node.tokens, 0)
        if parent.children.get(edge) is node:
            del parent.children[edge]
        self._owner[node.pages] = 0
        del self._nodes[node.number]
        node.is_cut_off = True
        if node.locks:
            return []
        self.evictable_pages -= len(node.pages)
        return [node.pages]

    def remove_oldest(self, count: int) -> list[PageNode]:
        """Remove at least `count` unheld pages, or all: whole leaves, the least recently used first.

        Each returned one still knows what it continued.
        """
        heap = [
            (node.used, -node.number, node) for node in self._nodes.values() if not node.locks and not node.children
        ]
        heapq.heapify(heap)
        chosen: list[PageNode] = []
        while heap and count > 0:
            _, _, node = heapq.heappop(heap)
            self._cut_off(node)
            chosen.append(node)
            count -= len(node.pages)
            parent = node.parent
            if parent is None or parent.parent is None or parent.locks:
                continue
            if not parent.children and not parent.is_cut_off:
                heapq.heappush(heap, (parent.used, -parent.number, parent))
        return chosen

    # -- books --------------------------------------------------------------------------------------------------------

    def indexed(self) -> NDArray[np.bool_]:
        """Return by page whether the tree has it."""
        return self._owner > 0

    def is_held(self, page: int) -> bool:
        """Return whether a request holds the page's node."""
        node = self._nodes.get(int(self._owner[page]))
        return node is not None and node.locks > 0
