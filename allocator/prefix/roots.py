"""Nodes without a parent."""

from __future__ import annotations

from collections.abc import Iterator

from kvcustody.allocator.prefix.node import Node


class Roots:
    """Nodes without a parent: a linked list through their sibling links, so that it never resizes."""

    __slots__ = ("first",)

    def __init__(self) -> None:
        self.first: Node | None = None

    def add(self, node: Node) -> None:
        """Enter `node`."""
        head = self.first
        node.previous_sibling, node.next_sibling = None, head
        if head is not None:
            head.previous_sibling = node
        self.first = node

    def remove(self, node: Node) -> None:
        """Take `node` out."""
        if self.first is node:
            self.first = node.next_sibling
        node.leave()

    def values(self) -> Iterator[Node]:
        """Every root."""
        node = self.first
        while node is not None:
            after = node.next_sibling
            yield node
            node = after
