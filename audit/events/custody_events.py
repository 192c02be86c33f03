"""Events of custody itself: residencies, the blocks they hold, custody ends and receipts.

Events of erasures in one process (what was taken, what stays, what was read back), and of overdue custody.

Events of what is done about custody: erasures, and scans for orphans.
"""

from __future__ import annotations

from typing import NamedTuple

from kvcustody.audit.events.block_runs import Runs


class ResidencyOpened(NamedTuple):
    """A request entered the cache: who, why, until when, what it attached and what it was handed (class B).

    `attached` existed before; `written` is what admission handed out, on record before anything is computed.
    `model` is the first 16 hex digits of the ModelIdentity's digest; empty where it is not known.
    """

    at_us: int
    residency: int
    tenant: str
    subject: str | None
    session: str | None
    asserted: bool
    classification: str
    domains: tuple[int, ...]
    attached: Runs
    reasons: tuple[str, ...]
    revision: int
    absolute_us: int
    written: Runs = ()
    model: str = ""
    trace: str = ""


class BlocksAttached(NamedTuple):
    """A running request came to refer to blocks that another had published meanwhile (class B).

    It uses them from then on as it does those that its `ResidencyOpened` lists as attached: until it is
    released, and under its hold after that.
    """

    at_us: int
    residency: int
    tenant: str
    runs: Runs
    trace: str = ""


class ResidencyReleased(NamedTuple):
    """A request left: what it wrote since admission, and until when it holds its blocks (0: not held) (class B).

    `written` is every block it had allocated that no earlier leaf of it lists: growth and copies, whatever
    became of them.
    """

    at_us: int
    residency: int
    tenant: str
    cause: str
    written: Runs
    hold_us: int
    incarnation: str = ""
    trace: str = ""


class BlocksReleased(NamedTuple):
    """A request that goes on let go of some blocks, as a sliding window does (class B).

    `own`: it had allocated them itself and no leaf lists them yet; its `ResidencyReleased` leaves them out.
    Else it had attached them, or was handed them at admission.
    """

    at_us: int
    residency: int
    tenant: str
    cause: str
    runs: Runs
    own: bool
    hold_us: int
    incarnation: str = ""
    trace: str = ""


class HoldsNarrowed(NamedTuple):
    """A narrowing act made holds of a tenant end earlier: which stand from here on, and until when (class B).

    `holds` are all residencies of the tenant in this process that hold anything after the act, ascending; `holds[i]`
    lasts until `until_us[i]`. What was released before and is not among them holds no longer. `revision` is the
    policy's that narrowed.
    """

    at_us: int
    tenant: str
    revision: int
    holds: tuple[int, ...]
    until_us: tuple[int, ...]


class CustodyEnded(NamedTuple):
    """Blocks of one owner left custody (class B).

    `retired_us` is when the last device work on them retired: the fence's end, or some earlier moment where
    none was in flight when custody ended. `ceiling_us` is their absolute end (0: none).
    """

    at_us: int
    tenant: str
    classification: str
    runs: Runs
    cause: str
    due_us: int
    ended_us: int
    retired_us: int
    scrub_within_us: int
    ceiling_us: int = 0
    incarnation: str = ""


class ReceiptRecorded(NamedTuple):
    """One shard's memory of these blocks was overwritten (class B).

    A launch that covers several owners is one receipt per owner with the same `launch`; a boot scrub has no
    owner (`tenant` None) and generation 0. `bytes`, `verified`: of these runs. `level`: launched, retired,
    sampled, full. `result`: ok or failed; failed blocks are a receipt of their own.
    """

    at_us: int
    launch: int
    shard: int
    tenant: str | None
    method: str
    device: str
    bytes: int
    started_us: int
    ended_us: int
    level: str
    share: float
    verified: int
    result: str
    runs: Runs
    incarnation: str = ""


class ErasureApplied(NamedTuple):
    """An erasure took effect here (class B): `runs` is all custody that it covers, ended or about to end or kept.

    `requests` were aborted, `finishing` run on unattachable, `residencies` lapsed; `objects[i]` are of `tiers[i]`.
    """

    at_us: int
    erasure: str
    tenant: str | None
    requests: int
    finishing: int
    residencies: int
    runs: Runs
    tiers: tuple[str, ...] = ()
    objects: tuple[int, ...] = ()


class ErasureRemaining(NamedTuple):
    """Custody that an erasure covers and that stays, with the reason (class B)."""

    at_us: int
    erasure: str
    tenant: str | None
    reason: str
    runs: Runs


class ErasureReread(NamedTuple):
    """What an erasure ended was read back after its receipts (class B).

    Only blocks that were still CLEAN at the same generation could be read: `checked`; the rest, `changed`, had been
    handed out again. `nonzero`: bytes that were not zero.
    """

    at_us: int
    erasure: str
    tenant: str | None
    checked: int
    changed: int
    nonzero: int


class CustodyOverdue(NamedTuple):
    """Holds are past their deadline and not lapsed yet: the process slept, or fell behind (class B).

    Nothing of them is served meanwhile. A second one, with none left, says that it has caught up.
    """

    at_us: int
    pool: int
    residencies: int
    due_us: int


class ErasureRequested(NamedTuple):
    """All custody of a selector must end by the deadline (class B). `actor` asked for it."""

    at_us: int
    erasure: str
    tenant: str | None
    selector: str
    subject: str | None
    session: str | None
    deadline_us: int
    actor: str
    detail: str = ""
    trace: str = ""


class ErasureCompleted(NamedTuple):
    """An erasure ran: what ended, what lawfully remains and why (class B). `outcome`: complete or partial."""

    at_us: int
    erasure: str
    tenant: str | None
    outcome: str
    residencies: int
    blocks: int
    remaining: int
    reason: str = ""


class OrphanScanned(NamedTuple):
    """A scan compared the allocator, live sequences and the ledger (class B). `mode`: online or full."""

    at_us: int
    scan: int
    mode: str
    started_us: int
    ended_us: int
    residencies: int
    blocks: int
    findings: int


class OrphanFound(NamedTuple):
    """Custody that two sources disagree about (class B). `orphan` is one of the classes of the design."""

    at_us: int
    scan: int
    finding: int
    orphan: str
    cause: str
    tenant: str | None
    age_us: int
    runs: Runs
    action: str
    outcome: str
    residency: int = 0
