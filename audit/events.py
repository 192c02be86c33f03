"""What happened to custody: plain tuples on the hot path, canonical leaf bytes in the ledger.

E1 Emitting an event costs one tuple. `leaves()` turns it into canonical bytes, later and on the writer's
thread.
E2 A leaf is JCS (RFC 8785) for our closed schema: ASCII keys in order, no floats, integers below 2^53 (else
decimal strings), at most 8 KiB. The bytes are the truth; every column elsewhere is derived from them.
E3 Run lists too long for one leaf continue in numbered leaves (`part` of `parts`, each repeating the head
and `blocks`, the total over all parts). A set that lacks a part is a gap.
E4 A subject or session appears only as a random pseudonym. No leaf carries token ids, prompt text, a bare
hash of either, or a key.
E5 Times in events, and `*_boot_us` in leaves, are boot-time microseconds of the incarnation: all deadline
arithmetic uses those, exactly. `at_us` in a leaf is UTC, for people and periods; `at_us - boot_us` is the
incarnation's offset, fixed at its start, so a step of the wall clock moves no deadline. 0 means "none".

Classes. A: durable before the act it records takes effect. B: lifecycle; spilled to disk when the database
is away. C: aggregated into counters. A residency id is unique inside its incarnation; globally it is
(incarnation, id).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import orjson

from kvcustody.audit.runs import EXACT, Run, count, encode, split
from kvcustody.errors import LedgerError

SCHEMA = "kvcustody/event@1"
SYSTEM = "system"
LEAF_BYTES_MAX = 8192
PROCESS_DEATH = "unproven: process death"
_PIECE_TOKENS = 96
_PARTS_DIGITS = 10
_CANONICAL = orjson.OPT_SORT_KEYS | orjson.OPT_STRICT_INTEGER

Runs = Sequence[Run]


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


class DecisionRecorded(NamedTuple):
    """A decision worth its own leaf: a reader's first use of a grant or segment under a revision (class A).

    Written in the reader's log and, when another tenant owns the blocks, in the owner's.
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


