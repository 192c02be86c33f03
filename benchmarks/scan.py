"""How long orphan scans take: a full one over everything, and the slices of an online one beside a working process.

    python benchmarks/scan.py [--residencies 1000000] [--blocks-each 4] [--steps 20000] [--json FILE]

The pool holds chains of four runs; every run has a residency of its own and `--blocks-each` blocks, so each residency
holds its run and the runs before it. Full: every node, hold, index entry and block against each other (`allocator`),
and the ledger's residencies against the process, from rows of the same number (`ledger`). Online: one slice a step;
p50, p99 and the most of `--steps` of them, beside those of as many pieces of fixed work (`fixed_work_us`): what the
machine adds by itself. CPU seconds, since other work on the machine would count otherwise.
"""

from __future__ import annotations

import argparse
import gc
import json
import secrets
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hardware
import numpy as np

from kvcustody.allocator.manager import BlockManager
from kvcustody.allocator.memory import UnbackedMemory
from kvcustody.allocator.node import NEVER_US, Node
from kvcustody.allocator.pool_options import PoolOptions
from kvcustody.audit.orphans import _residencies
from kvcustody.audit.store import WRITE, open_store
from kvcustody.governance.orphans.online_scan import OnlineScan
from kvcustody.governance.orphans.pool_scan import PoolScan
from kvcustody.governance.orphans.slices import Budget
from kvcustody.migrations.upgrade import upgrade

CHAIN = 4
TENANTS = 8


def build(residencies: int, blocks_each: int) -> BlockManager:
    """A pool in which everything is CACHED."""
    total = residencies * blocks_each
    manager = BlockManager(UnbackedMemory(total, 0), total, PoolOptions())
    manager.boot()
    accounts = [manager.account(f"t{number}") for number in range(TENANTS)]
    domains = [manager.domain(account, idle_us=1 << 50, absolute_us=NEVER_US) for account in accounts]
    per_tenant = residencies // TENANTS // CHAIN * CHAIN
    serial = 0
    for account, domain in zip(accounts, domains, strict=True):
        blocks = manager.pool.hand_out(account.partition, per_tenant * blocks_each, account)
        account.charge_active(len(blocks))
        parent: Node | None = None
        for number in range(per_tenant):
            start = number * blocks_each
            if number % CHAIN == 0:
                parent = None
            run = blocks[start : start + blocks_each]
            keys = secrets.token_bytes(32 * blocks_each)
            depth = 0 if parent is None else parent.start + parent.length
            if parent is not None:
                manager.tree.refer(parent, 1)
                for above in _above(parent):
                    manager.tree.refer(above, 1)
            node = manager.tree.publish(domain, parent, depth, run, keys, 1)
            serial += 1
            hold = manager.residency(account, domain, serial, None, 1)
            manager.tree.release(node, hold, 1, "finished")
            parent = node
    return manager


def _above(node: Node) -> list[Node]:
    found = []
    at = node.parent
    while at is not None:
        found.append(at)
        at = at.parent
    return found


def cpu_seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    gc.collect()
    gc.disable()
    start = time.process_time()
    made = work()
    spent = time.process_time() - start
    gc.enable()
    return spent, made


def ledger(residencies: int, folder: Path) -> float:
    """CPU seconds to find, among so many residencies, the one that was never released."""
    engine = open_store(folder / "ledger.db", timeout_seconds=60)
    upgrade(engine)
    into = "INSERT INTO residencies VALUES (1, ?, 1, ?, 1, 't', NULL, NULL, 0, 'c', 1, 1, 1, 0, 0, 4, 1, 4%s)"
    with engine.connect().execution_options(**WRITE) as connection, connection.begin():
        columns = connection.exec_driver_sql("SELECT count(*) FROM pragma_table_info('residencies')").scalar()
        rows = [(number, number) for number in range(residencies)]
        connection.exec_driver_sql(into % (", ''" * (int(columns or 18) - 18)), rows)
        out = "INSERT INTO releases VALUES (1, ?, 1, ?, 1, 1, 1, 't', 'f', 1, 1, 0, 0, 0, 0)"
        moved = [(residencies + number, number) for number, _ in rows[1:]]
        connection.exec_driver_sql(out, moved)
    with engine.connect() as connection:
        spent, found = cpu_seconds(lambda: _residencies(connection, 1, frozenset()))
    assert len(found[0]) == 1 and not found[1]
    engine.dispose()
    return spent


def slices(manager: BlockManager, steps: int) -> dict[str, float]:
    """Microseconds a slice, of its own thread's CPU time."""
    scan = OnlineScan(manager, lambda sequence: True, Budget())
    gc.collect()
    gc.freeze()
    times = _timed(scan.step, steps)
    gc.unfreeze()
    assert scan.take() == []
    return times


def machine(steps: int) -> dict[str, float]:
    """The same of a loop that does a fixed amount of work: what the machine itself adds to a slice's peak."""
    return _timed(lambda: sum(range(3000)), steps)


def _timed(work: Callable[[], Any], steps: int) -> dict[str, float]:
    times = np.zeros(steps)
    for at in range(steps):
        start = time.thread_time_ns()
        work()
        times[at] = time.thread_time_ns() - start
    p50, p99, p999 = (float(value) / 1000 for value in np.percentile(times, (50, 99, 99.9)))
    return {"p50": p50, "p99": p99, "p99.9": p999, "most": float(times.max()) / 1000, "steps": steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--residencies", type=int, default=1_000_000)
    parser.add_argument("--blocks-each", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    manager = build(options.residencies, options.blocks_each)
    nothing: set[Any] = set()
    full, found = cpu_seconds(lambda: PoolScan(manager, nothing, 2, lambda sequence: None).troubles())
    assert found == []
    online = slices(manager, options.steps)
    with tempfile.TemporaryDirectory() as folder:
        joined = ledger(options.residencies, Path(folder))
    result = {
        "hardware": hardware.facts("numpy", "SQLAlchemy"),
        "residencies": sum(len(account.residencies) for account in manager.accounts.values()),
        "blocks": manager.pool.blocks,
        "full_allocator_cpu_seconds": round(full, 3),
        "full_ledger_cpu_seconds": round(joined, 3),
        "full_cpu_seconds": round(full + joined, 3),
        "online_us": {name: round(value, 1) for name, value in online.items()},
        "fixed_work_us": {name: round(value, 1) for name, value in machine(options.steps).items()},
    }
    print(json.dumps({name: value for name, value in result.items() if name != "hardware"}, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
