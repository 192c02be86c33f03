"""Operations on the ledger: search of events, checkpoints, proofs, tiles.

1. A caller of one tenant sees that tenant's log; every other log is absent, the system log too.
2. With `as_of` a page is the same whenever it is asked for; the cursor of a page belongs to its filters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import partial
from typing import Annotated, Any, TypeVar

import orjson

from kvcustody.audit.evidence.explore.by_time import find_by_time
from kvcustody.audit.evidence.explore.summary import summarize
from kvcustody.audit.evidence.query.events import BlockRef, CursorError, EventFilter, find_events
from kvcustody.audit.evidence.query.events import Cursor as Place
from kvcustody.audit.kinds import SYSTEM, log_of
from kvcustody.audit.leaf import LEAF_KEYS
from kvcustody.audit.leaf.merkle import TreeError
from kvcustody.audit.tlog.database_proofs import LedgerProofs, LogHead
from kvcustody.audit.tlog.proofs import ProofError
from kvcustody.audit.verify.ledger.stated_times import LedgerTimes
from kvcustody.governance.api.declarations import Declarations
from kvcustody.governance.api.given import CallerDep, DeskDep
from kvcustody.governance.api.http.answer_times import answer_bytes
from kvcustody.governance.api.models.audit import (
    CheckpointModel,
    Consistency,
    EventPage,
    EventSummary,
    LeafProofModel,
    Logs,
    OddTimes,
)
from kvcustody.governance.identity.w3c_trace import CHARACTERS, PATTERN
from kvcustody.governance.service.access.caller import Caller
from kvcustody.governance.service.access.roles import Permission, Reach
from kvcustody.governance.service.operations.answer import Content
from kvcustody.governance.service.operations.desk import Desk
from kvcustody.governance.service.operations.operation import Operation
from kvcustody.governance.service.operations.pages import page
from kvcustody.governance.service.operations.parameter_groups import ParameterGroup, grouped
from kvcustody.governance.service.operations.parameters import (
    LARGE,
    NUMBER,
    AsOf,
    Cursor,
    Limit,
    Path,
    Query,
    Since,
    Tenant,
    Until,
)
from kvcustody.governance.service.page_cursor import CursorBinding
from kvcustody.governance.service.problem_details import ProblemError, not_found

READ = Permission.READ_CUSTODY
KindName = StrEnum("KindName", {name.replace("-", "_").upper(): name for name in sorted(LEAF_KEYS)})  # type: ignore[misc]
_SCAN_MAX = 200_000  # leaves that one page looks at
_TILE_WIDTH = 256
_NUMBER = "(0|[1-9][0-9]{0,14})"
_BLOCK = f"[0-9a-f]{{32}}:{_NUMBER}:{_NUMBER}(:(0|[1-9][0-9]{{0,5}}))?"
_read = partial(Operation, method="GET", action=READ, tag="audit", recorded=True)
Text = Annotated[str | None, Query(min_length=1, max_length=128)]
Number = Annotated[int | None, Query(ge=0, lt=LARGE), NUMBER]
Kind = Annotated[KindName | None, Query(description="A kind of event.", examples=["receipt"])]
LogName = Annotated[
    str, Query(min_length=1, max_length=320, description="`tenant/NAME` or `system`.", examples=["system"])
]
Trace = Annotated[
    str | None,
    Query(
        min_length=CHARACTERS,
        max_length=CHARACTERS,
        pattern=PATTERN,
        description="A W3C trace id: 32 lowercase hexadecimal digits.",
        examples=["4bf92f3577b34da6a3ce929d0e0e4736"],
    ),
]
Incarnation = Annotated[str | None, Query(pattern=r"^[0-9a-f]{32}$")]
Block = Annotated[str | None, Query(pattern=f"^{_BLOCK}$", description="INCARNATION:BLOCK:GENERATION")]


class EventOrder(StrEnum):
    """The order of a page of leaves."""

    LOG = "log"
    NEWEST = "newest"
    OLDEST = "oldest"


Index = Annotated[int, Query(ge=0, lt=LARGE), NUMBER]

_Found = TypeVar("_Found")


def add_audit(api: Declarations) -> None:
    """Declare the operations."""
    paged = ("not-found", "cursor-invalid")
    api.add(
        _read("listEvents", path="/v1/audit/events", exports=True, command="audit query"),
        found_events,
        answers=EventPage,
        problems=paged,
    )
    api.add(
        _read("summarizeEvents", path="/v1/audit/summary", command="audit summary"),
        summary,
        answers=EventSummary,
        problems=("not-found",),
    )
    api.add(_read("listLogs", path="/v1/audit/logs", command="audit logs"), logs, answers=Logs, problems=paged)
    api.add(
        _read("listOddTimes", path="/v1/audit/times", command="audit odd-times"),
        odd_times,
        answers=OddTimes,
        problems=paged,
    )
    latest = "/v1/audit/checkpoints/latest"
    api.add(
        _read("getLatestCheckpoint", path=latest, command="audit latest-checkpoint"),
        latest_checkpoint,
        answers=CheckpointModel,
        problems=("not-found",),
    )
    one = "/v1/audit/checkpoints/{size}"
    api.add(
        _read("getCheckpoint", path=one, command="audit checkpoint"),
        checkpoint,
        answers=CheckpointModel,
        problems=("not-found",),
    )
    inclusion = _read("proveEvent", path="/v1/audit/proofs/inclusion", command="audit prove")
    api.add(inclusion, prove, answers=LeafProofModel, problems=("not-found",))
    consistency = _read("proveConsistency", path="/v1/audit/proofs/consistency", command="audit prove-consistency")
    api.add(consistency, consistent, answers=Consistency, problems=("not-found",))
    tiles = _read("getTile", path="/v1/audit/tiles/{level}/{index}", command="audit tile")
    api.add(tiles, tile, media="application/octet-stream", problems=("not-found",))


@dataclass(frozen=True, kw_only=True)
class EventQuery(ParameterGroup):
    """Conditions on leaves."""

    tenant: Tenant = None
    since: Since = None
    until: Until = None
    kind: Kind = None
    outcome: Text = None
    actor: Text = None
    rule: Text = None
    grant: Text = None
    revision: Number = None
    residency: Number = None
    incarnation: Incarnation = None
    block: Block = None
    trace: Trace = None
    reader: Text = None
    owner: Text = None
    generation: Number = None

    def values(self) -> dict[str, Any]:
        """The conditions by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def filter(self, mine: str | None) -> EventFilter:
        """The filter for one tenant's log, or (None) for all logs."""
        asked = self.values()
        names = (
            "outcome",
            "actor",
            "rule",
            "grant",
            "revision",
            "residency",
            "incarnation",
            "trace",
            "reader",
        )
        return EventFilter(
            logs=None if mine is None else (log_of(mine),),
            since_us=self.since,
            until_us=self.until,
            kinds=() if self.kind is None else (str(self.kind),),
            block=None if self.block is None else _block(self.block),
            owner=self.owner,
            generation=self.generation,
            **{name: asked[name] for name in names},
        )


