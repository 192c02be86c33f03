"""A tier of files: an index in memory, objects in a folder, each with its owner; it destroys a few at a time."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.erasure.tier_protocol import TierEntry, TierErased


class FileTier:
    name = "nvme"

    def __init__(self, folder: Path, *, at_once: int = 2) -> None:
        self.folder = folder
        self.folder.mkdir(exist_ok=True)
        self.at_once = at_once
        self.entries: dict[bytes, TierEntry] = {}
        self.doomed: dict[str, list[bytes]] = {}
        self.destroyed: dict[str, int] = {}

    def store(self, key: bytes, tenant: str, now_us: int, data: bytes = b"canary") -> None:
        (self.folder / f"{key.hex()}.{tenant}.{now_us}").write_bytes(data)
        self.entries[key] = TierEntry(tenant, now_us)

    def erase(self, erasure: str, selector: Selector, before_us: int) -> TierErased:
        copies = [
            key
            for key, entry in self.entries.items()
            if selector.tenant == entry.tenant and entry.since_us <= before_us
        ]
        self.forget(copies)
        waiting = self.doomed.setdefault(erasure, [])
        waiting += copies
        now, self.doomed[erasure] = waiting[: self.at_once], waiting[self.at_once :]
        self.destroyed[erasure] = self.destroyed.get(erasure, 0) + self.destroy(now)
        return TierErased(self.destroyed[erasure], 6 * self.destroyed[erasure], len(self.doomed[erasure]))

    def objects(self) -> dict[bytes, TierEntry]:
        made = {}
        for path in self.folder.iterdir():
            key, tenant, since = path.name.split(".")
            made[bytes.fromhex(key)] = TierEntry(tenant, int(since))
        return made

    def index(self) -> dict[bytes, TierEntry]:
        return self.entries

    def destroy(self, keys: Collection[bytes]) -> int:
        paths = [path for path in self.folder.iterdir() if bytes.fromhex(path.name.split(".")[0]) in keys]
        for path in paths:
            path.unlink()
        return len(paths)

    def forget(self, keys: Collection[bytes]) -> int:
        return sum(self.entries.pop(key, None) is not None for key in keys)