class ResidencyOpened(NamedTuple):
    """A request entered the cache: who, why, until when, what it attached and what it was handed (class B).

    `attached` existed before; `written` is what admission handed out, on record before anything is computed.
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


class BlocksAttached(NamedTuple):
    """A running request came to refer to blocks that another had published meanwhile (class B).

    It uses them from then on as it does those that its `ResidencyOpened` lists as attached: until it is
    released, and under its hold after that.
    """

    at_us: int
    residency: int
    tenant: str
    runs: Runs


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


class ErasureRequested(NamedTuple):
    """All custody of a selector must end by the deadline (class B). `actor` asked for it."""

    at_us: int
    erasure: str
    tenant: str | None
    selector: str
    subject: str | None
    session: str | None
    deadline_us: int
    actor: str
    detail: str = ""


class ErasureCompleted(NamedTuple):
    """An erasure ran: what ended, what lawfully remains and why (class B). `outcome`: complete or partial."""

    at_us: int
    erasure: str
    tenant: str | None
    outcome: str
    residencies: int
    blocks: int
    remaining: int
    reason: str = ""


class OrphanScanned(NamedTuple):
    """A scan compared the allocator, live sequences and the ledger (class B). `mode`: online or full."""

    at_us: int
    scan: int
    mode: str
    started_us: int
    ended_us: int
    residencies: int
    blocks: int
    findings: int


class OrphanFound(NamedTuple):
    """Custody that two sources disagree about (class B). `orphan` is one of the classes of the design."""

    at_us: int
    scan: int
    finding: int
    orphan: str
    cause: str
    tenant: str | None
    age_us: int
    runs: Runs
    action: str
    outcome: str
    residency: int = 0


class ObservationStarted(NamedTuple):
    """A process began to watch an engine that it does not govern (class B).

    Nothing that it records is enforced: observed blocks are in no residency, custody end or receipt, so they
    count in no coverage and no conservation. `digest` is of the policy that the deadlines come from.
    """

    at_us: int
    worker: str
    endpoint: str
    policy: str
    digest: str
    software: str


class ObservedStored(NamedTuple):
    """An engine's own stream said that blocks of one chain entered its cache (class B).

    `residency` is the observer's number for the chain; the first leaf of one opens it. `tenant` is None where
    nothing attributes it, else by `attribution`: salt or scope. `deadline_us`: when the policy's absolute limit
    is reached. Hashes are not recorded: an engine's are functions of token ids.
    """

    at_us: int
    engine: str
    tenant: str | None
    residency: int
    classification: str
    attribution: str
    blocks: int
    deadline_us: int


class ObservedRemoved(NamedTuple):
    """An engine's own stream said that blocks left its cache; nobody saw their memory overwritten (class B).

    `cause`: removed, cleared or engine-restarted. `late`: how many of these blocks left after the deadline.
    `remaining`: blocks of the residency that are still there.
    """

    at_us: int
    engine: str
    tenant: str | None
    residency: int
    cause: str
    blocks: int
    late: int
    remaining: int


class ObservedOverdue(NamedTuple):
    """A deadline passed and, by its own stream, the engine still holds the blocks (class B)."""

    at_us: int
    engine: str
    tenant: str | None
    residency: int
    classification: str
    blocks: int
    deadline_us: int


class ObservationGap(NamedTuple):
    """What an observer could not see, by the engine's own batch numbers: its counts are unsure from here on (class B).

    `cause` says which: batches that nobody can replay, payloads that cannot be read, blocks beyond what it tracks.
    """

    at_us: int
    engine: str
    cause: str
    first_batch: int
    last_batch: int


class HitCounted(NamedTuple):
    """One own-scope hit or one denial (class C): added up by the writer, never a leaf of its own."""

    at_us: int
    tenant: str
    owner: str
    action: str
    effect: str
    rule: str
    revision: int
    blocks: int = 0
    tokens: int = 0
    requests: int = 1


class HitCounters(NamedTuple):
    """The class C events of one key over one interval, added up (class B once it exists)."""

    at_us: int
    tenant: str
    owner: str
    action: str
    effect: str
    rule: str
    revision: int
    from_us: int
    requests: int
    blocks: int
    tokens: int


class SpillStarted(NamedTuple):
    """The database was away or behind: events from `first_sequence` on went to the local spill (class B)."""

    at_us: int
    cause: str
    first_sequence: int


class ReplayCompleted(NamedTuple):
    """A spill was read back: leaves added, and leaves that the database already had (class B)."""

    at_us: int
    segments: int
    added: int
    duplicates: int
    torn_bytes: int


class GapRecorded(NamedTuple):
    """Events that could not be kept anywhere, by sequence (class B)."""

    at_us: int
    cause: str
    first_sequence: int
    last_sequence: int


class Withdrawn(NamedTuple):
    """A class A event was committed after its caller had been refused: its act did not happen (class B)."""

    at_us: int
    sequence: int
    tenant: str | None


Event = (
    WorkerStarted
    | WorkerStopped
    | WorkerDied
    | PolicyActivated
    | KeyEvent
    | DecisionRecorded
    | ResidencyOpened
    | BlocksAttached
    | ResidencyReleased
    | BlocksReleased
    | CustodyEnded
    | ReceiptRecorded
    | ErasureRequested
    | ErasureCompleted
    | OrphanScanned
    | OrphanFound
    | ObservationStarted
    | ObservedStored
    | ObservedRemoved
    | ObservedOverdue
    | ObservationGap
    | HitCounted
    | HitCounters
    | SpillStarted
    | ReplayCompleted
    | GapRecorded
    | Withdrawn
)


class Kind(NamedTuple):
    """An event's name in leaves and its outage class."""

    name: str
    outage: str


KINDS: dict[type, Kind] = {
    WorkerStarted: Kind("worker-started", "B"),
    WorkerStopped: Kind("worker-stopped", "B"),
    WorkerDied: Kind("worker-died", "B"),
    PolicyActivated: Kind("policy-activated", "A"),
    KeyEvent: Kind("key-event", "A"),
    DecisionRecorded: Kind("decision", "A"),
    ResidencyOpened: Kind("residency-opened", "B"),
    BlocksAttached: Kind("blocks-attached", "B"),
    ResidencyReleased: Kind("residency-released", "B"),
    BlocksReleased: Kind("blocks-released", "B"),
    CustodyEnded: Kind("custody-ended", "B"),
    ReceiptRecorded: Kind("receipt", "B"),
    ErasureRequested: Kind("erasure-requested", "B"),
    ErasureCompleted: Kind("erasure-completed", "B"),
    OrphanScanned: Kind("orphan-scanned", "B"),
    OrphanFound: Kind("orphan-found", "B"),
    ObservationStarted: Kind("observation-started", "B"),
    ObservedStored: Kind("observed-stored", "B"),
    ObservedRemoved: Kind("observed-removed", "B"),
    ObservedOverdue: Kind("observed-overdue", "B"),
    ObservationGap: Kind("observation-gap", "B"),
    HitCounted: Kind("hit-counted", "C"),
    HitCounters: Kind("hit-counters", "B"),
    SpillStarted: Kind("spill-started", "B"),
    ReplayCompleted: Kind("replay-completed", "B"),
    GapRecorded: Kind("gap", "B"),
    Withdrawn: Kind("withdrawn", "B"),
}


