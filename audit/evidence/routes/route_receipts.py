"""Route receipts, joined from the halves of a door and a worker, and the problems of each.

    for receipt in receipts_in_order(connection, RoutePeriod(since_us, until_us)):
        lacks, findings = judge(receipt, now_us=now_us)
    joined = read_routes(connection, period, now_us=now_us)      # all of it at once

1. Halves are joined by the name of their receipt and the log that they are in. A receipt belongs to the period of its
   door's half. A worker's half without a door's half belongs to its own period.
2. A half that is missing is a finding, never a zero. Until that is certain, the receipt is `awaited`.
   - A worker's half is awaited for `GRACE_US`, as its process may spill.
   - A door's half is awaited for `DOOR_GRACE_US`. A door writes its half when the answer begins, and waits for that at
     most `ANSWER_US_MAX` and half a minute.
   - No worker's half is missing if the request was not answered with a status below 300.
   - If the answer names its worker, another worker's half does not replace that worker's.
3. A router may present a request again, at another worker too. So a half from a worker other than the one that answered
   is not always a finding. It is one if it is later than the answering worker's halves by more than clocks may differ.
   There are no more halves than the token had uses. Only the worker itself states when its half was written.
4. A half's statements about itself may be wrong. Impossible figures are a finding, and are not used as measurements.
5. A record for one tenant uses only that tenant's log.
6. Receipts are in the order of the places of their first halves: time, log, number in the log. They are read in slices,
   so that a caller who takes few reads few.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from enum import StrEnum
from typing import Any, Final, NamedTuple

from sqlalchemy import Connection, Select, Table, and_, func, not_, or_, select

from kvcustody.audit.kinds import log_of, tenant_of
from kvcustody.audit.kinds.route_events import ANSWER_US_MAX
from kvcustody.audit.store.database.snapshot import AsOf, is_in
from kvcustody.audit.store.schema.all_tables import has_leaf
from kvcustody.audit.store.schema.leaf_tables import routes_found, routes_sent
from kvcustody.audit.store.schema.ledger import incarnations, logs, workers
from kvcustody.times import SECOND_US

GRACE_US: Final = 300 * SECOND_US
DOOR_GRACE_US: Final = ANSWER_US_MAX + GRACE_US  # which has room for clocks that are apart
CLOCKS_APART_US: Final = SECOND_US
_ANSWERED_BELOW: Final = 300
_RECEIPT_DIGITS: Final = 32
_SLICE_ROWS: Final = 1000  # of each half


class RoutePeriod(NamedTuple):
    """[since, until) in UTC µs, of one tenant or of all; of receipts whose name has this prefix, or of all."""

    since_us: int
    until_us: int
    tenant: str | None = None
    prefix: str = ""


class HalfPlace(NamedTuple):
    """The place of a half: its time (UTC µs), the id of its log, and its number there."""

    at_us: int
    log: int
    idx: int


BEFORE_ALL: Final = HalfPlace(-1, -1, -1)


class SentHalf(NamedTuple):
    """The door's half. Values below 0 and empty texts were not stated."""

    door: str
    scope: str
    fleet_epoch: int
    tenant_epoch: int
    scope_epoch: int
    worker: str
    target: str
    status: int
    answer_ms: int
    requests: int
    uses: int
    promised_tokens: int
    score: int
    at_us: int


class FoundHalf(NamedTuple):
    """A worker's half about one request of its engine."""

    worker: str
    asked: bool
    prompt_tokens: int
    found_tokens: int
    queue: int
    free_blocks: int
    crosses: bool
    agrees: bool
    model: str
    at_us: int

    @property
    def is_possible(self) -> bool:
        """Whether its figures are plausible (rule 4)."""
        return 0 <= self.found_tokens <= self.prompt_tokens and self.queue >= 0 and self.free_blocks >= 0


