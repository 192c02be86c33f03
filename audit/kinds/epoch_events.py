"""Events of erase epochs and of doors: epochs that erasures raised, doors that follow them, and clipped hints.

None has the tag of a scope: whose a tag is, no leaf says.
"""

from __future__ import annotations

from typing import Annotated

from kvcustody.audit.kinds.event import DoorsLifecycleEvent, LifecycleEvent, OneOf, OwnWorker, WordList, Words
from kvcustody.audit.kinds.row import INCARNATION, in_table

FLEET, TENANT, SHARED, SUBJECT, SESSION = SCOPES = ("fleet", "tenant", "shared", "subject", "session")


class EpochRaised(LifecycleEvent, frozen=True, tag="epoch-raised"):
    """An erasure raised an erase epoch (class B): no door gives a router an earlier name of that scope again.

    `scope`: `fleet`, `tenant`, `subject`, `session`, or `shared`: the name that a tenant's subjects share, whose epoch
    one `number` raises for all erasures that waited for it. No erasure is named where the key of epochs
    changed, or raises were lost in a restore.
    """

    erasure: str
    tenant: str | None
    scope: Annotated[str, OneOf(frozenset(SCOPES))]
    number: int

    row = in_table("epoch_raises", "erasure", "tenant", "scope", "number", "at_us", indexes={"erasure": ("erasure",)})


class EpochsTaken(DoorsLifecycleEvent, frozen=True, tag="epochs-taken"):
    """A door follows every epoch up to `version` (class B); `digest` is of its snapshot.

    A door writes at most one a second: the newest stands for those before it.
    """

    door: OwnWorker
    version: int
    digest: Words

    row = in_table(
        "epochs_taken", INCARNATION, "door", "version", "digest", "at_us",
        indexes={"version": ("incarnation", "version")},
    )  # fmt: skip


class HintsClipped(DoorsLifecycleEvent, frozen=True, tag="hints-clipped"):
    """Hints of clients were clipped in the last `seconds` (class B). The event names no client.

    Of each hint the value that was asked for, the one that went on, and how many requests had both; `others` are hints
    beyond the first 64 of different values. A door writes one a minute at most.
    """

    door: OwnWorker
    seconds: int
    hints: WordList
    asked: WordList
    passed: WordList
    requests_each: tuple[int, ...]
    others: int
