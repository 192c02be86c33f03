"""Operations on custody: residencies, a subject's page, totals, coverage, denials, gaps, findings, a block's history.

1. Every answer is about the tenant that the caller's credential names, or about the one asked for by those who see
   all.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from kvcustody.audit.evidence.copies.copy_coverage import copy_coverage
from kvcustody.audit.evidence.counters.hourly_coverage import by_hour, judged_state
from kvcustody.audit.evidence.counters.read_figures import denials_by_rule, event_counts, tenant_totals
from kvcustody.audit.evidence.coverage.custody_units import CustodySelection
from kvcustody.audit.evidence.coverage.summary import coverage
from kvcustody.audit.evidence.processes import sequence_gaps
from kvcustody.audit.evidence.processes.enforcement import (
    monitored_periods,
    qualification,
    unnamed,
    unnamed_qualification,
)
from kvcustody.audit.evidence.query import custody as queries
from kvcustody.audit.evidence.query.live_residencies import live_residencies
from kvcustody.audit.evidence.query.showback import dated_reuse
from kvcustody.audit.reports.subject_access import subject_page
from kvcustody.governance.api.declarations import Declarations
from kvcustody.governance.api.given import CallerDep, DeskDep
from kvcustody.governance.api.models.custody import (
    BlockHistory,
    CoverageAnswer,
    CrossedReuses,
    Denials,
    EventCounts,
    Findings,
    Gaps,
    HourlyCoverage,
    LiveResidencies,
    Residencies,
    SubjectAnswer,
    Totals,
    facts,
)
from kvcustody.governance.api.operations.audit import Kind
from kvcustody.governance.service.access.caller import Caller
from kvcustody.governance.service.access.roles import Permission, Reach
from kvcustody.governance.service.operations.desk import Desk
from kvcustody.governance.service.operations.operation import Operation
from kvcustody.governance.service.operations.pages import newest_page, page
from kvcustody.governance.service.operations.parameters import (
    LARGE,
    MOMENT,
    MOMENT_SCHEMA,
    NUMBER,
    Limit,
    Order,
    PageOrder,
    Path,
    Query,
    Since,
    Tenant,
    Until,
)
from kvcustody.governance.service.operations.parameters import Cursor as CursorText
from kvcustody.governance.service.page_cursor import CursorBinding
from kvcustody.governance.service.problem_details import ProblemError, not_found
from kvcustody.times import DAY_US

READ = Permission.READ_CUSTODY
Incarnation = Annotated[str, Path(pattern=r"^[0-9a-f]{32}$", examples=["ab" * 16])]
Place = Annotated[int, Path(ge=0, lt=LARGE, examples=[42]), NUMBER]
LastDaySince = Annotated[
    int | None, MOMENT, MOMENT_SCHEMA, Query(ge=0, lt=LARGE, description="Default: a day before `until`.")
]
UntilNow = Annotated[int | None, MOMENT, MOMENT_SCHEMA, Query(ge=0, lt=LARGE, description="Default: now.")]
Subject = Annotated[str, Query(min_length=1, max_length=128, description="The subject's name, not its pseudonym.")]
Party = Annotated[str | None, Query(min_length=1, max_length=257, description="A tenant, as the answer names it.")]
_read = partial(Operation, method="GET", action=READ, tag="custody", recorded=True)


def add_custody(api: Declarations) -> None:
    """Declare the operations."""
    paged = ("not-found", "cursor-invalid")
    api.add(
        _read("listResidencies", path="/v1/custody/residencies", command="custody residencies"),
        residencies,
        answers=Residencies,
        problems=paged,
    )
    one = _read("getSubject", path="/v1/custody/subject", command="subject show")
    api.add(one, subject_of, answers=SubjectAnswer, problems=("not-found",))
    api.add(
        _read("listLive", path="/v1/custody/live", command="custody live"),
        held_now,
        answers=LiveResidencies,
        problems=paged,
    )
    api.add(
        _read("listTotals", path="/v1/custody/totals", command="custody totals"),
        totals,
        answers=Totals,
        problems=paged,
    )
    api.add(
        _read("getCoverage", path="/v1/custody/coverage", command="custody coverage"),
        covered,
        answers=CoverageAnswer,
        problems=("not-found",),
    )
    hours = _read("listHourlyCoverage", path="/v1/custody/coverage/hours", command="custody coverage-hours")
    api.add(hours, covered_by_hour, answers=HourlyCoverage, problems=paged)
    counts = _read("countEvents", path="/v1/audit/counts", command="audit counts")
    api.add(counts, counted_events, answers=EventCounts, problems=paged)
    api.add(
        _read("listDenials", path="/v1/custody/denials", command="custody denials"),
        denials,
        answers=Denials,
        problems=paged,
    )
    api.add(
        _read("listCrossedReuse", path="/v1/custody/reuse", command="custody reuse"),
        crossed,
        answers=CrossedReuses,
        problems=paged,
    )
    api.add(
        _read("listGaps", path="/v1/audit/gaps", whole=True, command="audit gaps"),
        gaps,
        answers=Gaps,
        problems=paged,
    )
    api.add(
        _read("listFindings", path="/v1/orphans/findings", command="scan findings"),
        findings,
        answers=Findings,
        problems=paged,
    )
    place = "/v1/custody/blocks/{incarnation}/{block}/{generation}"
    api.add(
        _read("getBlockHistory", path=place, command="custody block"),
        history,
        answers=BlockHistory,
        problems=("not-found",),
    )


def residencies(
    caller: CallerDep,
    desk: DeskDep,
    subject: Subject,
    tenant: Tenant = None,
    cursor: CursorText = None,
    limit: Limit = 100,
) -> dict[str, Any]:
    """List everything that was held for one subject, oldest first."""
    mine, names = _named(caller, desk, tenant, subject)
    with desk.reading(mine) as connection:
        found = queries.custody_of(connection, mine, names) if names else ()
    question = CursorBinding("listResidencies", caller.name, {"tenant": mine, "subject": subject})
    return page(desk, question, facts(found), cursor, limit)


def subject_of(
    caller: CallerDep,
    desk: DeskDep,
    subject: Subject,
    tenant: Tenant = None,
    at: Annotated[
        int | None,
        MOMENT,
        MOMENT_SCHEMA,
        Query(ge=0, lt=LARGE, description="As of this time, in UTC microseconds or ISO 8601; default: now."),
    ] = None,
) -> dict[str, Any]:
    """Get one subject's page: what is held, why and until when, what still exists, and what was erased."""
    mine, names = _named(caller, desk, tenant, subject)
    now_us, periods = desk.clock.utc_us() if at is None else at, desk.work_periods()
    marked = desk.marked()
    with desk.reading_for_long(mine) as connection:
        return subject_page(connection, mine, names, now_us=now_us, periods=periods, marked=marked).data()


