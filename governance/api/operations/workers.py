"""Operations on and by workers: what operators see of them, and how workers hand in their ledgers.

1. A worker speaks for the incarnations that its own key registered: another's are absent.
2. A batch that was answered with 200 is durable. The same batch again adds nothing.
3. The question after erase epochs is the acknowledgement, too: who asks with a version acts by it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from anyio.to_thread import run_sync

from kvcustody.audit.evidence.query.issuers import known_issuers
from kvcustody.audit.evidence.subjects.subject_table import unknown_pseudonyms, unlinkings
from kvcustody.audit.tlog.database_proofs import LedgerProofs
from kvcustody.audit.write.compression import ENCODING, CompressionError, decompress
from kvcustody.clock import MICROSECONDS
from kvcustody.governance.api.declarations import Declarations
from kvcustody.governance.api.given import CallerDep, DeskDep, ServiceDep, WireDep
from kvcustody.governance.api.http.long_poll import Wait, long_poll, told_within
from kvcustody.governance.api.models.workers import (
    AttemptsReport,
    BatchStored,
    BegunErasure,
    ClosingModel,
    Covered,
    DeadProcess,
    Doors,
    EpochsModel,
    ErasureOnRecord,
    Heard,
    IncarnationModel,
    KeptModel,
    KnownIssuers,
    MetIssuer,
    Orders,
    PolicyRecords,
    PseudonymsModel,
    Registered,
    UnlinkedModel,
    WorkerReport,
    Workers,
)
from kvcustody.governance.observability.attempts import Attempted, events_of
from kvcustody.governance.restriction.orders import restricted_from
from kvcustody.governance.service.access.caller import Caller
from kvcustody.governance.service.access.roles import Permission, Role
from kvcustody.governance.service.fleet import worker_requests
from kvcustody.governance.service.fleet.covered_leaves import LeafRun, find_runs
from kvcustody.governance.service.ingest.ingest import WaitingBatch
from kvcustody.governance.service.ingest.worker_protocol import PROTOCOL, answer_older
from kvcustody.governance.service.operations.operation import Operation
from kvcustody.governance.service.operations.parameters import LARGE, NUMBER, Cursor, Limit, Path, Query
from kvcustody.governance.service.page_cursor import CursorBinding
from kvcustody.governance.service.problem_details import ProblemError

if TYPE_CHECKING:
    from kvcustody.governance.service.service import Service

Uuid = Annotated[str, Path(pattern=r"^[0-9a-f]{32}$", examples=["ab" * 16])]
ErasureId = Annotated[str, Path(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9-]+$", examples=["4f1c0e"])]
Sequence = Annotated[int, Path(ge=1, lt=LARGE, examples=[1]), NUMBER]
_STEPS_MAX = 200
_work = partial(Operation, action=Permission.WORK, tag="worker")
_hand_in = partial(Operation, action=Permission.HAND_IN, tag="worker")
_BATCH = {
    "requestBody": {
        "required": True,
        "description": "NDJSON: a list of new names, then one canonical leaf a line. With `Content-Encoding: zstd` it "
        "is one zstd frame that states its size; plain, it is as large as `batch_bytes_max` allows.",
        "content": {"application/x-ndjson": {"schema": {"type": "string"}, "example": "[]\n"}},
    }
}


def add_workers(api: Declarations) -> None:
    """Declare the operations."""
    listing = Operation(
        "listWorkers", "GET", "/v1/workers", Permission.READ_OPERATIONS, "operations", command="worker status"
    )
    api.add(listing, listed, answers=Workers, problems=("cursor-invalid",))
    closing = Operation(
        "closeWorker",
        "POST",
        "/v1/workers:close",
        Permission.OPERATE,
        "operations",
        keyed=True,
        command="worker declare-dead",
    )
    api.add(closing, close_worker, answers=ClosingModel, problems=("not-found", "conflict"))
    mine = "/v1/worker/incarnations/{incarnation}"
    problems = ("not-found", "conflict")
    api.add(
        _hand_in("registerIncarnation", "PUT", mine, command="protocol register"),
        register,
        answers=Registered,
        problems=problems,
    )
    api.add(
        _work("reportStatus", "PUT", f"{mine}/status", command="protocol report-status"),
        report,
        answers=Heard,
        problems=("not-found",),
    )
    steps = _work("pullPolicy", "GET", "/v1/worker/policy/records", command="protocol pull-policy")
    api.add(steps, policy_records, answers=PolicyRecords)
    api.add(
        _work("takeErasures", "GET", "/v1/worker/erasures", command="protocol take-erasures"),
        erasures,
        answers=Orders,
    )
    met = _work("assignIssuer", "PUT", "/v1/worker/issuers", command="protocol assign-issuer")
    api.add(met, assign_issuer, answers=KnownIssuers, problems=("conflict",))
    began = _work("requestWorkersErasure", "PUT", "/v1/worker/erasures/{erasure}", command="protocol request-erasure")
    api.add(began, request_erasure, answers=ErasureOnRecord, problems=("conflict",))
    refused = _work("reportAttempts", "POST", "/v1/worker/attempts", keyed=True, command="protocol report-attempts")
    api.add(refused, attempts, answers=Heard)
    checking = _work("checkPseudonyms", "POST", "/v1/worker/pseudonyms:check", command="protocol check-pseudonyms")
    api.add(checking, check_pseudonyms, answers=UnlinkedModel)
    kept = _hand_in("checkKept", "PUT", f"{mine}/kept", command="protocol check-kept")
    api.add(kept, check_kept, answers=Covered, problems=("not-found",))
    more = ("not-found", "refused-leaf", "unsupported-media-type", "worker-protocol", "ledger-schema")
    batch = _hand_in("shipBatch", "PUT", f"{mine}/batches/{{sequence}}", batch=True, command="protocol ship-batch")
    api.add(batch, ship, answers=BatchStored, problems=more, more=_BATCH)


def add_doors(api: Declarations) -> None:
    """Declare the operations on doors, and the one by which erase epochs are taken."""
    listing = Operation("listDoors", "GET", "/v1/doors", Permission.READ_OPERATIONS, "operations", command="door list")
    api.add(listing, listed_doors, answers=Doors)
    taking = Operation(
        "takeEpochs",
        "GET",
        "/v1/worker/epochs",
        Permission.HAND_IN,
        "worker",
        command="protocol take-epochs",
    )
    api.add(taking, epochs, answers=EpochsModel, problems=("conflict",))


def close_worker(caller: CallerDep, service: ServiceDep, what: DeadProcess) -> dict[str, Any]:
    """Declare a silent process dead, and its spill lost. Another person must confirm within a day; then it is closed.

    What it held is closed as unproven, as behind a crash. A process that was heard in the last minute is refused.
    """
    outcome = service.dead_workers.declare(what.incarnation, caller.name, what.reason)
    return {"incarnation": what.incarnation, "outcome": outcome}


async def policy_records(
    caller: CallerDep,
    service: ServiceDep,
    after: Annotated[int, Query(ge=0, lt=1 << 31), NUMBER] = 0,
    wait: Wait = 0,
) -> dict[str, Any]:
    """Get signed steps of the policy release from `after` on; held open up to `wait` seconds for a new one."""
    return await long_poll(
        service,
        caller,
        wait,
        lambda: _records(service, after),
        lambda answer: answer["total"] != after,
        kept=(f"records after {after}", lambda answer: answer["total"] == after),
    )


async def erasures(
    caller: CallerDep,
    service: ServiceDep,
    wait: Wait = 0,
    known: Annotated[
        str, Query(max_length=4096, pattern=r"^[A-Za-z0-9,-]*$", description="Orders that the worker has.")
    ] = "",
    keys: Annotated[
        int | None,
        Query(ge=0, lt=LARGE, description="The newest key order that the worker has; 0 for none."),
        NUMBER,
    ] = None,
    enforcement: Annotated[
        int | None,
        Query(ge=-1, lt=LARGE, description="The enforcement order that the worker has; -1 for none."),
        NUMBER,
    ] = None,
    restrictions: Annotated[
        str | None,
        Query(max_length=64, pattern=r"^[0-9a-f]*$", description="Digest of the restrictions that the worker follows."),
    ] = None,
    done: Annotated[
        bool,
        Query(
            alias="completed",
            description="Return at once the completed erasures of a subject or tenant, not the pending ones.",
        ),
    ] = False,
) -> dict[str, Any]:
    """Get the erasures that this worker owes an answer for, and key orders; held open up to `wait` seconds for news.

    And for whom it enforces its policy, and whose processing is restricted.
    """
    if done:
        return await run_sync(service.worker_orders.completed, caller.name)
    taken = set(known.split(","))
    return await long_poll(
        service,
        caller,
        wait,
        lambda: service.worker_orders.owed(caller.name),
        lambda answer: (
            any(item["erasure"] not in taken for item in answer["items"])
            or (keys is not None and any(item["order"] > keys for item in answer["keys"]))
            or (
                enforcement is not None
                and answer["enforcement"] is not None
                and answer["enforcement"]["order"] > enforcement
            )
            or (restrictions is not None and restricted_from(answer["restrictions"]).digest() != restrictions)
        ),
        kept=("erasures", lambda answer: not (answer["items"] or answer["restrictions"])),
    )


def assign_issuer(caller: CallerDep, service: ServiceDep, what: MetIssuer) -> dict[str, Any]:
    """Put a tenant issuer that is new to the ledger on record; the control plane writes the leaf."""
    found = worker_requests.assign_issuer(service, caller.name, what.issuer, what.tenants)
    return {"issuers": list(found.all)}


def request_erasure(caller: CallerDep, service: ServiceDep, erasure: ErasureId, what: BegunErasure) -> dict[str, Any]:
    """Put an erasure that this worker's engine began on record; every other worker carries it out too.

    The request names this worker as its actor.
    """
    asked = (erasure, what.selector, what.deadline_us)
    return {"new": worker_requests.request_erasure(service, caller.name, *asked)}


def listed(caller: CallerDep, desk: DeskDep, cursor: Cursor = None, limit: Limit = 100) -> dict[str, Any]:
    """List incarnations of workers, oldest first; for running ones, the erase epochs that they act by."""
    question = CursorBinding("listWorkers", caller.name, {})
    position = desk.cursors.read(question, cursor)
    found = desk.fleet.listed(after=int(position[0]) if position else 0, limit=limit + 1)
    following = desk.cursors.write(question, [found[limit - 1][0]]) if len(found) > limit else None
    return {"items": [worker._asdict() for _, worker in found[:limit]], "next": following}


def register(caller: CallerDep, service: ServiceDep, incarnation: Uuid, what: IncarnationModel) -> dict[str, Any]:
    """Put a new incarnation of this worker on record, and close the custody of its dead predecessors.

    It may be repeated, to hear again which issuers of tenants the ledger knows. A process whose clock is too far from
    the service's is refused: every time that it puts on record would be wrong by as much.
    """
    new = service.fleet.register(caller.name, incarnation, what.offset_us, what.utc_us, role=role_of(caller))
    with service.reading() as connection:
        issuers = list(known_issuers(connection).all)
    return {
        "new": new,
        "worker": caller.name,
        "issuers": issuers,
        "protocol": PROTOCOL,
    }


def report(caller: CallerDep, service: ServiceDep, incarnation: Uuid, what: WorkerReport) -> dict[str, Any]:
    """Report the worker's status: counters by name, its policy revision, blocks by tenant."""
    service.fleet.sender(caller.name, incarnation)
    tenants = {str(measure): dict(values) for measure, values in what.tenants.items()}
    service.fleet.heard(
        caller.name,
        incarnation,
        revision=what.policy_revision,
        status=what.status,
        charged=what.charged,
        tenants=tenants,
    )
    return {"at_us": service.clock.utc_us(), "unlinkings": _unlinkings(service)}


