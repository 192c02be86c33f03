"""How long orphan scans take: a full one over everything, and the slices of an online one beside a working process.

    python benchmarks/scan.py [--residencies 1000000] [--steps 20000] [--json FILE]

Requests of eight tenants go through a whole Governor with its real ledger (a SQLite file), four to a conversation and
each by a person of its own, so that every one leaves a residency that holds its four blocks and those before them.
`--live` more are running when the scan begins: some growing, some finished behind an open fence, some blocks waiting to
be scrubbed. Then `governor.scan_and_recover(WriterJoin(writer))`, as an operator runs it: nodes, holds, index entries,
block tables, fences and queues against each other, and residencies, custody, processes and sequences in the ledger
against the process. `process_cpu_seconds` is the part without the ledger, run by itself (`governor.scan()`).


Online: one slice a step; p50, p99 and the most of `--steps` of them, beside those of as many pieces of fixed work
(`fixed_work_us`): what the machine adds by itself. CPU seconds, since other work on the machine would count otherwise.
Filling the cache takes most of the time: about a millisecond a residency.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcustody.allocator.pool.block_state import BlockState
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.write.event_writer import EventWriter
from kvcustody.clock import SystemClock
from kvcustody.governance.admission_outcome import Admission
from kvcustody.governance.governor.governor import Governor
from kvcustody.governance.identity.principal import Principal, identify
from kvcustody.governance.orphans.ledger_join import WriterJoin
from kvcustody.governance.orphans.online_pool_scan import OnlineScan
from kvcustody.governance.orphans.slices import Budget
from kvcustody.migrations.upgrade import upgrade

sys.path.insert(0, str(Path(__file__).resolve().parent / "harness"))

from bench import Bench
from governed import ISSUER, MODEL, govern, serve

TURNS = 4
BLOCKS_EACH = 4
BLOCK_TOKENS = 16
TENANTS = [f"tenant-{number}" for number in range(8)]
TOKENS_RUNNING = 70
FLUSH_EVERY = 1000  # conversations


def fill(governor: Governor, writer: EventWriter, residencies: int) -> None:
    """Leave so many residencies, each with blocks of its own, and all of it on record."""
    for number, (who, turns) in enumerate(conversations(residencies // TURNS)):
        for turn in range(1, TURNS + 1):
            serve(governor, who(turn), turns[: turn * BLOCKS_EACH * BLOCK_TOKENS])
        if number % FLUSH_EVERY == 0:
            assert writer.flush(120)
    assert writer.flush(120)


def conversations(count: int) -> Iterator[tuple[Callable[[int], Principal], NDArray[np.int32]]]:
    """By conversation, who asks in each turn, and the tokens of all turns."""
    chance = np.random.default_rng(1)
    for number in range(count):
        tenant = TENANTS[number % len(TENANTS)]

        def who(turn: int, tenant: str = tenant, number: int = number) -> Principal:
            return identify(issuer=ISSUER, tenant=tenant, verified={"subject": f"{number}-{turn}"})

        yield who, chance.integers(0, 50_000, TURNS * BLOCKS_EACH * BLOCK_TOKENS, np.int32)


def run_some(governor: Governor, live: int) -> int:
    """`live` requests run and grow, as many more were aborted behind a fence; returns the fence, still open."""
    running: list[object] = []
    for number in range(2 * live):
        tenant = TENANTS[number % len(TENANTS)]
        who = identify(issuer=ISSUER, tenant=tenant, verified={"subject": f"now-{number}"})
        admission = governor.admit(who, MODEL, [50_000 + number] * TOKENS_RUNNING)
        assert isinstance(admission, Admission), admission
        running.append(admission.request_id)
    governor.commit(running, [TOKENS_RUNNING] * len(running))
    governor.extend_many(running, np.arange(len(running), dtype=np.int32))
    fence = governor.fence(running[live:])
    for request in running[live:]:
        governor.abort(request)
    governor.step()
    return fence


def cpu_seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    """Of all threads of this process, with the collector as a process has it."""
    start = time.process_time()
    made = work()
    return time.process_time() - start, made


def slices(governor: Governor, steps: int) -> dict[str, float]:
    """Microseconds a slice, of its own thread's CPU time."""
    running = governor.running
    scan = OnlineScan(governor.managers[0], lambda one: running.get(one.id) is one, Budget())
    gc.collect()
    gc.freeze()
    times = timed(scan.step, steps)
    gc.unfreeze()
    assert scan.take() == []
    return times


def machine(steps: int) -> dict[str, float]:
    """The same of a loop that does a fixed amount of work: what the machine itself adds to a slice's peak."""
    return timed(lambda: sum(range(3000)), steps)


def timed(work: Callable[[], Any], steps: int) -> dict[str, float]:
    """Percentiles in microseconds."""
    times = np.zeros(steps)
    for at in range(steps):
        start = time.thread_time_ns()
        work()
        times[at] = time.thread_time_ns() - start
    p50, p99, p999 = (float(value) / 1000 for value in np.percentile(times, (50, 99, 99.9)))
    return {
        "p50": round(p50, 1),
        "p99": round(p99, 1),
        "p99.9": round(p999, 1),
        "most": round(float(times.max()) / 1000, 1),
        "steps": steps,
    }


def measure(residencies: int, live: int, steps: int, folder: Path) -> dict[str, Any]:
    """Fill, scan, and take slices."""
    engine = open_store(folder / "ledger.db", timeout_seconds=60)
    upgrade(engine)
    writer = EventWriter(engine, worker="scan", clock=SystemClock(), spill_directory=folder / "spill", clear_names=True)
    governor = govern(residencies * BLOCKS_EACH + 16 * live + 8192, BLOCK_TOKENS, writer, tenants=TENANTS)
    fill(governor, writer, residencies)
    fence = run_some(governor, live)
    pool = governor.managers[0].pool
    states = {state.name.lower(): pool.counts[state] for state in BlockState}
    assert states["cached"] >= residencies * BLOCKS_EACH and states["active"] and states["fenced"]
    alone, found = cpu_seconds(governor.scan)
    assert found == []
    full, scanned = cpu_seconds(lambda: governor.scan_and_recover(WriterJoin(writer)))
    assert scanned.findings == () and scanned.residencies >= residencies
    result = {
        "residencies": scanned.residencies - len(governor.running),
        "running": len(governor.running),
        "blocks": states,
        "events": writer.status().durable_sequence,
        "process_cpu_seconds": round(alone, 3),
        "full_cpu_seconds": round(full, 3),
        "full_wall_seconds": round((scanned.ended_us - scanned.started_us) / 1e6, 3),
        "online_us": slices(governor, steps),
        "fixed_work_us": machine(steps),
    }
    governor.retire(fence)
    writer.close(120)
    engine.dispose()
    return result


def main() -> None:
    """Print one JSON object."""
    bench = Bench(__doc__, "numpy", "SQLAlchemy", facts="hardware")
    bench.add("--residencies", type=int, default=1_000_000)
    bench.add("--live", type=int, default=256)
    bench.add("--steps", type=int, default=20_000)
    options = bench.parse()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(options.residencies, options.live, options.steps, Path(folder))
    bench.keep(result, show=True)


if __name__ == "__main__":
    main()
