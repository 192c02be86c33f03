"""Checksums of what is reused: how many flipped bits are found at each level, and what it costs.

    python benchmarks/device/integrity.py [--flips 10000] [--clean 10000] [--rounds 9] [--json FILE]

- `detection`: a bit of a cached prefix is flipped, then the prefix is looked up; the flip is found where the hit ends
  before it. At `all` every one has to be, at `1/n` one in n within five standard deviations, at `none` none; look-ups
  of what nobody changed must raise no alarm at any level.
- `speed`: GB/s of a checksum, of a read-back after a scrub, a scrub and a copy of the same scattered blocks, in turns.
- `requests`: microseconds of a look-up and of a publication by the share that is compared, in turns.
"""

from __future__ import annotations

import hashlib
import statistics
import sys
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvcustody.allocator.manager.block_manager import BlockManager
from kvcustody.allocator.pool.options import PoolOptions
from kvcustody.allocator.pool.tensor_memory import TensorMemory, TensorSpec
from kvcustody.allocator.prefix.longest_prefix import Chain, Prompt, ReadPlan
from kvcustody.allocator.prefix.sequence import RunningSequence
from kvcustody.kernels.checksum import ChecksumKeys, checksum
from kvcustody.kernels.copy import copy
from kvcustody.kernels.scrub import scrub
from kvcustody.kernels.segment import SegmentTable
from kvcustody.kernels.verify import verify

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "harness"))

from bench import Bench, alternate

TOKENS = 16
LEVELS = ("all", "1/8", "1/64", "none")
PIECES = (4 << 10, 32 << 10, 64 << 10, 2 << 20)
SMALL = TensorSpec(layers=2, kv_heads=1, head_dim=8, block_tokens=TOKENS)
LARGE = TensorSpec(layers=4, kv_heads=8, head_dim=128, block_tokens=TOKENS)
FLIPS_A_POOL = 64  # a block that is found changed twice is withheld: pools are used up


def share_of(level: str) -> float:
    return 1.0 if level == "all" else 0.0 if level == "none" else float(Fraction(level))