@grouped
def found_events(
    *,
    caller: CallerDep,
    desk: DeskDep,
    sought: EventQuery,
    order: EventOrder = EventOrder.LOG,
    as_of: AsOf = None,
    cursor: Cursor = None,
    limit: Limit = 100,
) -> Content:
    """Search leaves: log by log, each in order of time, or over all logs by time."""
    mine = desk.tenant_of(caller, READ, sought.tenant)
    asked = sought.values() | {"tenant": mine, "order": order, "as_of": as_of}
    binding = CursorBinding("listEvents", caller.name, asked)
    position = desk.cursors.read(binding, cursor)
    wanted = sought.filter(mine)
    after = None if position is None else Place(*position)
    with desk.reading(mine) as connection, absent_as(desk):
        if order is EventOrder.LOG:
            matches = find_events(connection, wanted, after=after, limit=limit, as_of=as_of, scan_max=_SCAN_MAX)
        else:
            newest = order is EventOrder.NEWEST
            matches = find_by_time(
                connection,
                wanted,
                newest=newest,
                after=after,
                limit=limit,
                as_of=as_of,
                scan_max=_SCAN_MAX,
            )
        if not matches.rows and matches.next is None and position is None:
            desk.check_said(connection, wanted)
    following = None if matches.next is None else desk.cursors.write(binding, list(matches.next))
    items = [
        {
            "log": row.log,
            "idx": row.idx,
            "at_us": row.at_us,
            "at": None,  # its place, which `answer_bytes` fills: a dict that grows is laid out anew
            "kind": row.kind,
            "leaf": orjson.Fragment(row.leaf),
        }
        for row in matches.rows
    ]
    answer = {"items": items, "next": following, "as_of": as_of}
    return Content(answer_bytes(EventPage, answer))


