"""Events of copies off the device: objects of a tier that began, ended and were destroyed; decisions to move them.

A leaf is of several copies of one tenant, classification and cause in one tier: its lists belong together, one place a
copy. A copy is (incarnation, tier, number); its name is opaque, and may be another copy's once this one has ended.
"""

from __future__ import annotations

from kvcustody.audit.events.event import (
    ErasureId,
    HeldTenant,
    MaybeServed,
    OwnLife,
    WordList,
    Words,
    WorkersLifecycleEvent,
)

END_UNRECORDED = "orphan: its end was not recorded"  # the cause of every end that a scan recorded
ORDERLY_STOP = "teardown"  # the cause of every end that an orderly stop of the process made
ZEROED, UNLINKED, KEY_DESTROYED = "zeroed", "unlinked", "key-destroyed"
EVIDENCE = (ZEROED, UNLINKED, KEY_DESTROYED)  # of the end of a copy's bytes


class CopiesStored(WorkersLifecycleEvent, frozen=True, tag="copies-stored"):
    """Copies began (class B): each holds `blocks_each` blocks sealed in `bytes_each` bytes, and ends by `due_us`.

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


class CopiesEnded(WorkersLifecycleEvent, frozen=True, tag="copies-ended"):
    """From `ended_us` on nothing finds these copies (class B). `erasure` ended them, where `cause` is `erased`.

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


class CopiesDestroyed(WorkersLifecycleEvent, frozen=True, tag="copies-destroyed"):
    """Bytes of copies are gone, or nobody can open them any more (class B): `cause` is one of `EVIDENCE`.

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


class TransferDecided(WorkersLifecycleEvent, frozen=True, tag="transfer-decided"):
    """Whether copies were moved, by what either way was predicted to take, and what came of it (class B).

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