def _named(caller: Caller, desk: Desk, tenant: str | None, subject: str) -> tuple[str, list[str]]:
    """The tenant of a subject that a caller asks about, and the subject's pseudonyms."""
    mine = desk.tenant_of(caller, READ, tenant)
    if mine is None:
        raise ProblemError("invalid", "`subject` needs `tenant` too")
    return mine, desk.names_of(mine, subject)


def held_now(
    caller: CallerDep,
    desk: DeskDep,
    tenant: Tenant = None,
    cursor: CursorText = None,
    limit: Limit = 100,
) -> dict[str, Any]:
    """List residencies that run or whose hold has not ended, oldest first; people by pseudonym."""
    mine = desk.tenant_of(caller, READ, tenant)
    binding = CursorBinding("listLive", caller.name, {"tenant": mine})
    position = desk.cursors.read(binding, cursor)
    after = None if position is None else (int(position[0]), str(position[1]), int(position[2]))
    now_us, periods = desk.clock.utc_us(), desk.work_periods()
    with desk.reading(mine) as connection:
        found = live_residencies(connection, now_us=now_us, tenant=mine, after=after, limit=limit + 1, periods=periods)
    following = None
    if len(found) > limit:
        last = found[limit - 1]
        following = desk.cursors.write(binding, [last.opened_us, last.incarnation, last.residency])
    return {"items": facts(found[:limit]), "next": following, "now_us": now_us}


