"""Forks processes that erase without end, so that a test can kill -9 them: `go FOLDER NUMBER` forks, `wait` reaps.

FOLDER/erasing-NUMBER is there when the first erasure began.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import structlog

from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.write.event_writer import WriterSettings
from kvcustody.clock import VirtualClock
from kvcustody.governance.erasure.selector import Selector
from standins.fork_server import serve
from standins.robust.custody_world import TENANTS, CustodyWorld


def child(folder: Path, number: int) -> None:
    """Work and erase until killed."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    world = CustodyWorld(
        open_store(folder / "ledger.db"),
        folder,
        seed=number,
        worker="victim",
        clock=VirtualClock(utc_us=time.time_ns() // 1000),
        settings=WriterSettings(batch=50, interval_seconds=0.001),
    )
    world.run(20)
    acts = 0
    while True:
        world.act()
        acts += 1
        if acts % 3 == 0:
            world.governor.erase(Selector(TENANTS[acts % 3]))
            world.lengths = {one: n for one, n in world.lengths.items() if one in world.governor.running}
            world.writer.flush()
            (folder / f"erasing-{number}").touch()


if __name__ == "__main__":
    serve(child)