class Pseudonyms(Protocol):
    """Gives the random pseudonym of a subject, or of a session (kept with its subject)."""

    def __call__(self, tenant: str, subject: str, session: str = "") -> str:
        """The pseudonym, made on first use."""


class Context(NamedTuple):
    """What turns an incarnation's events into leaves."""

    incarnation: str
    offset_us: int
    pseudonym: Pseudonyms


class Leaf(NamedTuple):
    """One canonical leaf: its log, its decoded body and its bytes."""

    log: str
    body: dict[str, Any]
    data: bytes


_RUN_FIELDS = ("attached", "runs")  # and "written", where the event has no other list
_DURATIONS = ("scrub_within_us", "age_us")
_HEAD_KEYS = (
    "schema",
    "kind",
    "outage",
    "log",
    "incarnation",
    "sequence",
    "at_us",
    "boot_us",
    "part",
    "parts",
)


def _key(field: str, kind: type) -> str:
    """The leaf key of an event field: boot times say so, an event's first run list is `runs`."""
    if field in _RUN_FIELDS or (field == "written" and kind is not ResidencyOpened):
        return "runs"
    if field == "incarnation":
        return "of_incarnation"
    if field == "sequence":
        return "of_sequence"
    if field == "share":
        return "share_ppm"
    if field == "at_us":
        return "boot_us"
    if field.endswith("_us") and field not in _DURATIONS:
        return field[:-3] + "_boot_us"
    return field


_TOTALS = {"runs": "blocks", "written": "written_blocks"}  # run lists and the keys of their sizes
_KEYS: dict[type, tuple[str, ...]] = {
    kind: tuple(_key(field, kind) for field in kind._fields)  # type: ignore[attr-defined]
    for kind in KINDS
}
LEAF_KEYS: dict[str, frozenset[str]] = {
    KINDS[kind].name: frozenset({*_HEAD_KEYS, *keys, *(_TOTALS[key] for key in keys if key in _TOTALS)})
    for kind, keys in _KEYS.items()
}


def log_of(tenant: str | None) -> str:
    """The log a tenant's leaves go to; the system log when there is no tenant."""
    return SYSTEM if tenant is None else f"tenant/{tenant}"


def logs_of(event: Event) -> tuple[str, ...]:
    """The logs an event is written in: both parties' when one tenant reads another's blocks."""
    if isinstance(event, (DecisionRecorded, HitCounters)):
        reader = event.reader if isinstance(event, DecisionRecorded) else event.tenant
        return (log_of(reader),) if event.owner == reader else (log_of(reader), log_of(event.owner))
    return (log_of(getattr(event, "tenant", None)),)


def leaf(event: Event, context: Context, sequence: int = 0) -> bytes:
    """The canonical bytes of an event that needs one leaf; raises `LedgerError` where it needs several."""
    made = leaves(event, context, sequence)
    if len(made) != 1:
        raise LedgerError(f"`{KINDS[type(event)].name}` needs `{len(made)}` leaves", leaves=len(made))
    return made[0].data


def leaves(event: Event, context: Context, sequence: int) -> list[Leaf]:
    """Every leaf of an event, for each of its logs: usually one."""
    body, lists = _body(event, context, sequence)
    made: list[Leaf] = []
    for log in logs_of(event):
        whole = {**body, "log": log} if made else body
        whole["log"] = log
        data = canonical(whole)
        if len(data) <= LEAF_BYTES_MAX:
            made.append(Leaf(log, whole, data))
        else:
            made += _continued(whole, lists, log)
    return made


