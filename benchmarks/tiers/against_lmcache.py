"""A host tier's store and restore of 1 MiB runs, sealed, against LMCache's local CPU backend, which keeps them clear.

    python benchmarks/tiers/against_lmcache.py --lmcache PYTHON [--rounds 9] [--json FILE]

PYTHON is the interpreter of an environment of its own that has LMCache and the same CPU build of torch: `pip install
torch==2.13.0`, then `pip install --no-deps lmcache==0.5.6` with what it imports. Both sides take turns, on one thread.

- `engine`: blocks of a paged pool, in any order, into the tier and back (ours), through `LMCacheEngine` and a connector
  that gathers slots (theirs). Ours ÷ theirs; the goal is 2.
- `bytes`: memory in one piece, without a pool on either side. Theirs is one copy, so this says what sealing costs.
- `limit`: what ours would be if nothing were done but what must be: the blocks' one copy and the AEAD library's one
  call an object, without keys, names, index, arena and evidence. No store that seals on one thread is faster.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvcustody.allocator.pool.tensor_memory import TensorMemory, TensorSpec
from kvcustody.governance.tiers.seal.extended_nonce import TAG_BYTES
from kvcustody.governance.tiers.stores.host_arena import HostArena

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "harness"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench import Bench, alternate, frozen
from copies import BLOCK, OBJECT, OBJECTS, RUN, RUNS, Copies, rate

GOAL = 2.0
_NONCE = bytes(12)  # of content that goes nowhere
SPEC = TensorSpec(layers=4, kv_heads=8, head_dim=32, dtype=torch.float16)  # a block of 16 tokens is 64 KiB


class Pool:
    """Blocks of a pool in any order, in place of memory in one piece."""

    def __init__(self, copies: Copies) -> None:
        blocks = RUNS * RUN // BLOCK
        self.memory = TensorMemory.allocate(blocks, SPEC)
        assert self.memory.bytes_per_block == BLOCK
        self.table = np.random.default_rng(1).permutation(blocks)
        self.memory.write(0, self.table, memoryview(bytearray(copies.content)))
        self.copies = copies

    def read(self, at: int, into: memoryview) -> None:
        self.memory.read(0, self.table[at : at + len(into) // BLOCK], into)

    def write(self, at: int, data: memoryview) -> None:
        self.memory.write(0, self.table[at : at + len(data) // BLOCK], data)


class Paged(Copies):
    """One tier, and runs that lie in blocks of a pool."""

    def fill(self) -> None:
        self.pool = Pool(self)

    def take(self, at: int, into: memoryview) -> None:
        self.pool.read(at // BLOCK, into)

    def put(self, at: int, data: memoryview) -> None:
        self.pool.write(at // BLOCK, data)

    def check(self) -> None:
        self.pool.memory.write(0, self.pool.table, memoryview(bytearray(RUNS * RUN)))
        self.load()
        self.pool.memory.read(0, self.pool.table, self.back)
        assert self.back == self.content


class Limit(Paged):
    """The copy and the cipher alone: the same blocks, the same memory, one key."""

    def __init__(self, folder: Path, store: HostArena) -> None:
        super().__init__(folder, store)
        self.cipher, self.plain = AESGCM(os.urandom(32)), memoryview(bytearray(OBJECT))
        self.sealed = memoryview(bytearray(RUNS * OBJECTS * (OBJECT + TAG_BYTES)))

    def store(self) -> None:
        for at, sealed in self._objects():
            self.take(at, self.plain)
            self.cipher.encrypt_into(_NONCE, self.plain, None, sealed)

    def load(self) -> None:
        for at, sealed in self._objects():
            self.cipher.decrypt_into(_NONCE, sealed, None, self.plain)
            self.put(at, self.plain)

    def _objects(self) -> Iterator[tuple[int, memoryview]]:
        for number in range(RUNS * OBJECTS):
            size = OBJECT + TAG_BYTES
            yield number * OBJECT, self.sealed[number * size : (number + 1) * size]


class Peer:
    """LMCache, in its own process."""

    def __init__(self, python: str) -> None:
        self.process = subprocess.Popen(
            [python, "-P", str(Path(__file__).with_name("lmcache_side.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert self.process.stdout
        assert any(line == "ready\n" for line in self.process.stdout), "LMCache did not start"

    def round(self, what: str) -> dict[str, float]:
        assert self.process.stdin and self.process.stdout
        print(what, file=self.process.stdin, flush=True)
        found: dict[str, float] = json.loads(self.process.stdout.readline())
        return found

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait(30)


def round_of(copies: Copies) -> dict[str, float]:
    """GB/s of a store of every run and of their restore."""
    clear = lambda: copies.tier.destroy(list(copies.tier.index()))  # noqa: E731
    return {"store": rate(copies.store, clear)(), "load": rate(copies.load)()}


def point(ours: Copies, peer: Peer, what: str, rounds: int) -> dict[str, Any]:
    with frozen():
        found = alternate({"ours": lambda: round_of(ours), "theirs": lambda: peer.round(what)}, rounds, warm=2)
    took = {
        side: {step: median(one[step] for one in each) for step in ("store", "load")} for side, each in found.items()
    }
    ratios = {
        step: median(mine[step] / their[step] for mine, their in zip(found["ours"], found["theirs"], strict=True))
        for step in ("store", "load")
    }
    return {"gbps": took, **ratios}


def main() -> int:
    bench = Bench(__doc__, "torch", "cryptography", rounds=9, strict=True)
    bench.add("--lmcache", required=True, help="the interpreter of LMCache's environment")
    options = bench.parse()
    torch.set_num_threads(1)
    peer, points = Peer(options.lmcache), {}
    for name, what, kind in (
        ("engine", "engine", Paged),
        ("limit", "engine", Limit),
        ("bytes", "bytes", Copies),
    ):
        with tempfile.TemporaryDirectory() as folder:
            ours = kind(Path(folder), HostArena(2 * RUNS * RUN))
            if isinstance(ours, Paged):
                ours.fill()
                ours.store()
                ours.check()
            points[name] = point(ours, peer, what, options.rounds)
            ours.tier.close()
        one = points[name]
        print(f"{name}: ours ÷ LMCache: store {one['store']:.2f}, restore {one['load']:.2f}  {one['gbps']}")
    peer.close()
    version = subprocess.run(
        [
            options.lmcache,
            "-c",
            "from importlib.metadata import version as v; print(v('lmcache'), v('torch'))",
        ],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    bench.keep({"goal": GOAL, "lmcache": version[0], "its torch": version[1], "points": points})
    return bench.status(min(points["engine"]["store"], points["engine"]["load"]) >= GOAL)


if __name__ == "__main__":
    sys.exit(main())