class Receipt(NamedTuple):
    """Both halves, as far as they exist; `found` in the order of time.

    `place`: of the door's first half, else of the workers'. `door_halves`: how many there are; `sent` is the first.
    """

    receipt: str
    tenant: str
    sent: SentHalf | None
    found: tuple[FoundHalf, ...]
    place: HalfPlace = BEFORE_ALL
    door_halves: int = 0

    @property
    def at_us(self) -> int:
        """The time at which it counts."""
        return self.found[0].at_us if self.sent is None else self.sent.at_us

    @property
    def own(self) -> tuple[FoundHalf, ...]:
        """The halves of the answering worker, if the answer names one; else all."""
        if self.sent is None or not self.sent.worker:
            return self.found
        return tuple(half for half in self.found if half.worker == self.sent.worker)

    @property
    def served(self) -> FoundHalf | None:
        """The answering worker's hits, over all the engine's requests that it stands for; None if unknown."""
        requests = 1 if self.sent is None else max(1, self.sent.requests)
        halves = [half for half in self.own if half.is_possible][-requests:]
        if not halves:
            return None
        return halves[-1]._replace(
            prompt_tokens=sum(half.prompt_tokens for half in halves),
            found_tokens=sum(half.found_tokens for half in halves),
            crosses=any(half.crosses for half in halves),
            agrees=all(half.agrees for half in halves),
        )

    @property
    def promised_tokens(self) -> int | None:
        """The tokens that the router expected at the worker; None if not stated."""
        return None if self.sent is None or self.sent.promised_tokens < 0 else self.sent.promised_tokens


class ReceiptProblem(StrEnum):
    """The possible problems of a receipt."""

    NO_WORKER = "no-worker-half"
    NO_DOOR = "no-door-half"
    TWO_DOORS = "two-door-halves"
    ELSEWHERE = "sent-elsewhere"
    MORE = "more-than-allowed"
    NOT_FOUND = "promise-not-found"
    IMPOSSIBLE = "impossible-figures"


PROBLEMS: Final = {
    ReceiptProblem.NO_WORKER: "a door's half without that of a worker: the request was answered, and no worker says so",
    ReceiptProblem.NO_DOOR: "a worker's half that a door was to write one for, and did not",
    ReceiptProblem.TWO_DOORS: "two door's halves of one name",
    ReceiptProblem.ELSEWHERE: "a worker claims a request that was sent elsewhere",
    ReceiptProblem.MORE: "more workers' halves than the token had uses",
    ReceiptProblem.NOT_FOUND: "less was found than the router expected there",
    ReceiptProblem.IMPOSSIBLE: "figures that cannot be",
}


class RouteFinding(NamedTuple):
    """A problem of a receipt."""

    problem: ReceiptProblem
    receipt: str
    tenant: str
    worker: str
    detail: str
    at_us: int


class JoinedRoutes(NamedTuple):
    """The receipts of a period in order, their problems, and how many wait for a half.

    `since_us`: from when on they are there: later than the period begins where it has too many.
    """

    receipts: tuple[Receipt, ...]
    findings: tuple[RouteFinding, ...]
    awaited: int
    since_us: int


def read_routes(
    connection: Connection,
    period: RoutePeriod,
    *,
    now_us: int,
    as_of: AsOf | None = None,
    halves_max: int | None = None,
) -> JoinedRoutes:
    """Return the receipts of a period; `now_us` is the ledger's time in UTC, `as_of` the state to read.

    `halves_max`: only as many of the newest halves of either kind, with those that belong to them.
    """
    if halves_max is not None:
        period = newest_part(connection, period, halves_max, as_of=as_of)
    receipts: list[Receipt] = []
    findings: list[RouteFinding] = []
    awaited = 0
    for receipt in receipts_in_order(connection, period, as_of=as_of):
        receipts.append(receipt)
        is_awaited, wrong = judge(receipt, now_us=now_us)
        awaited += is_awaited
        findings += wrong
    return JoinedRoutes(tuple(receipts), tuple(findings), awaited, period.since_us)


def newest_part(
    connection: Connection, period: RoutePeriod, halves_max: int, *, as_of: AsOf | None = None
) -> RoutePeriod:
    """Return the part of a period that has at most that many of its newest halves of either kind."""
    since_us = period.since_us
    for table in (routes_sent, routes_found):
        newest = _halves(table, period, as_of).order_by(None).order_by(table.c.at_us.desc())
        row = connection.execute(newest.offset(halves_max).limit(1)).first()
        since_us = since_us if row is None else max(since_us, row.at_us + 1)
    return period._replace(since_us=since_us)


