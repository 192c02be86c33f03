"""Events of custody: residencies, the blocks they hold, custody ends and receipts.

Events of erasures in one process (what was taken, what stays, what was read back), and of overdue custody.

Events of what is done about custody: erasures, and scans for orphans.
"""

from __future__ import annotations

from typing import Annotated

from kvcustody.audit.kinds.block_runs import Runs
from kvcustody.audit.kinds.event import (
    ErasureId,
    HeldTenant,
    LifecycleOrder,
    MaybeHeld,
    MaybeOrdered,
    MaybeServed,
    MaybeWords,
    OneOf,
    OwnerTenant,
    OwnLife,
    ServedTenant,
    Trace,
    WordList,
    Words,
    WorkersLifecycleEvent,
)
from kvcustody.audit.kinds.row import (
    BLOCKS,
    HIGH,
    INCARNATION,
    LEAF_US,
    LOW,
    PART,
    Kept,
    LeafFigures,
    RowColumn,
    in_table,
)

WRITTEN_BLOCKS = RowColumn("written_blocks", "_written_blocks", Kept.NUMBER)
RELEASES = in_table(
    "releases", INCARNATION, "residency", PART, RowColumn("final", "_final", Kept.FLAG),
    RowColumn("written", "_written", Kept.FLAG), "tenant", "cause", RowColumn("released_us", "at_us"),
    RowColumn("released_boot_us", "boot_us"), "hold_boot_us", WRITTEN_BLOCKS, LOW, HIGH, LEAF_US,
    indexes={"residency": ("incarnation", "residency")}, has_items=True, month="at_us",
)  # fmt: skip


class ResidencyOpened(WorkersLifecycleEvent, frozen=True, tag="residency-opened"):
    """A request entered the cache: its principal, reason and limits, and its attached and handed-out blocks (class B).

    `attached` existed before; `written` is what admission handed out, on record before anything is computed.
    `model` is the first 16 hex digits of the ModelIdentity's digest; empty where it is not known. `earlier_blocks`: how
    many of `attached`, in their order, the request had before it was preempted, or has from the request it forked from.
    They are its own work, so they saved it nothing.
    """

    residency: int
    tenant: ServedTenant
    subject: MaybeWords
    session: MaybeWords
    asserted: bool
    classification: Words
    domains: tuple[int, ...]
    attached: Runs
    reasons: WordList
    revision: int
    absolute_us: int
    written: Runs = ()
    model: Words = ""
    trace: Trace = ""
    earlier_blocks: int = 0

    row = in_table(
        "residencies", INCARNATION, "residency", PART, "tenant", "subject", "session", "asserted", "classification",
        "revision", RowColumn("opened_us", "at_us"), RowColumn("opened_boot_us", "boot_us"), "absolute_boot_us",
        RowColumn("attached_blocks", "_blocks", Kept.NUMBER), WRITTEN_BLOCKS, LOW, HIGH,
        unique=("incarnation", "residency", "part"), month="opened_us",
    )  # fmt: skip
    figures = LeafFigures(sums={"attached_blocks": "runs", "written_blocks": "written"})


class RequestMonitored(WorkersLifecycleEvent, frozen=True, tag="request-monitored"):
    """The policy's decision on a request for which it was not enforced, and the order to monitor it (class B).

    It attached `reused_tokens`, under the engine's own keys. The policy would have refused `refused_tokens` of them,
    and had it been enforced, `forecast_tokens` would have been found: what is between that and `reused_tokens` would
    have been prefilled again. `effect` is `would-deny` where anything would have been refused, by `reasons`.
    """

    residency: int
    tenant: ServedTenant
    classification: Words
    effect: Words
    reasons: WordList
    revision: int
    order: int
    prompt_tokens: int
    reused_tokens: int
    refused_tokens: int
    forecast_tokens: int
    trace: Trace = ""

    figures = LeafFigures(
        by="effect",
        sums={name: name for name in ("prompt_tokens", "reused_tokens", "refused_tokens", "forecast_tokens")},
    )


class BlocksAssigned(WorkersLifecycleEvent, frozen=True, tag="blocks-assigned"):
    """Blocks handed to a residency of `tenant` belong to `owner`, because it fills that tenant's segment (class B).

    The leaf that hands them out lists them too; their custody, its charge and its end are the owner's. Written in both
    logs, so that each says by itself what its tenant holds.
    """

    residency: int
    tenant: ServedTenant
    owner: OwnerTenant
    classification: Words
    runs: Runs

    acting = "tenant"


class BlocksAttached(WorkersLifecycleEvent, frozen=True, tag="blocks-attached"):
    """A running request attached blocks that another had published meanwhile (class B).

    It uses them from then on as it does those that its `ResidencyOpened` lists as attached: until it is
    released, and under its hold after that.
    """

    residency: int
    tenant: HeldTenant
    runs: Runs
    trace: Trace = ""

    row = in_table(
        "attachments", INCARNATION, "residency", PART, "tenant", RowColumn("attached_boot_us", "boot_us"),
        RowColumn("attached_blocks", "_blocks", Kept.NUMBER), LOW, HIGH, "at_us",
        indexes={"residency": ("incarnation", "residency")}, month="at_us",
    )  # fmt: skip
    figures = LeafFigures(sums={"attached_blocks": "runs"})


