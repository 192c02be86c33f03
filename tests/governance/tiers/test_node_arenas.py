"""Arenas by memory node: an object lies near its caller, and a machine's own words say which node that is."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from kvcustody.governance.tiers.stores import node_arenas
from kvcustody.governance.tiers.stores.host_arena import HostArena
from kvcustody.governance.tiers.stores.node_arenas import (
    MemoryNode,
    NodeArenas,
    node_here,
    open_host_arena,
    prefer_node,
    preferred_node,
    read_nodes,
)

SIZE = 4096


def machine(folder: Path, processors: dict[int, str], distances: dict[int, str], memory: str) -> Path:
    """What a system with these nodes says of itself."""
    numbers = sorted(processors)
    (folder / "online").write_text(f"{numbers[0]}-{numbers[-1]}\n")
    (folder / "has_memory").write_text(f"{memory}\n")
    for number in numbers:
        (folder / f"node{number}").mkdir()
        (folder / f"node{number}" / "cpulist").write_text(f"{processors[number]}\n")
        (folder / f"node{number}" / "distance").write_text(f"{distances[number]}\n")
    return folder


def three(folder: Path) -> list[MemoryNode]:
    """Two sockets, and memory without processors that is nearer to the second."""
    words = {0: "10 32 17", 1: "32 10 14", 2: "17 14 10"}
    return read_nodes(machine(folder, {0: "0-3,8-11", 1: "4-7", 2: ""}, words, "0-2"))


def test_a_machine_says_which_nodes_it_has(tmp_path: Path) -> None:
    assert three(tmp_path) == [
        MemoryNode(0, frozenset({0, 1, 2, 3, 8, 9, 10, 11}), {0: 10, 1: 32, 2: 17}),
        MemoryNode(1, frozenset({4, 5, 6, 7}), {0: 32, 1: 10, 2: 14}),
        MemoryNode(2, frozenset(), {0: 17, 1: 14, 2: 10}),
    ]
    (tmp_path / "other").mkdir()
    some = machine(tmp_path / "other", {0: "0", 1: "1"}, {0: "10 20", 1: "20 10"}, "1")
    assert read_nodes(some) == [MemoryNode(1, frozenset({1}), {1: 10})], "processors without memory are no place"


@pytest.mark.parametrize("broken", ["absent", "words", "fewer distances"])
def test_a_machine_that_does_not_say_has_one_arena(tmp_path: Path, broken: str) -> None:
    if broken != "absent":
        words = "10 x" if broken == "words" else "10"
        machine(tmp_path, {0: "0", 1: "1"}, {0: words, 1: "20 10"}, "0-1")
    nodes = read_nodes(tmp_path)
    assert nodes == []
    store = open_host_arena(1 << 20, nodes)
    assert isinstance(store, HostArena)
    store.close()


def test_a_machine_with_several_nodes_has_an_arena_for_each_unless_they_are_small(tmp_path: Path) -> None:
    nodes = three(tmp_path)
    store = open_host_arena(3 << 30, nodes)
    assert isinstance(store, NodeArenas) and store.capacity_bytes == 3 << 30 and sorted(store.arenas) == [0, 1, 2]
    store.close()
    small = open_host_arena((3 << 30) - 1, nodes)
    assert isinstance(small, HostArena)
    small.close()


def test_this_thread_s_node_follows_its_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes, runs_on = three(tmp_path), list[int]()

    class Libc:
        def sched_getcpu(self) -> int:
            return runs_on[-1]

    monkeypatch.setattr(node_arenas, "_LIBC", Libc())
    for processor, node in ((0, 0), (9, 0), (5, 1), (64, 0)):
        runs_on.append(processor)
        assert node_here(nodes) == node


def test_an_object_lies_with_its_caller_and_beside_it_where_that_is_full(tmp_path: Path) -> None:
    """From node 1 the memory without processors is nearer than the other socket."""
    bound: list[tuple[int, int]] = []
    runs_on = [1]

    def prefer(address: int, size: int, node: int) -> bool:
        bound.append((node, size))
        return True

    store = NodeArenas(3 * 2 * SIZE, three(tmp_path), here=lambda _: runs_on[0], prefer=prefer)
    assert bound == [(0, 2 * SIZE), (1, 2 * SIZE), (2, 2 * SIZE)] and store.capacity_bytes == 6 * SIZE

    def put(number: int) -> bool:
        into = store.prepare_store(bytes([number]) * 32, SIZE)
        if into is None:
            return False
        into[:] = bytes([number]) * SIZE
        store.complete_store(bytes([number]) * 32)
        return True

    def lies() -> list[list[int]]:
        return [[one.name[0] for one in store.arenas[node].page(b"", 9)] for node in (0, 1, 2)]

    assert all(put(number) for number in range(1, 6)) and lies() == [[5], [1, 2], [3, 4]]
    runs_on[0] = 0
    assert put(6) and lies() == [[5, 6], [1, 2], [3, 4]]
    assert not put(7), "no node has room"
    assert store.delete([bytes([3]) * 32]).objects == 1 and put(7) and lies() == [[5, 6], [1, 2], [4, 7]]
    assert [one.name[0] for one in store.page(b"", 4)] == [1, 2, 4, 5]
    for number in (1, 2, 4, 5, 6, 7):
        found = store.prepare_load(bytes([number]) * 32)
        assert found is not None and bytes(found) == bytes([number]) * SIZE
        store.complete_load(bytes([number]) * 32)
    store.close()
    assert store.used_bytes == 0


def test_a_system_that_binds_nothing_is_told_of_and_used(tmp_path: Path) -> None:
    with capture_logs() as told:
        store = NodeArenas(6 * SIZE, three(tmp_path), here=lambda _: 0, prefer=lambda *_: False)
    assert [one["node"] for one in told if "not bound" in one["event"]] == [0, 1, 2]
    assert store.prepare_store(bytes(32), SIZE) is not None
    store.close()


def test_memory_is_bound_to_a_node_that_there_is() -> None:
    """By the kernel's own word; memory beside it is not, and a node that there is not is refused."""
    nodes = read_nodes()
    if not nodes:
        pytest.skip("the system does not say which nodes it has")
    bound, other = (mmap.mmap(-1, 4 * SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(2))
    address, beside = (ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in (bound, other))
    number = nodes[-1].number
    if not prefer_node(address, 4 * SIZE, number):
        pytest.skip(f"mbind is not permitted here ({os.strerror(ctypes.get_errno())})")
    assert preferred_node(address) == number and preferred_node(beside) is None
    assert not prefer_node(beside, 4 * SIZE, 1000) and preferred_node(beside) is None
    store = NodeArenas(2 * SIZE, [nodes[-1]])
    assert preferred_node(store.arenas[number]._address) == number
    store.close()
