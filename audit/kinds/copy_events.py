"""Events of copies off the device: a tier's objects from start to destruction, and decisions to move them.

A leaf is of several copies of one tenant, classification and cause in one tier: its lists belong together, one place a
copy. A copy is (incarnation, tier, number); its name is opaque, and may be another copy's once this one has ended.
"""

from __future__ import annotations

from typing import Annotated

from kvcustody.audit.kinds.event import (
    ErasureId,
    HeldTenant,
    MaybeServed,
    OneOf,
    OwnLife,
    WordList,
    Words,
    WorkersLifecycleEvent,
)
from kvcustody.audit.kinds.row import INCARNATION, Kept, LeafFigures, RowColumn, in_table

END_UNRECORDED = "orphan: its end was not recorded"  # the cause of every end that a scan recorded
ORDERLY_STOP = "teardown"  # the cause of every end that an orderly stop of the process made
ZEROED, UNLINKED, KEY_DESTROYED, DELETED = "zeroed", "unlinked", "key-destroyed", "deleted"
EVIDENCE = (ZEROED, UNLINKED, KEY_DESTROYED, DELETED)  # of the end of a copy's bytes


COPY_STEPS = in_table(
    "copy_steps", INCARNATION, RowColumn("step", "_step", Kept.NAME), "tier",
    RowColumn("tenant", kept=Kept.MAYBE_TEXT), "classification", RowColumn("cause", "_cause", Kept.TEXT),
    RowColumn("erasure", "_erasure", Kept.TEXT), *(RowColumn(name, f"_{name}", Kept.NUMBER) for name in
    ("copies", "numbers", "blocks", "bytes", "low", "high")), "at_us",
    indexes={"incarnation": ("incarnation", "tier", "step", "low"), "erasure": ("erasure",)}, month="at_us",
)  # fmt: skip
"""A row is of one leaf: how many copies it lists, and between which numbers, so that who asks for some copies reads few
leaves. Two sides are compared by the sum of the numbers (`numbers`), without a leaf."""


class CopiesStored(WorkersLifecycleEvent, frozen=True, tag="copies-stored"):
    """Copies were stored (class B): each holds `blocks_each` blocks sealed in `bytes_each` bytes, and ends by `due_us`.

    What proves that its bytes are gone has to follow by then and `within_us`, as the policy says now.
    """

    tier: Words
    tenant: HeldTenant
    classification: Words
    names: WordList
    numbers: tuple[int, ...]
    blocks_each: tuple[int, ...]
    bytes_each: tuple[int, ...]
    due_us: tuple[int, ...]
    stored_us: tuple[int, ...]
    within_us: int

    row = COPY_STEPS


class CopiesEnded(WorkersLifecycleEvent, frozen=True, tag="copies-ended"):
    """From `ended_us` on no look-up finds these copies (class B). With the cause `erased`, `erasure` ended them.

    `due_us` is what the process says that they were due by: never later than what it said when it stored them. What
    proves that their bytes are gone has to follow by then and `within_us`.
    """

    tier: Words
    tenant: HeldTenant
    classification: Words
    cause: Words
    names: WordList
    numbers: tuple[int, ...]
    blocks_each: tuple[int, ...]
    bytes_each: tuple[int, ...]
    due_us: tuple[int, ...]
    ended_us: tuple[int, ...]
    within_us: int
    erasure: ErasureId = ""
    incarnation: OwnLife = ""

    row = COPY_STEPS
    figures = LeafFigures(by="cause")


class CopiesDestroyed(WorkersLifecycleEvent, frozen=True, tag="copies-destroyed"):
    """The bytes of copies are gone, or nobody can decrypt them any more (class B): `cause` is one of `EVIDENCE`.

    A copy may have more than one: the first ends it. A leaf of numbers 0 is of what a process before left under those
    names; `tenant` None: nothing tells whose it was.
    """

    tier: Words
    tenant: MaybeServed
    classification: Words
    cause: Words
    names: WordList
    numbers: tuple[int, ...]
    blocks_each: tuple[int, ...]
    bytes_each: tuple[int, ...]
    destroyed_us: tuple[int, ...]

    row = COPY_STEPS
    figures = LeafFigures(by="cause")


class CopiesLocked(WorkersLifecycleEvent, frozen=True, tag="copies-locked"):
    """A store refuses to delete the bytes of these ended copies until `until_us` because of its own lock (class B).

    It is no evidence of an end: that is a key's, or the delete that follows the lock. `erasure` ended them, if any did.
    """

    tier: Words
    tenant: HeldTenant
    classification: Words
    names: WordList
    numbers: tuple[int, ...]
    blocks_each: tuple[int, ...]
    bytes_each: tuple[int, ...]
    until_us: tuple[int, ...]
    erasure: ErasureId = ""


class TierInherited(WorkersLifecycleEvent, frozen=True, tag="tier-inherited"):
    """A worker died and another opened its tier (class B): the outcome for these copies.

    `outcome`: `restored`, custody of them is the recorder's from now on, under the deadlines that they had; or `ended`,
    as policy says of their classification, or because the recorder is no heir. Who died, `left_by_worker` and
    `left_by_process`, is empty where nothing tells.
    """

    tier: Words
    tenant: HeldTenant
    classification: Words
    outcome: Annotated[str, OneOf(frozenset(("restored", "ended")))]
    left_by_worker: Words
    left_by_process: Words
    copies: WordList
    blocks_in_each: tuple[int, ...]
    sizes_in_each: tuple[int, ...]


class BlocksHandedOver(WorkersLifecycleEvent, frozen=True, tag="blocks-handed-over"):
    """Blocks of a request that one worker prefilled pass to another that decodes it (class B).

    `step`: `offered` to `peer` by this worker; `given`, its fetch was answered; `received` by this one from it; or
    `refused`, by either, for a `reason`. `ticket` is the nonce of the ticket, by which both workers' leaves are found.
    """

    tenant: HeldTenant
    step: Annotated[str, OneOf(frozenset(("offered", "given", "received", "refused")))]
    peer: Words
    peer_life: Words
    ticket: Words
    blocks: int
    objects: int
    bytes: int
    reason: Words


class TransferDecided(WorkersLifecycleEvent, frozen=True, tag="transfer-decided"):
    """A decision whether to move copies, with predicted and measured times (class B).

    `action`: store or restore. `choice`: transfer, recompute or none. `outcome`: done, partial, failed, or empty.
    `actual_us` is what was measured: 0 where nothing moved. `residency`: whom it was restored for; 0 for a store.
    `part_blocks`: how many of the blocks came, where the outcome is partial. `latency_class` is the request's, empty
    where it has none.
    """

    action: Words
    tier: Words
    tenant: HeldTenant
    residency: int
    blocks: int
    bytes: int
    transfer_us: int
    recompute_us: int
    choice: Words
    outcome: Words
    actual_us: int
    reason: Words
    part_blocks: int = 0
    latency_class: Words = ""

    row = in_table(
        "transfer_decisions", INCARNATION, "action", "tier", "tenant", "residency", "blocks", "bytes", "transfer_us",
        "recompute_us", "choice", "outcome", "actual_us", "reason", "at_us", RowColumn("part_blocks", default="0"),
        RowColumn("latency_class", default=""),
        indexes={"residency": ("incarnation", "residency"), "at": ("at_us", "log", "idx")}, month="at_us",
    )  # fmt: skip
    figures = LeafFigures(by="choice")