def canonical(body: dict[str, Any]) -> bytes:
    """The canonical bytes of a leaf body; raises `LedgerError` on what the profile refuses.

    The body is put right in place where a number needs it: numpy's become Python's, large ones become decimal strings.
    """
    try:
        return orjson.dumps(body, option=_CANONICAL)
    except (TypeError, ValueError):
        for key, value in body.items():
            plain = value.item() if isinstance(value, np.generic) else value
            large = plain.__class__ is int and not -EXACT < plain < EXACT
            body[key] = str(plain) if large else plain
    try:
        _refuse_floats(body.values(), body["kind"])
        return orjson.dumps(body, option=_CANONICAL)
    except (TypeError, ValueError) as problem:
        raise LedgerError(
            f"`{body.get('kind')}` cannot be written as a canonical leaf: {problem}"
        ) from problem


class _Shape(NamedTuple):
    """What is known about a kind of event before any is seen."""

    keys: tuple[str, ...]
    head: dict[str, Any]
    lists: tuple[str, ...]  # keys of run lists
    share: bool
    subject: bool
    about: bool  # may be about another incarnation


def _shape(kind: type) -> _Shape:
    keys = _KEYS[kind]
    name, outage = KINDS[kind]
    head = {"schema": SCHEMA, "kind": name, "outage": outage, "part": 1, "parts": 1}
    return _Shape(
        keys,
        head,
        tuple(key for key in _TOTALS if key in keys),
        "share_ppm" in keys,
        "subject" in keys,
        "of_incarnation" in keys,
    )


_SHAPES = {kind: _shape(kind) for kind in KINDS}


def _body(event: Event, context: Context, sequence: int) -> tuple[dict[str, Any], dict[str, Runs]]:
    shape = _SHAPES[event.__class__]
    body = shape.head.copy()
    body.update(zip(shape.keys, event, strict=True))
    lists: dict[str, Runs] = {}
    for key in shape.lists:
        runs = lists[key] = body[key]
        body[key] = [encode(run) for run in runs if len(run.blocks)]
        body[_TOTALS[key]] = count(runs)
    if shape.share:
        body["share_ppm"] = round(body["share_ppm"] * 1_000_000)
    if shape.about and not body["of_incarnation"]:
        body["of_incarnation"] = context.incarnation
    if shape.subject:
        _pseudonymise(body, context.pseudonym)
    body["incarnation"] = context.incarnation
    body["sequence"] = sequence
    body["at_us"] = body["boot_us"] + context.offset_us
    _refuse_floats(body.values(), body["kind"])
    return body, lists


def _refuse_floats(values: Iterable[Any], kind: str) -> None:
    if float in set(map(type, values)):
        raise LedgerError(f"`{kind}` carries a float", kind=kind)


def _pseudonymise(body: dict[str, Any], pseudonym: Pseudonyms) -> None:
    tenant, subject, session = body["tenant"] or "", body["subject"], body["session"]
    if session is not None:
        body["session"] = pseudonym(tenant, subject or "", session)
    if subject is not None:
        body["subject"] = pseudonym(tenant, subject)


def _continued(body: dict[str, Any], lists: dict[str, Runs], log: str) -> list[Leaf]:
    """The same event over several leaves, each filled close to the limit."""
    empty: dict[str, Any] = {key: [] for key in lists}
    room = LEAF_BYTES_MAX - len(canonical({**body, **empty})) - _PARTS_DIGITS
    parts: list[dict[str, list[Any]]] = [{key: [] for key in lists}]
    used = 0
    for key, run in [(key, run) for key, runs in lists.items() for run in runs if len(run.blocks)]:
        for piece in split(run, _PIECE_TOKENS):
            item = encode(piece)
            size = len(orjson.dumps(item)) + 1
            if used + size > room and used:
                parts.append({key: [] for key in lists})
                used = 0
            parts[-1][key].append(item)
            used += size
    made = []
    for number, items in enumerate(parts, 1):
        whole = {**body, **items, "part": number, "parts": len(parts)}
        data = canonical(whole)
        if len(data) > LEAF_BYTES_MAX:
            raise LedgerError(
                f"`{body['kind']}` does not fit `{LEAF_BYTES_MAX}` bytes a leaf", bytes=len(data), log=log
            )
        made.append(Leaf(log, whole, data))
    return made
