"""Every kind of event: its name in leaves, its outage class, the keys of its leaf and the logs it goes to."""

from __future__ import annotations

from typing import NamedTuple

from kvcustody.audit.events.control_events import (
    AccessRecorded,
    AttemptsRefused,
    ClockConfirmed,
    DecisionRecorded,
    GrantsRevoked,
    IssuerAssigned,
    KeyEvent,
    KeysOrdered,
    LegalHoldChanged,
    PolicyActivated,
    PolicyStaged,
    PolicyText,
    PrincipalChanged,
    ReleaseStep,
    RetentionPurged,
    SigningKeyRecorded,
    SinkChanged,
    SubjectUnlinked,
    WorkerDied,
    WorkerStarted,
    WorkerStopped,
)
from kvcustody.audit.events.custody_events import (
    BlocksAttached,
    BlocksReleased,
    CustodyEnded,
    CustodyOverdue,
    ErasureApplied,
    ErasureCompleted,
    ErasureRemaining,
    ErasureRequested,
    ErasureReread,
    HoldsNarrowed,
    OrphanFound,
    OrphanScanned,
    ReceiptRecorded,
    ResidencyOpened,
    ResidencyReleased,
)
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

SYSTEM = "system"
SCHEMA = "kvcustody/event@1"

Event = (
    WorkerStarted
    | WorkerStopped
    | WorkerDied
    | PolicyActivated
    | PolicyStaged
    | PolicyText
    | GrantsRevoked
    | ReleaseStep
    | IssuerAssigned
    | KeyEvent
    | KeysOrdered
    | SigningKeyRecorded
    | RetentionPurged
    | LegalHoldChanged
    | SubjectUnlinked
    | SinkChanged
    | ClockConfirmed
    | AccessRecorded
    | AttemptsRefused
    | PrincipalChanged
    | DecisionRecorded
    | ResidencyOpened
    | BlocksAttached
    | ResidencyReleased
    | BlocksReleased
    | HoldsNarrowed
    | CustodyEnded
    | ReceiptRecorded
    | ErasureRequested
    | ErasureApplied
    | ErasureRemaining
    | ErasureReread
    | CustodyOverdue
    | ErasureCompleted
    | OrphanScanned
    | OrphanFound
    | ObservationStarted
    | ObservedStored
    | ObservedRemoved
    | ObservedOverdue
    | ObservationGap
    | HitCounted
    | HitCounters
    | SpillStarted
    | ReplayCompleted
    | GapRecorded
    | Withdrawn
)


class EventKind(NamedTuple):
    """An event's name in leaves and its outage class."""

    name: str
    outage: str


