"""How long a million copies of a tenant take to end by its key: until it is destroyed, none is found, all are unlinked.

    python benchmarks/tiers/ended_by_key.py [--objects 1000000] [--json FILE]

- One sealed tier of files, of one tenant; each object holds one small block.
- `commit`: the destroyed secret is durably out of the key store; from then on nobody opens an object. Goal: 100 ms.
- `not found`: the tier has looked at its keys and finds none of them.
- `step`: the longest that one call of `narrow` or `expire` takes the tier's thread, of those that unlink in turns.
- `unlinked`: the store's own listing is empty. Then copies stored and ended are the same number, each with evidence.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
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
from kvcustody.governance.tiers.tier import SealedTier

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "harness"))

from bench import Bench

BLOCK, DAY_US = 64, 86_400_000_000
COMMIT_MS = 100.0


def measure(folder: Path, objects: int) -> dict[str, Any]:
    """Fill, destroy, and wait for the last byte."""
    clock, wrapping = SystemClock(), RootKeyWrapping(KeyBuffer.random())
    ring = Keyring(FileKeyStore(folder / "keys.json"), wrapping, clock)
    shred = ShredKeys.open(folder / "shred.keys", wrapping, clock)
    spec = DomainSpec(scope=ScopeKind.TENANT, classification="internal", model=bytes(32), key_epoch=1, issuer="idp",
                      tenant="acme", subject=None)  # fmt: skip
    ring.ensure([spec.owner])
    label = DomainLabel("acme", "internal", 1, "tenant", None, None, spec)
    keys, staging = SealKeys(ring, shred), Staging(1, BLOCK)
    limit = CopyLimit(DAY_US, DAY_US // 16)
    terms = TierTerms(bytes(32), BLOCK, 16, lambda *_: limit, tenants=("acme",), object_blocks=1)
    store = FileStore(folder / "tier", 1 << 40)
    tier = SealedTier(store, keys, shred, staging, clock, terms)
    now_us, stored = clock.now_us(), 0
    plain = bytes(BLOCK)

    def read(first: int, count: int, into: memoryview) -> None:
        into[:] = plain

    began = time.perf_counter()
    for number in range(objects):
        run = PublishedRun(label, number.to_bytes(32), bytes(32), 0, now_us, now_us + DAY_US, now_us + DAY_US)
        stored += tier.store(run, read)
        if number % 4096 == 0:
            tier.take_events()
    filled = time.perf_counter() - began
    tier.take_events()
    began = time.perf_counter()
    ring.destroy(spec.owner, 1)
    commit = time.perf_counter() - began
    steps, ends, destroyed = [], 0, 0
    began = time.perf_counter()
    tier.narrow()
    found_none = time.perf_counter() - began
    while True:
        for event in tier.take_events():
            ends += event.step == "ended"
            destroyed += event.step == "destroyed"
        if not store.used_bytes:
            break
        at = time.perf_counter()
        tier.expire()
        steps.append(time.perf_counter() - at)
    unlinked = time.perf_counter() - began
    left = len(store.page(b"", 1000))
    tier.close()
    shred.close()
    return {
        "objects": objects,
        "stored": stored,
        "filled_seconds": round(filled, 1),
        "commit_ms": round(1000 * commit, 2),
        "not_found_seconds": round(found_none, 3),
        "longest_step_ms": round(1000 * max([found_none, *steps]), 1),
        "steps": len(steps),
        "unlinked_seconds": round(unlinked, 1),
        "ended": ends,
        "left_in_the_store": left,
    }


def main() -> int:
    """Print and keep the figures."""
    bench = Bench(__doc__, "cryptography", strict=True)
    bench.add("--objects", type=int, default=1_000_000)
    options = bench.parse()
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(Path(folder), options.objects)
    bench.keep(figures, show=True)
    whole = figures["ended"] == figures["stored"] == options.objects and not figures["left_in_the_store"]
    return bench.status(whole and figures["commit_ms"] < COMMIT_MS)


if __name__ == "__main__":
    raise SystemExit(main())
