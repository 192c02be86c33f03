"""What the ledger costs an engine: requests a second with the real ledger and with one that only counts, in pairs.

A generated trace of conversations (prefixes shared by turns and system prompts) goes through the whole Governor: admit,
commit, release, step. `steps_of_ms` is how long the engine waits for its accelerator in each of its steps, with eight
requests a step: 0 is a loop that does nothing but bookkeeping, the worst that can happen and no engine; 20 is a large
model's. While it waits, the interpreter is free, as in an engine that waits for its device. The ledger is a SQLite file
with synchronous=FULL; its thread may still be writing when the last request ends: `behind_at_the_end` says how much.
Rounds alternate; the loss is the median over pairs of rounds, and each figure has its pairs beside it.
Run: `python benchmarks/evidence/ledger_cost.py [--pairs 9] [--conversations 150] [--out FILE]`.
"""

from __future__ import annotations

import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from numpy.typing import NDArray

from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.write.event_writer import EventWriter
from kvcustody.clock import SystemClock
from kvcustody.governance.ledger_protocol import CountingLedger, Ledger
from kvcustody.lab.replay.traces.token_ids import expand
from kvcustody.lab.replay.workload.generator import WorkloadSpec, generate
from kvcustody.migrations.upgrade import upgrade

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "harness"))

from bench import Bench, alternate
from governed import govern, principal, serve

BLOCK_TOKENS = 16
POOL_BLOCKS = 1 << 14
REQUESTS_A_STEP = 8
Prompt = NDArray[Any]


class Ran(NamedTuple):
    """One replay: requests a second, processor time of the engine's thread a request, events, and those unwritten."""

    per_s: float
    engine_us: float
    events: int
    behind: int


def prompts(conversations: int) -> list[Prompt]:
    """Token ids of every request of the trace, in order."""
    made = generate(WorkloadSpec(conversations=conversations, tenants=1, block_tokens=BLOCK_TOKENS))
    return [expand(request.blocks, BLOCK_TOKENS) for request in made.requests]


def replay(trace: Sequence[Prompt], ledger: Ledger, step_ms: float) -> tuple[float, float]:
    """Seconds by the clock and of the engine's thread."""
    governor = govern(POOL_BLOCKS, BLOCK_TOKENS, ledger)
    who = principal("reader")
    serve(governor, who, trace[0])
    gc.collect()
    gc.freeze()
    start, busy = time.perf_counter(), time.thread_time()
    for number, tokens in enumerate(trace, 1):
        serve(governor, who, tokens)
        if step_ms and number % REQUESTS_A_STEP == 0:
            time.sleep(step_ms / 1e3)
    spent = time.perf_counter() - start, time.thread_time() - busy
    gc.unfreeze()
    return spent


def with_ledger(trace: Sequence[Prompt], step_ms: float) -> Ran:
    """The trace with the real writer."""
    with tempfile.TemporaryDirectory() as folder:
        engine = open_store(Path(folder) / "ledger.db")
        upgrade(engine)
        writer = EventWriter(
            engine,
            worker="cost",
            clock=SystemClock(),
            spill_directory=Path(folder) / "spill",
            clear_names=True,
        )
        wall, busy = replay(trace, writer, step_ms)
        status = writer.status()
        assert writer.flush(120)
        writer.close(120)
        engine.dispose()
    left = status.submitted_sequence - status.durable_sequence
    return Ran(len(trace) / wall, busy / len(trace) * 1e6, status.submitted_sequence, left)


def without(trace: Sequence[Prompt], step_ms: float) -> Ran:
    """The trace with a ledger that counts."""
    ledger = CountingLedger()
    wall, busy = replay(trace, ledger, step_ms)
    return Ran(len(trace) / wall, busy / len(trace) * 1e6, sum(ledger.counts.values()), 0)


def compared(trace: Sequence[Prompt], step_ms: float, pairs: int) -> dict[str, Any]:
    """The loss of throughput with the ledger on; negative where the pair says that it was faster."""
    sides = {side.__name__: partial(side, trace, step_ms) for side in (with_ledger, without)}
    on, off = alternate(sides, pairs).values()
    losses = [1 - one.per_s / other.per_s for one, other in zip(on, off, strict=True)]
    return {
        "loss_percent": round(statistics.median(losses) * 100, 2),
        "pairs_percent": [round(loss * 100, 1) for loss in losses],
        "requests_per_s_on": round(statistics.median(ran.per_s for ran in on), 1),
        "requests_per_s_off": round(statistics.median(ran.per_s for ran in off), 1),
        "engine_thread_us_on": round(min(ran.engine_us for ran in on), 1),
        "engine_thread_us_off": round(min(ran.engine_us for ran in off), 1),
        "events_a_request": round(on[0].events / len(trace), 2),
        "behind_at_the_end": max(ran.behind for ran in on),
    }


def main() -> None:
    """Print one JSON object."""
    bench = Bench(__doc__, "SQLAlchemy", "orjson", "numpy", facts="hardware")
    bench.add("--pairs", type=int, default=9)
    bench.add("--conversations", type=int, default=150)
    bench.add("--steps-ms", type=float, nargs="+", default=[0.0, 20.0])
    options = bench.parse()
    trace = prompts(options.conversations)
    figures: dict[str, Any] = {
        "requests": len(trace),
        "requests_a_step": REQUESTS_A_STEP,
        "steps_of_ms": {f"{step_ms:g}": compared(trace, step_ms, options.pairs) for step_ms in options.steps_ms},
    }
    bench.keep(figures, show=True)


if __name__ == "__main__":
    main()