@grouped
def summary(*, caller: CallerDep, desk: DeskDep, sought: EventQuery) -> dict[str, Any]:
    """Summarize the leaves of a filter: their number, kinds and times."""
    mine = desk.tenant_of(caller, READ, sought.tenant)
    wanted = sought.filter(mine)
    with desk.reading(mine) as connection:
        totals = summarize(connection, wanted)
    return {
        "total": totals.total,
        "exact": totals.exact,
        "facets": [
            {
                "name": name,
                "counted": name in totals.counted,
                "values": [value._asdict() for value in values],
            }
            for name, values in totals.facets.items()
        ],
        "sampled": totals.sampled,
        "column_us": totals.column_us,
        "columns": [column._asdict() for column in totals.columns],
    }


def logs(
    caller: CallerDep,
    desk: DeskDep,
    tenant: Tenant = None,
    as_of: AsOf = None,
    cursor: Cursor = None,
    limit: Limit = 100,
) -> dict[str, Any]:
    """List sub-logs and their heads: your own, or all."""
    mine = desk.tenant_of(caller, READ, tenant)

    def look() -> tuple[int, list[LogHead]]:
        with desk.reading(mine) as connection:
            proofs = LedgerProofs(connection)
            size = proofs.checkpoint(as_of).size
            return size, [log for log in proofs.logs(as_of=size) if mine is None or log.name == log_of(mine)]

    size, found = _covered(desk, look)
    items = [{"log": log.name, "size": log.head.size, "root": log.head.root.hex()} for log in found]
    question = CursorBinding("listLogs", caller.name, {"tenant": mine, "as_of": as_of})
    return page(desk, question, items, cursor, limit) | {"as_of": size}


def odd_times(
    caller: CallerDep, desk: DeskDep, log: LogName, cursor: Cursor = None, limit: Limit = 100
) -> dict[str, Any]:
    """List leaves whose time contradicts the signed checkpoints around them, or that arrived late from a spill."""
    name = _log(desk, caller, log)
    question = CursorBinding("listOddTimes", caller.name, {"log": name})
    position = desk.cursors.read(question, cursor)
    since = 0 if position is None else int(position[0])
    with desk.reading() as connection, absent_as(desk):  # by all signatures, and the lives of processes
        found, following = LedgerTimes(connection).page(name, since, limit, _SCAN_MAX)
    after = None if following is None else desk.cursors.write(question, [following])
    return {"items": [odd._asdict() for odd in found], "next": after}


def latest_checkpoint(desk: DeskDep) -> dict[str, Any]:
    """Get the newest signed checkpoint. Later commits get theirs moments later."""

    def look() -> dict[str, Any]:
        with desk.reading() as connection:
            proofs = LedgerProofs(connection)
            return _checkpoint(proofs, proofs.signed().size)

    desk.seal_soon()
    return _covered(desk, look)


def checkpoint(desk: DeskDep, size: Annotated[int, Path(ge=1, lt=LARGE, examples=[4]), NUMBER]) -> dict[str, Any]:
    """Get the checkpoint of a size of the root log, with the first signed note that covers it."""
    with desk.reading() as connection, absent_as(desk):
        return _checkpoint(LedgerProofs(connection), size)


def prove(caller: CallerDep, desk: DeskDep, log: LogName, idx: Index, as_of: AsOf = None) -> Content:
    """Get one leaf with the proof that a signed checkpoint covers it: the newest, or the one of `as_of`."""
    name = _log(desk, caller, log)
    with desk.reading(_own(caller)) as connection, absent_as(desk):
        leaf = LedgerProofs(connection).leaf(name, idx)

    def look() -> str:
        with desk.reading() as connection:  # a proof goes through hashes of every log
            return LedgerProofs(connection).inclusion(name, idx, as_of=as_of).to_bytes().decode()

    proof = _covered(desk, look)
    body = orjson.loads(leaf)
    event = {
        "log": name,
        "idx": idx,
        "at_us": int(body["at_us"]),
        "kind": body["kind"],
        "leaf": orjson.Fragment(leaf),
    }
    answer = {"event": event, "canonical": leaf.decode(), "proof": proof}
    return Content(answer_bytes(LeafProofModel, answer))


