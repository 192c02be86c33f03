"""A million raised scopes in a door's or worker's memory: what they take, and what a request and an erasure cost then.

    python benchmarks/fleet/raised_epochs.py [--scopes 1000000] [--lookups 20000] [--json FILE]

A look-up is `KnownEpochs.of`: the epochs of fleet, tenant and subject, tags included. Half of the subjects that are
asked for were erased, and every answer is checked. An erasure adds one raise to the snapshot; who hears of it computes
its digest. Times are of the CPU: medians and 99th percentiles.
"""

from __future__ import annotations

import statistics
import sys
import time
import tracemalloc
from pathlib import Path

from kvcustody.governance.edge.erase_epochs import (
    EpochScope,
    EpochTags,
    EraseEpochs,
    KnownEpochs,
    RaisedEpoch,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "harness"))

from bench import Bench

_KEY = bytes(range(32))
_TENANTS = 100
_ERASURES = 20


def subject(number: int) -> tuple[str, str, str]:
    """Issuer, tenant and name of a subject."""
    return "corp", f"tenant-{number % _TENANTS}", f"subject-{number}"


def snapshot(scopes: int) -> tuple[KnownEpochs, float]:
    """Epochs of so many subjects, and the bytes that the snapshot takes."""
    tags = EpochTags(_KEY)
    raised = [RaisedEpoch(number + 1, tags.of(EpochScope(*subject(number)))) for number in range(scopes)]
    tracemalloc.start()
    epochs = EraseEpochs(raised, version=scopes)
    size_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return KnownEpochs(epochs, tags), size_bytes


def times_of(known: KnownEpochs, scopes: int, lookups: int) -> list[float]:
    """Microseconds of each look-up; raises where one gives another epoch than it must."""
    took = []
    for number in range(lookups):
        asked = (number * 7919) % (2 * scopes)
        who = subject(asked)
        began = time.process_time_ns()
        found = known.of(*who)
        took.append((time.process_time_ns() - began) / 1e3)
        if found.private != (asked + 1 if asked < scopes else 0):
            raise SystemExit(f"subject {asked} has the epoch {found.private}")
    return took


def main() -> None:
    """Print one JSON object."""
    bench = Bench(__doc__, "numpy")
    bench.add("--scopes", type=int, default=1_000_000)
    bench.add("--lookups", type=int, default=20_000)
    options = bench.parse()
    empty = sorted(times_where_nothing_was_raised(options.lookups))
    known, size_bytes = snapshot(options.scopes)
    took = sorted(times_of(known, options.scopes, options.lookups))
    added, digests = [], []
    epochs = known.epochs
    for number in range(_ERASURES):
        version = epochs.version + 1
        one = RaisedEpoch(version, known.tags.of(EpochScope("corp", "tenant-0", f"later-{number}")))
        began = time.process_time()
        epochs = epochs.extended([one], version=version, floor=0)
        added.append(1e3 * (time.process_time() - began))
        began = time.process_time()
        assert epochs.digest
        digests.append(1e3 * (time.process_time() - began))
    bench.keep(
        {
            "scopes": options.scopes,
            "snapshot_bytes": int(size_bytes),
            "bytes_each": round(size_bytes / options.scopes, 1),
            "lookup_us": _figures(took),
            "lookup_of_none_raised_us": _figures(empty),
            "add_one_raise_ms": round(statistics.median(added), 2),
            "digest_ms": round(statistics.median(digests), 2),
        },
        show=True,
    )


def times_where_nothing_was_raised(lookups: int) -> list[float]:
    """Microseconds of each look-up."""
    known = KnownEpochs(EraseEpochs(), EpochTags(_KEY))
    took = []
    for number in range(lookups):
        began = time.process_time_ns()
        known.of(*subject(number))
        took.append((time.process_time_ns() - began) / 1e3)
    return took


def _figures(took: list[float]) -> dict[str, float]:
    return {"p50": round(took[len(took) // 2], 2), "p99": round(took[len(took) * 99 // 100], 2)}


if __name__ == "__main__":
    main()
