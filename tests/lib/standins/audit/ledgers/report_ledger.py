"""A ledger worth reporting on: three workers, good custody and bad, an erasure, denials, a gap, a policy, a seal."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine

from kvcustody.audit.kinds import (
    CustodyEnded,
    ErasureCompleted,
    ErasureRequested,
    Event,
    GapRecorded,
    HitCounters,
    OrphanFound,
    PolicyActivated,
    ReceiptRecorded,
    ReleaseStep,
    ReportKeyRecorded,
    SpillStarted,
    WorkerStopped,
)
from kvcustody.audit.leaf.batch import read_leaves
from kvcustody.audit.reports.model import Report
from kvcustody.audit.store.database.engine import WRITE
from kvcustody.audit.tlog.checkpoint_signer import CheckpointSigner
from kvcustody.audit.tlog.signed_note import KeyKind
from kvcustody.audit.tlog.signing_key import SigningKey
from kvcustody.audit.write.append_leaves import Appender
from kvcustody.clock import VirtualClock
from standins.audit import falsified
from standins.audit.documents import signed_by_reports_key

ORIGIN = "ledger.example/kvcustody"
REPORT_KEY = SigningKey.from_seed(f"{ORIGIN}/report", KeyKind.ED25519, bytes([7]) * 32)

REPORT_KEY_MADE = ReportKeyRecorded(2, "made", str(REPORT_KEY.verifier), "", "governor")


def histories(world: Callable[..., Any]) -> list[list[Event]]:
    """A worker that stopped in order, one that still runs, and one that lost a twentieth of its ends and receipts."""
    chance = random.Random(11)
    first = world(1).run(120)
    for residency in sorted(first.open):
        first.leave(residency)
    while first.dirty:
        first.scrub()
    at = first.now
    orderly = [
        *first.events[:1],
        PolicyActivated(2, 1, "regulated-saas", "shared", "sha256:" + "cd" * 32, "governor"),
        REPORT_KEY_MADE,
        *first.events[1:],
        ErasureRequested(at + 1, "e-1", "tenant-1", "subject", "user-1", None, at + 9_000_000, "dpo"),
        ErasureCompleted(at + 2, "e-1", "tenant-1", "partial", 1, 3, 1, "held by another residency"),
        HitCounters(at + 3, "tenant-2", "tenant-0", "reuse", "deny", "no-<grant>", 1, 1, 7, 0, 0),
        HitCounters(at + 3, "tenant-2", "tenant-0", "reuse", "permit", "grant-1", 1, 1, 2, 5, 80),
        OrphanFound(at + 4, 1, 1, "stuck fence", "bound passed", "tenant-0", 5, (), "quarantine", "quarantined"),
        ReleaseStep(at + 4, 1, "propose", 1, "sha256:" + "cd" * 32, "ab" * 32, "ada"),
        ReleaseStep(at + 5, 2, "approve", 1, "sha256:" + "cd" * 32, "ab" * 32, "ben"),
        SpillStarted(at + 5, "the database is away", 9),
        WorkerStopped(at + 6, "worker-1", "closed", first.generation, tuple(first.scrubbed)),
    ]
    running = world(2).run(120).events
    lossy = [
        e
        for e in world(3).run(120).events
        if not (isinstance(e, (ReceiptRecorded, CustodyEnded)) and chance.random() < 0.05)
    ]
    return [orderly, running, [*lossy, GapRecorded(world(3).run(120).now, "disk full", 5000, 5009)]]


def fill(store: Engine, world: Callable[..., Any], folder: Path, *, seed: bytes = bytes(32)) -> SigningKey:
    """Write the histories, and sign the checkpoint; returns the signing key."""
    return fill_with(store, histories(world), folder, seed=seed)


def fill_with(store: Engine, every: list[list[Event]], folder: Path, *, seed: bytes = bytes(32)) -> SigningKey:
    """The same with other histories, each of a process and in a batch of its own."""
    with store.connect().execution_options(**WRITE) as connection:
        appender = Appender()
        for number, events in enumerate(every):
            with connection.begin():
                appender.append(connection, read_leaves(falsified.leaf_bytes(events, f"{number + 1:032x}")))
    key = SigningKey.from_seed(ORIGIN, KeyKind.ED25519, seed)
    sign(store, key, folder)
    return key


def signed(connection: Connection, report: Report) -> Report:
    """The report, signed by the key that the ledger names."""
    return signed_by_reports_key(connection, report, REPORT_KEY)


def sign(store: Engine, key: SigningKey, folder: Path) -> None:
    """Sign the newest checkpoint at a fixed time."""
    clock = VirtualClock(utc_us=falsified.OFFSET_US + 10**9)
    CheckpointSigner(store, [key], memory=folder / "signed", clock=clock).sign_once()
