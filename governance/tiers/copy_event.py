"""What happened to copies in tiers, and what was decided of them: what a tier tells, before governance writes it down.

Times are boot-time microseconds of the process; those ahead are as they stood when the event was made.
"""

from __future__ import annotations

from typing import NamedTuple


class CopyEvent(NamedTuple):
    """One step of one copy: `stored`, `ended` (nothing finds it from then on) or `destroyed`.

    `number` tells the copies of one tier and process apart, whatever names they lie under. `cause` is why it ended, or
    what shows that it is gone: `zeroed`, `unlinked`, `absent`, `key-destroyed`; of one that an earlier process stored,
    `found`. A copy may be destroyed twice: its key at once, and its bytes when the store is there again.
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


class TransferDecision(NamedTuple):
    """Blocks were to be moved, or not: what both ways were expected to take, what was chosen, and what it took.

    `action` is `store` or `restore`, `choice` `transfer` or `recompute`, `outcome` empty, `done`, `partial`, `failed`.
    """

    action: str
    tier: str
    tenant: str
    residency: int
    blocks: int
    size: int
    at_us: int
    transfer_us: int
    recompute_us: int
    choice: str
    outcome: str
    actual_us: int
    reason: str
