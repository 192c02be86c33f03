"""Events of a tier's copies; `copy_leaves` records them."""

from __future__ import annotations

from typing import NamedTuple

from kvcustody.governance.tiers.heirs import UNKNOWN, TierHolder


class CopyEvent(NamedTuple):
    """One step of one copy. Its number is unique in one tier of one process; a name may recur.

    `step`: stored; ended (nothing finds it any more); destroyed (its bytes are gone, or nobody can open them); locked
    (the store keeps the bytes of what ended until `due_us`, by a lock of its own). A copy may be destroyed twice: its
    key at once, its bytes later. `at_us` and `due_us`, by when it must have ended, are boot times; every step has both.
    `cause` is of an end: ceiling, evicted, erased, lost, broken, orphan, teardown or policy; and of destruction the
    evidence: zeroed, unlinked, deleted or key-destroyed. `erasure` is what ended it, where that is one. Number 0: what
    a process before left in the store, destroyed at start; nothing tells whose.

    At a start also `inherited`: what a dead process left, `heir_of`; `cause` is restored or ended.
    """

    step: str
    name: bytes
    number: int
    tenant: str
    classification: str
    blocks: int
    size: int
    at_us: int
    due_us: int
    cause: str = ""
    erasure: str = ""
    heir_of: TierHolder = UNKNOWN
