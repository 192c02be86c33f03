"""The tree of pages: walks, splits, holds, what is taken out while it is held."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from kvcustody.integrations.sglang.page_tree import PageTree


def pages(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


def put(tree: PageTree, name: str, tokens: list[int], numbers: list[int]):
    given = array("q", tokens)
    node, runs = tree.walk(None, name, given, 0, len(numbers))
    there = sum(map(len, runs))
    return tree.insert(node, name, given, pages(*numbers), there, len(numbers))


def found(tree: PageTree, name: str, tokens: list[int], last: int | None = None) -> list[int]:
    count = len(tokens) // tree.page_tokens
    _, runs = tree.walk(None, name, array("q", tokens), 0, count if last is None else last)
    return [page for run in runs for page in run.tolist()]


def test_a_chain_is_found_in_its_own_namespace_alone():
    tree = PageTree(64, 1)
    put(tree, "a", [5, 6, 7], [1, 2, 3])
    assert found(tree, "a", [5, 6, 7, 8]) == [1, 2, 3]
    assert found(tree, "b", [5, 6, 7]) == []
    assert found(tree, "a", [6, 7]) == []


@pytest.mark.parametrize("size", [1, 4])
def test_nodes_split_at_whole_pages(size):
    tree = PageTree(64, size)
    first = [9] * size + [8] * size + [7] * size
    put(tree, "a", first, [1, 2, 3])
    second = first[: 2 * size - 1] + [1] + [2] * size  # differs in the last token of the second page
    put(tree, "a", second, [1, 5, 6])
    assert found(tree, "a", first) == [1, 2, 3]
    assert found(tree, "a", second) == [1, 5, 6]
    assert tree.evictable_pages == 5 and int(tree.indexed().sum()) == 5


def oldest(tree: PageTree, count: int) -> list[int]:
    return [page for node in tree.remove_oldest(count) for page in node.pages.tolist()]


def test_holders_of_a_node_hold_both_halves_after_a_split():
    tree = PageTree(64, 1)
    node = put(tree, "a", [1, 2, 3, 4], [1, 2, 3, 4])
    tree.lock(node)
    assert found(tree, "a", [1, 2]) == [1, 2]
    assert tree.held_pages == 4 and tree.evictable_pages == 0
    assert tree.path(node).tolist() == [1, 2, 3, 4]
    assert not tree.remove_oldest(9)
    assert not len(tree.unlock(node))
    assert tree.held_pages == 0 and tree.evictable_pages == 4


def test_what_is_taken_out_under_a_hold_comes_free_with_it():
    tree = PageTree(64, 1)
    node = put(tree, "a", [1, 2, 3, 4], [1, 2, 3, 4])
    tree.lock(node)
    assert not len(tree.remove(pages(3, 4)))
    assert found(tree, "a", [1, 2, 3, 4]) == [1, 2]
    assert not tree.use(node)
    put(tree, "a", [1, 2, 3, 4], [1, 2, 7, 8])  # somebody computes it anew meanwhile
    assert sorted(tree.unlock(node).tolist()) == [3, 4]
    assert found(tree, "a", [1, 2, 3, 4]) == [1, 2, 7, 8]
    assert tree.held_pages == 0 and tree.evictable_pages == 4


def test_the_oldest_leaves_go_first_and_children_before_parents():
    tree = PageTree(64, 1)
    put(tree, "a", [1, 2, 3], [1, 2, 3])
    put(tree, "a", [1, 2, 9], [1, 2, 5])
    put(tree, "b", [4], [7])
    found(tree, "a", [1, 2, 3])
    assert oldest(tree, 1) == [5]
    assert oldest(tree, 1) == [7]
    assert oldest(tree, 99) == [3, 1, 2]
    assert not tree.indexed().any() and tree.evictable_pages == 0