class ResidencyReleased(WorkersLifecycleEvent, frozen=True, tag="residency-released"):
    """A request left: the blocks it wrote since admission, and until when it holds its blocks (0: not held) (class B).

    `written` is every block it had allocated that no earlier leaf of it lists: growth and copies, whatever
    became of them.
    """

    residency: int
    tenant: HeldTenant
    cause: Words
    written: Runs
    hold_us: int
    incarnation: OwnLife = ""
    trace: Trace = ""

    row = RELEASES
    figures = LeafFigures(by="cause", sums={"written_blocks": "runs"})


class BlocksReleased(WorkersLifecycleEvent, frozen=True, tag="blocks-released"):
    """A continuing request released some blocks, as a sliding window does (class B).

    `own`: it had allocated them itself and no leaf lists them yet; its `ResidencyReleased` leaves them out.
    Else it had attached them, or was handed them at admission.
    """

    residency: int
    tenant: HeldTenant
    cause: Words
    runs: Runs
    own: bool
    hold_us: int
    incarnation: OwnLife = ""
    trace: Trace = ""

    row = RELEASES
    figures = LeafFigures(by="cause")


class HoldsNarrowed(WorkersLifecycleEvent, frozen=True, tag="holds-narrowed"):
    """A narrowing act ended a tenant's holds earlier: which holds stand from here on, and until when (class B).

    `holds` are all residencies of the tenant in this process that hold anything after the act, ascending; `holds[i]`
    lasts until `until_us[i]`. What was released before and is not among them holds no longer. `revision` is the
    policy's that narrowed.
    """

    tenant: HeldTenant
    revision: int
    holds: tuple[int, ...]
    until_us: tuple[int, ...]


class CustodyEnded(WorkersLifecycleEvent, frozen=True, tag="custody-ended"):
    """Blocks of one owner left custody (class B).

    `retired_us` is when the last device work on them retired: the fence's end, or some earlier moment where
    none was in flight when custody ended. `ceiling_us` is their absolute end (0: none).
    """

    tenant: HeldTenant
    classification: Words
    runs: Runs
    cause: Words
    due_us: int
    ended_us: int
    retired_us: int
    scrub_within_us: int
    ceiling_us: int = 0
    incarnation: OwnLife = ""

    row = in_table(
        "custody_ends", INCARNATION, "tenant", "classification", "cause", "due_us", "due_boot_us", "ended_boot_us",
        "retired_boot_us", "ceiling_boot_us", "scrub_within_us", BLOCKS, LOW, HIGH, LEAF_US,
        indexes={"due": ("due_us",), "generation": ("incarnation", "high")}, has_items=True, month="at_us",
    )  # fmt: skip
    figures = LeafFigures(by="cause", sums={"blocks": "runs"})


class ReceiptRecorded(WorkersLifecycleEvent, frozen=True, tag="receipt"):
    """One shard's memory of these blocks was overwritten (class B).

    A launch that covers several owners is one receipt per owner with the same `launch`; a boot scrub has no
    owner (`tenant` None) and generation 0. `bytes`, `verified`: of these runs. `level`: launched, retired,
    sampled, full. `result`: ok or failed; failed blocks are a receipt of their own.
    """

    launch: int
    shard: int
    tenant: MaybeHeld
    method: Words
    device: Words
    bytes: int
    started_us: int
    ended_us: int
    level: Words
    share: float
    verified: int
    result: Words
    runs: Runs
    incarnation: OwnLife = ""

    row = in_table(
        "receipts", INCARNATION, "launch", RowColumn("shard", kept=Kept.SMALL), "tenant", "method", "device",
        RowColumn("bytes", "_bytes", Kept.NUMBER), "started_boot_us", "ended_boot_us", "level",
        RowColumn("share_ppm", kept=Kept.SMALL), RowColumn("verified", "_verified", Kept.NUMBER), "result", BLOCKS,
        LOW, HIGH, LEAF_US,
        indexes={"generation": ("incarnation", "high")}, has_items=True, month="at_us",
    )  # fmt: skip
    figures = LeafFigures(by="result")


class IntegrityMismatch(WorkersLifecycleEvent, frozen=True, tag="integrity-mismatch"):
    """Blocks about to be reused differed from their published content (class B).

    They were not attached and their custody ends; `requests` running ones refer to them until they are released.
    """

    tenant: HeldTenant
    classification: Words
    runs: Runs
    requests: int


class CustodyChanged(WorkersLifecycleEvent, frozen=True, tag="custody-changed"):
    """One process's releases, ends and scrubs for one tenant within a short time, as one leaf (class B).

    Each is an event with its own moments; `leaf_schema` says how they stand in the leaf, and `EventQueue` which may.
    """

    tenant: HeldTenant
    released: tuple[ResidencyReleased, ...] = ()
    passed: tuple[BlocksReleased, ...] = ()
    ended: tuple[CustodyEnded, ...] = ()
    scrubbed: tuple[ReceiptRecorded, ...] = ()


