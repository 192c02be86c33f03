"""Route receipts: where a door's request went, and its hits there. Two leaves of two processes form one receipt.

1. The door writes its half when the answer's headers came, the worker its own when the request is admitted. Both name
   one `receipt`: 16 hexadecimal digits of the request id's digest, then 16 that no other request has.
2. What nobody said is no figure: `worker` and `target` are then empty, `promised_tokens` and `score` below 0.
3. A half names its process by its incarnation.
"""

from __future__ import annotations

from typing import Annotated

from kvcustody.audit.kinds.event import (
    DoorsLifecycleEvent,
    OneOf,
    ServedTenant,
    Trace,
    Words,
    WorkersLifecycleEvent,
)
from kvcustody.audit.kinds.row import INCARNATION, Kept, RowColumn, in_table

NAMED_SCOPES = ("subject", "session", "tenant", "request")
ANSWER_US_MAX = 3_600_000_000  # that a door waits for the first word of an answer, before it writes that none came
UNSAID = -1  # of a count that nobody said


class RouteSent(DoorsLifecycleEvent, frozen=True, tag="route-sent"):
    """A door's half of a route receipt: a request of `tenant` went to a router, which answered (class B).

    `scope`: whose name routers got; `request`: one that nobody else has, as the door was past its lease on epochs. The
    three epochs are those of the name. `worker` is who answered, as its own door says; `target` where the router says
    that it went. `status` is the answer's (0: none came), after `answer_ms`. `requests`: of the engine, in this one;
    `uses`: as often may they be presented. `promised_tokens`, `score` (millionths): what the router says that it chose
    by.
    """

    tenant: ServedTenant
    receipt: Words
    scope: Annotated[str, OneOf(frozenset(NAMED_SCOPES))]
    fleet_epoch: int
    tenant_epoch: int
    scope_epoch: int
    worker: Words
    target: Words
    status: int
    answer_ms: int
    requests: int
    uses: int
    promised_tokens: int
    score: int

    row = in_table(
        "routes_sent", INCARNATION, "tenant", RowColumn("receipt", kept=Kept.NAME), "scope", "fleet_epoch",
        "tenant_epoch", "scope_epoch", "worker", "target", "status", "answer_ms", "requests", "uses",
        "promised_tokens", "score", "at_us",
        indexes={"receipt": ("receipt",), "time": ("at_us",)}, month="at_us",
    )  # fmt: skip


class RouteFound(WorkersLifecycleEvent, frozen=True, tag="route-found"):
    """A worker's half of a route receipt: a request that came through a door was admitted here (class B).

    Of `prompt_tokens` it found `found_tokens`. `queue`: requests that were here when it came; `free_blocks`: those
    that nobody held. `crosses`: it found blocks of another tenant. `agrees`: door and worker knew of the same erasures.
    `asked`: the door writes its half, too; else this one is alone, as the request crosses.
    """

    tenant: ServedTenant
    receipt: Words
    asked: bool
    prompt_tokens: int
    found_tokens: int
    queue: int
    free_blocks: int
    crosses: bool
    agrees: bool
    model: Words = ""
    trace: Trace = ""

    row = in_table(
        "routes_found", INCARNATION, "tenant", RowColumn("receipt", kept=Kept.NAME), "asked", "prompt_tokens",
        "found_tokens", "queue", "free_blocks", "crosses", "agrees", "model", "at_us",
        indexes={"receipt": ("receipt",), "time": ("at_us",)}, month="at_us",
    )  # fmt: skip
