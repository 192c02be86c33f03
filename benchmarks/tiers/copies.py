"""A tier's store and restore, in the host's memory and in files, against copying and writing the same bytes in clear.

    python benchmarks/tiers/copies.py [--rounds 7] [--folder DIR] [--json FILE]

- `host`: GB/s of runs that go from plain memory into the tier sealed, and back; a plain copy of them takes turns. An
  object is 1 MiB, a run 16 of them.
- `nvme`: the same through files behind their guard, and a plain writer of as many files beside it: written, renamed,
  never synced, as ours. The goal is 0.85 of its throughput. Files that were just written are read from the page cache.
  Ours uses a second core, where one is free.
- Each ratio is the median of pairs that took turns.
- `index`: bytes an object has in it, and microseconds of a look-up, by how many are there.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from kvcustody.clock import SystemClock
from kvcustody.governance.decisions.access_plan import DomainLabel
from kvcustody.governance.identity.domain_spec import DomainSpec, ScopeKind
from kvcustody.governance.keys.keyring import Keyring
from kvcustody.governance.keys.locked_buffer import KeyBuffer
from kvcustody.governance.keys.root_key_wrapping import RootKeyWrapping
from kvcustody.governance.keys.shred_keys import ShredKeys
from kvcustody.governance.keys.wrapped_key_store import FileKeyStore
from kvcustody.governance.tiers.copies.index import CopyLimit, PublishedRun, TierTerms
from kvcustody.governance.tiers.seal_keys import SealKeys
from kvcustody.governance.tiers.staging import Staging
from kvcustody.governance.tiers.stores.file_store import FileStore
from kvcustody.governance.tiers.stores.guarded_store import GuardedStore
from kvcustody.governance.tiers.stores.host_arena import HostArena
from kvcustody.governance.tiers.stores.store_protocol import TierStore
from kvcustody.governance.tiers.tier import SealedTier
from kvcustody.governance.tiers.tier_index import IndexRow, TierIndex

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "harness"))

from bench import Bench, alternate, frozen

BLOCK, BLOCKS, OBJECTS, RUNS = 64 << 10, 16, 16, 4  # an object is 1 MiB, a round 4 runs of 16 of them
OBJECT = BLOCK * BLOCKS
RUN = OBJECT * OBJECTS
GOAL = 0.85
DAY_US = 86_400_000_000


class Copies:
    """One tier, and runs to keep in it."""

    def __init__(self, folder: Path, store: TierStore) -> None:
        clock = SystemClock()
        wrapping = RootKeyWrapping(KeyBuffer.random())
        keyring = Keyring(FileKeyStore(folder / "keys.json"), wrapping, clock)
        shred = ShredKeys.open(folder / "shred.keys", wrapping, clock)
        spec = DomainSpec(
            scope=ScopeKind.TENANT,
            classification="internal",
            model=bytes(32),
            key_epoch=1,
            issuer="i",
            tenant="t",
        )
        keyring.ensure([spec.owner])
        self.label = DomainLabel("t", "internal", 1, "tenant", None, None, spec)
        terms = TierTerms(bytes(32), BLOCK, 16, lambda *_: CopyLimit(DAY_US, DAY_US // 16), object_blocks=BLOCKS)
        self.tier = SealedTier(store, SealKeys(keyring, shred), shred, Staging(1, OBJECT), clock, terms)
        self.clock = clock
        self.content = memoryview(bytearray(os.urandom(RUNS * RUN)))
        self.back = memoryview(bytearray(RUNS * RUN))
        self.keys: list[bytes] = []

    def take(self, at: int, into: memoryview) -> None:
        """Bytes of the runs from there on, as from a device."""
        into[:] = self.content[at : at + len(into)]

    def put(self, at: int, data: memoryview) -> None:
        """The same, back."""
        self.back[at : at + len(data)] = data

    def store(self) -> None:
        """Keep every run anew."""
        self.keys = [os.urandom(32 * BLOCKS * OBJECTS) for _ in range(RUNS)]
        now_us = self.clock.now_us()
        for number, keys in enumerate(self.keys):
            run = PublishedRun(self.label, keys, bytes(32), 0, now_us, now_us + DAY_US, now_us + DAY_US)

            def read(first: int, count: int, into: memoryview, at: int = number * RUN) -> None:
                self.take(at + first * BLOCK, into)

            assert self.tier.store(run, read) == BLOCKS * OBJECTS

    def load(self) -> None:
        """Bring every run back."""
        for number, keys in enumerate(self.keys):

            def write(first: int, count: int, skip: int, data: memoryview, at: int = number * RUN) -> None:
                self.put(at + first * BLOCK, data)

            found = self.tier.lookup(self.label, keys, 0)
            assert sum(one.blocks for one in self.tier.load(self.label, keys, 0, found, write)) == BLOCKS * OBJECTS


def rate(run: Callable[[], object], before: Callable[[], object] = lambda: None) -> Callable[[], float]:
    def measured() -> float:
        before()
        begun = time.perf_counter()
        run()
        return RUNS * RUN / (time.perf_counter() - begun) / 1e9

    return measured


def point(
    copies: Copies,
    plain_store: Callable[[], object],
    plain_load: Callable[[], object],
    rounds: int,
    *,
    keeps: bool = False,
) -> Any:
    """GB/s of each side, and ours ÷ plain. `keeps`: nothing is deleted between rounds."""
    clear = (lambda: None) if keeps else lambda: copies.tier.destroy(list(copies.tier.index()))
    copies.store()
    with frozen():
        results = alternate(
            {
                "store": rate(copies.store, clear),
                "plain store": rate(plain_store),
                "load": rate(copies.load),
                "plain load": rate(plain_load),
            },
            rounds,
            warm=1,
        )
    copies.load()
    assert copies.back == copies.content
    took = {name: median(each) for name, each in results.items()}
    copies.tier.close()
    return {
        "gbps": took,
        **{
            side: median(ours / plain for ours, plain in zip(results[side], results[f"plain {side}"], strict=True))
            for side in ("store", "load")
        },
    }


def host(folder: Path, rounds: int) -> Any:
    copies = Copies(folder, HostArena(2 * RUNS * OBJECTS * (OBJECT + 4096)))
    other = memoryview(bytearray(RUNS * RUN))

    def copy_in() -> None:
        other[:] = copies.content

    def copy_out() -> None:
        copies.back[:] = other

    return point(copies, copy_in, copy_out, rounds)


def nvme(folder: Path, rounds: int) -> Any:
    files = FileStore(folder / "tier", (rounds + 4) * RUNS * (RUN + (1 << 20)))
    copies = Copies(folder, GuardedStore(files, seconds=5.0, clock=SystemClock()))
    plain = folder / "plain"
    plain.mkdir()

    written = 0

    def write() -> None:
        nonlocal written
        written += 1
        for number in range(RUNS * OBJECTS):
            part = copies.content[number * OBJECT : (number + 1) * OBJECT]
            with (plain / f"{written}-{number}.draft").open("wb", buffering=0) as file:
                file.write(part)
            (plain / f"{written}-{number}.draft").rename(plain / f"{written}-{number}")

    def read() -> None:
        for number in range(RUNS * OBJECTS):
            with (plain / f"{written}-{number}").open("rb", buffering=0) as file:
                file.readinto(copies.back[number * OBJECT : (number + 1) * OBJECT])

    write()
    return point(copies, write, read, rounds, keeps=True)


def index(objects: int) -> dict[str, float]:
    names = [os.urandom(32) for _ in range(objects)]
    tracemalloc.start()
    tier_index = TierIndex()
    for name in names:
        tier_index.add(name, IndexRow(1, 1, 2, 2, 2, OBJECT, 0, BLOCKS, 1, 1, 1))
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    some = names[:: max(1, objects // 10_000)]
    best = float("inf")
    for _ in range(5):
        begun = time.perf_counter()
        for name in some:
            tier_index.find(name)
        best = min(best, time.perf_counter() - begun)
    return {"objects": objects, "bytes_an_object": taken / objects, "find_us": best / len(some) * 1e6}


def main() -> int:
    bench = Bench(__doc__, "cryptography", rounds=7, strict=True)
    bench.add("--folder", type=Path, default=None, help="where files go (default: a temporary folder)")
    options = bench.parse()
    by_medium = {}
    for name, measure in (("host", host), ("nvme", nvme)):
        folder = Path(tempfile.mkdtemp(dir=options.folder))
        try:
            by_medium[name] = measure(folder, options.rounds)
        finally:
            shutil.rmtree(folder)
        rates = "  ".join(f"{side} {each:.2f}" for side, each in by_medium[name]["gbps"].items())
        print(
            f"{name}: GB/s {rates}; ours ÷ plain: store {by_medium[name]['store']:.3f}, "
            f"load {by_medium[name]['load']:.3f}"
        )
    sizes = [index(objects) for objects in (10_000, 100_000, 1_000_000)]
    for one in sizes:
        print(
            f"index of {one['objects']:,}: {one['bytes_an_object']:.0f} bytes an object, "
            f"look-up {one['find_us']:.2f} us"
        )
    bench.keep({"goal_nvme": GOAL, **by_medium, "index": sizes})
    met = min(by_medium["nvme"]["store"], by_medium["nvme"]["load"]) >= GOAL
    return bench.status(met and all(one["bytes_an_object"] <= 200 for one in sizes))


if __name__ == "__main__":
    sys.exit(main())