def attempts(caller: CallerDep, service: ServiceDep, what: AttemptsReport) -> dict[str, Any]:
    """Report identities that the door of this worker's engine refused; they go on record for that door."""
    now_us = service.clock.now_us()
    found = [
        Attempted(one.reason, one.source, one.attempts, now_us - MICROSECONDS * what.seconds) for one in what.items
    ]
    service.submit(events_of("door", found, now_us, of_worker=caller.name))
    return {"at_us": service.clock.utc_us(), "unlinkings": _unlinkings(service)}


def check_pseudonyms(service: ServiceDep, what: PseudonymsModel) -> dict[str, Any]:
    """Return which of these pseudonyms no longer belong to anybody. The worker forgets them; a returning person gets a
    new one.
    """
    with service.reading() as connection:
        return {"gone": unknown_pseudonyms(connection, what.names)}


async def ship(
    caller: CallerDep, service: ServiceDep, incarnation: Uuid, sequence: Sequence, wire: WireDep
) -> dict[str, Any]:
    """Hand in a batch of leaves; the answer means that it is durable. `sequence` is that of its first event."""
    sent, encoding = wire.body, wire.headers.get("content-encoding")
    bytes_max = int(service.settings.batch_bytes_max)

    def take(decided: Callable[[], None]) -> WaitingBatch:
        sender = service.fleet.sender(caller.name, incarnation)._replace(role=role_of(caller))
        batch = service.ingest.read(plain_body(sent, encoding, bytes_max), sender)
        service.fleet.check_dates(batch.batch)
        service.claims.check(sender, batch.batch)
        return service.ingest.begin(caller.name, incarnation, batch, decided)

    async with told_within(service.ingest.timeout_seconds) as decided:
        try:
            waiting = await run_sync(take, decided, limiter=service.ingest.threads)
        except ProblemError as refused:
            raise answer_older(refused, wire.headers) from None
    try:
        stored = service.ingest.end(waiting)
    except ProblemError:
        service.fleet.forget()
        raise
    last_sequence = waiting.batch.last_sequence
    service.fleet.received(incarnation, max(sequence, last_sequence))
    return stored._asdict() | {"last_sequence": last_sequence}