def receipts_in_order(
    connection: Connection, period: RoutePeriod, *, as_of: AsOf | None = None, after: HalfPlace = BEFORE_ALL
) -> Iterator[Receipt]:
    """Yield the receipts of a period after a place, in the order of their places (rule 6)."""
    end: HalfPlace | None = after
    while end is not None:
        places, end = _next_places(connection, period, as_of, end)
        joined = _joined(connection, period, as_of, places)
        yield from sorted((one for one in joined if one.place in places), key=lambda one: one.place)


def _next_places(
    connection: Connection, period: RoutePeriod, as_of: AsOf | None, after: HalfPlace
) -> tuple[dict[HalfPlace, str], HalfPlace | None]:
    """Return the names of the next receipts after a place, and the place up to which all are included; None at the
    end.
    """
    places: dict[HalfPlace, str] = {}
    ends: list[HalfPlace] = []
    for table in (routes_sent, routes_found):
        of, since_us = table.c, max(period.since_us, after.at_us)
        query = _halves(table, period._replace(since_us=since_us), as_of).where(
            or_(
                of.at_us > after.at_us,
                and_(of.at_us == after.at_us, of.log > after.log),
                and_(of.at_us == after.at_us, of.log == after.log, of.idx > after.idx),
            )
        )
        rows = connection.execute(query.limit(_SLICE_ROWS)).all()
        places |= {HalfPlace(row.at_us, row.log, row.idx): row.receipt for row in rows}
        if len(rows) == _SLICE_ROWS:
            ends.append(HalfPlace(rows[-1].at_us, rows[-1].log, rows[-1].idx))
    end = min(ends, default=None)
    return {place: name for place, name in places.items() if end is None or place <= end}, end


def _joined(
    connection: Connection, period: RoutePeriod, as_of: AsOf | None, places: dict[HalfPlace, str]
) -> Iterator[Receipt]:
    """Yield the receipts with these names, each with all of its halves (rule 1)."""
    if not places:
        return
    near = period._replace(since_us=min(places).at_us - DOOR_GRACE_US, until_us=max(places).at_us + DOOR_GRACE_US)
    names = {*places.values()}
    worker_halves: dict[tuple[int, str], list[tuple[HalfPlace, FoundHalf]]] = defaultdict(list)
    door_halves: dict[tuple[int, str], list[tuple[HalfPlace, SentHalf]]] = defaultdict(list)
    tenants: dict[int, str] = {}
    for row in connection.execute(_halves(routes_found, near, as_of, names)):
        tenants[row.log] = tenant_of(row.log_name)
        half = FoundHalf(row.worker_name, *(getattr(row, name) for name in FoundHalf._fields[1:]))
        worker_halves[row.log, row.receipt].append((HalfPlace(row.at_us, row.log, row.idx), half))
    for row in connection.execute(_halves(routes_sent, near, as_of, names)):
        tenants[row.log] = tenant_of(row.log_name)
        said = SentHalf(row.worker_name, *(getattr(row, name) for name in SentHalf._fields[1:]))
        door_halves[row.log, row.receipt].append((HalfPlace(row.at_us, row.log, row.idx), said))
    for key in {*worker_halves, *door_halves}:
        doors, halves = door_halves.get(key, []), worker_halves.get(key, [])
        yield Receipt(
            key[1],
            tenants[key[0]],
            doors[0][1] if doors else None,
            tuple(half for _, half in halves),
            (doors or halves)[0][0],
            len(doors),
        )


def judge(receipt: Receipt, *, now_us: int) -> tuple[bool, list[RouteFinding]]:
    """Return whether a receipt waits for a half (rule 2), and its problems by worker."""
    findings = [*_wrong(receipt)]
    if receipt.door_halves > 1:
        detail = f"{receipt.door_halves} halves"
        findings.append(_finding(ReceiptProblem.TWO_DOORS, receipt, "", detail))
    lacks = _lacks(receipt)
    grace_us = DOOR_GRACE_US if receipt.sent is None else GRACE_US
    is_awaited = lacks is not None and now_us - receipt.at_us < grace_us
    if lacks is not None and not is_awaited:
        findings.append(lacks)
    return is_awaited, sorted(findings, key=lambda one: (one.problem, one.worker))


