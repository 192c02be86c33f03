"""A ledger with tiers and all that a report can speak of: two workers, one that died, a desk with people's requests.

Worker 1 has two tiers and stops in order; worker 2 has one and dies, and its next process destroys what it left, is
simulated and monitors some. The log's key is handed over between two checkpoints.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import Engine

from kvcustody.audit.kinds import (
    PROCESS_DEATH,
    CaseOpened,
    CaseStepped,
    CopiesEnded,
    DecisionRecorded,
    EnforcementChanged,
    ErasureCompleted,
    ErasureRequested,
    Event,
    GapRecorded,
    HitCounters,
    IssuerAssigned,
    OrphanFound,
    OrphanScanned,
    PolicyActivated,
    ReplayCompleted,
    ReportKeyRecorded,
    RouteFound,
    RouteSent,
    SigningKeyRecorded,
    SpillStarted,
    TransferDecided,
    WorkerDied,
    WorkerStarted,
    WorkerStopped,
)
from kvcustody.audit.leaf.batch import read_leaves
from kvcustody.audit.store.database.engine import WRITE
from kvcustody.audit.tlog.checkpoint_signer import CheckpointSigner
from kvcustody.audit.tlog.key_rotation import rotation_record
from kvcustody.audit.tlog.signed_note import KeyKind
from kvcustody.audit.tlog.signing_key import SigningKey
from kvcustody.audit.write.append_leaves import Appender
from kvcustody.clock import VirtualClock
from kvcustody.governance.tiers.copy_event import CopyEvent
from kvcustody.governance.tiers.copy_leaves import copy_leaves
from standins.audit import falsified
from standins.audit.copy_world import CopyWorld

ORIGIN = "ledger.example/tiered"
OLD, NEW = (SigningKey.from_seed(ORIGIN, KeyKind.ED25519, bytes([seed]) * 32) for seed in (1, 2))
REPORT_KEY = SigningKey.from_seed(f"{ORIGIN}/report", KeyKind.ED25519, bytes([9]) * 32)
SECOND_US, DAY_US = 1_000_000, 86_400_000_000
DIGEST = "ab" * 32
UUIDS = tuple(f"{number:032x}" for number in range(1, 5))


class Sealed(NamedTuple):
    """The sizes of the two checkpoints that were signed."""

    first: int
    last: int


def fill(store: Engine, world: Callable[..., Any], folder: Path) -> Sealed:
    """Write it all, sign, hand the key over, and sign what came later by the next."""
    clock = VirtualClock(utc_us=falsified.OFFSET_US + 10**9)
    first = CheckpointSigner(store, [OLD], memory=folder / "signed", clock=clock)
    dead = CopyWorld("nvme", 9).run(60)
    with store.connect().execution_options(**WRITE) as connection:
        appender = Appender()

        def append(events: list[Event], process: int) -> None:
            with connection.begin():
                appender.append(connection, read_leaves(falsified.leaf_bytes(events, UUIDS[process])))

        append(_orderly(world), 0)
        append(_started("worker-2", copy_leaves("nvme", dead.events)), 1)
        assert first.sign_once()
        head = first.last_head()
        record = base64.b64encode(rotation_record(OLD, NEW, head, 1)).decode()
        append(_desk(record), 2)
        append(_next_process(dead), 3)
    second = CheckpointSigner(store, [NEW], memory=folder / "signed-again", clock=clock)
    assert second.sign_once()
    return Sealed(head.size, second.last_head().size)


def _started(worker: str, events: list[Event], at_us: int = 1, origin: str = "") -> list[Event]:
    return [WorkerStarted(at_us, worker, 64, 1, 4096, "cpu", "test", origin=origin), *events]


def _routed(at: int) -> list[Event]:
    """Route receipts: two whole ones, of which one was promised too much, and one without its worker's half."""
    sent = [
        RouteSent(at, tenant, name * 32, "subject", 0, 1, 3, "worker-1", "w1", 200, 7, 1, 3, promised, 875_000)
        for tenant, name, promised in (("acme", "a", 64), ("acme", "b", 112), ("labs", "c", -1))
    ]
    found = [RouteFound(at, "acme", name * 32, True, 128, 96, 2, 40, False, True) for name in "ab"]
    return [*sent, *found]