def check_kept(caller: CallerDep, service: ServiceDep, incarnation: Uuid, what: KeptModel) -> dict[str, Any]:
    """Return which kept leaves are in the ledger under a signed checkpoint; the worker may delete those."""
    service.fleet.sender(caller.name, incarnation, fresh=True)
    runs = [LeafRun(run.incarnation, run.first, run.last) for run in what.runs]
    with service.reading() as connection:
        signed = LedgerProofs(connection).signed_or_none()
        found = find_runs(connection, caller.name, runs, None if signed is None else signed.size)
    return {
        "runs": [one._asdict() for one in found],
        "size": 0 if signed is None else signed.size,
        "note": None if signed is None else signed.note.decode(),
        "refused": "" if service.signer is None else service.signer.status().refused,
    }


def listed_doors(service: ServiceDep) -> dict[str, Any]:
    """List doors and workers that take erase epochs: the version each acts by, and since when it lags behind."""
    return {"items": [one._asdict() for one in service.epochs.takers.listed()], "next": None}


async def epochs(
    caller: CallerDep,
    service: ServiceDep,
    known: Annotated[
        int | None,
        Query(ge=0, lt=LARGE, description="The version in use; omit it to acknowledge nothing."),
        NUMBER,
    ] = None,
    floor: Annotated[int, Query(ge=0, lt=LARGE, description="The floor of its epochs."), NUMBER] = 0,
    after: Annotated[
        int | None,
        Query(ge=0, lt=LARGE, description="The version that pages continue from, if it is not `known`."),
        NUMBER,
    ] = None,
    scopes: Annotated[
        str, Query(pattern=r"^[0-9a-f]{0,32}$", description="Digest of the scopes that it uses to name requests.")
    ] = "",
    lost: Annotated[
        int | None,
        Query(
            ge=1,
            lt=LARGE,
            description="The version that it knows, where what it was given lacks raises of it, as after a restore.",
        ),
        NUMBER,
    ] = None,
    wait: Wait = 0,
) -> dict[str, Any]:
    """Get the erase epochs raised since a version, up to 10,000; held open up to `wait` seconds for news.

    A page after which more follow has no digest. Whoever puts the pages together has the snapshot of the digest. By
    which scopes requests are named is in a door's answer where it is other than `scopes`. With `lost` the fleet's epoch
    is raised above it first, unless it is: every name of a router ends.
    """
    if known is not None:
        await run_sync(service.epochs.takers.heard, caller.name, role_of(caller), known)
    if lost is not None:
        await run_sync(service.raise_above, lost)
    start = (known or 0) if after is None else after
    return await long_poll(
        service,
        caller,
        wait,
        lambda: _epochs_after(service, start, scopes if role_of(caller) == Role.DOOR else None),
        lambda answer: (answer["version"], answer["floor"], answer["scopes"]) != (start, floor, None),
        looks=role_of(caller) == Role.DOOR,  # scopes follow what workers run
    )


