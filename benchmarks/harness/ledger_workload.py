"""What the ledger's benchmarks record: residencies from their opening to the receipt of their blocks."""

from __future__ import annotations

import numpy as np

from kvcustody.audit.kinds import (
    CustodyEnded,
    Event,
    ReceiptRecorded,
    ResidencyOpened,
    ResidencyReleased,
    WorkerStarted,
)
from kvcustody.audit.kinds.block_runs import Run

BATCH = 1000


def workload(residencies: int, blocks: int, *, scattered: bool, tenants: int = 32, of: str = "") -> list[Event]:
    """Residencies that open, release, end and are scrubbed, each with its own run of blocks.

    Every residency is a session of its own, of one of 31 subjects a tenant. `of` ends the tenants' names: writers with
    different ones have no log in common but the system's.
    """
    chance = np.random.default_rng(7)
    events: list[Event] = [WorkerStarted(1, "bench", 1 << 20, 1, 65536, "cpu", "bench")]
    generation = 1
    for number in range(1, residencies + 1):
        indices = chance.integers(0, 1 << 20, blocks) if scattered else np.arange(blocks) + number
        run = (Run(indices, generation),)
        generation += blocks
        tenant = f"tenant-{number % tenants}{of}"
        at = 1_000_000 + number * 100
        events += [
            ResidencyOpened(
                at,
                number,
                tenant,
                f"user-{number // tenants % 31}",
                f"chat-{number}",
                False,
                "internal",
                (1, 2),
                (),
                ("own-scope",),
                1,
                at + 10_000_000,
            ),
            ResidencyReleased(at + 20, number, tenant, "finish", run, at + 40),
            CustodyEnded(at + 40, tenant, "internal", run, "expired", at + 40, at + 40, at + 30, 1_000_000),
            ReceiptRecorded(
                at + 60,
                number,
                0,
                tenant,
                "memset",
                "cpu",
                blocks * 65536,
                at + 50,
                at + 60,
                "full",
                1.0,
                blocks,
                "ok",
                run,
            ),
        ]
    return events
