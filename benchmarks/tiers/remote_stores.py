"""A tier in a store beyond the machine, against the store's client library alone on the same bytes.

    python benchmarks/tiers/remote_stores.py [--rounds 7] [--only s3|valkey|mooncake] [--in-flight 4] [--json FILE]

- Real servers on loopback (SeaweedFS, Valkey, Mooncake's master with a client that gives memory), which share the
  processor with both sides. A kind that is not installed is left out.
- `store`: a run leaves plain memory, sealed, as objects of 1, 4 or 16 MiB, and the store has all of them. `load`: the
  run comes back, is opened and lies in plain memory. A round is 64 MiB at least.
- The library alone puts and gets as many bytes in as many objects, in clear, with as many in flight on threads. It
  copies them from the same memory, and to it, as a device's bytes are.
- Each ratio is the median of pairs that took turns. The goal is 0.9; with Mooncake, which copies memory, 0.95 of
  1 / (1 + t), where t is what sealing or opening takes over what the library alone takes.
- `seal_us`: microseconds that sealing and opening one object takes by itself.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
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
from kvcustody.governance.tiers.seal.object_layout import object_bytes
from kvcustody.governance.tiers.seal_keys import SealKeys
from kvcustody.governance.tiers.staging import Staging
from kvcustody.governance.tiers.stores.guarded_store import GuardedStore
from kvcustody.governance.tiers.stores.host_arena import HostArena
from kvcustody.governance.tiers.stores.mooncake_client import MooncakeClient, MooncakePlace
from kvcustody.governance.tiers.stores.remote_store import ObjectClient, RemoteStore
from kvcustody.governance.tiers.stores.store_protocol import TierStore
from kvcustody.governance.tiers.stores.valkey_client import ValkeyClient
from kvcustody.governance.tiers.tier import SealedTier

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "harness"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "lib"))

from bench import Bench, alternate, frozen

from standins.governance.store_servers import KINDS, SERVERS, absent

MIB, BLOCKS, ROUND = 1 << 20, 16, 64 << 20
SIZES = (1, 4, 16)  # MiB of an object's content
GOAL, GOAL_MOONCAKE = 0.9, 0.95
DAY_US = 86_400_000_000


class MooncakeServer:
    """A master, and a process that gives it memory."""

    def __init__(self, folder: Path) -> None:
        from standins.engines.mooncake.store_world import Client, Master

        folder.mkdir()
        self._master = Master(folder, None, lease_ms=60_000)
        self._memory = Client(self._master, "default", memory_bytes=1 << 30)

    def client(self, prefix: str, seconds: float) -> ObjectClient:
        where = MooncakePlace(self._master.address, self._master.http, prefix)
        return MooncakeClient(where, buffer_bytes=512 << 20, seconds=seconds)

    def close(self) -> None:
        self._memory.__exit__(None, None, None)
        self._master.close()


def missing(kind: str) -> str:
    if kind != "mooncake":
        return absent(kind)
    return "" if find_spec("mooncake") else "not installed (benchmarks/mooncake_env.sh)"


class RunInTier:
    """One tier, and a run of objects to keep in it."""

    def __init__(self, folder: Path, store: TierStore, size: int) -> None:
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
        self.block, self.objects, self.clock = size // BLOCKS, max(4, ROUND // size), clock
        terms = TierTerms(bytes(32), self.block, 16, lambda *_: CopyLimit(DAY_US, DAY_US // 16), object_blocks=BLOCKS)
        self.tier = SealedTier(store, SealKeys(keyring, shred), shred, Staging(1, size), clock, terms)
        self.content = memoryview(bytearray(os.urandom(self.objects * size)))
        self.back = memoryview(bytearray(self.objects * size))
        self.keys = b""

    def store(self) -> None:
        self.keys = os.urandom(32 * BLOCKS * self.objects)
        now_us = self.clock.now_us()
        run = PublishedRun(self.label, self.keys, bytes(32), 0, now_us, now_us + DAY_US, now_us + DAY_US)

        def read(first: int, count: int, into: memoryview) -> None:
            into[:] = self.content[first * self.block : (first + count) * self.block]

        stored = self.tier.store(run, read)
        assert stored == BLOCKS * self.objects, f"{stored} of {BLOCKS * self.objects} blocks were stored"

    def load(self) -> None:
        def write(first: int, count: int, skip: int, data: memoryview) -> None:
            self.back[first * self.block : (first + count) * self.block] = data

        found = self.tier.lookup(self.label, self.keys, 0)
        came = sum(one.blocks for one in self.tier.load(self.label, self.keys, 0, found, write))
        assert came == BLOCKS * self.objects, f"{came} of {BLOCKS * self.objects} blocks came back"

    def clear(self) -> None:
        self.tier.destroy(list(self.tier.index()))


class Alone:
    """The client library on the same bytes, as many at a time."""

    def __init__(self, client: ObjectClient, run: RunInTier, size: int, in_flight: int) -> None:
        self._client, self._run, self._size = client, run, size
        self._threads = ThreadPoolExecutor(in_flight)
        self._names: list[bytes] = []
        self._memory = [bytearray(size) for _ in range(in_flight)]

    def store(self) -> None:
        self._names = [os.urandom(32) for _ in range(self._run.objects)]

        def put(at: int) -> None:
            memory = self._memory.pop()
            memory[:] = self._run.content[at * self._size : (at + 1) * self._size]
            if isinstance(self._client, MooncakeClient):
                assert self._client._store.put(self._client._key(self._names[at]), memoryview(memory)) == 0
            elif isinstance(self._client, ValkeyClient):
                assert self._client._client.set(self._client._key(self._names[at]), memoryview(memory), nx=True)
            else:
                assert self._client.put(self._names[at], memoryview(memory), 0)
            self._memory.append(memory)

        list(self._threads.map(put, range(self._run.objects)))

    def load(self) -> None:
        def get(at: int) -> None:
            found = self._get(self._names[at])
            assert len(found) == self._size
            self._run.back[at * self._size : (at + 1) * self._size] = found

        list(self._threads.map(get, range(self._run.objects)))

    def _get(self, name: bytes) -> Any:
        """As the library gives it, not by our own receiving."""
        if isinstance(self._client, MooncakeClient):
            return memoryview(self._client._store.get_buffer(self._client._key(name))).cast("B")
        if isinstance(self._client, ValkeyClient):
            return self._client._client.get(self._client._key(name))
        return self._client.get(name, self._size, lambda size: memoryview(bytearray(size)))

    def clear(self) -> None:
        if self._names:
            self._client.delete(self._names)

    def close(self) -> None:
        self._threads.shutdown()


def rate(run: Callable[[], object], size: int, before: Callable[[], object] = lambda: None) -> Any:
    def measured() -> float:
        before()
        begun = time.perf_counter()
        run()
        return size / (time.perf_counter() - begun) / 1e6

    return measured


def seal_us(folder: Path, size: int) -> dict[str, float]:
    """What one object takes where the store is this process's memory."""
    folder.mkdir()
    largest = object_bytes(size, enclosed=True, checked=False)
    run = RunInTier(folder, HostArena(2 * max(4, ROUND // size) * (largest + 4096)), size)
    took: dict[str, list[float]] = {"seal": [], "open": []}
    for _ in range(3):
        for name, act in (("seal", run.store), ("open", run.load)):
            begun = time.perf_counter()
            act()
            took[name].append((time.perf_counter() - begun) / run.objects * 1e6)
        run.clear()
    run.tier.close()
    return {name: min(each) for name, each in took.items()}


def point(folder: Path, clients: Callable[[], ObjectClient], mib: int, in_flight: int, rounds: int) -> Any:
    size = mib * MIB
    largest = object_bytes(size, enclosed=True, checked=False)
    store = RemoteStore(clients(), worker="w", capacity_bytes=1 << 40, object_bytes_max=largest, in_flight=in_flight)
    run = RunInTier(folder, GuardedStore(store, seconds=60, clock=SystemClock()), size)
    alone = Alone(clients(), run, size, in_flight)
    whole = run.objects * size
    run.store()
    alone.store()
    with frozen():
        results = alternate(
            {
                "store": rate(run.store, whole, run.clear),
                "library store": rate(alone.store, whole, alone.clear),
                "load": rate(run.load, whole),
                "library load": rate(alone.load, whole),
            },
            rounds,
            warm=1,
        )
    run.back[:] = bytes(len(run.back))
    run.load()
    assert run.back == run.content
    run.clear()
    alone.clear()
    alone.close()
    run.tier.close()
    pairs = {
        side: median(ours / library for ours, library in zip(results[side], results[f"library {side}"], strict=True))
        for side in ("store", "load")
    }
    return {"mib": mib, "objects": run.objects, "mbps": {k: median(v) for k, v in results.items()}, **pairs}


def goal(kind: str, point: Any) -> dict[str, float]:
    """What each side's ratio is to reach."""
    if kind != "mooncake":
        return {"store": GOAL, "load": GOAL}
    named = {"store": "seal", "load": "open"}
    takes_us = {side: point["mib"] * MIB / point["mbps"][f"library {side}"] for side in named}
    return {side: GOAL_MOONCAKE / (1 + point["seal_us"][act] / takes_us[side]) for side, act in named.items()}


def main() -> int:
    bench = Bench(__doc__, "obstore", "valkey", "cryptography", rounds=7, only="one kind of store", strict=True)
    bench.add("--in-flight", type=int, default=4, help="objects on their way at a time (default: %(default)s)")
    options = bench.parse()
    by_kind: dict[str, Any] = {}
    for kind in (*KINDS, "mooncake") if options.only is None else (options.only,):
        if why := missing(kind):
            print(f"{kind}: {why}")
            continue
        with tempfile.TemporaryDirectory() as temporary:
            server: Any = {**SERVERS, "mooncake": MooncakeServer}[kind](Path(temporary) / "server")
            try:
                by_kind[kind] = []
                for mib in SIZES:
                    folder = Path(temporary) / str(mib)
                    folder.mkdir()
                    figures = point(
                        folder,
                        partial(server.client, f"bench-{mib}", 60.0),
                        mib,
                        options.in_flight,
                        options.rounds,
                    )
                    figures["seal_us"] = seal_us(folder / "seal", mib * MIB)
                    figures["goal"] = goal(kind, figures)
                    by_kind[kind].append(figures)
                    rates = "  ".join(f"{side} {each:,.0f}" for side, each in figures["mbps"].items())
                    print(
                        f"{kind} {mib} MiB: MB/s {rates}; ours ÷ library: store {figures['store']:.3f}, "
                        f"load {figures['load']:.3f}; goals {figures['goal']['store']:.3f}, "
                        f"{figures['goal']['load']:.3f}",
                        flush=True,
                    )
            finally:
                server.close()
    bench.keep({"in_flight": options.in_flight, **by_kind})
    points = [one for each in by_kind.values() for one in each]
    sides = ("store", "load")
    return bench.status(bool(points) and all(one[side] >= one["goal"][side] for one in points for side in sides))


if __name__ == "__main__":
    sys.exit(main())
