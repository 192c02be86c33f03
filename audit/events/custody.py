"""Events of custody itself: residencies, the blocks they hold, custody ends and receipts."""

from __future__ import annotations

from typing import NamedTuple

from kvcustody.audit.runs import Runs


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
