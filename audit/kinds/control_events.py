"""Events of the control plane: reads of the ledger, and changes of the principals who may ask.

Events of a policy's release: every step of it, what a worker stages, and what it takes back.

Events of how long the ledger's own content is kept, and for whom it no longer means anybody.

Events of the keys that sign the ledger's checkpoints; data keys have events of their own.

Events of processes, policies, issuers, keys and recorded decisions.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from kvcustody.audit.kinds.event import (
    Actor,
    GuardingEvent,
    GuardingOrder,
    LifecycleEvent,
    MaybeServed,
    OneOf,
    Ordered,
    OrderedList,
    OrderNumber,
    OwnerTenant,
    OwnWorker,
    ServedTenant,
    Trace,
    WordList,
    Words,
    WorkersGuardingEvent,
    WorkersLifecycleEvent,
)
from kvcustody.audit.kinds.row import Kept, LeafFigures, RowColumn, in_table

GOVERNOR, POLICY_FEED = "governor", "policy-feed"  # parts of a worker that act by themselves
OWN_ACTORS = frozenset({GOVERNOR, POLICY_FEED})


class AccessRecorded(GuardingEvent, frozen=True, tag="access"):
    """A role that sees others' custody read the ledger or exported from it (class A).

    `operation` is the operation's name in the API. `of_tenant` is whom the question was about, empty for everybody.
    `filters` are the names of the filters that were used, never their values: one could be a subject's name.
    """

    actor: str
    roles: tuple[str, ...]
    operation: str
    of_tenant: str = ""
    filters: tuple[str, ...] = ()
    trace: str = ""


class PrincipalChanged(GuardingEvent, frozen=True, tag="principal-changed"):
    """A principal was enrolled or disabled, or its key issued, replaced or revoked (class A).

    `detail` is a key's public prefix. Never the key.
    """

    principal: str
    action: str
    roles: tuple[str, ...]
    of_tenant: str
    actor: str
    detail: str = ""
    trace: str = ""


class AttemptsRefused(WorkersLifecycleEvent, frozen=True, tag="attempts-refused"):
    """How often an identity was refused, from `from_us` to now, because it is unproved or not admitted (class B).

    `place`: an `engine`, the `door` before one, or the `service`. `source`: the network that they came from, or the
    tenant that they named; `others` are all beyond the bound. `of_worker`: whose door it is.
    """

    place: Annotated[str, OneOf(frozenset({"engine"}))]
    reason: Words
    source: Words
    attempts: int
    from_us: int
    of_worker: Annotated[str, OneOf(frozenset({""}))] = ""


class ReleaseStep(GuardingEvent, frozen=True, tag="release-step"):
    """A step of the release workflow is about to be taken (class A).

    `step` is its number in the release; `record` the digest of the signed record, which holds the rest.
    """

    is_order: ClassVar[bool] = True
    step: int
    action: str
    revision: int
    digest: str
    record: str
    actor: str
    detail: str = ""
    trace: str = ""


class PolicyStaged(WorkersGuardingEvent, frozen=True, tag="policy-staged"):
    """A revision took effect for some tenants of a worker (class A). `stage` names them, or their share."""

    revision: int
    name: Words
    digest: Words
    stage: Words
    actor: Actor
    previous: int = 0


class EnforcementOrdered(GuardingOrder, frozen=True, tag="enforcement-ordered"):
    """Somebody ordered for whom workers enforce their policy until `until_seconds` (UTC), and for whom not (class A).

    `mode` is `monitor` (nobody), `canary` (the tenants named, and of the others a share of sessions, in millionths) or
    `enforce` (everybody: an order back). `seed` chooses the sessions of a share, and keys nothing.
    """

    mode: str
    tenants: tuple[str, ...]
    share_millionths: int
    seed: str
    until_seconds: int
    actor: str
    reason: str
    trace: str = ""


class EnforcementChanged(WorkersGuardingEvent, frozen=True, tag="enforcement-changed"):
    """A worker now enforces its policy for these (class A): on record before anybody else is monitored.

    `order` is the order's place in the system log, `refused` why the worker does not follow it and enforces.
    """

    mode: Ordered
    tenants: OrderedList
    share_millionths: int
    until_seconds: int
    revision: int
    order: OrderNumber
    actor: Actor
    refused: Words = ""


class GrantsRevoked(WorkersLifecycleEvent, frozen=True, tag="grants-revoked"):
    """A worker revoked grants, segments or sharing groups: in effect before it is recorded (class B)."""

    ids: WordList
    revision: int
    actor: Actor


class RetentionPurged(GuardingOrder, frozen=True, tag="retention-purged"):
    """The content of a log's leaves below `below` is about to be dropped; their hashes stay (class A).

    `first` is the first of them that still had content. `size` and `digest` name what was exported before: the
    checkpoint by its root leaves, and SHA-256 of the export's manifest. `approver` is another person than `actor`.
    """

    of_log: str
    first: int
    below: int
    size: int
    digest: str
    actor: str
    approver: str
    reason: str

    row = in_table(
        "retention_purges",
        "of_log",
        "first",
        "below",
        "size",
        "digest",
        "actor",
        "approver",
        "reason",
        "at_us",
    )


class LegalHoldChanged(GuardingOrder, frozen=True, tag="legal-hold"):
    """A legal hold on ledger content was placed or lifted (class A). `tenant` None: on all of it.

    `subject`: for what is held of one subject of the tenant. It binds the ledger's retention, and no deadline of any
    block.
    """

    hold: str
    tenant: str | None
    action: str
    reason: str
    actor: str
    subject: str | None = None

    row = in_table("legal_holds", "hold", "tenant", "action", "reason", "actor", "at_us", "subject")


class SubjectUnlinked(GuardingOrder, frozen=True, tag="subject-unlinked"):
    """A subject's names and key are about to be destroyed; its pseudonyms then belong to nobody (class A)."""

    tenant: str
    pseudonyms: int
    actor: str
    reason: str


