"""Sealing and opening an object, against the AEAD library alone on the same bytes, by size.

    python benchmarks/tiers/seal.py [--rounds 9] [--json FILE]

- `seal`, `open`: the library's time ÷ ours, in turns, both into memory that is there; 1 would be free. The goal is
  0.92 from 1 MiB on.
- `enclosed`: with sealed facts, as in files; `checked`: with a checksum, too.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvcustody.governance.keys.locked_buffer import KeyBuffer
from kvcustody.governance.tiers.seal.extended_nonce import ExtendedNonceKey
from kvcustody.governance.tiers.seal.object_layout import ObjectFacts, object_bytes
from kvcustody.governance.tiers.seal.sealer import open_into, seal_into

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "harness"))

from bench import Bench, alternate, frozen

SIZES = (64 << 10, 256 << 10, 1 << 20, 2 << 20, 4 << 20)
GOAL, FROM = 0.92, 1 << 20
NAME = os.urandom(32)
DIGEST = bytes(32)
FACTS = ObjectFacts(
    DIGEST,
    "internal",
    DIGEST,
    DIGEST,
    DIGEST,
    DIGEST,
    DIGEST,
    0,
    1,
    0,
    16,
    256,
    1,
    2,
    1,
    bytes(16),
    bytes(16),
    2,
    bytes(16),
)


def microseconds(run: Callable[[], object], times: int) -> Callable[[], float]:
    def measured() -> float:
        best = float("inf")
        for _ in range(times):
            begun = time.perf_counter()
            run()
            best = min(best, time.perf_counter() - begun)
        return best * 1e6

    return measured


def point(size: int, rounds: int) -> dict[str, float]:
    """One size: the library's microseconds, and the library ÷ ours."""
    key, facts_key = (ExtendedNonceKey(KeyBuffer.random()) for _ in range(2))
    library, content = AESGCM(os.urandom(32)), bytearray(os.urandom(size))
    raw, back = bytearray(size + 16), memoryview(bytearray(size))
    library.encrypt_into(bytes(12), content, b"", raw)
    arena = memoryview(bytearray(object_bytes(size, enclosed=True, checked=True)))
    data = memoryview(bytearray(object_bytes(size, enclosed=False, checked=False)))
    seal_into(key, NAME, FACTS, content, data)
    both = {"facts_key": facts_key, "checked": True}
    sides = {
        "library seal": lambda: library.encrypt_into(bytes(12), content, b"", raw),
        "seal": lambda: seal_into(key, NAME, FACTS, content, arena),
        "enclosed": lambda: seal_into(key, NAME, FACTS, content, arena, facts_key=facts_key),
        "checked": lambda: seal_into(key, NAME, FACTS, content, arena, **both),
        "library open": lambda: library.decrypt_into(bytes(12), raw, b"", back),
        "open": lambda: open_into(key, NAME, FACTS, data, back),
    }
    times = max(8, (32 << 20) // size)
    with frozen():
        found = alternate({name: microseconds(run, times) for name, run in sides.items()}, rounds, warm=1)
    assert back == content
    took = {name: median(each) for name, each in found.items()}
    return {
        "bytes": size,
        "library_gbps": size / took["library seal"] / 1e3,
        **{
            name: took[f"library {'open' if name == 'open' else 'seal'}"] / took[name]
            for name in ("seal", "open", "enclosed", "checked")
        },
    }


def main() -> int:
    bench = Bench(__doc__, "cryptography", rounds=9, strict=True)
    options = bench.parse()
    points = [point(size, options.rounds) for size in SIZES]
    for one in points:
        ratios = "  ".join(f"{name} {one[name]:.3f}" for name in ("seal", "open", "enclosed", "checked"))
        print(f"{int(one['bytes']) >> 10:>5} KiB  library {one['library_gbps']:.1f} GB/s  library ÷ ours: {ratios}")
    bench.keep({"goal": GOAL, "from_bytes": FROM, "points": points})
    met = all(min(one["seal"], one["open"]) >= GOAL for one in points if one["bytes"] >= FROM)
    return bench.status(met)


if __name__ == "__main__":
    sys.exit(main())