def role_of(caller: Caller) -> str:
    """Return `door` for a door before a router, otherwise `worker`."""
    return (Role.DOOR if Role.DOOR in caller.roles else Role.WORKER).value


def _epochs_after(service: ServiceDep, start: int, known_scopes: str | None) -> dict[str, Any]:
    """`known_scopes`: their digest; None: the asker names nobody by them."""
    page = service.epochs.page(after=start)
    scopes = None if known_scopes is None else service.name_scopes.now()
    return {
        "key": service.epochs.key.hex(),
        "version": page.version,
        "floor": page.floor,
        "digest": page.digest,
        "raised": [[number, tag.hex()] for number, tag in page.raised],
        "namespace_days": service.epochs.namespace_days,
        "scopes": None if scopes is None or scopes.digest == known_scopes else scopes.data(),
        "shortest_ceiling_us": service.shortest_ceiling_us(),
        "at_us": service.clock.utc_us(),
    }


def plain_body(body: bytes, encoding: str | None, bytes_max: int) -> bytes:
    """Decode a batch's `Content-Encoding`; raises `unsupported-media-type`, `too-large` or `malformed`."""
    if encoding is None:
        return body
    if encoding.strip().lower() != ENCODING:
        accepted = {"Accept-Encoding": ENCODING}
        raise ProblemError("unsupported-media-type", f"a batch comes plain or as `{ENCODING}`", headers=accepted)
    try:
        return decompress(body, bytes_max=bytes_max)
    except CompressionError as problem:
        raise ProblemError("too-large" if problem.over else "malformed", problem.message) from None


def _unlinkings(service: Service) -> int:
    seen = service.orders_seen_lately()
    if seen is not None:
        return seen.unlinkings
    with service.reading() as connection:
        return unlinkings(connection)


def _records(service: Service, after: int) -> dict[str, Any]:
    records = service.policies.records()
    return {"items": [data.decode() for data in records[after : after + _STEPS_MAX]], "total": len(records)}