def totals(
    caller: CallerDep,
    desk: DeskDep,
    tenant: Tenant = None,
    cursor: CursorText = None,
    limit: Limit = 100,
) -> dict[str, Any]:
    """Get what the ledger holds, by tenant."""
    mine = desk.tenant_of(caller, READ, tenant)
    with desk.reading(mine) as connection:
        found = tenant_totals(connection, tenant=mine)
    return page(desk, CursorBinding("listTotals", caller.name, {"tenant": mine}), facts(found), cursor, limit)


def covered(
    caller: CallerDep,
    desk: DeskDep,
    tenant: Tenant = None,
    since: LastDaySince = None,
    until: UntilNow = None,
    classification: Annotated[str | None, Query(min_length=1, max_length=128)] = None,
    model: Annotated[
        str | None, Query(pattern=r"^([0-9a-f]{16}|unknown)$", description="The name as leaves have it.")
    ] = None,
    tier: Annotated[
        str | None,
        Query(
            pattern=r"^(device|host|nvme|remote)$",
            description="`device` for blocks only, or a tier for its copies only.",
        ),
    ] = None,
) -> dict[str, Any]:
    """Get deletion coverage of the custody that was due in a period, by tenant and classification.

    `monitored` is when a worker did not enforce its policy for everybody then, `qualification` says so in words.
    """
    mine = desk.tenant_of(caller, READ, tenant)
    until_us = desk.clock.utc_us() if until is None else until
    since_us = max(0, until_us - DAY_US) if since is None else since
    if since_us >= until_us:
        raise ProblemError("invalid", "`since` must be before `until`")
    with desk.reading_for_long(mine) as connection:
        covering = coverage(
            connection,
            since_us=since_us,
            until_us=until_us,
            tenant=mine,
            classification=classification,
            model=model,
            tier=tier,
        )
        chosen = CustodySelection(since_us, until_us, mine, classification, model, tier)
        copies = copy_coverage(connection, chosen, with_system=mine is None)
    with desk.reading(None) as connection:  # system leaves are in nobody's rows
        monitored = monitored_periods(connection, since_us, until_us, mine)
    spans = unnamed(monitored)
    said = qualification(monitored) if mine is None else unnamed_qualification(spans)
    period = {"since_us": since_us, "until_us": until_us, "monitored": facts(spans), "qualification": said}
    lag = {name: getattr(covering, name) for name in ("lag_us_p50", "lag_us_p99", "lag_us_max")}
    rows = {"rows": facts(covering.rows), "copies": facts(copies.rows)}
    return {**rows, "total": covering.total._asdict(), **lag, **period}


def covered_by_hour(
    caller: CallerDep,
    desk: DeskDep,
    tenant: Tenant = None,
    since: Since = None,
    until: Until = None,
    cursor: CursorText = None,
    limit: Limit = 100,
) -> dict[str, Any]:
    """Get deletion coverage of up to 31 days by hour, tenant and classification, as last judged.

    `judged_us` says when, `as_of` over which checkpoint; null before the first time. Percentiles of lags are at most an
    eighth too long.
    """
    mine = desk.tenant_of(caller, READ, tenant)
    binding = CursorBinding("listHourlyCoverage", caller.name, {"tenant": mine, "since": since, "until": until})
    position = desk.cursors.read(binding, cursor)
    after = None if position is None else (int(position[0]), str(position[1]), str(position[2]))
    with desk.reading(mine) as connection:
        state = judged_state(connection)
        hours = by_hour(connection, tenant=mine, after=after, limit=limit + 1, since_us=since or 0, until_us=until)
    following = None
    if len(hours) > limit:
        last = hours[limit - 1]
        place = [last.hour_us, last.row.tenant, last.row.classification]
        following = desk.cursors.write(binding, place)
    items = [each._asdict() | {"row": each.row._asdict()} for each in hours[:limit]]
    judged = (None, None) if state is None else state
    return {"items": items, "next": following, "as_of": judged[0], "judged_us": judged[1]}