def _halves(of: Table, period: RoutePeriod, as_of: AsOf | None, names: Collection[str] | None = None) -> Select[Any]:
    """Return the rows of a table in the order of their places, with the names of their process and log."""
    joined = of.join(incarnations, incarnations.c.id == of.c.incarnation)
    joined = joined.join(workers, workers.c.id == incarnations.c.worker).join(logs, logs.c.id == of.c.log)
    query = (
        select(of, workers.c.name.label("worker_name"), logs.c.name.label("log_name"))
        .select_from(joined)
        .where(has_leaf(of), is_in(as_of, of))
        .order_by(of.c.at_us, of.c.log, of.c.idx)
    )
    if period.tenant is not None:
        query = query.where(logs.c.name == log_of(period.tenant))
    outside = or_(of.c.at_us < period.since_us, of.c.at_us >= period.until_us)
    if names is not None:  # one NOT: SQLite then looks names up, and does not read the period for each slice
        return query.where(of.c.receipt.in_(names), not_(outside))
    query = query.where(of.c.at_us >= period.since_us, of.c.at_us < period.until_us)
    if period.prefix:
        last = period.prefix.ljust(_RECEIPT_DIGITS, "f")
        query = query.where(of.c.receipt >= period.prefix, of.c.receipt <= last)
    return query


def _lacks(receipt: Receipt) -> RouteFinding | None:
    """Return the missing half (rule 2)."""
    sent = receipt.sent
    if sent is None:
        if not any(half.asked for half in receipt.found):
            return None
        return _finding(ReceiptProblem.NO_DOOR, receipt, receipt.found[0].worker, "")
    if not 0 < sent.status < _ANSWERED_BELOW or len(receipt.own) >= sent.requests:
        return None
    where = sent.worker or sent.target
    return _finding(ReceiptProblem.NO_WORKER, receipt, where, f"{len(receipt.own)} of {sent.requests} halves are there")


def _wrong(receipt: Receipt) -> Iterator[RouteFinding]:
    """What the halves that are there say against each other."""
    sent, halves = receipt.sent, receipt.found
    for half in halves:
        if not half.is_possible:
            yield _finding(ReceiptProblem.IMPOSSIBLE, receipt, half.worker, "")
    if sent is None:
        return
    if len(halves) > sent.uses:
        yield _finding(ReceiptProblem.MORE, receipt, "", f"{len(halves)} halves, {sent.uses} uses")
    if receipt.own:
        last_us = max(half.at_us for half in receipt.own)
        for half in halves:
            if half not in receipt.own and half.at_us > last_us + CLOCKS_APART_US:
                detail = f"it was sent to {sent.worker}"
                yield _finding(ReceiptProblem.ELSEWHERE, receipt, half.worker, detail)
    served, promised = receipt.served, receipt.promised_tokens
    if served is not None and promised is not None and served.found_tokens < promised:
        detail = f"{served.found_tokens} of {promised} tokens"
        yield _finding(ReceiptProblem.NOT_FOUND, receipt, served.worker, detail)


def _finding(problem: ReceiptProblem, receipt: Receipt, worker: str, detail: str) -> RouteFinding:
    return RouteFinding(problem, receipt.receipt, receipt.tenant, worker, detail, receipt.at_us)


class RouteTokens(NamedTuple):
    """Tokens of the requests with a worker's half in one part of a period."""

    at_us: int
    prompt_tokens: int
    found_tokens: int


def tokens_over_time(
    connection: Connection, since_us: int, until_us: int, width_us: int, *, tenant: str | None = None
) -> tuple[RouteTokens, ...]:
    """Return prompt tokens and those that were found, by part of a period; parts begin at whole multiples of their
    width (µs).
    """
    column = routes_found.c
    start = (column.at_us - column.at_us % width_us).label("start")
    sums = func.sum(column.prompt_tokens), func.sum(column.found_tokens)
    query = select(start, *sums).where(column.at_us >= since_us, column.at_us < until_us, has_leaf(routes_found))
    if tenant is not None:
        query = query.where(column.tenant == tenant)
    rows = connection.execute(query.group_by(start).order_by(start))
    return tuple(RouteTokens(*map(int, row)) for row in rows)


def by_problem(findings: Sequence[RouteFinding]) -> dict[str, int]:
    """Return the number of findings of each kind, including kinds without any."""
    return {problem.value: sum(one.problem is problem for one in findings) for problem in ReceiptProblem}
