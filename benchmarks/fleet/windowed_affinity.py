"""What a window's end costs: cached tokens that a trace finds where names are windowed tokens, by the window's length.

    python benchmarks/fleet/windowed_affinity.py TRACE --json benchmarks/results/windowed-affinity-NAME.json

1. Each session of a recorded trace in Mooncake's form is a subject. A router that knows prompts by their salt sends a
   request to the worker that has had the longest part of it under this salt, and to the one with the fewest requests
   where none has.
2. Each worker's cache is a model: blocks of a subject, which end when they were idle for `--idle-minutes`. It knows
   subjects, not salts: what a window's end loses is the way to the worker that has the blocks.
3. A salt changes where a window ends; the control has one that never does. Windows begin at `--phases` moments.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from pathlib import Path
from statistics import mean
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "harness"))

from bench import Bench

from kvcustody.lab.replay.traces.model import TraceRequest
from kvcustody.lab.replay.traces.readers import open_trace
from kvcustody.times import MINUTE_US

WINDOWS_MINUTES: Final = (1, 2, 5, 10, 20, 30, 60)


class Fleet:
    """A router by salts, and the caches of its workers."""

    def __init__(self, workers: int, idle_us: int) -> None:
        self._idle_us = idle_us
        self._used_us: list[dict[tuple[object, int], int]] = [{} for _ in range(workers)]
        self._requests = Counter(dict.fromkeys(range(workers), 0))
        self._sent: defaultdict[tuple[object, int], dict[int, set[int]]] = defaultdict(dict)
        self.found_tokens = 0

    def ask(self, request: TraceRequest, window: int, block_tokens: int) -> None:
        """Place a request, and count what its worker has of it."""
        blocks, subject = request.blocks.tolist(), request.session
        known = self._sent[subject, window]
        worker = self._longest(known, blocks)
        if worker is None:
            worker = min(self._requests, key=lambda each: (self._requests[each], each))
        self._requests[worker] += 1
        for block in blocks:
            known.setdefault(block, set()).add(worker)
        used, hit = self._used_us[worker], 0
        while hit < len(blocks):
            if request.at_us - used.get((subject, blocks[hit]), -self._idle_us - 1) > self._idle_us:
                break
            hit += 1
        used.update(((subject, block), request.at_us) for block in blocks)
        self.found_tokens += min(hit * block_tokens, request.input_tokens)

    @staticmethod
    def _longest(known: dict[int, set[int]], blocks: list[int]) -> int | None:
        having: set[int] = set()
        for place, block in enumerate(blocks):
            more = known.get(block, set()) if place == 0 else having & known.get(block, set())
            if not more:
                break
            having = more
        return min(having, default=None)


def found_tokens(
    trace: list[TraceRequest], block_tokens: int, workers: int, idle_us: int, window_us: int, phase_us: int
) -> int:
    """Cached tokens of the whole trace; `window_us` 0: salts never change."""
    fleet = Fleet(workers, idle_us)
    for request in trace:
        window = (request.at_us + phase_us) // window_us if window_us else 0
        fleet.ask(request, window, block_tokens)
    return fleet.found_tokens


def measure(path: Path, workers: int, idle_minutes: int, phases: int) -> dict[str, Any]:
    """Shares of the control's cached tokens, by the window's length."""
    opened = open_trace(path, "mooncake")
    trace = list(opened)
    block_tokens, idle_us = opened.block_tokens, idle_minutes * MINUTE_US
    whole = found_tokens(trace, block_tokens, workers, idle_us, 0, 0)
    kept = {}
    for minutes in WINDOWS_MINUTES:
        window_us = minutes * MINUTE_US
        shares = [
            found_tokens(trace, block_tokens, workers, idle_us, window_us, window_us * phase // phases) / whole
            for phase in range(phases)
        ]
        kept[str(minutes)] = {"kept": round(mean(shares), 4), "least": round(min(shares), 4)}
    return {
        "trace": path.name.partition(".")[0],
        "workers": workers,
        "idle_minutes": idle_minutes,
        "requests": len(trace),
        "minutes": round((trace[-1].at_us - trace[0].at_us) / MINUTE_US, 1),
        "cached share of the control": round(whole / sum(each.input_tokens for each in trace), 4),
        "by window in minutes": kept,
    }


def main() -> None:
    """Print one JSON object."""
    bench = Bench(__doc__)
    bench.add("trace", type=Path)
    bench.add("--workers", type=int, default=4)
    bench.add("--idle-minutes", type=int, default=10)
    bench.add("--phases", type=int, default=5, help="moments at which windows begin (default: %(default)s)")
    options = bench.parse()
    bench.keep(measure(options.trace, options.workers, options.idle_minutes, options.phases), show=True)


if __name__ == "__main__":
    main()