class OrderSigned(GuardingOrder, frozen=True, tag="order-signed"):
    """An unsigned recorded order counts from now on, unchanged and as of its own time (class A).

    `digest` is the SHA-256 of its leaf, in hex; `idx` its place in the log of `tenant` (None: the system log).
    """

    tenant: str | None
    of_kind: str
    idx: int
    digest: str
    actor: str
    reason: str


class SinkChanged(GuardingEvent, frozen=True, tag="sink-changed"):
    """A sink of leaves (a webhook, a collector's file) is about to be attached, detached, or sent its dead batches
    again (class A). It is recorded here and not in the sink, which may be unreachable.
    """

    sink: str
    action: str
    actor: str
    reason: str
    trace: str = ""


class ReportScheduleChanged(GuardingEvent, frozen=True, tag="report-schedule-changed"):
    """A schedule of reports is about to be created, paused, resumed or deleted (class A).

    `of_tenant` is whose reports it makes, empty for all. `destinations` are names of the settings, never addresses.
    """

    schedule: str
    action: str
    framework: str
    of_tenant: str
    every: str
    zone: str
    destinations: tuple[str, ...]
    actor: str
    reason: str = ""


class ScheduledReportMade(GuardingEvent, frozen=True, tag="scheduled-report-made"):
    """A schedule produced a report, whose delivery begins (class A). `actor` is the schedule's author.

    `period` is ISO 8601, in UTC. `digest` is the SHA-256 of report.json without its signature; `opinion` its verdict.
    """

    report: str
    schedule: str
    framework: str
    of_tenant: str
    period: str
    checkpoint: int
    digest: str
    opinion: str
    signed_by: str
    actor: str


class ReportDelivery(GuardingEvent, frozen=True, tag="report-delivery"):
    """A scheduled report is about to be delivered for the first time (`begun`), was accepted (`delivered`), was not
    accepted (`failed`: recorded once, and retried), was given up, or is retried on `actor`'s request (`again`) (class
    A).
    """

    report: str
    schedule: str
    of_tenant: str
    destination: str
    action: str
    digest: str
    actor: str
    reason: str = ""


class ClockConfirmed(GuardingEvent, frozen=True, tag="clock-confirmed"):
    """Somebody confirms a machine's wall clock, which is this far ahead of the deadline clock (class A)."""

    ahead_seconds: int
    actor: str
    reason: str
    trace: str = ""