class Cache:
    """One pool with one domain, and prompts of whole blocks in it."""

    def __init__(self, blocks: int, spec: TensorSpec, share: float) -> None:
        self.memory = TensorMemory.allocate(blocks, spec)
        self.manager = BlockManager(self.memory, blocks, PoolOptions(block_tokens=TOKENS, evict_ahead=1))
        self.manager.boot()
        account = self.manager.account("a")
        self.domain = self.manager.domain(account, integrity_share=share)
        state = hashlib.blake2b(key=b"k" * 32, digest_size=32)
        self.plan = ReadPlan(Chain(self.domain, state))
        self.manager.pool.keep_sums()

    def prompt(self, seed: int, blocks: int) -> Prompt:
        tokens = np.random.default_rng(seed).integers(0, 1 << 20, blocks * TOKENS + 1).astype(np.int32)
        return Prompt(tokens.tobytes(), len(tokens), blocks, blocks, 4 * TOKENS, {})

    def begin(self, prompt: Prompt) -> RunningSequence:
        manager, account = self.manager, self.domain.owner
        residency = manager.residency(account, self.domain, "p", None, 1)
        found = manager.match_prefix(self.plan, prompt, 1)
        sequence = manager.allocate(object(), found, prompt, residency, 1)
        assert isinstance(sequence, RunningSequence), sequence
        return sequence

    def fill(self, prompt: Prompt) -> np.ndarray:
        """Serve the prompt once; the blocks that hold it from now on."""
        sequence = self.begin(prompt)
        blocks = sequence.blocks[: prompt.whole].copy()
        for block in blocks[sequence.hit_blocks :].tolist():
            self.memory.fill(np.array([block]), 1 + block % 250)
        self.manager.commit(sequence, prompt.tokens, 1)
        self.manager.release(sequence, 1, "finished")
        return blocks

    def hit(self, prompt: Prompt) -> int:
        return self.manager.match_prefix(self.plan, prompt, 1).hit_blocks

    def flip(self, block: int, bit: int) -> None:
        words = self.memory.tables[0].words
        for piece in words:
            row = piece.view(torch.uint8)[block]
            if bit < 8 * len(row):
                row[bit // 8] ^= 1 << bit % 8
                return
            bit -= 8 * len(row)
        raise AssertionError("no such bit")


def detection(level: str, flips: int, clean: int) -> dict[str, Any]:
    """Flips that were found, and alarms that nothing had caused."""
    share, random = share_of(level), np.random.default_rng(11)
    length, detected, done = 8, 0, 0
    while done < flips:
        cache = Cache(256, SMALL, share)
        prompt = cache.prompt(done, length)
        for _ in range(min(FLIPS_A_POOL, flips - done)):
            blocks = cache.fill(prompt)
            at, bit = int(random.integers(length)), int(random.integers(8 * SMALL.bytes_per_block))
            cache.flip(int(blocks[at]), bit)
            hit = cache.hit(prompt)
            assert hit in (at, length), (hit, at)
            detected += hit == at
            if hit == length:
                cache.flip(int(blocks[at]), bit)  # as it was
            done += 1
    cache = Cache(256, SMALL, share)
    prompt = cache.prompt(1, length)
    cache.fill(prompt)
    alarms = sum(cache.hit(prompt) != length for _ in range(clean))
    deviation = (flips * share * (1 - share)) ** 0.5
    as_stated = abs(detected - flips * share) <= 5 * deviation and alarms == 0
    return {
        "verify": level,
        "flips": flips,
        "found": detected,
        "expected": flips * share,
        "clean": clean,
        "alarms": alarms,
        "as_stated": as_stated,
    }


def speed(piece: int, mib: int, rounds: int) -> dict[str, Any]:
    """GB/s over the same scattered blocks; the best of the rounds."""
    layers = 4
    listed = max(4, (mib << 20) // (piece * layers))
    tensors = [torch.randint(0, 255, (2 * listed, piece), dtype=torch.uint8) for _ in range(layers)]
    table = SegmentTable.from_tensors(tensors)
    keys = ChecksumKeys(table)
    order = np.random.default_rng(1).permutation(2 * listed)
    blocks, rest = order[:listed], order[listed:]
    flat = torch.zeros(listed * table.bytes_per_block, dtype=torch.uint8)
    other = torch.zeros_like(flat)

    def timed(work: Any) -> Any:
        def one() -> float:
            start = time.perf_counter()
            work()
            return time.perf_counter() - start

        return one

    sides = {
        "checksum": timed(lambda: checksum(table, keys, blocks)),
        "verify": timed(lambda: verify(table, blocks)),
        "copy": timed(lambda: copy(table, blocks, rest)),
        "memcpy": timed(lambda: other.copy_(flat)),
        "scrub": timed(lambda: scrub(table, rest)),
    }
    taken = alternate(sides, rounds, warm=1)
    rates = {name: len(flat) / min(times) / 1e9 for name, times in taken.items()}
    return {"piece": piece, "blocks": listed, "bytes_per_block": table.bytes_per_block, "gbps": rates}


def requests(rounds: int, length: int) -> dict[str, Any]:
    """Microseconds of a look-up that hits `length` blocks, and of a commit that publishes as many, by share."""
    sides: dict[str, Any] = {}
    for level in LEVELS:
        cache = Cache(4 * length, LARGE, share_of(level))
        warm = cache.prompt(0, length)
        cache.fill(warm)
        numbers = iter(range(1, 10_000))

        def one(cache: Cache = cache, warm: Prompt = warm, numbers: Any = numbers) -> tuple[float, float]:
            start = time.perf_counter()
            assert cache.hit(warm) == length
            looked_up = time.perf_counter() - start
            sequence = cache.begin(cache.prompt(next(numbers), length))
            start = time.perf_counter()
            cache.manager.commit(sequence, length * TOKENS + 1, 1)
            published = time.perf_counter() - start
            cache.manager.release(sequence, 1, "finished")
            cache.manager.tree.lapse(sequence.residency, "expired", 1)
            cache.manager.tree.flush(1)
            return looked_up * 1e6, published * 1e6

        sides[level] = one
    taken = alternate(sides, rounds, warm=1)
    return {
        "blocks": length,
        "bytes_per_block": LARGE.bytes_per_block,
        "microseconds": {
            level: {
                "look_up": statistics.median(one[0] for one in times),
                "publish": statistics.median(one[1] for one in times),
            }
            for level, times in taken.items()
        },
    }


def main() -> int:
    bench = Bench(__doc__, "kvcustody", "torch", "numpy", rounds=9, strict=True)
    bench.add("--flips", type=int, default=10_000, help="at each level (default: %(default)s)")
    bench.add("--clean", type=int, default=10_000, help="look-ups of what nobody changed (default: %(default)s)")
    bench.add("--mib", type=int, default=64, help="bytes of each point of `speed`, MiB")
    options = bench.parse()
    detections = [detection(level, options.flips, options.clean) for level in LEVELS]
    for one in detections:
        print(
            f"verify {one['verify']:5} {one['found']:>6} of {one['flips']} flips found, "
            f"{one['expected']:.0f} expected; "
            f"{one['alarms']} alarms in {one['clean']} clean look-ups"
        )
    points = [speed(piece, options.mib, options.rounds) for piece in PIECES]
    for point in points:
        rates = "  ".join(f"{name} {rate:.1f}" for name, rate in point["gbps"].items())
        print(f"{point['piece'] >> 10:>5} KiB pieces, GB/s: {rates}")
    served = requests(options.rounds, 32)
    for level, times in served["microseconds"].items():
        print(
            f"verify {level:5} look-up {times['look_up']:>8.0f} us, publication {times['publish']:>8.0f} us "
            f"of {served['blocks']} blocks of {served['bytes_per_block'] >> 10} KiB"
        )
    bench.keep({"detection": detections, "speed": points, "requests": served})
    return bench.status(all(one["as_stated"] for one in detections))


if __name__ == "__main__":
    sys.exit(main())
