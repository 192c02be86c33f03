"""Every kind of event: its name in leaves, its outage class, the keys of its leaf and the logs it goes to."""

from __future__ import annotations

from typing import NamedTuple

from kvcustody.audit.events.control_events import (
    AccessRecorded,
    DecisionRecorded,
    GrantsRevoked,
    KeyEvent,
    KeysOrdered,
    LegalHoldChanged,
    PolicyActivated,
    PolicyStaged,
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

Event = (
    WorkerStarted
    | WorkerStopped
    | WorkerDied
    | PolicyActivated
    | PolicyStaged
    | GrantsRevoked
    | ReleaseStep
    | KeyEvent
    | KeysOrdered
    | SigningKeyRecorded
    | RetentionPurged
    | LegalHoldChanged
    | SubjectUnlinked
    | SinkChanged
    | AccessRecorded
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


class Kind(NamedTuple):
    """An event's name in leaves and its outage class."""

    name: str
    outage: str


KINDS: dict[type, Kind] = {
    WorkerStarted: Kind("worker-started", "B"),
    WorkerStopped: Kind("worker-stopped", "B"),
    WorkerDied: Kind("worker-died", "B"),
    PolicyActivated: Kind("policy-activated", "A"),
    PolicyStaged: Kind("policy-staged", "A"),
    GrantsRevoked: Kind("grants-revoked", "B"),
    ReleaseStep: Kind("release-step", "A"),
    KeyEvent: Kind("key-event", "A"),
    KeysOrdered: Kind("keys-ordered", "A"),
    SigningKeyRecorded: Kind("signing-key", "A"),
    RetentionPurged: Kind("retention-purged", "A"),
    LegalHoldChanged: Kind("legal-hold", "A"),
    SubjectUnlinked: Kind("subject-unlinked", "A"),
    SinkChanged: Kind("sink-changed", "A"),
    AccessRecorded: Kind("access", "A"),
    PrincipalChanged: Kind("principal-changed", "A"),
    DecisionRecorded: Kind("decision", "A"),
    ResidencyOpened: Kind("residency-opened", "B"),
    BlocksAttached: Kind("blocks-attached", "B"),
    ResidencyReleased: Kind("residency-released", "B"),
    BlocksReleased: Kind("blocks-released", "B"),
    HoldsNarrowed: Kind("holds-narrowed", "B"),
    CustodyEnded: Kind("custody-ended", "B"),
    ReceiptRecorded: Kind("receipt", "B"),
    ErasureRequested: Kind("erasure-requested", "B"),
    ErasureApplied: Kind("erasure-applied", "B"),
    ErasureRemaining: Kind("erasure-remaining", "B"),
    ErasureReread: Kind("erasure-reread", "B"),
    CustodyOverdue: Kind("custody-overdue", "B"),
    ErasureCompleted: Kind("erasure-completed", "B"),
    OrphanScanned: Kind("orphan-scanned", "B"),
    OrphanFound: Kind("orphan-found", "B"),
    ObservationStarted: Kind("observation-started", "B"),
    ObservedStored: Kind("observed-stored", "B"),
    ObservedRemoved: Kind("observed-removed", "B"),
    ObservedOverdue: Kind("observed-overdue", "B"),
    ObservationGap: Kind("observation-gap", "B"),
    HitCounted: Kind("hit-counted", "C"),
    HitCounters: Kind("hit-counters", "B"),
    SpillStarted: Kind("spill-started", "B"),
    ReplayCompleted: Kind("replay-completed", "B"),
    GapRecorded: Kind("gap", "B"),
    Withdrawn: Kind("withdrawn", "B"),
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
