"""What the ledger's trees cost: hashing, appending, proving among ten million leaves, verifying an export of a million.

Processor time of the thread is given beside wall time: the first is a property of the code, the second also of what
else the machine does. Run: `python benchmarks/evidence/proofs.py [--leaves 10000000] [--export 1000000]`.
"""

from __future__ import annotations

import os
import random
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvcustody.audit.leaf.merkle import EMPTY, Frontier, TreeHead, leaf_hashes, parents
from kvcustody.audit.tlog.proofs import (
    TILE_WIDTH,
    check_inclusion,
    consistency_proof,
    inclusion_proof,
    tile_width,
)
from kvcustody.audit.tlog.root_log import root_checkpoint, seal
from kvcustody.audit.tlog.signed_note import KeyKind
from kvcustody.audit.tlog.signing_key import SigningKey, sign_checkpoint
from kvcustody.audit.tlog.tiles import CHECKPOINT, write_export
from kvcustody.audit.verify.verify_tiles import verify_export

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "harness"))

from bench import Bench

LEAF_BYTES = 300


def best(rounds: int, work: Callable[[], Any]) -> float:
    """The least processor time, in seconds, that `work` took."""
    found = []
    for _ in range(rounds):
        before = time.thread_time()
        work()
        found.append(time.thread_time() - before)
    return min(found)


def hashing() -> dict[str, float]:
    leaves = [os.urandom(LEAF_BYTES) for _ in range(10_000)]
    hashes = leaf_hashes(leaves)
    start = EMPTY.extend(hashes[:777]).frontier
    batch, few = hashes[:1000], hashes[:10]
    leaf, node = best(30, lambda: leaf_hashes(leaves)) / 10_000, best(30, lambda: parents(hashes)) / 5_000
    return {
        "leaf_hashes_per_s": round(1 / leaf),
        "leaf_hash_ns": round(leaf * 1e9),
        "node_hash_ns": round(node * 1e9),
        "batch_1000_leaf_hashes_us": round(leaf * 1e9),
        "batch_1000_node_hashes_us": round(node * 1e9),
        "batch_1000_extend_us": round(best(100, lambda: start.extend(batch)) * 1e6),
        "batch_10_extend_us": round(best(1000, lambda: start.extend(few)) * 1e6, 1),
        "root_us": round(best(1000, start.root) * 1e6, 1),
        "frontier_to_and_from_bytes_us": round(best(1000, lambda: Frontier.from_bytes(start.to_bytes())) * 1e6, 1),
    }


def committing(logs: int) -> dict[str, float]:
    """All that trees add to a batch of 1,000 leaves over so many sub-logs, short of storing and signing."""
    leaves = [os.urandom(LEAF_BYTES) for _ in range(1000)]
    frontiers = {
        f"tenant/{number}": EMPTY.extend(leaf_hashes(leaves[: 777 + number])).frontier for number in range(logs)
    }
    root = EMPTY.extend(leaf_hashes(leaves[:500])).frontier

    def batch() -> None:
        heads = {}
        for number, (name, frontier) in enumerate(frontiers.items()):
            grown = frontier.extend(leaf_hashes(leaves[number::logs])).frontier
            heads[name] = grown.head()
            grown.to_bytes(heads[name].root)
        root.extend(leaf_hashes(opening.commitment() for opening in seal(heads))).frontier.to_bytes()

    return {
        "us": round(best(300, batch) * 1e6),
        "of_which_leaf_hashes_us": round(best(100, lambda: leaf_hashes(leaves)) * 1e6),
    }


def signing() -> dict[str, float]:
    figures = {}
    checkpoint = root_checkpoint("ledger.example/root", EMPTY.extend(leaf_hashes([b"x"])).frontier.head())
    for kind in (KeyKind.ED25519, KeyKind.ML_DSA_44):
        key = SigningKey.generate("ledger.example/root", kind)
        cost = best(20, lambda key=key: sign_checkpoint(checkpoint, [key]))  # type: ignore[misc]
        figures[f"sign_{kind.name.lower()}_us"] = round(cost * 1e6)
    return figures