KINDS: dict[type, EventKind] = {
    WorkerStarted: EventKind("worker-started", "B"),
    WorkerStopped: EventKind("worker-stopped", "B"),
    WorkerDied: EventKind("worker-died", "B"),
    PolicyActivated: EventKind("policy-activated", "A"),
    PolicyStaged: EventKind("policy-staged", "A"),
    PolicyText: EventKind("policy-text", "B"),
    GrantsRevoked: EventKind("grants-revoked", "B"),
    ReleaseStep: EventKind("release-step", "A"),
    IssuerAssigned: EventKind("issuer-assigned", "A"),
    KeyEvent: EventKind("key-event", "A"),
    KeysOrdered: EventKind("keys-ordered", "A"),
    SigningKeyRecorded: EventKind("signing-key", "A"),
    RetentionPurged: EventKind("retention-purged", "A"),
    LegalHoldChanged: EventKind("legal-hold", "A"),
    SubjectUnlinked: EventKind("subject-unlinked", "A"),
    SinkChanged: EventKind("sink-changed", "A"),
    ClockConfirmed: EventKind("clock-confirmed", "A"),
    AccessRecorded: EventKind("access", "A"),
    AttemptsRefused: EventKind("attempts-refused", "B"),
    PrincipalChanged: EventKind("principal-changed", "A"),
    DecisionRecorded: EventKind("decision", "A"),
    ResidencyOpened: EventKind("residency-opened", "B"),
    BlocksAttached: EventKind("blocks-attached", "B"),
    ResidencyReleased: EventKind("residency-released", "B"),
    BlocksReleased: EventKind("blocks-released", "B"),
    HoldsNarrowed: EventKind("holds-narrowed", "B"),
    CustodyEnded: EventKind("custody-ended", "B"),
    ReceiptRecorded: EventKind("receipt", "B"),
    ErasureRequested: EventKind("erasure-requested", "B"),
    ErasureApplied: EventKind("erasure-applied", "B"),
    ErasureRemaining: EventKind("erasure-remaining", "B"),
    ErasureReread: EventKind("erasure-reread", "B"),
    CustodyOverdue: EventKind("custody-overdue", "B"),
    ErasureCompleted: EventKind("erasure-completed", "B"),
    OrphanScanned: EventKind("orphan-scanned", "B"),
    OrphanFound: EventKind("orphan-found", "B"),
    ObservationStarted: EventKind("observation-started", "B"),
    ObservedStored: EventKind("observed-stored", "B"),
    ObservedRemoved: EventKind("observed-removed", "B"),
    ObservedOverdue: EventKind("observed-overdue", "B"),
    ObservationGap: EventKind("observation-gap", "B"),
    HitCounted: EventKind("hit-counted", "C"),
    HitCounters: EventKind("hit-counters", "B"),
    SpillStarted: EventKind("spill-started", "B"),
    ReplayCompleted: EventKind("replay-completed", "B"),
    GapRecorded: EventKind("gap", "B"),
    Withdrawn: EventKind("withdrawn", "B"),
}

HEAD_KEYS = (
    "schema",
    "kind",
    "outage",
    "log",
    "incarnation",
    "sequence",
    "at_us",
    "boot_us",
    "part",
    "parts",
)
TOTALS = {"runs": "blocks", "written": "written_blocks"}  # run lists and the keys of their sizes
ROWS = ("holds", "until_boot_us")  # lists of numbers that belong together and continue together
TRACE = "trace"  # the one key that a leaf lacks where its event has nothing to say
_RUN_FIELDS = ("attached", "runs")  # and "written", where the event has no other list
_DURATIONS = ("scrub_within_us", "age_us")
_RENAMED = {
    "incarnation": "of_incarnation",
    "sequence": "of_sequence",
    "share": "share_ppm",
    "at_us": "boot_us",
}


def _key(field: str, kind: type) -> str:
    """The leaf key of an event field: boot times say so, an event's first run list is `runs`."""
    if field in _RUN_FIELDS or (field == "written" and kind is not ResidencyOpened):
        return "runs"
    if field in _RENAMED:
        return _RENAMED[field]
    if field.endswith("_us") and field not in _DURATIONS:
        return field[:-3] + "_boot_us"
    return field


FIELD_KEYS: dict[type, tuple[str, ...]] = {
    kind: tuple(_key(field, kind) for field in kind._fields)  # type: ignore[attr-defined]
    for kind in KINDS
}
LEAF_KEYS: dict[str, frozenset[str]] = {
    KINDS[kind].name: frozenset({*HEAD_KEYS, *keys, *(TOTALS[key] for key in keys if key in TOTALS)})
    for kind, keys in FIELD_KEYS.items()
}


def field_types(kind: type) -> list[str]:
    """The declared type of every field of an event, as it is written there."""
    fields: tuple[str, ...] = kind._fields  # type: ignore[attr-defined]
    return [getattr(kind.__annotations__[field], "__forward_arg__", "") for field in fields]


def log_of(tenant: str | None) -> str:
    """The log a tenant's leaves go to; the system log when there is no tenant."""
    return SYSTEM if tenant is None else f"tenant/{tenant}"


def logs_of(event: Event) -> tuple[str, ...]:
    """The logs an event is written in: both parties' when one tenant reads another's blocks."""
    if isinstance(event, (DecisionRecorded, HitCounters)):
        reader = event.reader if isinstance(event, DecisionRecorded) else event.tenant
        return (log_of(reader),) if event.owner == reader else (log_of(reader), log_of(event.owner))
    return (log_of(getattr(event, "tenant", None)),)