def counted_events(
    caller: CallerDep,
    desk: DeskDep,
    tenant: Tenant = None,
    kind: Kind = None,
    since: Since = None,
    until: Until = None,
    cursor: CursorText = None,
    limit: Limit = 100,
) -> dict[str, Any]:
    """Count events by log, kind and outcome: of all time, or of the hours that a period touches."""
    mine = desk.tenant_of(caller, READ, tenant)
    name = None if kind is None else str(kind.value)
    asked = {"tenant": mine, "kind": name, "since": since, "until": until}
    with desk.reading(mine) as connection:
        found = event_counts(connection, tenant=mine, kind=name, since_us=since, until_us=until)
    return page(desk, CursorBinding("countEvents", caller.name, asked), facts(found), cursor, limit)


def denials(
    caller: CallerDep,
    desk: DeskDep,
    tenant: Tenant = None,
    since: Since = None,
    until: Until = None,
    cursor: CursorText = None,
    limit: Limit = 100,
) -> dict[str, Any]:
    """Count denied requests by reader, owner, rule and revision: of all time, or of the hours that a period touches."""
    mine = desk.tenant_of(caller, READ, tenant)
    with desk.reading(mine) as connection:
        found = denials_by_rule(connection, tenant=mine, since_us=since, until_us=until)
    asked = {"tenant": mine, "since": since, "until": until}
    return page(desk, CursorBinding("listDenials", caller.name, asked), facts(found), cursor, limit)


def crossed(
    caller: CallerDep,
    desk: DeskDep,
    since: LastDaySince = None,
    until: UntilNow = None,
    tenant: Tenant = None,
    owner: Party = None,
    reader: Party = None,
    cursor: CursorText = None,
    limit: Limit = 100,
) -> dict[str, Any]:
    """Count the blocks that tenants reused of one another in [since, until), by reader, owner, and grant or segment.

    With `tenant`, those where it is either; with `owner` or `reader`, those where it is that. Each row says when the
    first and the last were counted, to the minute.
    """
    mine = desk.tenant_of(caller, READ, tenant)
    until_us = desk.clock.utc_us() if until is None else until
    since_us = max(0, until_us - DAY_US) if since is None else since
    with desk.reading(mine) as connection:
        counted = dated_reuse(connection, since_us, until_us, party=mine)
    rows = [row for row in counted if owner in (None, row.owner) and reader in (None, row.reader)]
    asked = {"tenant": mine, "since": since, "until": until, "owner": owner, "reader": reader}
    return page(desk, CursorBinding("listCrossedReuse", caller.name, asked), facts(rows), cursor, limit)


def gaps(caller: CallerDep, desk: DeskDep, cursor: CursorText = None, limit: Limit = 100) -> dict[str, Any]:
    """List missing evidence that is known. It concerns all tenants, so only callers who see all may read it."""
    with desk.reading() as connection:
        found = sequence_gaps.gaps(connection)
    return page(desk, CursorBinding("listGaps", caller.name, {}), facts(found), cursor, limit)


def findings(
    caller: CallerDep,
    desk: DeskDep,
    tenant: Tenant = None,
    order: Order = PageOrder.NEWEST,
    cursor: CursorText = None,
    limit: Limit = 100,
) -> dict[str, Any]:
    """List orphan findings, and the outcome of each."""
    mine = desk.tenant_of(caller, READ, tenant)
    with desk.reading(mine) as connection:
        found = queries.findings(connection, tenant=mine)
    question = CursorBinding("listFindings", caller.name, {"tenant": mine, "order": order})
    if order is PageOrder.NEWEST:
        return newest_page(desk, question, facts(found), cursor, limit)
    return page(desk, question, facts(found), cursor, limit)


def history(
    caller: CallerDep,
    desk: DeskDep,
    incarnation: Incarnation,
    block: Place,
    generation: Place,
    pool: Annotated[int, Query(ge=0, le=1 << 20), NUMBER] = 0,
) -> dict[str, Any]:
    """Get everything on record about one (block, generation), within your own tenant if you have one."""
    with desk.reading(caller.tenant) as connection:
        found = queries.block_history(connection, incarnation, block, generation, pool)
    if caller.reach(READ) is Reach.OWN:
        found = tuple(event for event in found if event.log == f"tenant/{caller.tenant}")
    if not found:
        raise not_found()
    return {"items": facts(found), "next": None}
