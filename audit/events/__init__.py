"""What happened to custody: small records on the hot path, canonical leaf bytes in the ledger.

1. Emitting an event costs one record. `leaves()` turns it into canonical bytes, later and on the writer's thread.
2. A leaf is JCS (RFC 8785) for our closed schema: ASCII keys in order, no floats, integers below 2^53 (else decimal
   strings), at most 8 KiB. The bytes are the truth; every column elsewhere is derived from them.
3. Run lists too long for one leaf continue in numbered leaves (`part` of `parts`, each repeating the head and
   `blocks`, the total over all parts). A set that lacks a part is a gap.
4. A subject or session appears only as a random pseudonym. No leaf carries token ids, prompt text, a bare hash of
   either, or a key.
5. Times in events, and `*_boot_us` in leaves, are boot-time microseconds of the incarnation: all deadline arithmetic
   uses those, exactly. `at_us` in a leaf is UTC, for people and periods; `at_us - boot_us` is the incarnation's
   offset, fixed at its start, so a step of the wall clock moves no deadline. 0 means "none".
6. `trace` is the W3C trace id, 32 hexadecimal digits, that the request or act came with, where it came with one; else
   the leaf has no such key. The other party's copy of a leaf never has it.

Classes. A: durable before the act it records takes effect. B: lifecycle; spilled to disk when the database
is away. C: aggregated into counters. A residency id is unique inside its incarnation; globally it is
(incarnation, id).
"""

from __future__ import annotations

from kvcustody.audit.events.batch_encoder import leaf, leaves
from kvcustody.audit.events.block_runs import Runs
from kvcustody.audit.events.canonical_leaf import (
    HANDOVER_BYTES_MAX,
    LEAF_BYTES_MAX,
    Context,
    Leaf,
    PseudonymSource,
    canonical,
    parse,
)
from kvcustody.audit.events.control_events import (
    BARE,
    DECLARED,
    GENERATED,
    ORIGINS,
    PROCESS_DEATH,
    QUALIFIED,
    REPLAYED,
    SILENCE,
    AccessRecorded,
    AttemptsRefused,
    ClockConfirmed,
    DecisionRecorded,
    GrantsRevoked,
    IssuerAssigned,
    KeyEvent,
    KeysOrdered,
    LegalHoldChanged,
    LogBroken,
    PolicyActivated,
    PolicyStaged,
    PolicyText,
    PrincipalChanged,
    ReleaseStep,
    RetentionPurged,
    SigningKeyRecorded,
    SinkChanged,
    SubjectUnlinked,
    WorkerClosingAsked,
    WorkerDied,
    WorkerReturned,
    WorkerStarted,
    WorkerStopped,
)
from kvcustody.audit.events.copy_events import (
    EVIDENCE,
    KEY_DESTROYED,
    UNLINKED,
    ZEROED,
    CopiesDestroyed,
    CopiesEnded,
    CopiesStored,
    TransferDecided,
)
from kvcustody.audit.events.custody_events import (
    BlocksAttached,
    BlocksReleased,
    CustodyChanged,
    CustodyEnded,
    CustodyOverdue,
    ErasureApplied,
    ErasureCompleted,
    ErasureRemaining,
    ErasureRequested,
    ErasureReread,
    HoldsNarrowed,
    IntegrityMismatch,
    OrphanFound,
    OrphanScanned,
    ReceiptRecorded,
    ResidencyOpened,
    ResidencyReleased,
)
from kvcustody.audit.events.event import Event
from kvcustody.audit.events.leaf_schema import LEAF_KEYS
from kvcustody.audit.events.ledger_events import (
    GapRecorded,
    HitCounted,
    HitCounters,
    ObservationGap,
    ObservationStarted,
    ObservedOverdue,
    ObservedRemoved,
    ObservedStored,
    ReplayCompleted,
    SpillStarted,
    Withdrawn,
)
from kvcustody.audit.events.registry import (
    KINDS,
    SCHEMA,
    SYSTEM,
    EventKind,
    log_of,
    logs_of,
)

__all__ = [
    "BARE",
    "DECLARED",
    "EVIDENCE",
    "GENERATED",
    "HANDOVER_BYTES_MAX",
    "KEY_DESTROYED",
    "KINDS",
    "LEAF_BYTES_MAX",
    "LEAF_KEYS",
    "ORIGINS",
    "PROCESS_DEATH",
    "QUALIFIED",
    "REPLAYED",
    "SCHEMA",
    "SILENCE",
    "SYSTEM",
    "UNLINKED",
    "ZEROED",
    "AccessRecorded",
    "AttemptsRefused",
    "BlocksAttached",
    "BlocksReleased",
    "ClockConfirmed",
    "Context",
    "CopiesDestroyed",
    "CopiesEnded",
    "CopiesStored",
    "CustodyChanged",
    "CustodyEnded",
    "CustodyOverdue",
    "DecisionRecorded",
    "ErasureApplied",
    "ErasureCompleted",
    "ErasureRemaining",
    "ErasureRequested",
    "ErasureReread",
    "Event",
    "EventKind",
    "GapRecorded",
    "GrantsRevoked",
    "HitCounted",
    "HitCounters",
    "HoldsNarrowed",
    "IntegrityMismatch",
    "IssuerAssigned",
    "KeyEvent",
    "KeysOrdered",
    "Leaf",
    "LegalHoldChanged",
    "LogBroken",
    "ObservationGap",
    "ObservationStarted",
    "ObservedOverdue",
    "ObservedRemoved",
    "ObservedStored",
    "OrphanFound",
    "OrphanScanned",
    "PolicyActivated",
    "PolicyStaged",
    "PolicyText",
    "PrincipalChanged",
    "PseudonymSource",
    "ReceiptRecorded",
    "ReleaseStep",
    "ReplayCompleted",
    "ResidencyOpened",
    "ResidencyReleased",
    "RetentionPurged",
    "Runs",
    "SigningKeyRecorded",
    "SinkChanged",
    "SpillStarted",
    "SubjectUnlinked",
    "TransferDecided",
    "Withdrawn",
    "WorkerClosingAsked",
    "WorkerDied",
    "WorkerReturned",
    "WorkerStarted",
    "WorkerStopped",
    "canonical",
    "leaf",
    "leaves",
    "log_of",
    "logs_of",
    "parse",
]
