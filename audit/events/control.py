"""Events of processes, policies, keys and recorded decisions."""

from __future__ import annotations

from typing import NamedTuple

PROCESS_DEATH = "unproven: process death"  # the cause of every end that a successor recorded


class WorkerStarted(NamedTuple):
    """A process began to hold custody; `generation` is where its pool's counter starts (class B)."""

    at_us: int
    worker: str
    blocks: int
    shards: int
    bytes_per_block: int
    device: str
    software: str
    revision: int = 0
    generation: int = 0


class WorkerStopped(NamedTuple):
    """A process ended in order, with its pool's own counters (class B)."""

    at_us: int
    worker: str
    cause: str
    allocated: int
    scrubbed: tuple[int, ...]


class WorkerDied(NamedTuple):
    """An incarnation ended without saying so; its successor closed its custody as unproven (class B)."""

    at_us: int
    worker: str
    incarnation: str
    teardown: str
    residencies: int
    blocks: int


class PolicyActivated(NamedTuple):
    """A policy revision took effect (class A). `digest` is of the policy document."""

    at_us: int
    revision: int
    name: str
    profile: str
    digest: str
    actor: str
    previous: int = 0


class KeyEvent(NamedTuple):
    """A key epoch was made, rotated, revoked or destroyed (class A). Never the key."""

    at_us: int
    tenant: str | None
    action: str
    epoch: int
    actor: str
    trace: str = ""


class KeysOrdered(NamedTuple):
    """Every worker is to rotate, or to destroy, a tenant's key epochs from before this moment (class A).

    A leaf of the system log: it has to outlast the tenant's own content. What workers do is a `KeyEvent` each.
    """

    at_us: int
    of_tenant: str
    action: str
    actor: str
    reason: str
    trace: str = ""


class DecisionRecorded(NamedTuple):
    """A decision worth its own leaf: a reader's first use of a grant or segment under a revision (class A).

    Written in the reader's log and, when another tenant owns the blocks, in the owner's, without the reader's trace.
    """

    at_us: int
    action: str
    effect: str
    reader: str
    owner: str
    classification: str
    reasons: tuple[str, ...]
    revision: int
    via: str = ""
    residency: int = 0
    trace: str = ""
