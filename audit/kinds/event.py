"""An event: a small record of one moment, made on the hot path and turned into leaves later.

1. A kind of event is declared once, as a class with its outage class as base and its name in leaves as `tag`. All that
   is known of it elsewhere (`leaf_schema`) follows: to add a field, add it here, last and with a default.
2. The base also says who writes the kind. Workers hand in the kinds below `WorkersGuardingEvent` and
   `WorkersLifecycleEvent`, doors those below `DoorsLifecycleEvent` and those of workers that say `by_door`; only the
   control plane writes all others.
3. Every text in a kind that workers or doors hand in has a `FieldMeaning`, or the values that it may have (`OneOf`).
   The control plane refuses a leaf whose text names what its worker neither is, holds nor was told
   (`service.ingest`). A kind with a text of no stated meaning cannot be loaded (`leaf_schema`).
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated, ClassVar, NamedTuple, Self

import msgspec

from kvcustody.audit.kinds.row import LeafFigures, LeafRow


class FieldMeaning(Enum):
    """The meaning of a field in a worker's leaf, and so the values that its worker may write there."""

    WORDS = "names nobody"
    TRACE = "a W3C trace id"
    WORKER = "this worker"
    LIFE = "this incarnation"
    EARLIER = "a sequence of this incarnation, before the leaf's own"
    SERVED = (
        "a tenant whose request, key or copy this worker handles, of an issuer that the ledger knows: the leaf is in "
        "that tenant's log"
    )
    HELD = "a tenant whose request, key or copy this worker has recorded"
    OWNER = "the reader's own tenant, or a tenant that the ledger knows"
    ACTOR = "this worker, or the author of the order that the leaf follows"
    ERASURE = "an erasure of the leaf's tenant whose request is in the ledger"
    CASE = "a case that restricts, of the leaf's tenant"
    OF_ORDER = "the tenant of the erasure or case that the leaf names"
    ORDER = "an order on enforcement; 0: none"
    ORDERED = "that order's value"


class OneOf(NamedTuple):
    """The allowed values of a field in a worker's leaf."""

    values: frozenset[str]


Words = Annotated[str, FieldMeaning.WORDS]
MaybeWords = Annotated[str | None, FieldMeaning.WORDS]
WordList = Annotated[tuple[str, ...], FieldMeaning.WORDS]
Trace = Annotated[str, FieldMeaning.TRACE]
OwnWorker = Annotated[str, FieldMeaning.WORKER]
OwnLife = Annotated[str, FieldMeaning.LIFE]
EarlierSequence = Annotated[int, FieldMeaning.EARLIER]
ServedTenant = Annotated[str, FieldMeaning.SERVED]
MaybeServed = Annotated[str | None, FieldMeaning.SERVED]
HeldTenant = Annotated[str, FieldMeaning.HELD]
MaybeHeld = Annotated[str | None, FieldMeaning.HELD]
OwnerTenant = Annotated[str, FieldMeaning.OWNER]
Actor = Annotated[str, FieldMeaning.ACTOR]
ErasureId = Annotated[str, FieldMeaning.ERASURE]
CaseId = Annotated[str, FieldMeaning.CASE]
OrderedTenant = Annotated[str, FieldMeaning.OF_ORDER]
MaybeOrdered = Annotated[str | None, FieldMeaning.OF_ORDER]
OrderNumber = Annotated[int, FieldMeaning.ORDER]
Ordered = Annotated[str, FieldMeaning.ORDERED]
OrderedList = Annotated[tuple[str, ...], FieldMeaning.ORDERED]


class Event(msgspec.Struct, frozen=True, gc=False):
    """Something that happened at `at_us`, in boot-time microseconds of its incarnation."""

    outage: ClassVar[str] = ""
    by_worker: ClassVar[bool] = False  # whether workers hand it in (rule 2)
    by_door: ClassVar[bool] = False  # whether doors do
    is_order: ClassVar[bool] = False  # whether others act on it: no worker's role of a database may insert it
    row: ClassVar[LeafRow | None] = None
    figures: ClassVar[LeafFigures] = LeafFigures()
    acting: ClassVar[str] = ""
    at_us: int

    def _replace(self, **changes: object) -> Self:
        """Return the event with some fields replaced."""
        return msgspec.structs.replace(self, **changes)


class GuardingEvent(Event, frozen=True):
    """Class A: durable before the recorded act takes effect."""

    outage: ClassVar[str] = "A"


class LifecycleEvent(Event, frozen=True):
    """Class B: spilled to disk when the database is away."""

    outage: ClassVar[str] = "B"


class CountedEvent(Event, frozen=True):
    """Class C: added up into counters."""

    outage: ClassVar[str] = "C"


class GuardingOrder(GuardingEvent, frozen=True, kw_only=True):
    """Class A, followed by others. The writer adds `signature` (`audit.store.database.signed_orders`)."""

    is_order: ClassVar[bool] = True
    signature: str = ""


class LifecycleOrder(LifecycleEvent, frozen=True, kw_only=True):
    """Class B, followed by others; like `GuardingOrder`."""

    is_order: ClassVar[bool] = True
    signature: str = ""


class WorkersGuardingEvent(GuardingEvent, frozen=True):
    """Class A, of a kind that workers submit."""

    by_worker: ClassVar[bool] = True


class WorkersLifecycleEvent(LifecycleEvent, frozen=True):
    """Class B, of a kind that workers submit."""

    by_worker: ClassVar[bool] = True


class DoorsLifecycleEvent(LifecycleEvent, frozen=True):
    """Class B, of a kind that doors before a router submit, and workers do not."""

    by_door: ClassVar[bool] = True