class ErasureApplied(WorkersLifecycleEvent, frozen=True, tag="erasure-applied"):
    """An erasure took effect here (class B): `runs` is all custody that it covers, ended, ending or kept.

    `requests` were aborted, `finishing` run on unattachable, `residencies` lapsed; `objects[i]` are of `tiers[i]`.
    """

    erasure: ErasureId
    tenant: MaybeOrdered
    requests: int
    finishing: int
    residencies: int
    runs: Runs
    tiers: WordList = ()
    objects: tuple[int, ...] = ()

    row = in_table(
        "erasure_effects", INCARNATION, "erasure", PART, "requests", "finishing", "residencies", BLOCKS, LOW, HIGH,
        "at_us", indexes={"erasure": ("erasure",)},
    )  # fmt: skip


class ErasureRemaining(WorkersLifecycleEvent, frozen=True, tag="erasure-remaining"):
    """Custody that an erasure covers but that stays, with the reason (class B)."""

    erasure: ErasureId
    tenant: MaybeOrdered
    reason: Words
    runs: Runs

    row = in_table(
        "erasure_remains", INCARNATION, "erasure", PART, "reason", BLOCKS, LOW, HIGH, "at_us",
        indexes={"erasure": ("erasure",)},
    )  # fmt: skip


class ErasureReread(WorkersLifecycleEvent, frozen=True, tag="erasure-reread"):
    """Memory that an erasure ended was read back after its receipts (class B).

    Only blocks that were still CLEAN at the same generation could be read: `checked`; the rest, `changed`, had been
    handed out again. `nonzero`: bytes that were not zero.
    """

    erasure: ErasureId
    tenant: MaybeOrdered
    checked: int
    changed: int
    nonzero: int

    row = in_table(
        "erasure_rereads", INCARNATION, "erasure", "checked", "changed", "nonzero", "at_us",
        indexes={"erasure": ("erasure",)},
    )  # fmt: skip


class CustodyOverdue(WorkersLifecycleEvent, frozen=True, tag="custody-overdue"):
    """Holds are past their deadline but have not lapsed: the process slept, or fell behind (class B).

    Nothing of them is served meanwhile. A second one, with none left, says that it has caught up.
    """

    pool: int
    residencies: int
    due_us: int


class ErasureRequested(LifecycleOrder, frozen=True, tag="erasure-requested"):
    """All custody of a selector must end by the deadline (class B), on `actor`'s request."""

    erasure: str
    tenant: str | None
    selector: str
    subject: str | None
    session: str | None
    deadline_us: int
    actor: str
    detail: str = ""
    trace: str = ""

    row = in_table(
        "erasures", "erasure", "tenant", "selector", "subject", "session", "actor", INCARNATION, "at_us",
        RowColumn("at_boot_us", "boot_us"), "deadline_boot_us", "detail",
        indexes={"erasure": ("erasure",)},
    )  # fmt: skip
    figures = LeafFigures(by="selector")


class ErasureCompleted(WorkersLifecycleEvent, frozen=True, tag="erasure-completed"):
    """An erasure ran: what ended, and what lawfully remains with the reason (class B). `outcome`: complete or
    partial.
    """

    erasure: ErasureId
    tenant: MaybeOrdered
    outcome: Words
    residencies: int
    blocks: int
    remaining: int
    reason: Words = ""

    row = in_table(
        "erasure_results", INCARNATION, "erasure", "outcome", "residencies", RowColumn("blocks"), "remaining", "reason",
        "at_us", indexes={"erasure": ("erasure",)},
    )  # fmt: skip
    figures = LeafFigures(by="outcome")


class OrphanScanned(WorkersLifecycleEvent, frozen=True, tag="orphan-scanned"):
    """A scan compared the allocator, live sequences and the ledger (class B). `mode`: full, online, workers."""

    scan: int
    mode: Annotated[str, OneOf(frozenset({"full", "online", "workers"}))]
    started_us: int
    ended_us: int
    residencies: int
    blocks: int
    findings: int

    row = in_table(
        "orphan_scans", INCARNATION, "scan", "mode", "started_boot_us", "ended_boot_us", "residencies", "blocks",
        "findings", "at_us",
    )  # fmt: skip


class OrphanFound(WorkersLifecycleEvent, frozen=True, tag="orphan-found"):
    """Custody on which two sources disagree (class B). `orphan` is one of the classes of the design."""

    scan: int
    finding: int
    orphan: Words
    cause: Words
    tenant: MaybeServed
    age_us: int
    runs: Runs
    action: Words
    outcome: Words
    residency: int = 0

    row = in_table(
        "orphan_findings", INCARNATION, "scan", "finding", "orphan", "cause", "tenant", "residency", "age_us", "action",
        "outcome", BLOCKS, "at_us",
    )  # fmt: skip
    figures = LeafFigures(by="orphan")
