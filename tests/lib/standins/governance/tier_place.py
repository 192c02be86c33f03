"""A sealed tier in a folder, and keys for what it keeps."""

from __future__ import annotations

import hashlib
from pathlib import Path

from kvcustody.governance.decisions.access_plan import DomainLabel
from kvcustody.governance.orphans.scans import tier_findings
from kvcustody.governance.tiers.copies.index import CopyLimit, PublishedRun, TierShare, TierTerms
from kvcustody.governance.tiers.copy_event import CopyEvent
from kvcustody.governance.tiers.heirs import TierHolder
from kvcustody.governance.tiers.staging import Staging
from kvcustody.governance.tiers.stores.file_store import FileStore
from kvcustody.governance.tiers.stores.host_arena import HostArena
from kvcustody.governance.tiers.stores.store_protocol import TierStore
from kvcustody.governance.tiers.tier import SealedTier
from standins.governance.sealed_objects import World
from standins.governance.store_servers import StoreServer

BLOCK, STEP = 256, 4


ABSOLUTE_US = 16_000_000


LAYOUT = hashlib.sha256(b"layout").digest()


class Place:
    """A tier, its keys, and a device whose block of a key holds bytes that the key says."""

    def __init__(
        self,
        folder: Path,
        kind: str,
        capacity: int = 1 << 20,
        *,
        server: StoreServer | None = None,
        worker: str = "w1",
        world: World | None = None,
        prefix: str = "",
        holder: TierHolder | None = None,
        heir_of: tuple[str, ...] = (),
    ) -> None:
        """`server`: where the store is that workers of one `prefix` share, else of the folder's name.

        `holder`: the process that has the tier; with none nobody asks who had it before.
        """
        self.world = World(folder) if world is None else world
        self.folder, self.kind, self.capacity = folder, kind, capacity
        self.server, self.worker, self.prefix = server, worker, prefix or folder.name
        self.holder, self.heir_of, self.restores = holder, heir_of, True
        self.allowed = {"internal": ABSOLUTE_US}
        self.shares: dict[str, TierShare] = {}
        self.staging = Staging(2, STEP * BLOCK)
        self.layout = LAYOUT
        self.open()

    def open(self) -> None:
        """As a process does that begins."""
        store = self.made()
        terms = TierTerms(
            self.layout,
            BLOCK,
            16,
            self.limit,
            lambda tenant: self.shares.get(tenant, TierShare()),
            ("acme", "beta"),
            STEP,
            holder=self.holder,
        )
        self.store = store
        self.tier = SealedTier(store, self.world.keys, self.world.shred, self.staging, self.world.clock, terms)

    def made(self) -> TierStore:
        """The store of this kind."""
        if self.server is not None:
            utc_us = self.world.clock.utc_us
            said = {"utc_us": utc_us, "heir_of": self.heir_of}
            return self.server.store(self.prefix, self.worker, self.capacity, **said)
        if self.kind == "host":
            return HostArena(self.capacity)
        return FileStore(self.folder / "tier", self.capacity)

    def limit(self, tenant: str, classification: str) -> CopyLimit:
        absolute_us = self.allowed.get(classification, 0)
        return CopyLimit(absolute_us, max(1, absolute_us // 16), restores=self.restores)

    def label(self, tenant: str, subject: str | None = None) -> DomainLabel:
        spec = self.world.spec(tenant, subject)
        scope = "subject" if subject else "tenant"
        return DomainLabel(tenant, "internal", 1, scope, subject, None, spec)

    def keep(
        self,
        label: DomainLabel,
        prompt: str,
        blocks: int,
        depth: int = 0,
        *,
        lives_us: int = ABSOLUTE_US,
        held_us: int = 1 << 50,
    ) -> int:
        keys, now_us = keys_of(prompt, blocks), self.world.clock.now_us()
        parent = keys[32 * (depth - 1) : 32 * depth] if depth else bytes(32)
        held_us = min(held_us, lives_us)
        run = PublishedRun(label, keys[32 * depth :], parent, depth, now_us, now_us + lives_us, now_us + held_us)

        def read(first: int, count: int, into: memoryview) -> None:
            into[:] = b"".join(content(run.keys, first + at) for at in range(count))

        return self.tier.store(run, read)

    def bring(self, label: DomainLabel, prompt: str, blocks: int, depth: int = 0) -> int:
        """How many blocks come back from `depth` on; each must be what was kept of that key."""
        keys = keys_of(prompt, blocks)
        found = self.tier.lookup(label, keys, depth)

        def write(first: int, count: int, skip: int, data: memoryview) -> None:
            assert data[BLOCK * skip :] == b"".join(content(keys, first + at) for at in range(count))

        self.restored = self.tier.load(label, keys, depth, found, write)
        return sum(one.blocks for one in self.restored)

    def counted(self) -> tuple[int, int]:
        """Copies that the events say are here, and that the store says."""
        self.events()
        steps = {"stored": 1, "ended": -1, "destroyed": 0}
        return sum(steps[one.step] for one in self.seen if one.number), len(self.tier.objects())

    def events(self) -> list[CopyEvent]:
        """What happened since the start."""
        self.seen = [*getattr(self, "seen", []), *self.tier.take_events()]
        return self.seen

    def orphans(self, *, repair: bool = False) -> list[str]:
        """What a scan finds."""
        found = tier_findings([self.tier], self.world.clock.now_us())
        for one in found if repair else ():
            one.repair()
        return [one.finding.orphan for one in found]

    def ends(self) -> list[str]:
        return [one.cause for one in self.events() if one.step == "ended"]


def keys_of(prompt: str, blocks: int) -> bytes:
    """A chain of block keys; prompts that begin alike share their first keys up to the slash."""
    parts = prompt.split("/")
    found = b""
    for at in range(blocks):
        named = parts[0] if len(parts) == 1 or at < int(parts[1]) else prompt
        found += hashlib.sha256(f"{named}{at}".encode()).digest()
    return found


def content(keys: bytes, at: int) -> bytes:
    return hashlib.sha256(keys[32 * at : 32 * at + 32]).digest() * (BLOCK // 32)
