"""The events of one custody of four blocks on two shards, each of which a test may change."""

from __future__ import annotations

from typing import Any

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

WITHIN = 1000


def runs(*blocks: int, generation: int = 10) -> tuple[Run, ...]:
    return (Run(np.array(blocks, np.int64), generation),)


BLOCKS = runs(5, 6, 7, 8)


def story(**changes: Any) -> list[Event]:
    """Opened at 100, released at 200, held until 500, ended at 500, scrubbed on both shards until 600."""
    ended = {"due_us": 500, "ended_us": 500, "retired_us": 200, "ceiling_us": 900, "cause": "expired"}
    ended |= {key: value for key, value in changes.items() if key in ended}
    proof = {"started_us": 550, "ended_us": 600, "level": "full", "result": "ok", "runs": BLOCKS}
    proof |= changes.get("receipt", {})
    last = proof | changes.get("last_receipt", {})
    return [
        WorkerStarted(1, "worker-1", 64, 2, 4096, "cpu", "test"),
        opened(1, changes.get("attached", ())),
        ResidencyReleased(200, 1, "acme", "finish", changes.get("written", BLOCKS), changes.get("hold_us", 500)),
        *changes.get("more", ()),
        CustodyEnded(510, "acme", "internal", BLOCKS, scrub_within_us=WITHIN, **ended),
        receipt(0, **proof),
        *([receipt(1, **last)] if changes.get("both", True) else []),
    ]


def opened(residency: int, attached: tuple[Run, ...] = (), at_us: int = 100, tenant: str = "acme") -> Event:
    return ResidencyOpened(at_us, residency, tenant, "alice", None, False, "internal", (), attached, ("own",), 1, 900)


def receipt(shard: int, **facts: Any) -> Event:
    return ReceiptRecorded(
        facts["ended_us"],
        1,
        shard,
        "acme",
        "memset",
        "cpu",
        4096 * 4,
        facts["started_us"],
        facts["ended_us"],
        facts["level"],
        1.0,
        4,
        facts["result"],
        facts["runs"],
    )
