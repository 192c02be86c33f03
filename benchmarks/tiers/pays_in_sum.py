"""Whether stores that are said to pay do: what their restores saved less what they took, over thousands of decisions.

    python benchmarks/tiers/pays_in_sum.py [--decisions 2500] [--json FILE]

- A prefix leaves the device and `TierLink` decides whether to store it. Whether it comes back is drawn. One that does
  is restored or computed, as `TierLink` decides. Of the restores that it would make, a random 5 % are computed as
  control.
- `host`: real bytes are encrypted into host memory and back. `store with a delay`: the same behind a wait with a heavy
  tail. Computing is real as well: matrix products for each token.
- `saved` is the control's time a token, times the tokens that were restored, less what the restores took. `spent` is
  what the stores took. Both are of stores that were said to pay; the interval is of 2,000 bootstrap samples.
- `computing` is what all prefixes take to compute. A store pays where the interval is above 0. One that breaks even
  cannot: there the sum stays within 3 % of `computing`, either way.
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvcustody.governance.tiers.tier_link import TierLink

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "harness"))

from bench import Bench

TOKEN_BYTES, BLOCK_TOKENS = 8 << 10, 16
CONTROL_SHARE, COMES_BACK, SAMPLES = 0.05, 0.5, 2_000
EVEN_SHARE = 0.03
KNOWN = 64  # prefixes that are computed before, so that the time of computing is known


class Times(Protocol):
    """What one prefix takes, in microseconds: measured, or drawn."""

    def compute_us(self, tokens: int) -> float: ...

    def store_us(self, tokens: int) -> float: ...

    def restore_us(self, tokens: int) -> float: ...


class InSum(NamedTuple):
    """Decisions, those said to pay, the controls; saved less spent and its 95 % interval; computing (microseconds)."""

    decisions: int
    paying: int
    controls: int
    saved_us: float
    spent_us: float
    low_us: float
    high_us: float
    computing_us: float

    @property
    def pays(self) -> bool:
        """Saved less spent is above 0 with 95 % confidence."""
        return self.low_us > 0

    @property
    def breaks_even(self) -> bool:
        """Whatever was stored made no difference that counts."""
        return abs(self.saved_us - self.spent_us) <= EVEN_SHARE * self.computing_us


class _Stored(NamedTuple):
    """A store that was said to pay: what it took, and what became of it."""

    spent_us: float
    restored_tokens: int
    restore_us: float


def experiment(times: Times, decisions: int, seed: int) -> InSum:
    """So many stores are decided about; the seed draws prefixes, who comes back, and the control."""
    drawn, link = random.Random(seed), TierLink()
    computed = [(tokens, times.compute_us(tokens)) for tokens in (_tokens(drawn) for _ in range(KNOWN))]
    known_us, known_tokens = sum(us for _, us in computed), sum(tokens for tokens, _ in computed)
    paying, controls = list[_Stored](), list[tuple[int, float]]()
    all_tokens = 0
    for number in range(decisions):
        tokens = _tokens(drawn)
        all_tokens += tokens
        size, blocks, recompute_us = (
            tokens * TOKEN_BYTES,
            tokens // BLOCK_TOKENS,
            known_us / known_tokens * tokens,
        )
        choice = link.choose_store(size, recompute_us)
        spent_us = 0.0
        if choice.moves:
            spent_us = times.store_us(tokens)
            link.stored(size, blocks, int(spent_us))
        restored, restore_us = 0, 0.0
        if choice.moves and drawn.random() < COMES_BACK:
            is_control = drawn.random() < CONTROL_SHARE
            if link.choose_restore(size, recompute_us, number * 1_000_000, looks=True).moves and not is_control:
                restored, restore_us = tokens, times.restore_us(tokens)
                link.restored(size, blocks, int(restore_us), asked=blocks)
            elif is_control:
                controls.append((tokens, times.compute_us(tokens)))
                known_tokens, known_us = known_tokens + tokens, known_us + controls[-1][1]
        if choice.reason == "pays":
            paying.append(_Stored(spent_us, restored, restore_us))
    return _summed(paying, controls, decisions, known_us / known_tokens * all_tokens, seed)


def _tokens(drawn: random.Random) -> int:
    return BLOCK_TOKENS * drawn.randint(1, 32)


def _summed(
    paying: list[_Stored],
    controls: list[tuple[int, float]],
    decisions: int,
    computing_us: float,
    seed: int,
) -> InSum:
    if not paying or not controls:
        return InSum(decisions, len(paying), len(controls), 0.0, 0.0, 0.0, 0.0, computing_us)
    stored, control = np.array(paying, np.float64), np.array(controls, np.float64)
    rate = control[:, 1].sum() / control[:, 0].sum()
    saved = rate * stored[:, 1] - stored[:, 2]
    resample, sums = np.random.default_rng(seed), np.empty(SAMPLES)
    for place in range(SAMPLES):
        again = control[resample.integers(len(control), size=len(control))]
        some = stored[resample.integers(len(stored), size=len(stored))]
        drawn_rate = again[:, 1].sum() / again[:, 0].sum()
        sums[place] = (drawn_rate * some[:, 1] - some[:, 2] - some[:, 0]).sum()
    low, high = np.percentile(sums, (2.5, 97.5)).tolist()
    spent_us = float(stored[:, 0].sum())
    return InSum(decisions, len(paying), len(controls), float(saved.sum()), spent_us, low, high, computing_us)


class HostTier:
    """Real computing and real encryption into host memory; `delay_us` is waited for, with a heavy tail, each time."""

    def __init__(self, delay_us: float = 0.0) -> None:
        self._delay_us, self._drawn = delay_us, random.Random(1)
        self._key, self._cell = AESGCM(os.urandom(16)), b""
        self._weights = np.random.default_rng(0).standard_normal((512, 512), np.float32)
        self._plain = os.urandom(32 * BLOCK_TOKENS * TOKEN_BYTES)

    def compute_us(self, tokens: int) -> float:
        begun = time.perf_counter()
        hidden = np.ones((tokens, 512), np.float32)
        for _ in range(4):
            hidden = np.tanh(hidden @ self._weights)
        return (time.perf_counter() - begun) * 1e6

    def store_us(self, tokens: int) -> float:
        begun = time.perf_counter()
        self._cell = self._key.encrypt(bytes(12), self._plain[: tokens * TOKEN_BYTES], None)
        self._wait()
        return (time.perf_counter() - begun) * 1e6

    def restore_us(self, tokens: int) -> float:
        begun = time.perf_counter()
        self._key.decrypt(bytes(12), self._cell, None)
        self._wait()
        return (time.perf_counter() - begun) * 1e6

    def _wait(self) -> None:
        if self._delay_us:
            time.sleep(self._delay_us * self._drawn.lognormvariate(0, 1) / 1e6)


def main() -> int:
    bench = Bench(__doc__, strict=True)
    bench.add("--decisions", type=int, default=2_500)
    bench.add("--delays-us", type=float, nargs="+", default=[300.0, 1_000.0, 3_000.0, 10_000.0])
    options = bench.parse()
    figures: dict[str, object] = {}
    met = True
    for delay_us in (0.0, *options.delays_us):
        name = f"store with a delay of {delay_us:g} us" if delay_us else "host"
        summed = experiment(HostTier(delay_us), options.decisions, seed=48)
        verdict = "pays" if summed.pays else "breaks even" if summed.breaks_even else "costs"
        figures[name] = summed._asdict() | {"verdict": verdict}
        met = met and (summed.pays or (summed.breaks_even and delay_us > 0))
        print(
            f"{name}: {summed.decisions:,} decisions, {summed.paying:,} said to pay, {summed.controls} controls: saved "
            f"{summed.saved_us / 1e6:.2f} s, spent {summed.spent_us / 1e6:.2f} s, saved less spent 95 % within "
            f"{summed.low_us / 1e6:.2f} to {summed.high_us / 1e6:.2f} s, computing {summed.computing_us / 1e6:.1f} s: "
            f"{verdict}",
            flush=True,
        )
    bench.keep(figures)
    return bench.status(met)


if __name__ == "__main__":
    sys.exit(main())