class LogBroken(GuardingEvent, frozen=True, tag="log-broken"):
    """Somebody confirms that the root log does not extend what its key signed, and that it continues anyway (class A).

    `record` is the statement that the key signed, in base64: what was lost, and where the next signature begins.
    """

    lost_size: int
    base_size: int
    record: str
    actor: str
    reason: str
    trace: str = ""


class SchemaChanged(GuardingEvent, frozen=True, tag="schema-changed"):
    """Tables of leaves' rows have a new form, whose rows were made from leaves and compared (class A).

    The leaf commits with the swap of the forms. `rows` were copied; `leafless` of them have no leaf any more.
    """

    before: str
    revision: str
    tables: tuple[str, ...]
    rows: int
    leafless: int
    actor: str


class SigningKeyRecorded(GuardingEvent, frozen=True, tag="signing-key"):
    """A key that signs checkpoints was made, or took over from another (class A).

    `vkey` is the public key (C2SP). `record` is the handover that both keys signed, in base64 (none: the first key).
    """

    action: str
    vkey: str
    record: str
    actor: str


class ReportKeyRecorded(GuardingEvent, frozen=True, tag="report-key"):
    """A key that signs evidence reports was made, or took over from another (class A).

    As `SigningKeyRecorded`, of a key that signs no checkpoint: `record` is the handover that both keys signed.
    """

    action: str
    vkey: str
    record: str
    actor: str


PROCESS_DEATH = "unproven: process death"  # the cause of every end that a successor recorded


GENERATED, REPLAYED = "generated", "replayed"  # what a process that serves nobody says of all that it records
SIMULATED = "simulated"  # what one says that is at work, for generated traffic
ORIGINS = frozenset({"", GENERATED, REPLAYED, SIMULATED})
SIGNED, FROM_CONTROL_PLANE = "signed", "control-plane"  # which orders a worker follows


class WorkerStarted(WorkersLifecycleEvent, frozen=True, tag="worker-started"):
    """A process began to hold custody; `generation` is where its pool's counter starts (class B).

    `origin` applies to everything that it records. It is empty for an engine at work, and `replayed` for recorded
    traffic that is run again. It is `generated` for traffic that nobody ever sent, and `simulated` if such traffic is
    served now. Leaves of earlier versions have no origin and are not marked. `orders` names those that it follows:
    those of its control plane, only those that a trusted key `signed` in its own ledger, or (empty) all.
    """

    worker: OwnWorker
    blocks: int
    shards: int
    bytes_per_block: int
    device: Words
    software: Words
    revision: int = 0
    generation: int = 0
    origin: Annotated[str, OneOf(ORIGINS)] = ""
    orders: Annotated[str, OneOf(frozenset({"", SIGNED, FROM_CONTROL_PLANE}))] = ""


class WorkerStopped(WorkersLifecycleEvent, frozen=True, tag="worker-stopped"):
    """A process stopped normally, with the counters of its pool (class B) and of its tiers, one place for each tier."""

    worker: OwnWorker
    cause: Words
    allocated: int
    scrubbed: tuple[int, ...]
    tiers: WordList = ()
    copies_stored: tuple[int, ...] = ()
    copies_ended: tuple[int, ...] = ()
    copies_destroyed: tuple[int, ...] = ()

    by_door = True


SILENCE, DECLARED = (
    "silence",
    "declared",
)  # who closed a dead process: a control plane by a bound, or two people


class WorkerDied(LifecycleEvent, frozen=True, tag="worker-died"):
    """An incarnation ended without recording it, and its custody was closed as unproven (class B).

    `closed_by` is empty where a successor closed it. It is `silence` where the control plane `actor` had heard nothing
    for `silent_seconds`, longer than `bound_seconds`. It is `declared` where two people (`actor`, `approver`) stated
    for `reason` that it will not come back. With `spill_lost` they also stated that nothing it spilled will come.
    `residencies`, `blocks` and `copies` count everything that was closed.
    """

    worker: str
    incarnation: str
    teardown: str
    residencies: int
    blocks: int
    closed_by: str = ""
    silent_seconds: int = 0
    bound_seconds: int = 0
    actor: str = ""
    approver: str = ""
    reason: str = ""
    spill_lost: bool = False
    copies: int = 0


