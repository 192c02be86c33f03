"""What a block manager must answer, as a plain dictionary: published prefixes with their references and times.

- A prefix of whole blocks is found while somebody runs on it or a hold's deadline is ahead, and its ceiling is ahead.
- Everything is kept per block and domain; the model knows no nodes, no queues and no blocks' whereabouts.
"""

from __future__ import annotations

from typing import NamedTuple

SIZE = 4
Prefix = tuple[str, tuple[int, ...]]


class Limits(NamedTuple):
    """A domain's times in microseconds; an idle time of 0 means never cached, never published."""

    idle_us: int
    absolute_us: int


class Entry:
    """One published block."""

    def __init__(self, ceiling_us: int, handle: tuple[int, int] | None) -> None:
        self.ceiling_us = ceiling_us
        self.deadline_us = 0
        self.users: set[object] = set()
        self.handle = handle

    def alive(self, now_us: int) -> bool:
        return now_us < self.ceiling_us and (bool(self.users) or now_us < self.deadline_us)


class Running:
    """One request as the model sees it."""

    def __init__(self, name: str, tokens: list[int]) -> None:
        self.name = name
        self.tokens = list(tokens)
        self.computed = 0
        self.published = 0  # blocks from the start that this request attached or published
        self.private = False


class Model:
    """`limits` by domain name. Without eviction its answers are exact; with eviction they are an upper bound."""

    def __init__(self, limits: dict[str, Limits]) -> None:
        self.limits = limits
        self.entries: dict[Prefix, Entry] = {}
        self.running: dict[object, Running] = {}

    def hit(self, name: str, tokens: list[int], now_us: int) -> int:
        """The longest prefix that may be reused, in blocks; the last token is always computed."""
        depth = 0
        while depth < (len(tokens) - 1) // SIZE:
            entry = self.entries.get((name, tuple(tokens[: SIZE * (depth + 1)])))
            if entry is None or not entry.alive(now_us):
                break
            depth += 1
        return depth

    def admit(self, id_: object, name: str, tokens: list[int], hit: int) -> None:
        request = self.running[id_] = Running(name, tokens)
        request.published = hit
        request.private = self.limits[name].idle_us == 0
        for depth in range(1, hit + 1):
            self.entries[name, tuple(tokens[: SIZE * depth])].users.add(id_)

    def commit(self, id_: object, computed: int, now_us: int, handles: list[tuple[int, int]]) -> None:
        """`handles`: the request's (block, generation) by depth, for blocks that it publishes."""
        request = self.running[id_]
        request.computed = computed
        while request.published < computed // SIZE and not request.private:
            key = (request.name, tuple(request.tokens[: SIZE * (request.published + 1)]))
            entry = self.entries.get(key)
            if entry is not None and not entry.alive(now_us):
                if entry.users:
                    request.private = True  # past its ceiling and still in use: the key is taken
                    return
                entry = None
            if entry is None:
                entry = self.entries[key] = Entry(self._ceiling(key, now_us), handles[request.published])
            entry.users.add(id_)
            request.published += 1

    def _ceiling(self, key: Prefix, now_us: int) -> int:
        name, tokens = key
        own = now_us + self.limits[name].absolute_us
        parent = self.entries.get((name, tokens[:-SIZE]))
        return min(own, parent.ceiling_us) if parent is not None else own

    def fork(self, id_: object, child: object) -> None:
        parent = self.running[id_]
        if len(parent.tokens) // SIZE > parent.published:
            parent.private = True
        request = self.running[child] = Running(parent.name, parent.tokens)
        request.computed, request.published = parent.computed, parent.published
        request.private = parent.private
        for depth in range(1, parent.published + 1):
            self.entries[parent.name, tuple(parent.tokens[: SIZE * depth])].users.add(child)

    def release(self, id_: object, now_us: int) -> None:
        request = self.running.pop(id_)
        path = [
            self.entries[request.name, tuple(request.tokens[: SIZE * depth])]
            for depth in range(1, request.published + 1)
        ]
        if path and now_us < path[-1].ceiling_us:
            deadline = min(now_us + self.limits[request.name].idle_us, path[-1].ceiling_us)
            for entry in path:
                entry.deadline_us = max(entry.deadline_us, deadline)
        for entry in path:
            entry.users.discard(id_)

    def forget(self, name: str) -> None:
        """An erasure of the whole domain."""
        for key in [key for key in self.entries if key[0] == name]:
            del self.entries[key]