class SqliteTiles:
    """Tiles as rows, as a ledger keeps them."""

    def __init__(self, path: Path) -> None:
        self.database = sqlite3.connect(path, isolation_level=None)
        self.database.execute("PRAGMA journal_mode=OFF")
        self.database.execute(
            "CREATE TABLE tiles (level INT, idx INT, hashes BLOB, PRIMARY KEY (level, idx)) WITHOUT ROWID"
        )

    def tile(self, level: int, index: int, width: int) -> bytes:
        row = self.database.execute("SELECT hashes FROM tiles WHERE level = ? AND idx = ?", (level, index)).fetchone()
        return bytes(row[0])[: 32 * width]

    def fill(self, size: int) -> bytes:
        """Tiles of a tree whose leaves are numbers; the root."""
        frontier, rows, batch = EMPTY, {}, 64 * TILE_WIDTH
        self.database.execute("BEGIN")
        for start in range(0, size, batch):
            hashes = leaf_hashes(b"%d" % number for number in range(start, min(size, start + batch)))
            frontier, grown = frontier.extend(hashes)
            for level, first, made in ((0, start, hashes), *grown):
                row = rows.setdefault(level, [])
                row += made
                index = (first + len(made) - len(row)) // TILE_WIDTH
                while len(row) >= TILE_WIDTH:
                    self._put(level, index, row[:TILE_WIDTH])
                    del row[:TILE_WIDTH]
                    index += 1
        for level, row in rows.items():
            if row:
                index = (size >> 8 * level) // TILE_WIDTH
                assert len(row) == tile_width(size, level, index)
                self._put(level, index, row)
        self.database.execute("COMMIT")
        return frontier.root()

    def _put(self, level: int, index: int, hashes: list[bytes]) -> None:
        self.database.execute("INSERT INTO tiles VALUES (?, ?, ?)", (level, index, b"".join(hashes)))


def proving(folder: Path, size: int) -> dict[str, float]:
    tiles = SqliteTiles(folder / "tiles.db")
    head = TreeHead(size, tiles.fill(size))
    chance = random.Random(1)
    times: dict[str, list[float]] = {"inclusion": [], "inclusion_wall": [], "consistency": [], "check": []}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        before, wall = time.thread_time(), time.perf_counter()
        made = work()
        times[name].append((time.thread_time() - before) * 1e3)
        if name == "inclusion":
            times["inclusion_wall"].append((time.perf_counter() - wall) * 1e3)
        return made

    for _ in range(500):
        index = chance.randrange(size)
        leaf = leaf_hashes([b"%d" % index])[0]
        path = timed("inclusion", lambda index=index: inclusion_proof(tiles, index, size))
        timed("check", lambda leaf=leaf, index=index, path=path: check_inclusion(leaf, index, head, path))
        timed("consistency", lambda index=index: consistency_proof(tiles, index + 1, size))
    return {
        f"{name}_ms_{label}": round(sorted(spent)[at], 3)
        for name, spent in times.items()
        for label, at in (("median", 250), ("p99", 495))
    }


def exporting(folder: Path, size: int) -> dict[str, float]:
    filler = "x" * LEAF_BYTES

    def leaves() -> Iterator[bytes]:
        return (
            (b'{"at_us":%d,"filler":"' % number + filler.encode())[: LEAF_BYTES - 2] + b'"}' for number in range(size)
        )

    frontier = EMPTY
    encoded = list(leaves())
    frontier = frontier.extend(leaf_hashes(encoded)).frontier
    key = SigningKey.generate("ledger.example/root")
    note = sign_checkpoint(root_checkpoint(key.name, frontier.head()), [key])
    before, wall = time.process_time(), time.perf_counter()
    write_export(folder / "log", encoded, frontier.head(), {CHECKPOINT: note}, durable=False)
    wrote, wrote_wall = time.process_time() - before, time.perf_counter() - wall
    del encoded
    before, wall = time.process_time(), time.perf_counter()
    report = verify_export(folder / "log", str(key.verifier))
    assert report.ok, report.problems
    return {
        "write_cpu_s": round(wrote, 1),
        "write_wall_s": round(wrote_wall, 1),
        "verify_cpu_s": round(time.process_time() - before, 1),
        "verify_wall_s": round(time.perf_counter() - wall, 1),
    }


def main() -> None:
    bench = Bench(__doc__, "kvcustody", "cryptography")
    bench.add("--leaves", type=int, default=10_000_000)
    bench.add("--export", type=int, default=1_000_000)
    given = bench.parse()
    with tempfile.TemporaryDirectory() as folder:
        found: dict[str, Any] = {"leaf_bytes": LEAF_BYTES, "hashing": hashing(), "signing": signing()}
        found |= {f"batch_1000_over_{logs}_logs": committing(logs) for logs in (1, 32, 250)}
        found[f"proofs_among_{given.leaves}_leaves"] = proving(Path(folder), given.leaves)
        found[f"export_of_{given.export}_leaves"] = exporting(Path(folder), given.export)
    bench.keep(found, show=True)


if __name__ == "__main__":
    main()