def consistent(
    caller: CallerDep,
    desk: DeskDep,
    old_size: Annotated[int, Query(ge=1, lt=LARGE), NUMBER],
    size: Annotated[int, Query(ge=1, lt=LARGE), NUMBER],
    log: Annotated[str, Query(min_length=1, max_length=320, description="Name of a log, or `root`.")] = "root",
) -> dict[str, Any]:
    """Prove that a log only grew between two sizes."""
    if old_size > size:
        raise ProblemError("invalid", "`old_size` must not be larger than `size`")
    name = log if log == "root" else _log(desk, caller, log)
    with desk.reading(None if log == "root" else _own(caller)) as connection, absent_as(desk):
        proofs = LedgerProofs(connection)
        path = proofs.root_consistency(old_size, size) if name == "root" else proofs.consistency(name, old_size, size)
    return {"log": name, "old_size": old_size, "size": size, "path": [node.hex() for node in path]}


def tile(
    caller: CallerDep,
    desk: DeskDep,
    level: Annotated[int, Path(ge=0, le=7, examples=[0]), NUMBER],
    index: Annotated[int, Path(ge=0, lt=LARGE, examples=[0]), NUMBER],
    log: Annotated[str, Query(min_length=1, max_length=320, description="Name of a log, or `root`.")] = "root",
    width: Annotated[int, Query(ge=1, le=_TILE_WIDTH), NUMBER] = _TILE_WIDTH,
) -> Content:
    """Get a tile of hashes (C2SP tlog-tiles): `width` hashes of 32 bytes."""
    name = None if log == "root" else _log(desk, caller, log)
    with desk.reading(None if log == "root" else _own(caller)) as connection, absent_as(desk):
        try:
            data = LedgerProofs(connection).tiles(name).tile(level, index, width)
        except TreeError as error:
            raise desk.absent(error) from None
    return Content(data, "application/octet-stream")


def _covered(desk: Desk, look: Callable[[], _Found]) -> _Found:
    """What a look gives; one that misses a proof looks again when all that is committed is sealed and signed."""
    try:
        return look()
    except ProofError:
        desk.cover()
    with absent_as(desk):
        return look()


@contextmanager
def absent_as(desk: Desk) -> Iterator[None]:
    """Translate missing proofs and stale cursors into the desk's own problems."""
    try:
        yield
    except CursorError:
        raise ProblemError("cursor-invalid") from None
    except ProofError as error:
        raise desk.absent(error) from None


def _own(caller: Caller) -> str | None:
    """The tenant behind whose wall a caller reads; None for those who see all."""
    return None if caller.reach(READ) is Reach.ALL else caller.tenant


def _log(desk: Desk, caller: Caller, log: str) -> str:
    """The log that a caller names, if they may see it (rule 1)."""
    if caller.reach(READ) is Reach.ALL:
        if log != SYSTEM and not log.startswith("tenant/"):
            raise desk.absent(ProofError(f"log `{log}` is neither `{SYSTEM}` nor `tenant/NAME`"))
        return log
    if caller.tenant is None or log != log_of(caller.tenant):
        raise not_found()
    return log


def _checkpoint(proofs: LedgerProofs, size: int) -> dict[str, Any]:
    found = proofs.checkpoint(size)
    note = proofs.signed_or_none(size)
    signed = None if note is None else note.note.decode()
    return {"size": found.size, "root": found.root.hex(), "at_us": found.at_us, "note": signed}


def _block(text: str) -> BlockRef:
    if re.fullmatch(_BLOCK, text) is None:  # a page asks with what its reader typed
        raise ProblemError("invalid", "`block` is not INCARNATION:BLOCK:GENERATION")
    incarnation, *numbers = text.split(":")
    return BlockRef(incarnation, *map(int, numbers))