def _orderly(world: Callable[..., Any]) -> list[Event]:
    """Worker 1: custody on the device, two tiers, decisions, and counters when it stops."""
    pool, tiers = world(4).run(90), [CopyWorld(tier, 5).run(80) for tier in ("host", "nvme")]
    for residency in sorted(pool.open):
        pool.leave(residency)
    while pool.dirty:
        pool.scrub()
    for tier in tiers:
        for copy in [*tier.living.values()][:-2]:
            tier.end(copy, "teardown")
        for copy in [*tier.waiting.values()][:-2]:
            tier.destroy(copy)
    counts = [tier.counts() for tier in tiers]
    at = max(pool.now, *(tier.now for tier in tiers))
    events = [event for tier in tiers for event in copy_leaves(tier.tier, tier.events)]
    counters = (tuple(getattr(one, name) for one in counts) for name in ("stored", "ended", "destroyed"))
    return [
        *pool.events,
        *events,
        TransferDecided(at, "restore", "nvme", "acme", 7, 48, 3 << 20, 812, 40_312, "transfer", "done", 799, "fast"),
        TransferDecided(at, "restore", "host", "labs", 9, 1, 99, 900, 200, "recompute", "", 0, "the tier is slow"),
        *_routed(at),
        DecisionRecorded(at, "attach", "deny", "tenant-0", "tenant-1", "internal", (), 1, "", 0, ""),
        HitCounters(at, "tenant-2", "tenant-0", "reuse", "deny", "no-<grant>", 1, 1, 7, 0, 0),
        OrphanScanned(at, 1, "full", at - 5, at, 3, 4, 1),
        OrphanFound(at, 1, 1, "leaked", "test", "tenant-0", 5, (), "none", "left"),
        GapRecorded(at, "disk full", 5000, 5009),
        WorkerStopped(
            at + 9, "worker-1", "closed", pool.generation + 1, tuple(pool.scrubbed), ("host", "nvme"), *counters
        ),
    ]  # fmt: skip


def _desk(record: str) -> list[Event]:
    """A process of commands: keys, the policy, an issuer, an erasure, three requests of people."""
    at = 2 * SECOND_US
    return [
        SigningKeyRecorded(at, "rotated", str(NEW.verifier), record, "custodian"),
        ReportKeyRecorded(at, "made", str(REPORT_KEY.verifier), "", "governor"),
        PolicyActivated(at, 1, "base", "shared", "sha256:" + "cd" * 32, "governor"),
        IssuerAssigned(at, "https://id.example", "bare", "governor"),
        ErasureRequested(at, "e-1", "tenant-1", "subject", "user-1", None, at + 9 * SECOND_US, "dpo"),
        SpillStarted(at, "the database is away", 9),
        ReplayCompleted(at, 1, 7, 2, 0),
        *_case("answered", at, 5, ("identity", "extend", "erasure", "decide", "answer")),
        *_case("void", at, 5, ("identity", "decide")),
        *_case("missed", at, 60, ("identity",)),
    ]


def _case(name: str, at_us: int, days: int, steps: tuple[str, ...]) -> list[Event]:
    received = falsified.OFFSET_US + at_us - days * DAY_US
    parts = {
        "identity": ("confirmed", "", "", "", ""),
        "extend": ("", "complexity", "", "many systems", ""),
        "erasure": ("", "", "e-1", "", ""),
        "decide": ("erased", "", "", "", ""),
        "answer": ("", "", "letter", "", DIGEST),
    }
    opened = CaseOpened(
        at_us, name, "tenant-1", "user-1", "erasure", "mail", received, "Europe/Berlin", ("2023-12-11",), "dana"
    )  # fmt: skip
    stepped = [
        CaseStepped(at_us + place, name, "tenant-1", step, *parts[step], "dana") for place, step in enumerate(steps, 1)
    ]
    return [opened, *stepped]


def _next_process(dead: CopyWorld) -> list[Event]:
    """Worker 2 again: it closes the process before it, destroys what that one left, and answers the erasure."""
    at = dead.now + 5 * SECOND_US
    living = sorted(dead.living.values(), key=lambda copy: copy.number)
    closed = [
        CopiesEnded(
            at, "nvme", copy.tenant, copy.classification, PROCESS_DEATH, (copy.name.hex(),), (copy.number,),
            (copy.blocks,), (copy.size,), (copy.due_us,), (at,), SECOND_US, incarnation=UUIDS[1],
        )
        for copy in living
    ]  # fmt: skip
    left = [CopyEvent("destroyed", copy.name, 0, "", "", 0, copy.size, at + 7, 0, "unlinked") for copy in living]
    return _started(
        "worker-2",
        [
            *closed,
            *copy_leaves("nvme", left[:-1]),
            WorkerDied(at, "worker-2", UUIDS[1], "unknown", 0, 0, copies=len(living)),
            EnforcementChanged(at + 3, "monitor", (), 0, 0, 1, 1, "ops"),
            EnforcementChanged(at + 4, "canary", ("tenant-1",), 500_000, 0, 1, 2, "ops"),
            ErasureCompleted(at, "e-1", "tenant-1", "complete", 1, 3, 0),
        ],
        at,
        "simulated",
    )