class WorkerReturned(LifecycleEvent, frozen=True, tag="worker-returned"):
    """An incarnation that counted as dead submitted leaves of its own: it is alive until it ends (class B)."""

    worker: str
    incarnation: str


class WorkerClosingAsked(GuardingEvent, frozen=True, tag="worker-closing-asked"):
    """Somebody requests that a silent process be declared dead and its spill lost; a second person must agree (class
    A).
    """

    worker: str
    incarnation: str
    actor: str
    reason: str
    trace: str = ""


class PolicyActivated(WorkersGuardingEvent, frozen=True, tag="policy-activated"):
    """A policy revision took effect (class A). `digest` is of the policy document."""

    revision: int
    name: Words
    profile: Words
    digest: Words
    actor: Actor
    previous: int = 0

    row = in_table(
        "policy_revisions", "revision", "name", "profile", "digest", "actor", "previous", "at_us",
        indexes={"revision": ("revision",)},
    )  # fmt: skip


class PolicyText(WorkersLifecycleEvent, frozen=True, tag="policy-text"):
    """Piece `number` of `of`, from 1, of the document of a policy that a worker enforces (class B).

    It proves nothing by itself: what all pieces are together is the policy where its digest is `digest`, which the
    `policy-activated` or `policy-staged` leaf states.
    """

    digest: Words
    number: int
    of: int
    text: Words


BARE, QUALIFIED = "bare", "qualified"  # how an issuer's tenants are named: `acme`, or `acme^partner`


class IssuerAssigned(GuardingOrder, frozen=True, tag="issuer-assigned"):
    """The ledger met an issuer of tenants, which is about to be named for the first time (class A).

    `tenants` of the first one are `bare`: every id that stands alone in this ledger, in leaves from before this one
    too, is that issuer's. Those of any other are `qualified`: their names end with `^` and the issuer.
    """

    issuer: str
    tenants: str
    actor: str


class KeyEvent(WorkersGuardingEvent, frozen=True, tag="key-event"):
    """A key epoch was made, rotated, revoked or destroyed (class A). It never contains the key.

    `in_service`: what the key service does with the key that wraps the epoch alone: `owed`, `still-owed` by a process
    before, `pending` until `ends_utc` (µs), `gone`. Without a service, the same of known backups of the key store.
    """

    tenant: MaybeServed
    action: Words
    epoch: int
    actor: Actor
    trace: Trace = ""
    in_service: Words = ""
    ends_utc: int = 0


class KeysDropped(WorkersGuardingEvent, frozen=True, tag="keys-dropped"):
    """A process no longer holds any secret of the epochs that an order of the moment `ordered_utc` (µs) ended (class
    A).

    `epochs`: of how many it destroyed the wrapped copy; 0 where another process of these keys was quicker.
    """

    ordered_utc: int
    epochs: int


class KeysOrdered(GuardingOrder, frozen=True, tag="keys-ordered"):
    """Every worker must rotate, or destroy, a tenant's key epochs from before this moment (class A).

    A leaf of the system log: it has to outlast the tenant's own content. What workers do is a `KeyEvent` each.
    """

    of_tenant: str
    action: str
    actor: str
    reason: str
    trace: str = ""


class DecisionRecorded(WorkersGuardingEvent, frozen=True, tag="decision"):
    """A decision with its own leaf: a reader's first use of a grant or segment under a revision (class A).

    Written in the reader's log and, when another tenant owns the blocks, in the owner's, without the reader's trace.
    """

    action: Words
    effect: Words
    reader: ServedTenant
    owner: OwnerTenant
    classification: Words
    reasons: WordList
    revision: int
    via: Words = ""
    residency: int = 0
    trace: Trace = ""

    row = in_table(
        "decisions", "action", "effect", "reader", "owner", "classification", RowColumn("rule", "_rule", Kept.TEXT),
        "revision", "via", "at_us", month="at_us",
    )  # fmt: skip
    figures = LeafFigures(by="effect")
    acting = "reader"
